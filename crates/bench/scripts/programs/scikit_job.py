"""Fits models with scikit-learn. Usage: scikit_job.py ROWS"""

import sys

import numpy as np
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression

ROWS = int(sys.argv[1])
random = np.random.default_rng(5)
table = random.normal(size=(ROWS, 20))
label = (table[:, 0] + table[:, 1] * table[:, 2] > 0.2).astype(np.int64)

reduced = PCA(n_components=5, random_state=1).fit_transform(table)
print(np.abs(reduced).sum(axis=0).round(3).tolist())
print(round(KMeans(n_clusters=8, n_init=1, max_iter=20, random_state=1).fit(table).inertia_, 3))
print(LogisticRegression(max_iter=50).fit(table, label).score(table, label))
forest = RandomForestClassifier(n_estimators=10, max_depth=12, random_state=1).fit(table, label)
print(forest.score(table, label))
