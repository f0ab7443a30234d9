-- Recording receipts and failures.

-- name: lock_rows
-- Locks the rows that are about to be updated, in one order for all sessions, so that two of them
-- cannot wait for each other. Rows that are gone are not missed.
select 1 from blobs where blobid = any(%(blobids)s::text[]) order by blobid for no key update;

-- name: mark_copied
-- Records blobs as stored. A size that the catalog knows is left alone, one that its column cannot
-- hold is left out.
update blobs
set {copied} = true, {last_checked} = now(), {copy_failed} = false,
    size = coalesce(blobs.size, case when stored.size <= {largest_size} then stored.size end)
from unnest(%(blobids)s::text[], %(sizes)s::bigint[]) as stored (blobid, size)
where blobs.blobid = stored.blobid;

-- name: forget_failures
-- What is stored has not failed any more.
delete from ntt_backup.failures where target = %(target)s and blobid = any(%(blobids)s::text[]);

-- name: mark_failed
-- Takes blobs out of what is pending, until they are requeued.
update blobs set {copy_failed} = true where blobid = any(%(blobids)s::text[]);

-- name: record_failures
-- Says why blobs failed, and how often they did. Blobs that left the catalog meanwhile leave no
-- trace.
insert into ntt_backup.failures as known (target, blobid, reason, detail)
select %(target)s, f.blobid, f.reason, f.detail
from unnest(%(blobids)s::text[], %(reasons)s::text[], %(details)s::text[])
    as f (blobid, reason, detail)
where exists (select from blobs where blobs.blobid = f.blobid)
order by f.blobid
on conflict (target, blobid) do update
set reason = excluded.reason, detail = excluded.detail,
    attempts = known.attempts + 1, last_at = excluded.last_at;

-- name: requeue_listed
-- Makes one batch of the failed blobs in our list pending again, all or those of one reason, and
-- takes them off the list. Locks blobs before failures, as recording does. Returns how many were on
-- the list, and how many of them were failed blobs.
with listed as materialized (
    select blobid from ntt_backup.failures
    where target = %(target)s and (%(reason)s::text is null or reason = %(reason)s)
    order by blobid limit %(limit)s
), locked as materialized (
    select blobid from blobs
    where blobid in (select blobid from listed) and {copy_failed}
    order by blobid for no key update
), requeued as (
    update blobs set {copy_failed} = false
    where blobid in (select blobid from locked)
    returning 1
), forgotten as (
    delete from ntt_backup.failures
    where target = %(target)s and blobid in (select blobid from listed)
)
select (select count(*) from listed), (select count(*) from requeued);

-- name: requeue_unlisted
-- Makes one batch of failed blobs pending again that are not in our list: another program marked
-- them. Walks the index on from the blobid `past`. Returns how many, and the last blobid.
with locked as materialized (
    select blobid from blobs
    where {uncopied} and {copy_failed} and (%(past)s::text is null or blobid > %(past)s)
    order by blobid limit %(limit)s
    for no key update
), requeued as (
    update blobs set {copy_failed} = false
    where blobid in (select blobid from locked)
)
select count(*), max(blobid) from locked;
