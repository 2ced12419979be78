"""Groups, joins and sorts a table with DuckDB. Usage: duckdb_job.py ROWS"""

import sys

import duckdb

ROWS = int(sys.argv[1])
base = duckdb.connect()
base.execute(
    f"""
    create table orders as
    select hash(i) % {ROWS // 10} as customer, hash(i + 1) % 1000 as product, hash(i + 2) % 10000 as amount
    from range({ROWS}) as numbers(i);
    create table customers as select i as customer, hash(i) % 50 as region from range({ROWS // 10}) as numbers(i);
    """
)
GROUP = "select customer, sum(amount) as total, count(*) from orders group by customer order by total desc, customer limit 5"
JOIN = "select region, sum(amount) from orders join customers using (customer) group by region order by region limit 5"
SORT = f"""
    select amount, customer, product from
    (select *, row_number() over (order by amount, customer, product) as number from orders)
    where number % {ROWS // 5} = 0 order by number
"""
for query in (GROUP, JOIN, SORT):
    print(base.execute(query).fetchall())
