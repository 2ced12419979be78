"""Three things that NumPy programs do with large arrays; prints the milliseconds of each.

Usage: numpy_rows.py MIB
"""

import sys
import time

import numpy as np

BYTES = int(sys.argv[1]) << 20
ROUNDS = 20

base = np.ones(BYTES // 8)


def zeros_and_touch():
    array = np.zeros(BYTES, dtype=np.uint8)
    array[::4096] = 1


def expression():
    array = base * 2.0 + 1.0
    return float(array[0])


def empty_and_fill():
    array = np.empty(BYTES // 8)
    array.fill(3.0)


for job in (zeros_and_touch, expression, empty_and_fill):
    job()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        job()
    print((time.perf_counter() - start) / ROUNDS * 1e3, flush=True)
