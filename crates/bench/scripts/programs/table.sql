-- A table with indices, joined, grouped and sorted, in SQLite.
pragma temp_store = memory;
pragma cache_size = -200000;
create table numbers(id integer primary key, a integer, b text);
with recursive count(i) as (select 1 union all select i + 1 from count where i < 200000)
insert into numbers select i, (i * 7919) % 100003, 'text ' || ((i * 104729) % 50021) from count;
create index by_a on numbers(a);
create index by_b on numbers(b);
select b, count(*), sum(a) from numbers group by b order by 3 desc, b limit 5;
select count(*), sum(x.a + y.id) from numbers x join numbers y on x.a = y.id where x.id % 3 = 0;
update numbers set a = a + 1 where id % 5 = 0;
delete from numbers where id % 7 = 0;
select sum(id * place) from (select id, row_number() over (order by b desc, a) % 1000 as place from numbers);
