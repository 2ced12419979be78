"""A Redis server of its own, driven through a Unix socket: data of all sizes, BGSAVE, a restart from the file, FLUSHALL.

Usage: redis.py DIRECTORY RESULT COMMAND...

COMMAND starts the server, whatever stands in front of `redis-server`. What must not depend on how it was started (digests, lengths)
goes to RESULT as JSON, for the caller to compare.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time

MIB = 1 << 20


class Client:
    """A connection that speaks RESP."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self.file = self.socket.makefile("rwb", buffering=1 << 20)

    def send(self, *words):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        self.file.write(b"*%d\r\n" % len(words))
        for word in words:
            self.file.write(b"$%d\r\n%b\r\n" % (len(word), word))

    def receive(self):
        line = self.file.readline()
        if not line:
            raise ConnectionError("the server has closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        if kind == b"+":
            return rest.decode()
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if int(rest) < 0 else self.file.read(int(rest) + 2)[:-2]
        return [self.receive() for _ in range(int(rest))]

    def call(self, *words):
        self.send(*words)
        self.file.flush()
        return self.receive()


class Server:
    """A server process and a connection to it."""

    def __init__(self, command, directory):
        self.directory = directory
        self.path = os.path.join(directory, "socket")
        options = ["--port", "0", "--unixsocket", self.path, "--dir", directory, "--save", "", "--appendonly", "no"]
        options += ["--enable-debug-command", "yes", "--daemonize", "no", "--loglevel", "warning"]
        options += ["--proto-max-bulk-len", "512mb", "--client-query-buffer-limit", "1gb", "--stop-writes-on-bgsave-error", "no"]
        self.process = subprocess.Popen([*command, *options])
        deadline = time.monotonic() + 30
        while True:
            try:
                self.client = Client(self.path)
                if self.client.call("PING") == "PONG":
                    return
            except (FileNotFoundError, ConnectionRefusedError):
                pass
            except RuntimeError as error:
                if "LOADING" not in str(error):
                    raise
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"the server did not start (status {self.process.poll()})")
            time.sleep(0.02)

    def stop(self):
        try:
            self.client.call("SHUTDOWN", "NOSAVE")
        except ConnectionError:
            pass
        status = self.process.wait(30)
        assert status == 0, f"the server ended with status {status}"


def value(seed, size):
    """Bytes that depend on the seed and do not repeat within 4 KiB."""
    block = random.Random(seed).randbytes(4093)
    return (block * (size // len(block) + 1))[:size]


def load(client, version):
    """A few hundred MiB in strings of 100 bytes to 32 MiB, and hashes, lists and sorted sets."""
    sizes = [(100, 2000), (20_000, 300), (400_000, 60), (1_100_000, 40), (2_000_000, 40), (9_000_000, 6), (32 * MIB, 2)]
    count = 0
    for size, number in sizes:
        for index in range(number):
            client.send("SET", f"s:{size}:{index}", value(version * 1000 + index, size))
            count += 1
    for index in range(20):
        fields = [word for field in range(200) for word in (f"f{field}", value(field + version, 300))]
        client.send("HSET", f"h:{index}", *fields)
        client.send("RPUSH", f"l:{index}", *[value(item + version, 2000) for item in range(100)])
        client.send("ZADD", f"z:{index}", *[word for item in range(100) for word in (item * version, f"m{item}")])
        count += 3
    client.file.flush()
    for _ in range(count):
        client.receive()


def grow(client):
    """Values that grow by reallocation and shrink again."""
    client.call("DEL", "grown")
    for step in range(40):
        client.call("APPEND", "grown", value(step, 300_000))
    client.call("SETRANGE", "grown", 30 * MIB, b"end")
    client.call("SET", "cut", client.call("GETRANGE", "grown", 5_000_000, 6_000_000))
    return [client.call("STRLEN", "grown"), client.call("STRLEN", "cut")]


def background_save(client):
    client.call("BGSAVE")
    # The server goes on writing while its child saves.
    for index in range(30):
        client.call("SET", f"during:{index}", value(index, 1_500_000))
    for index in range(30):
        client.call("DEL", f"during:{index}")
    deadline = time.monotonic() + 60
    while True:
        about = client.call("INFO", "persistence").decode()
        if "rdb_bgsave_in_progress:0" in about:
            assert "rdb_last_bgsave_status:ok" in about, about
            return
        assert time.monotonic() < deadline, "BGSAVE does not end"
        time.sleep(0.02)


def main():
    directory, result, *command = sys.argv[1:]
    facts = {}
    server = Server(command, directory)
    client = server.client
    load(client, 1)
    facts["first"] = client.call("DEBUG", "DIGEST")
    load(client, 2)
    facts["grown"] = grow(client)
    facts["second"] = client.call("DEBUG", "DIGEST")
    facts["large value"] = client.call("GET", f"s:{32 * MIB}:1") == value(2001, 32 * MIB)
    assert facts["large value"]
    client.call("SAVE")
    before = client.call("DEBUG", "DIGEST")
    background_save(client)
    assert client.call("DEBUG", "DIGEST") == before, "BGSAVE changed the data"
    client.call("DEBUG", "RELOAD", "NOSAVE")
    facts["reloaded"] = client.call("DEBUG", "DIGEST")
    client.call("FLUSHALL")
    client.call("FLUSHALL", "ASYNC")
    assert client.call("DBSIZE") == 0
    load(client, 3)
    facts["third"] = client.call("DEBUG", "DIGEST")
    background_save(client)
    server.stop()

    server = Server(command, directory)
    facts["restarted"] = server.client.call("DEBUG", "DIGEST")
    assert facts["restarted"] == facts["third"], "the data read from the file differs from what was saved"
    path = ["redis-benchmark", "-s", server.path, "-q", "-c", "4"]
    subprocess.run([*path, "-t", "set,get,lpush,lrange_100", "-n", "3000", "-d", "3000"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*path, "-t", "set,get", "-n", "150", "-d", "2000000", "-r", "20"], check=True, stdout=subprocess.DEVNULL)
    server.client.call("FLUSHALL")
    facts["empty"] = server.client.call("DEBUG", "DIGEST")
    server.stop()
    with open(result, "w", encoding="utf-8") as file:
        json.dump(facts, file, indent=1, sort_keys=True)


main()
