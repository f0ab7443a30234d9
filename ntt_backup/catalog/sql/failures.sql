-- What failed in the part of the session, and all that is known of one blob. A catalog may still lack the column known_at.

-- name: known_at
-- When somebody said that a failure is known; null where nobody did since it last failed, or where
-- there is no such column: so it is read from the whole row.
(
    case
        when (to_jsonb(f) ->> 'known_at')::timestamptz >= f.last_at
        then (to_jsonb(f) ->> 'known_at')::timestamptz
    end
)

-- name: next_failed
-- The next failed blobs of our list after one, in order: all, or those of one reason, or those that
-- failed in the last so many seconds. A merge of the two tables begins after it in both.
select f.blobid, f.reason, f.detail, f.attempts, f.first_at, f.last_at, {known_at}
from ntt_backup.failures f
join {blobs} on blobs.blobid = f.blobid
where f.target = %(target)s and {uncopied} and {copy_failed} and {mine_listed}
    and (%(reason)s::text is null or f.reason = %(reason)s)
    and (%(since)s::float8 is null or f.last_at >= now() - make_interval(secs => %(since)s::float8))
    and (%(past)s::text is null or f.blobid > %(past)s and blobs.blobid > %(past)s)
order by f.blobid limit %(limit)s;

-- name: next_failed_unlisted
-- The next failed blobs after one that are not in our list: another program marked them.
select blobs.blobid from {blobs}
where {uncopied} and {copy_failed} and {mine}
    and (%(past)s::text is null or blobs.blobid > %(past)s)
    and not exists (
        select from ntt_backup.failures f
        where f.target = %(target)s and f.blobid = blobs.blobid
            and (%(past)s::text is null or f.blobid > %(past)s)
    )
order by blobs.blobid limit %(limit)s;

-- name: acknowledge
-- Notes that the failures of now are known, all or those of one reason. Returns how many.
with known as (
    update ntt_backup.failures f set known_at = clock_timestamp()
    where f.target = %(target)s and f.reason <> all(%(checks)s::text[]) and {mine_listed}
        and (%(reason)s::text is null or f.reason = %(reason)s)
        and (f.known_at is null or f.known_at < f.last_at)
    returning 1
)
select count(*) from known;

-- name: unknown_failed
-- How many blobs on our list are failed, and nobody has said that it is known.
select count(*) from ntt_backup.failures f
join {blobs} on blobs.blobid = f.blobid
where f.target = %(target)s and {uncopied} and {copy_failed} and {mine_listed}
    and (f.known_at is null or f.known_at < f.last_at);

-- name: failed_for
-- Those of these blobs that are on our list for a reason.
select blobid from ntt_backup.failures
where target = %(target)s and reason = %(reason)s and blobid = any(%(blobids)s::text[]);

-- name: blobs_named
-- The blob of exactly this name, else the first ones between two.
(select blobid from {blobs} where blobid = %(name)s limit 1)
union
(
    select blobid from {blobs} where blobid >= %(low)s and blobid <= %(high)s
    order by blobid limit %(limit)s
);

-- name: is_mine
-- Whether a blob is in the part of the session.
select {mine} from {blobs} where blobid = %(blobid)s limit 1;

-- name: targets
-- The targets that the table has columns for, as far as we may read these.
select target
from (
    select regexp_replace(attname, '_(copied|last_checked|copy_failed)$', '') as target
    from pg_attribute
    where attrelid = to_regclass({blobs_name}) and attnum > 0 and not attisdropped
        and attname ~ '._(copied|last_checked|copy_failed)$'
        and has_column_privilege(attrelid, attnum, 'select')
) as columns
group by target having count(*) = 3 order by target;

-- name: blob_at_target
-- What the ledger says of one blob, and why it failed.
select {size}, {copied} is true, {copy_failed} is true, {last_checked}::timestamptz,
    f.reason, f.detail, f.attempts, f.first_at, f.last_at, {known_at}
from {blobs}
left join ntt_backup.failures f on f.target = %(target)s and f.blobid = blobs.blobid
where blobs.blobid = %(blobid)s
limit 1;
