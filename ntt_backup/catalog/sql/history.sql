-- The history of runs, dumps and checks. A session that is about a part of the blobs knows the runs and
-- checks of this part.

-- name: start_run
-- Notes that a run begins.
insert into ntt_backup.runs (run_id, target, host, pid, strategy, workers{prefixes})
values (%(run_id)s, %(target)s, %(host)s, %(pid)s, %(strategy)s, %(workers)s{its_prefixes});

-- name: unended_runs
-- The runs of a target from one host that have no end.
select run_id, pid from ntt_backup.runs
where target = %(target)s and host = %(host)s and ended_at is null;

-- name: note_killed
-- Notes of runs whose process is gone that they were killed, at the latest known moment of theirs.
update ntt_backup.runs set outcome = 'killed', ended_at = updated_at
where run_id = any(%(run_ids)s) and ended_at is null;

-- name: update_run
-- Notes what a run has done so far, and with an outcome how it ended. Where it was taken for killed,
-- that is taken back. The figures of a run only grow: a statement that was given up while a lock held
-- it is carried out later than the next one. Returns a row where the run is known.
update ntt_backup.runs
set updated_at = now(), copied = greatest(copied, %(copied)s),
    failed = greatest(failed, %(failed)s), bytes = greatest(bytes, %(bytes)s),
    outcome = %(outcome)s, exit_code = %(exit_code)s,
    ended_at = case when %(outcome)s::text is not null then now() end
where run_id = %(run_id)s and (ended_at is null or outcome = 'killed')
returning run_id;

-- name: note_reason
-- Notes why a run ended. A catalog may still lack the column.
update ntt_backup.runs set reason = %(reason)s where run_id = %(run_id)s;

-- name: may_note_hours
-- Whether there is a table of hours, and we may add to it.
select coalesce(
    has_table_privilege(hours, 'select') and has_table_privilege(hours, 'insert')
    and has_table_privilege(hours, 'update'), false
)
from to_regclass('ntt_backup.hours') as hours;

-- name: add_to_hour
-- Adds to the hour what a run has done since its row was updated last. Comes before that update, in one
-- transaction: what is carried out late, or twice, adds nothing twice.
insert into ntt_backup.hours as known (target, hour, copied, failed, bytes, outage_s)
select target, date_trunc('hour', now()), greatest(%(copied)s - copied, 0),
    greatest(%(failed)s - failed, 0), greatest(%(bytes)s - bytes, 0), %(outage_s)s
from ntt_backup.runs
where run_id = %(run_id)s and (ended_at is null or outcome = 'killed')
    and (%(copied)s > copied or %(failed)s > failed or %(bytes)s > bytes or %(outage_s)s > 0)
for update
on conflict (target, hour) do update
set copied = known.copied + excluded.copied, failed = known.failed + excluded.failed,
    bytes = known.bytes + excluded.bytes, outage_s = known.outage_s + excluded.outage_s;

-- name: hours
-- What a target's runs did in each of the last hours in which they did anything.
select hour, copied, failed, bytes, outage_s from ntt_backup.hours
where target = %(target)s and hour > now() - make_interval(days => %(days)s)
order by hour;

-- name: last_end
-- When the target's last run ended, and how; and when one last ended with all copied. One that was
-- killed has no exit code: it counts as an error of the program.
select ended_at, coalesce(exit_code, 1), (
    select max(ended_at) from ntt_backup.runs r
    where target = %(target)s and exit_code = 0 {and_of_part}
), coalesce(to_jsonb(r) ->> 'reason', '')
from ntt_backup.runs r where target = %(target)s and ended_at is not null {and_of_part}
order by ended_at desc limit 1;

-- name: parts_of_others
-- The prefixes of hosts whose runs of the last days had another part of the blobs, and the hosts.
select distinct prefixes, host from ntt_backup.runs
where target = %(target)s and updated_at > now() - interval '7 days' and prefixes <> %(prefixes)s
order by prefixes, host
limit 256;

