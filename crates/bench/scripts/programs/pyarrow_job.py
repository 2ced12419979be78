"""Reads, filters, groups and sorts tables with PyArrow. Usage: pyarrow_job.py ROWS"""

import io
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ROWS = int(sys.argv[1])
random = np.random.default_rng(5)
table = pa.table(
    {
        "customer": random.integers(0, ROWS // 10, ROWS),
        "amount": random.integers(1, 10_000, ROWS),
        "name": pa.array([f"name {number % 1000}" for number in range(ROWS)]),
    }
)
for _ in range(2):
    file = io.BytesIO()
    pq.write_table(table, file, compression="snappy")
    file.seek(0)
    read = pq.read_table(file)
    kept = read.filter(pc.greater(read["amount"], 2500))
    grouped = kept.group_by("name").aggregate([("amount", "sum")]).sort_by("name")
    print(kept.num_rows, grouped.slice(0, 3).to_pylist())
    ordered = kept.sort_by([("amount", "ascending"), ("customer", "descending")])
    print(ordered["customer"].take(list(range(0, ordered.num_rows, ordered.num_rows // 5))).to_pylist())
