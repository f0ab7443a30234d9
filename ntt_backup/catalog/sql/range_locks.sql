-- Claiming ranges and reading what is pending in them. A range is [lo, hi); hi null means no end.
--
-- A range without an end is a branch of its own in each query: `hi is null or blobid < hi` could
-- not end an index scan, and every range would be read to the end of the table.

-- name: plan_anew
-- Has the server forget the session's plans: the table may have grown since they were made.
discard plans;

-- name: free_slices
-- How many pending blobs the given slices of ranges have, up to `limit` in all; none counts in what
-- another session holds. Slices are looked into in the given order, until the limit or the time is
-- reached, and the first one in any case: those before the last one that is returned are done with.
-- Without a class nobody holds any.
--
-- The time is asked between slices, as a nested loop fetches them: a dead entry of the index costs
-- time and returns no row, so no limit of rows ends a walk over many of them. It begins with the
-- first slice: a busy server may take longer than that to plan.
select nth, count(one)
from (
    select r.nth, b.one
    from (
        select * from unnest(%(indexes)s::int[], %(los)s::text[], %(his)s::text[])
            with ordinality as r (index, lo, hi, nth)
        where clock_timestamp() < (select clock_timestamp()) + %(milliseconds)s * interval '1 ms'
            or nth = 1
    ) as r
    left join lateral (
        (
            select 1 as one from {blobs}
            where {pending} and blobid >= r.lo and blobid < r.hi and r.index <> all ({taken})
            order by blobid limit %(limit)s
        )
        union all
        (
            select 1 from {blobs}
            where {pending} and blobid >= r.lo and r.hi is null and r.index <> all ({taken})
            order by blobid limit %(limit)s
        )
    ) as b on true
    limit %(limit)s
) as looked
group by nth
order by nth;

-- name: taken
-- What other sessions hold, as an array of range indexes.
array(
    select l.objid::bigint from pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 2 and l.pid <> pg_backend_pid()
        and l.database = (select oid from pg_database where datname = current_database())
        and l.classid::bigint = %(class)s::bigint & 4294967295
)

-- name: shared_ranges
-- The ranges that are held in parts, by anybody.
select distinct l.objid::int from pg_locks l
where l.locktype = 'advisory' and l.objsubid = 2 and l.mode = 'ShareLock'
    and l.database = (select oid from pg_database where datname = current_database())
    and l.classid::bigint = %(class)s::bigint & 4294967295
order by 1;

-- name: lock_ranges
-- Takes the locks of the given ranges, and parts of ranges, as far as they are free. The lock of a part
-- comes with a lock on its whole that others may share, but nobody who wants the whole. Returns those
-- taken.
select index from unnest(%(indexes)s::int[], %(wholes)s::int[]) as r (index, whole)
where case
    when index = whole then pg_try_advisory_lock(%(class)s, index)
    when not pg_try_advisory_lock_shared(%(class)s, whole) then false
    when pg_try_advisory_lock(%(class)s, index) then true
    else not pg_advisory_unlock_shared(%(class)s, whole)
end;

-- name: unlock_ranges
-- Gives the locks of the given ranges, and parts of ranges, back.
select pg_advisory_unlock(%(class)s, index),
    case when index <> whole then pg_advisory_unlock_shared(%(class)s, whole) end
from unnest(%(indexes)s::int[], %(wholes)s::int[]) as r (index, whole);

-- name: pending_blobs
-- The next pending blobs of the given slices of ranges, in order; of a slice without any, one row
-- without a blobid. It ends at the limit or when the time is over, as `free_slices` does. A slice
-- that was begun before has the last blobid as lo and `past`, so that neither blobs under way nor
-- dead entries of the index before it are walked again. A kept plan returns what it did, of whatever
-- type the column is now.
select nth, blobid::text, size
from (
    select r.nth, b.blobid, b.size
    from (
        select * from unnest(%(los)s::text[], %(his)s::text[], %(pasts)s::text[])
            with ordinality as r (lo, hi, past, nth)
        where nth = 1
            or clock_timestamp() < statement_timestamp() + %(milliseconds)s * interval '1 ms'
    ) as r
    left join lateral (
        (
            select blobid, {size} as size from {blobs}
            where {pending} and blobid >= r.lo and blobid < r.hi and blobid is distinct from r.past
            order by blobid limit %(limit)s
        )
        union all
        (
            select blobid, {size} as size from {blobs}
            where {pending} and blobid >= r.lo and r.hi is null and blobid is distinct from r.past
            order by blobid limit %(limit)s
        )
    ) as b on true
    limit %(limit)s
) as looked
order by nth, blobid;

-- name: listen
-- Has the server tell us when blobs are inserted (see `notify_trigger`).
listen ntt_backup_blobs;

-- name: holders
-- Who holds which range of the target, or which part of one: index, application_name, pid.
select l.objid::int, coalesce(a.application_name, ''), l.pid
from pg_locks l
left join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.objsubid = 2 and l.granted
    and l.database = (select oid from pg_database where datname = current_database())
    and l.classid::bigint = %(class)s::bigint & 4294967295 and l.mode = 'ExclusiveLock'
order by l.objid::int;

-- name: wake_workers
-- Wakes the daemons that wait for new blobs.
notify ntt_backup_blobs;
