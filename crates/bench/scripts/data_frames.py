"""A data-frame job: orders are generated, cleaned, joined with customers, aggregated, ranked,
turned into features and smoothed.

Prints a checksum of its results on the last line.

Usage: data_frames.py ROWS
"""

import hashlib
import sys

import numpy as np
import pandas as pd

ROWS = int(sys.argv[1])
CUSTOMERS = max(ROWS // 50, 1)
DAYS = 365

digest = hashlib.sha256()


def note(frame):
    """Adds a result to the checksum."""
    digest.update(pd.util.hash_pandas_object(frame).to_numpy().tobytes())


def generate():
    random = np.random.default_rng(7)
    orders = pd.DataFrame(
        {
            "customer": random.integers(0, CUSTOMERS, ROWS),
            "day": random.integers(0, DAYS, ROWS),
            "product": random.integers(0, 500, ROWS).astype(np.int16),
            "quantity": random.integers(1, 20, ROWS),
            "price": random.gamma(2.0, 25.0, ROWS).round(2),
            "discount": random.choice([0.0, 0.05, 0.1, np.nan], ROWS),
        }
    )
    customers = pd.DataFrame(
        {
            "customer": np.arange(CUSTOMERS),
            "region": pd.Categorical.from_codes(random.integers(0, 12, CUSTOMERS), [f"region {n}" for n in range(12)]),
            "since": random.integers(0, 3650, CUSTOMERS),
            "credit": random.normal(1000.0, 300.0, CUSTOMERS),
        }
    )
    return orders, customers


def clean(orders):
    orders = orders.assign(discount=orders["discount"].fillna(0.0))
    orders["revenue"] = orders["quantity"] * orders["price"] * (1.0 - orders["discount"])
    orders["large"] = orders["revenue"] > orders["revenue"].mean() * 2.0
    upper = orders["revenue"].quantile(0.999)
    return orders[orders["revenue"] < upper].reset_index(drop=True)


def features(frame):
    """What a model would be trained on: scaled columns without outliers, and how they act together."""
    columns = ["quantity", "price", "revenue", "since", "credit"]
    table = pd.DataFrame(index=frame.index)
    for name in columns:
        values = frame[name].astype(np.float64)
        scaled = (values - values.mean()) / values.std()
        table[name] = scaled.clip(-3.0, 3.0)
        table[name + " squared"] = table[name] ** 2
        table[name + " per item"] = scaled / frame["quantity"]
    for index, first in enumerate(columns):
        for second in columns[index + 1 :]:
            table[f"{first} by {second}"] = table[first] * table[second]
    return table.astype(np.float32)


def weighted_means(table):
    """Means in which rows far from the middle count for less."""
    values = table.to_numpy(dtype=np.float64)
    distance = np.zeros(len(table))
    for column in values.T:
        distance += (column - column.mean()) ** 2
    weights = 1.0 / (1.0 + distance / values.shape[1])
    return pd.Series([(column * weights).sum() / weights.sum() for column in values.T], index=table.columns)


def smoothed(orders):
    revenue = np.zeros((DAYS, 500))
    np.add.at(revenue, (orders["day"].to_numpy(), orders["product"].to_numpy()), orders["revenue"].to_numpy())
    return pd.DataFrame(revenue).rolling(7, min_periods=1).mean().stack()


def job():
    orders, customers = generate()
    orders = clean(orders)
    joined = orders.merge(customers, on="customer", how="left")
    note(joined.groupby(["region", "day"], observed=True)["revenue"].agg(["sum", "mean", "count"]))
    note(joined.groupby("customer")["revenue"].sum().nlargest(1000))
    ranked = joined[joined["large"]].sort_values(["region", "revenue"], ascending=[True, False], kind="stable")
    ranked["rank"] = ranked.groupby("region", observed=True).cumcount()
    note(ranked[ranked["rank"] < 1000])
    for quantile in (0.25, 0.5, 0.75):
        above = joined[joined["credit"] > joined["credit"].quantile(quantile)]
        note(above.groupby("product")[["quantity", "revenue", "since"]].mean())
    wide = pd.concat([joined, joined[joined["large"]]], ignore_index=True)
    wide["share"] = wide["revenue"] / wide.groupby("day")["revenue"].transform("sum")
    note(wide.pivot_table(index="day", columns="region", values="share", aggfunc="sum", observed=True))
    table = features(wide)
    note(weighted_means(table).round(6))
    note(table[wide["large"]].describe().round(4))
    note(smoothed(orders).round(6))


job()
print(digest.hexdigest())
