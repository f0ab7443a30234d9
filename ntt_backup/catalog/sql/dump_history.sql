-- Dumps of the catalog: what is known about the database, and what became of the last ones.

-- name: database_state
-- The database, its server, and the counters that tell whether anybody else has changed anything in
-- it. Those of our own tables, of temporary ones, of what all databases share, and of what ANALYZE
-- writes say nothing about that; nor do the updates of blobs that are our own marks. A server that
-- has crashed counts from zero, and notes that in pg_stat_bgwriter. The fingerprint is empty where
-- the server does not count.
select current_database(), current_setting('server_version'),
    current_setting('server_version_num')::integer,
    case when current_setting('track_counts')::boolean then concat_ws(
        ' ',
        (select oid from pg_database where datname = current_database()),
        (select extract(epoch from stats_reset) from pg_stat_bgwriter),
        (
            select extract(epoch from stats_reset) from pg_stat_database
            where datname = current_database()
        ),
        (
            select concat_ws(
                '+', count(*), sum(n_tup_ins),
                sum(n_tup_upd) - (select coalesce(sum(marked), 0) from ntt_backup.marks),
                sum(n_tup_del)
            )
            from pg_stat_all_tables
            where schemaname <> 'ntt_backup' and schemaname !~ '^pg_(toast|temp)'
                and relname not in ('pg_statistic', 'pg_statistic_ext_data')
                and relid not in (select oid from pg_class where relisshared)
        )
    ) else '' end;

-- name: first_relation
-- Any table, view or sequence that somebody made in this database. What an extension brings is
-- nobody's: a new database has it where template1 has it.
select concat_ws('.', n.nspname, c.relname)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p', 'v', 'm', 'S', 'f')
    and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
    and not exists (
        select from pg_depend d
        where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e'
    )
order by 1
limit 1;

-- name: record_dump
-- Records a dump that was made, or why none was.
insert into ntt_backup.dumps (target, started_at, name, bytes, sha256, error)
values (
    %(target)s, %(started_at)s, %(name)s, %(bytes)s, %(sha256)s, %(error)s
)
on conflict do nothing;

-- name: last_dumps
-- The target's latest good dump, and after it the latest failure that is newer. By the time at which
-- they were noted, which is the server's: a host whose clock was once ahead would hide all failures
-- until that day comes.
(
    select started_at, ended_at, name, bytes, sha256, error from ntt_backup.dumps
    where target = %(target)s and error = '' order by ended_at desc limit 1
)
union all
(
    select started_at, ended_at, name, bytes, sha256, error from ntt_backup.dumps
    where target = %(target)s and error <> '' and ended_at > coalesce(
        (
            select max(ended_at) from ntt_backup.dumps
            where target = %(target)s and error = ''
        ),
        '-infinity'
    )
    order by ended_at desc limit 1
);

-- name: recent_dumps
-- The target's last dumps, also those that failed, the newest first.
select started_at, ended_at, name, bytes, sha256, error from ntt_backup.dumps
where target = %(target)s order by ended_at desc limit %(limit)s;
