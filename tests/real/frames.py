"""A data-frame job with large columns; prints digests of its results."""

import hashlib

import numpy as np
import pandas as pd


def digest(name, frame):
    data = pd.util.hash_pandas_object(frame, index=True).values.tobytes()
    print(name, frame.shape, hashlib.sha256(data).hexdigest()[:16])


def main():
    random = np.random.default_rng(7)
    rows = 2_000_000
    frame = pd.DataFrame(
        {
            "key": random.integers(0, 5000, rows),
            "group": random.integers(0, 50, rows),
            "value": random.integers(-1000, 1000, rows).astype(float),
            "weight": random.random(rows).round(3),
        }
    )
    names = pd.DataFrame({"key": np.arange(5000), "name": [f"name {number % 700}" for number in range(5000)]})
    digest("frame", frame)
    for step in range(3):
        frame["value"] = frame["value"] * 2 + step
        frame["part"] = np.where(frame["value"] > 0, frame["weight"], 0.0)
        sums = frame.groupby(["group", "key"], sort=True).agg({"value": "sum", "weight": "max", "part": "count"})
        digest("sums", sums)
        joined = frame.merge(names, on="key", how="left")
        digest("joined", joined)
        digest("sorted", joined.sort_values(["key", "value", "weight", "group"], kind="stable").head(1_000_000))
        wide = joined.pivot_table(index="name", columns="group", values="value", aggfunc="sum", fill_value=0)
        digest("wide", wide)
        digest("rolling", frame["value"].rolling(50).sum().fillna(0).to_frame())
        del joined, wide, sums


main()
