"""Three users of a pool: two who ask now and then, and one who takes and takes. The two have as much ready as without him, within 5 points.

Usage: shares.py SOCKET SECONDS

SECONDS is how long each of the phases is: two users alone, and the same beside the third, in turn, once for each thing that he tries."""

import os
import random
import socket
import sys
import time

MIB = 1 << 20
QUIET = {1001: [4, 8, 16], 1002: [2, 6, 32]}
GREEDY = 1003
POINTS = 0.05
# What he asks for, in MiB.
TRICKS = {
    "small ones": lambda: 2,
    "large ones": lambda: 128,
    "those of others": lambda: random.choice([size for sizes in QUIET.values() for size in sizes]),
    "any": lambda: 2 * random.randrange(1, 65),
}


def take(path, size):
    """Takes and gives back. Returns the bytes that were ready and the seconds until they were there."""
    begin = time.monotonic()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        server.send(f"take size={size} until=closed".encode())
        answer, files, _, _ = socket.recv_fds(server, 65536, 1)
        waited = time.monotonic() - begin
        words = dict(word.split("=", 1) for word in answer.decode().split() if "=" in word)
        if not files:
            raise PermissionError(answer.decode())
        time.sleep(random.random() / 500)
        os.close(files[0])
    return int(words["ready"]), waited


def user(number, path, end, size, pause, seed, report):
    """In a process of this user: takes until `end`. The same `seed` makes the same requests after the same pauses."""
    os.setgroups([])
    os.setgid(number)
    os.setuid(number)
    random.seed(seed)
    asked = ready = takes = refused = 0
    slowest = 0.0
    while time.monotonic() < end:
        bytes_asked = size() * MIB
        try:
            got, waited = take(path, bytes_asked)
        except PermissionError as refusal:
            refused += 1
            reason = str(refusal)
        else:
            asked, ready, takes, slowest = asked + bytes_asked, ready + got, takes + 1, max(slowest, waited)
        time.sleep(random.random() * 2 * pause)
    os.write(report, f"{asked} {ready} {takes} {refused} {slowest}\n".encode())
    # Whoever takes and takes comes to his quota.
    if refused and number != GREEDY:
        os.write(2, f"user {number} was refused: {reason}\n".encode())


def phase(path, seconds, trick, what):
    """Returns the share that the two had ready, and how often who took and was refused."""
    end = time.monotonic() + seconds
    users = {number: (lambda sizes=sizes: random.choice(sizes), 0.15) for number, sizes in QUIET.items()}
    if trick:
        users[GREEDY] = (trick, 0.002)
    pipes = {}
    for number, (size, pause) in users.items():
        read, write = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                user(number, path, end, size, pause, f"{number} {what}", write)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        pipes[number] = os.fdopen(read)
    results = {number: [float(word) for word in pipe.read().split()] for number, pipe in pipes.items()}
    for _ in users:
        if os.wait()[1] != 0:
            sys.exit("a user has failed")
    quiet = [results[number] for number in QUIET]
    asked, ready, takes, refused = (sum(result[field] for result in quiet) for field in range(4))
    slowest = max(result[4] for result in quiet)
    greedy = results.get(GREEDY, [0] * 5)
    return ready / asked, takes + greedy[2], refused, slowest


path, seconds, least = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
# What is wanted is known only once it was asked for.
phase(path, 5, None, "first")
bad, all_takes = False, 0
for name, trick in TRICKS.items():
    # One large request that met an empty pool is a few points in a few seconds: what looks bad is looked at once more, for much longer.
    for times in (1, 9):
        # Of both, the two ask for the same: what differs is what he does to them.
        what = f"{name} {times} {os.getpid()}"
        alone, takes_alone, refused_alone, _ = phase(path, times * seconds, None, what)
        beside, takes, refused, slowest = phase(path, times * seconds, trick, what)
        all_takes += takes_alone + takes
        less = beside < alone - POINTS
        print(f"{name}: ready {alone:.1%} alone, {beside:.1%} beside {takes:.0f} takes, the slowest {slowest * 1000:.1f} ms")
        if not less:
            break
    bad |= less or refused + refused_alone > 0
print(f"{all_takes:.0f} takes")
if all_takes < least:
    sys.exit(f"that is less than {least}")
if bad:
    sys.exit("somebody has less for another one's greed")
