-- Figures, of the blobs that are in the part of the session (`mine`). Exact ones read the whole
-- table; they are for people who ask, not for the send loop.
--
-- Sizes are another program's, and may be any number. Those below zero count as none, and a sum
-- that no bigint holds as the largest one. (least() passes over a null, so none may reach it.)

-- name: totals
-- All blobs by their state: how many, the bytes of those with a known size, and how many lack a
-- size. Rows without a blobid are in no state.
select
    count(*) filter (where {pending}),
    count(*) filter (where {copied}),
    count(*) filter (where {uncopied} and {copy_failed}),
    least(
        coalesce(sum(greatest(size, 0)) filter (where {pending}), 0), 9223372036854775807
    )::bigint,
    least(
        coalesce(sum(greatest(size, 0)) filter (where {copied}), 0), 9223372036854775807
    )::bigint,
    least(
        coalesce(sum(greatest(size, 0)) filter (where {uncopied} and {copy_failed}), 0),
        9223372036854775807
    )::bigint,
    count(*) filter (where {pending} and size is null),
    (select count(*) from {blobs} where blobid is null)
from {blobs}
where blobid is not null and {mine};

-- name: pending_total
-- All pending blobs: how many, their known bytes, and how many lack a size.
select count(*), least(coalesce(sum(greatest(size, 0)), 0), 9223372036854775807)::bigint,
    count(*) - count(size)
from {blobs} where {pending} and blobid is not null and {mine};

-- name: pending_starts
-- Of each given range the first pending blobs, at most `limit`: how many, the first, the last, their
-- known bytes, and how many lack a size.
select count(one.blobid), min(one.blobid), max(one.blobid),
    least(coalesce(sum(greatest(one.size, 0)), 0), 9223372036854775807)::bigint,
    count(one.blobid) - count(one.size)
from unnest(%(los)s::text[], %(his)s::text[]) with ordinality as r (lo, hi, nth)
left join lateral (
    (
        select blobid, size from {blobs}
        where {pending} and blobid >= r.lo and blobid < r.hi
        order by blobid limit %(limit)s
    )
    union all
    (
        select blobid, size from {blobs}
        where {pending} and blobid >= r.lo and r.hi is null
        order by blobid limit %(limit)s
    )
) as one on true
group by r.nth
order by r.nth;

-- name: pending_plan
-- What the planner thinks how many blobs are pending. It scales what it knows to the table's size of
-- this moment.
explain (format json) select from {blobs} where {pending} and blobid is not null and {mine};

-- name: size_statistics
-- What ANALYZE last found about sizes: the average, and the share of rows without one. The largest
-- bound, one blob of many, would count as much as the hundredth part of all.
select coalesce(avg(bound) filter (where bound between 0 and 9223372036854775807), 0)::float8,
    coalesce(max(null_frac), 0)::float8
from pg_stats
left join lateral (
    select bound from unnest(coalesce(histogram_bounds, most_common_vals)::text::float8[]) as bound
    order by bound limit coalesce(array_length(histogram_bounds, 1) - 1, 100)
) as bounds on true
where (schemaname, tablename) = (
    select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = to_regclass({blobs_name})
) and attname = 'size';

-- name: uncopied_by_reason
-- What is not copied and has a reason, or is failed without one of ours ('unknown'): reason, whether
-- failed, how many, their known bytes. What has a reason and is not failed was found missing or
-- wrong by a check. Reads all that is not copied.
select coalesce(f.reason, 'unknown'), {copy_failed} is true, count(*),
    least(coalesce(sum(greatest(size, 0)), 0), 9223372036854775807)::bigint
from {blobs}
left join ntt_backup.failures f on f.target = %(target)s and f.blobid = blobs.blobid
where {uncopied} and blobs.blobid is not null and ({copy_failed} or f.reason is not null)
    and {mine}
group by 1, 2
order by 3 desc, 1;

-- name: listed_by_reason
-- The same of what is on our list: goes from our few reasons to their rows, not through the table.
select f.reason, {copy_failed} is true, count(*),
    least(coalesce(sum(greatest(size, 0)), 0), 9223372036854775807)::bigint
from ntt_backup.failures f
join {blobs} on blobs.blobid = f.blobid
where f.target = %(target)s and {uncopied} and {mine_listed}
group by 1, 2
order by 3 desc, 1;

-- name: noted_by_reason
-- The same from the list alone, where it is long.
select reason, reason <> all(%(checks)s::text[]), count(*), 0
from ntt_backup.failures f where target = %(target)s and {mine_listed}
group by 1, 2
order by 3 desc, 1;

-- name: without_blobid
-- Rows that are never sent.
select count(*) from {blobs} where blobid is null;

-- name: stored_packs
-- The packs of a bucket: how many, and their bytes.
select count(*), coalesce(sum(size), 0)::bigint from ntt_backup.packs where target = %(target)s;

-- name: large_copied
-- The copied blobs that are objects of their own, being so large: how many, and their bytes.
select count(*), least(coalesce(sum(size), 0), 9223372036854775807)::bigint
from {blobs} where {copied} and size >= %(least)s;

-- name: all_rows
-- How many rows the table has, as vacuum last knew: dead rows do not count. Null before that.
select case when reltuples > 0 then reltuples end::bigint from pg_class
where oid = to_regclass({blobs_name});

-- name: all_rows_plan
-- What the planner thinks.
explain (format json) select from {blobs};

-- name: copied_by_runs
-- What the target's runs, of the session's part, have copied so far: blobs, bytes.
select coalesce(sum(copied), 0)::bigint,
    least(coalesce(sum(bytes), 0), 9223372036854775807)::bigint
from ntt_backup.runs r where target = %(target)s {and_of_part};

-- name: proved
-- Of a sample of the copied blobs how many were last found right in the last 7, 30 and 90 days, and
-- ever. The sample is of whole pages, and the same each time.
select count(*), count(*) filter (where {last_checked} > now() - interval '7 days'),
    count(*) filter (where {last_checked} > now() - interval '30 days'),
    count(*) filter (where {last_checked} > now() - interval '90 days'), count({last_checked})
from {blobs} tablesample system (%(percent)s) repeatable (1)
where {copied} and {mine};

-- name: failure_examples
-- Of each reason the latest failures, of the first 10,000 on the target's list.
select blobid, reason, detail, attempts, first_at, last_at, {known_at}
from (
    select *, row_number() over (partition by reason order by last_at desc, blobid) as nth
    from (
        select * from ntt_backup.failures f
        where target = %(target)s and {mine_listed} limit 10000
    ) as listed
) as f
where nth <= %(each)s
order by reason, nth;
