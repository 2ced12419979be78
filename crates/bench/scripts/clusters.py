"""A NumPy job: finds clusters (Lloyd's algorithm) in points that it makes, the way NumPy programs do it: column by column, with
whole-array expressions. Prints a checksum of the result, and after a pause the MiB that it then has resident.

Usage: clusters.py POINTS PAUSE_SECONDS
"""

import gc
import sys
import time

import numpy as np

POINTS, PAUSE = int(sys.argv[1]), float(sys.argv[2])
DIMENSIONS, CLUSTERS, ROUNDS = 4, 6, 4


def points():
    random = np.random.default_rng(11)
    centres = random.uniform(-10.0, 10.0, (CLUSTERS, DIMENSIONS))
    membership = random.integers(0, CLUSTERS, POINTS)
    data = np.empty((DIMENSIONS, POINTS))
    for dimension in range(DIMENSIONS):
        data[dimension] = centres[membership, dimension] + random.standard_normal(POINTS)
    return data


def normalised(data):
    return (data - data.mean(axis=1)[:, None]) / data.std(axis=1)[:, None]


def nearest(data, centres):
    best = np.full(POINTS, np.inf)
    labels = np.zeros(POINTS, dtype=np.int64)
    for label, centre in enumerate(centres):
        distance = np.zeros(POINTS)
        for dimension in range(DIMENSIONS):
            distance = distance + (data[dimension] - centre[dimension]) ** 2
        closer = distance < best
        labels = np.where(closer, label, labels)
        best = np.minimum(best, distance)
    return labels, best.sum()


def job():
    data = normalised(points())
    centres = data[:, :CLUSTERS].T.copy()
    total = 0.0
    for _ in range(ROUNDS):
        labels, total = nearest(data, centres)
        sizes = np.maximum(np.bincount(labels, minlength=CLUSTERS), 1)
        for dimension in range(DIMENSIONS):
            centres[:, dimension] = np.bincount(labels, weights=data[dimension], minlength=CLUSTERS) / sizes
    return total, centres


total, centres = job()
print(f"{total:.6e} {np.sort(centres, axis=0).round(6).tobytes().hex()[:32]}", flush=True)
gc.collect()
time.sleep(PAUSE)
with open("/proc/self/statm") as statm:
    print(int(statm.read().split()[1]) / 256)
