-- The table that PostgreSQL sorts.
create table rows as
select i as id, (i::bigint * 7919) % 2000003 as a, md5(i::text) as b from generate_series(1, 2000000) as i;
vacuum analyze rows;
