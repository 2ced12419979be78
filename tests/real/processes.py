"""Processes that fork with large arrays, send them to each other and end; prints digests of the results."""

import hashlib
import multiprocessing
import threading

import numpy as np

base = np.arange(12_000_000, dtype=np.int64)


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()[:16]


def work(number):
    """Uses what was inherited, and memory of its own."""
    own = np.zeros(3_000_000, dtype=np.int64)
    assert not own.any()
    own += base[number : number + 3_000_000] * number
    grown = np.concatenate([own, base[: 1_000_000 * (number % 5)]])
    return number, int(grown.sum()), grown[: 1_000_000].copy()


def churn(stop):
    while not stop.is_set():
        block = np.zeros(2_000_000)
        block += 1
        assert block.sum() == 2_000_000


def main():
    context = multiprocessing.get_context("fork")
    stop = threading.Event()
    threads = [threading.Thread(target=churn, args=(stop,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for round_number in range(3):
            with context.Pool(4) as pool:
                for number, total, part in pool.map(work, range(12)):
                    print(round_number, number, total, digest(part))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    # Processes that are ended from outside.
    for _ in range(5):
        process = context.Process(target=work, args=(3,))
        process.start()
        process.terminate()
        process.join()
    print("base", digest(base))


main()