-- name: latest_runs
-- The target's latest run, and those that are under way on other hosts; with the server's time, by
-- which the figures of a run have an age. One that was not heard of for some minutes has died.
select run_id, target, host, pid, strategy, workers, started_at, updated_at, ended_at, outcome,
    exit_code, copied, failed, bytes, coalesce(to_jsonb(runs) ->> 'reason', ''), clock_timestamp()
from (
    select *, row_number() over (order by started_at desc, run_id) as nth
    from ntt_backup.runs r where target = %(target)s {and_of_part}
) as runs
where nth = 1 or (ended_at is null and updated_at > now() - interval '10 minutes')
order by nth limit 100;

-- name: note_check
-- Notes a check that ends now. Times are the server's.
insert into ntt_backup.checks
    (target, command, started_at, exit_code, blobs, bytes, wrong, detail{prefixes})
values (
    %(target)s, %(command)s, clock_timestamp() - make_interval(secs => %(lasted)s::float8),
    %(exit_code)s, %(blobs)s, %(bytes)s, %(wrong)s, %(detail)s{its_prefixes}
)
on conflict do nothing;

-- name: last_checks
-- Of each command its last call, and the last one that found all right; the newest first. A drill is
-- about all blobs, whichever host has called it.
select command, started_at, ended_at, exit_code, blobs, bytes, wrong, detail
from (
    select *, row_number() over (partition by command order by ended_at desc) as nth,
        row_number() over (partition by command, exit_code order by ended_at desc) as nth_so
    from ntt_backup.checks r where target = %(target)s and (command = 'drill' or (true {and_of_part}))
) as checks
where nth = 1 or (exit_code = 0 and nth_so = 1)
order by ended_at desc, command;

-- name: lock_work
-- An advisory lock of this session, if no other session has it. Ranges have other second keys.
select pg_try_advisory_lock(%(key)s, -1);

-- name: share_work
-- The same lock, which several sessions may hold as long as none has it alone.
select pg_try_advisory_lock_shared(%(key)s, -1);

-- name: recent_runs
-- The target's last runs, the newest first.
select run_id, target, host, pid, strategy, workers, started_at, updated_at, ended_at, outcome,
    exit_code, copied, failed, bytes, coalesce(to_jsonb(r) ->> 'reason', ''), clock_timestamp()
from ntt_backup.runs r where target = %(target)s {and_of_part}
order by started_at desc, run_id limit %(limit)s;

-- name: database_state
-- The database, its server, and the counters that tell whether anybody else has changed anything in
-- it. Those of our own tables, of temporary ones, of what all databases share, and of what ANALYZE
-- writes say nothing about that; nor do the updates of blobs that are our own marks. A server that
-- has crashed counts from zero, and notes that in pg_stat_bgwriter. The fingerprint is empty where
-- the server does not count. A temporary table has rows in some system catalogs: of these catalogs,
-- the transactions that wrote the other rows are added up instead.
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
                and not (schemaname = 'pg_catalog' and relname in (
                    'pg_attrdef', 'pg_attribute', 'pg_class', 'pg_constraint', 'pg_depend', 'pg_index',
                    'pg_namespace', 'pg_sequence', 'pg_type'
                ))
                and relid not in (select oid from pg_class where relisshared)
        ),
        (
            select concat_ws('+', count(*), sum(writer::text::bigint))
            from (
                select xmin as writer, relnamespace as schema from pg_class
                union all
                select a.xmin, c.relnamespace from pg_attribute as a join pg_class as c on c.oid = a.attrelid
                union all
                select d.xmin, c.relnamespace from pg_attrdef as d join pg_class as c on c.oid = d.adrelid
                union all
                select xmin, connamespace from pg_constraint
                union all
                select xmin, typnamespace from pg_type
                union all
                select xmin, oid from pg_namespace
            ) as written
            where schema not in (select oid from pg_namespace where nspname ~ '^pg_(toast_)?temp_')
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
