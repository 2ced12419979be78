set work_mem = '512MB';
set max_parallel_workers_per_gather = 0;
select id from (select id, row_number() over (order by b collate "C", a) as place from rows) as ordered
where place % 400000 = 0 order by place;
