#!/usr/bin/env python3
"""Scrapes a pool's metrics and takes from the pool, while others do to the metrics what nobody should.

scrapers.py PAGECREW SERVER ADDRESS, where ADDRESS is HOST:PORT or the path of a socket."""

import os
import random
import re
import socket
import subprocess
import sys
import threading
import time

SECONDS = 15
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
SAMPLE = re.compile(r'(pagecrew_pool_[a-z_]+)(\{(?:node|user)="[^"]*"\})? (\d+(?:\.\d+)?)$')
pagecrew, server, address = sys.argv[1], int(sys.argv[2]), sys.argv[3]
stop = threading.Event()
problems = []


def connect():
    if "/" in address:
        connection = socket.socket(socket.AF_UNIX)
        place = address
    else:
        connection = socket.socket(socket.AF_INET)
        host, port = address.rsplit(":", 1)
        place = (host, int(port))
    connection.settimeout(10)
    connection.connect(place)
    return connection


def scrape():
    with connect() as connection:
        connection.sendall(REQUEST)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.decode().partition("\r\n\r\n")
    lines = body.splitlines()
    if not head.startswith("HTTP/1.1 200 ") or lines[-1] != "# EOF":
        raise ValueError(answer)
    samples = {}
    for line in lines:
        if line.startswith("# "):
            continue
        name, labels, value = SAMPLE.match(line).groups()
        if name + (labels or "") in samples:
            raise ValueError(f"{line} is there twice")
        samples[name + (labels or "")] = float(value)
    return samples


def silent(held):
    held.append(connect())


def garbage(held):
    connect().sendall(random.randbytes(random.randrange(1, 5000)) + b"\r\n\r\n")


def endless(held):
    connect().sendall(b"GET /" + b"x" * (1 << 20))


def deaf(held):
    held.append(connect())
    held[-1].sendall(REQUEST)


def gone(held):
    connect().close()


def hostile():
    held = []
    while not stop.is_set():
        try:
            random.choice([silent, garbage, endless, deaf, gone])(held)
        except OSError:
            pass
        if len(held) > 100:
            held.pop(random.randrange(len(held))).close()
        time.sleep(0.02)


def cpu_of_metrics():
    """Seconds that the thread has used."""
    for thread in os.listdir(f"/proc/{server}/task"):
        with open(f"/proc/{server}/task/{thread}/stat") as file:
            name, _, rest = file.read().partition("(")[2].partition(")")
        if name == "metrics":
            fields = rest.split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise ValueError("there is no such thread")


before, cpu_before = scrape(), cpu_of_metrics()
threads = [threading.Thread(target=hostile, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
end, takes, slowest_take, scrapes, failed, most_open = time.monotonic() + SECONDS, 0, 0, 0, 0, 0
while time.monotonic() < end:
    begin = time.monotonic()
    path = subprocess.run([pagecrew, "pool", "take", "--size", "2M"], check=True, capture_output=True, text=True).stdout.strip()
    slowest_take = max(slowest_take, time.monotonic() - begin)
    takes += 1
    subprocess.run([pagecrew, "pool", "release", path], check=True)
    most_open = max(most_open, len(os.listdir(f"/proc/{server}/fd")))
    try:
        scrape()
        scrapes += 1
    except OSError:
        # Where more than the places there are come in the same moment, one may be ended.
        failed += 1
stop.set()
for thread in threads:
    thread.join()
cpu = cpu_of_metrics() - cpu_before
# The figures of one scrape are good for those of the next 100 ms.
time.sleep(0.2)
# Those who are left have their time, and a scraper tries again.
for _ in range(10):
    try:
        after = scrape()
        break
    except OSError:
        time.sleep(1)
print(f"{takes} takes, the slowest {slowest_take:.3f} s; {scrapes} scrapes, {failed} ended; {most_open} open; {cpu:.2f} s of CPU in {SECONDS} s")
if after["pagecrew_pool_takes_total"] - before["pagecrew_pool_takes_total"] != takes:
    sys.exit(f"{takes} takes are counted as {after}")
if slowest_take > 5 or failed > scrapes / 10 or scrapes < 10 or most_open > 100 or cpu > SECONDS / 4:
    sys.exit("that is too slow, or too much")
