"""A load that comes and goes beside a pool, reclaim, trim and a program under `run`, and what each of them makes of it, second by second.

Nothing may go up and down by itself: between two peaks of anything that Pagecrew sets there are 30 seconds at least. And nothing is lost: the
program's memory is as it wrote it, and the pool's files are zero when they come.

Usage: together.py PAGECREW SOCKET FILES SECONDS

Services run already; FILES is a directory of files on a disk, more than the page cache has room for."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

MIB = 1 << 20
# The load is there and away for so long; somebody takes from the pool so often.
LOAD = 150
TAKE = 97
# No two peaks of a signal are closer.
PERIOD = 30
# What goes up and down by itself goes from one end to the other: less than this part of that is the load's own noise, and so is what is less than
# this much. (Readers that find more or less in the page cache, a program that frees and allocates.)
NOISE = 0.5
FACTOR_NOISE = 20
BYTES_NOISE = 64 * MIB

# Holds blocks of many sizes, each full of its own bytes, changes some of them now and then, and looks at them again. Two minutes it has many, and
# two minutes few.
PROGRAM = """
import random, sys, time
random.seed(1)
end = time.monotonic() + float(sys.argv[1])
blocks, rounds = {}, 0
while time.monotonic() < end:
    much = time.monotonic() % 240 < 120
    for _ in range(8):
        key = random.randrange(64 if much else 8)
        if key in blocks:
            byte, block = blocks.pop(key)
            assert block.count(byte) == len(block), "memory has changed"
        if random.random() < 0.7:
            byte = random.randrange(256)
            blocks[key] = byte, bytes([byte]) * random.randrange(64 << 10, 2 << 20)
    for key in [key for key in blocks if key >= 8 and not much]:
        del blocks[key]
    rounds += 1
    time.sleep(0.1)
print(rounds)
"""


def peaks(values, noise):
    """When a signal turns from up to down, in seconds, where each way is more than `noise`."""
    found, up = [], None
    low = high = values[0]
    high_at = 0
    for at, value in enumerate(values):
        if value > high:
            high, high_at = value, at
        low = min(low, value)
        if up is not False and value < high - noise:
            if up:
                found.append(high_at)
            up, low = False, value
            high, high_at = value, at
        elif up is not True and value > low + noise:
            up, high, high_at = True, value, at
            low = value
    return found


def take(path, size):
    """Takes from the pool, looks and gives back. Returns how much was ready."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        server.send(f"take size={size} until=closed".encode())
        answer, files, _, _ = socket.recv_fds(server, 65536, 1)
        words = dict(word.split("=", 1) for word in answer.decode().split() if "=" in word)
        if not files:
            raise PermissionError(answer.decode())
        for offset in range(0, size, MIB):
            assert os.pread(files[0], MIB, offset).count(0) == MIB, "a file of the pool is not zero"
            os.pwrite(files[0], b"x", offset)
        os.close(files[0])
        return int(words["ready"])


def stop(readers):
    if readers is not None:
        os.killpg(readers.pid, signal.SIGKILL)
        readers.wait()


def look(pagecrew, program):
    """What Pagecrew sets now."""
    ask = lambda *words: json.loads(subprocess.check_output([pagecrew, *words, "--json"]))
    pool = ask("pool", "status")
    zones = ask("stats", str(program))["zones"]
    return {
        "factor": int(pathlib.Path("/proc/sys/vm/watermark_scale_factor").read_text()),
        "pool": pool["ready_bytes"],
        "kept": sum(zone["retained_dirty_bytes"] + zone["retained_zeroed_bytes"] for zone in zones),
    }


def main():
    pagecrew, path, files, seconds = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
    begin = time.monotonic()
    program = subprocess.Popen(
        [pagecrew, "run", "--", sys.executable, "-c", PROGRAM, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    time.sleep(2)
    readers, rows, takes = None, [], 0
    while (now := time.monotonic() - begin) < seconds:
        if int(now / LOAD) % 2 == 0:
            # Without a pause, which would be a load that comes and goes by itself.
            readers = readers or subprocess.Popen(
                ["sh", "-c", 'while :; do "$0" bench-worker load "$1" 4 cached; done', pagecrew, files],
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        else:
            readers = stop(readers)
        if now // TAKE > takes:
            takes += 1
            take(path, 64 * MIB)
        rows.append(look(pagecrew, program.pid))
        time.sleep(max(0, begin + len(rows) + 2 - time.monotonic()))
    stop(readers)
    rounds, _ = program.communicate(timeout=60)
    assert program.returncode == 0 and int(rounds) > seconds, f"the program: {program.returncode}, {rounds} rounds"
    said, bad = [], []
    for name in rows[0]:
        values = [row[name] for row in rows]
        reach = max(values) - min(values)
        noise = max(NOISE * reach, FACTOR_NOISE if name == "factor" else BYTES_NOISE)
        found = peaks(values, noise)
        nearest = min((after - before for before, after in zip(found, found[1:])), default=None)
        said.append(f"{name} {min(values)}..{max(values)}, {len(found)} peaks, {nearest} s between the nearest")
        if nearest is not None and nearest < PERIOD:
            bad.append(f"{name} goes up and down: peaks at {found} of {values}")
    print("\n".join(bad))
    print(f"{len(rows)} s, {takes} takes; " + "; ".join(said))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
