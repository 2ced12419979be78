"""Groups, joins and sorts a table with Polars. Usage: polars_job.py ROWS"""

import sys

import numpy as np
import polars as pl

ROWS = int(sys.argv[1])
random = np.random.default_rng(5)
orders = pl.DataFrame(
    {
        "customer": random.integers(0, ROWS // 10, ROWS),
        "product": random.integers(0, 1000, ROWS),
        "amount": random.integers(1, 10_000, ROWS),
    }
)
customers = pl.DataFrame({"customer": np.arange(ROWS // 10), "region": random.integers(0, 50, ROWS // 10)})

for _ in range(2):
    grouped = orders.group_by("customer").agg(pl.col("amount").sum().alias("total"), pl.len().alias("count"))
    print(grouped.sort("total", "customer", descending=True).head(5).rows())
    joined = orders.join(customers, on="customer")
    print(joined.group_by("region").agg(pl.col("amount").sum()).sort("region").rows()[:5])
    ordered = joined.sort("amount", "customer", "product")
    print(ordered.select(pl.col("amount").gather_every(ROWS // 5)).to_series().to_list())
