-- Claiming ranges and reading what is pending in them. A range is [lo, hi); hi null means no end.
--
-- A range without an end is a branch of its own in each query: `hi is null or blobid < hi` could
-- not end an index scan, and every range would be read to the end of the table.

-- name: free_ranges
-- Of the given ranges, those that nobody holds and that have pending blobs: in the given order,
-- only as many as it takes to fill `limit`. One probe of the index for a range without pending
-- blobs. Without a class nobody holds any.
--
-- In two steps, and the second without an order of its own: else the planner, where its statistics
-- know of few pending blobs, would look into every range and sort what it found.
with free as materialized (
    select r.index, r.lo, r.hi, r.nth
    from unnest(%(indexes)s::int[], %(los)s::text[], %(his)s::text[])
        with ordinality as r (index, lo, hi, nth)
    where not exists (
        select from pg_locks l
        where l.locktype = 'advisory' and l.objsubid = 2
            and l.database = (select oid from pg_database where datname = current_database())
            and l.classid::bigint = %(class)s::bigint & 4294967295
            and l.objid::bigint = r.index
    )
    order by r.nth
), found as (
    select free.index, free.nth
    from free
    cross join lateral (
        (
            select 1 from blobs
            where {pending} and blobid >= free.lo and blobid < free.hi
            order by blobid limit %(limit)s
        )
        union all
        (
            select 1 from blobs
            where {pending} and blobid >= free.lo and free.hi is null
            order by blobid limit %(limit)s
        )
    ) as one
    limit %(limit)s
)
select index from found group by index, nth order by nth;

-- name: lock_ranges
-- Takes the locks of the given ranges, as far as they are free. Returns those taken.
select index from unnest(%(indexes)s::int[]) as index where pg_try_advisory_lock(%(class)s, index);

-- name: unlock_ranges
-- Gives the locks of the given ranges back.
select pg_advisory_unlock(%(class)s, index) from unnest(%(indexes)s::int[]) as index;

-- name: any_beyond
-- Whether a range has more than `count` pending blobs. Its bounds come out of a list, as everywhere
-- here: the planner then walks the index of what is pending.
select count(*) > %(count)s
from unnest(%(los)s::text[], %(his)s::text[]) as r (lo, hi)
cross join lateral (
    (
        select 1 from blobs
        where {pending} and blobid >= r.lo and blobid < r.hi
        order by blobid limit %(count)s + 1
    )
    union all
    (
        select 1 from blobs
        where {pending} and blobid >= r.lo and r.hi is null
        order by blobid limit %(count)s + 1
    )
) as one;

-- name: shared_ranges
-- The ranges that are held in parts, by anybody.
select distinct l.objid::int from pg_locks l
where l.locktype = 'advisory' and l.objsubid = 2 and l.mode = 'ShareLock'
    and l.database = (select oid from pg_database where datname = current_database())
    and l.classid::bigint = %(class)s::bigint & 4294967295
order by 1;

-- name: lock_parts
-- Takes the locks of the given parts of ranges, as far as they are free: each with a lock on its
-- whole that others may share, but nobody who wants the whole. Returns those taken.
select part from unnest(%(parts)s::int[], %(wholes)s::int[]) as p (part, whole)
where case
    when not pg_try_advisory_lock_shared(%(class)s, whole) then false
    when pg_try_advisory_lock(%(class)s, part) then true
    else not pg_advisory_unlock_shared(%(class)s, whole)
end;

-- name: unlock_parts
-- Gives the locks of the given parts of ranges back.
select pg_advisory_unlock(%(class)s, part), pg_advisory_unlock_shared(%(class)s, whole)
from unnest(%(parts)s::int[], %(wholes)s::int[]) as p (part, whole);

-- name: pending_blobs
-- The next pending blobs of the given ranges, range by range in the given order, after the blobid
-- `past` where it is not null. lo then is that blobid, so that neither blobs under way nor dead
-- entries of the index before it are walked again.
select r.index, b.blobid, b.size
from unnest(%(indexes)s::int[], %(los)s::text[], %(his)s::text[], %(pasts)s::text[])
    with ordinality as r (index, lo, hi, past, nth)
cross join lateral (
    (
        select blobid, {size} as size from blobs
        where {pending} and blobid >= r.lo and blobid < r.hi and blobid is distinct from r.past
        order by blobid limit %(limit)s
    )
    union all
    (
        select blobid, {size} as size from blobs
        where {pending} and blobid >= r.lo and r.hi is null and blobid is distinct from r.past
        order by blobid limit %(limit)s
    )
) as b
order by r.nth, b.blobid
limit %(limit)s;

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
