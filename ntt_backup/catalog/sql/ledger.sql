-- Recording receipts and failures.
--
-- An update may silently do nothing: a trigger or a policy of the table's owner keeps a row as it
-- is. So each tells which rows stay as they were.
--
-- Lists of blobids travel in binary form (%b), which the server only copies: as a text it would parse
-- them byte by byte.

-- name: counted
-- Counts the rows that the part `marked` of a statement has updated: what the server counts beyond
-- them is others' work. A rollback takes our count back and not the server's, which may cost a dump
-- and hides nothing.
(
    insert into ntt_backup.marks as known (slot, marked)
    select mod(pg_backend_pid(), 64), count(*) from marked having count(*) > 0
    on conflict (slot) do update set marked = known.marked + excluded.marked
)

-- name: lock_rows
-- Locks the rows of the given blobids, in one order for all sessions, so that two of them cannot
-- wait for each other. Returns their blobids: the others are gone.
select blobid from {blobs} where blobid = any(%(blobids)b::text[])
order by blobid for no key update;

-- name: unlockable
-- Rows that can be seen and yet were not locked: a policy lets nobody like us update them. Without
-- policies a row that was not locked is one that was inserted since.
select count(*), min(blobid) from {blobs}
where blobid = any(%(blobids)b::text[]) and row_security_active({blobs_name});

-- name: mark_copied
-- Records blobs as stored, and as checked where their content was. Returns how many rows are marked
-- now, whether the catalog lacks the size of any, and whether anything is on our list of failures. Few
-- batches need the three statements below.
-- The list is selected, because the planner estimates each element of a list that it can see.
with marked as (
    update {blobs} set {copied} = true, {copy_failed} = false,
        {last_checked} = case when %(checked)s::boolean then now() end
    where blobid = any((select %(blobids)b::text[])::text[])
    returning {copied} as done, size is null as unsized
), counted as {counted}
select count(*) filter (where done), coalesce(bool_or(unsized), false),
    exists (select from ntt_backup.failures where target = %(target)s)
from marked;

-- name: unmarked
-- Those of the blobids that are not marked: their rows are gone, or stay as they are. Without a unique
-- index a blobid may stand there twice: one row that is marked suffices.
select unnest(%(blobids)b::text[])
except
select blobid from {blobs} where blobid = any(%(blobids)b::text[]) and {copied};

-- name: forget_failures
-- Forgets that blobs ever failed.
delete from ntt_backup.failures
where target = %(target)s and blobid = any(%(blobids)b::text[]);

-- name: record_sizes
-- Notes the sizes of blobs that have none in the catalog. One that the column cannot hold is left
-- out.
with marked as (
    update {blobs} set size = stored.size
    from unnest(%(blobids)b::text[], %(sizes)s::bigint[]) as stored (blobid, size)
    where blobs.blobid = stored.blobid and blobs.size is null and stored.size <= {largest_size}
    returning blobs.blobid
), counted as {counted}
select count(*) from marked;

-- name: mark_failed
-- Takes locked rows out of what is pending, until they are requeued. Those that another session has
-- copied meanwhile stay copied.
with failing as (
    select blobid from {blobs} where blobid = any(%(blobids)b::text[]) and {copied} is not true
), marked as (
    update {blobs} set {copy_failed} = true where blobid in (select blobid from failing)
    returning blobid, {copy_failed} as done
), counted as {counted}, unchanged as (
    select blobid from failing except select blobid from marked where done
)
select count(*), min(blobid) from unchanged;

-- name: record_failures
-- Says why blobs failed, and how often they did.
insert into ntt_backup.failures as known (target, blobid, reason, detail)
select %(target)s, f.blobid, f.reason, f.detail
from unnest(%(blobids)b::text[], %(reasons)b::text[], %(details)b::text[])
    as f (blobid, reason, detail)
where f.blobid in (
    select blobid from {blobs} where blobid = any(%(blobids)b::text[]) and {copied} is not true
)
order by f.blobid
on conflict (target, blobid) do update
set reason = excluded.reason, detail = excluded.detail,
    attempts = known.attempts + 1, last_at = excluded.last_at;

-- name: requeue_listed
-- Makes one batch of the failed blobs in our list pending again, all of the session's part, those of
-- one reason or those of these names, and takes them off the list. What a check has found stays on it: such a blob is pending
-- already, and must not be taken for right. Locks blobs before failures, as recording does. Returns
-- how many were on the list, the last of them, and how many became pending.
with listed as materialized (
    select blobid from ntt_backup.failures f
    where target = %(target)s and (%(reason)s::text is null or reason = %(reason)s)
        and case when %(blobids)b::text[] is null then {mine_listed} else blobid = any(%(blobids)b) end
        and reason <> all(%(checks)s::text[])
    order by blobid limit %(limit)s
), locked as materialized (
    select blobid from {blobs}
    where blobid in (select blobid from listed) and {copy_failed}
    order by blobid for no key update
), marked as (
    update {blobs} set {copy_failed} = false
    where blobid in (select blobid from locked)
    returning blobid, not {copy_failed} as done
), counted as {counted}, forgotten as (
    delete from ntt_backup.failures
    where target = %(target)s and blobid in (select blobid from listed)
), unchanged as (
    select blobid from locked except all select blobid from marked where done
)
select (select count(*) from listed), (select max(blobid) from listed),
    (select count(*) from marked), count(*), min(blobid)
from unchanged;

-- name: requeue_unlisted
-- Makes one batch of failed blobs pending again that are not in our list: another program marked
-- them. Walks the index on from the blobid `past`. Returns the same.
with locked as materialized (
    select blobid from {blobs}
    where {uncopied} and {copy_failed} and (%(past)s::text is null or blobid > %(past)s)
        and case when %(blobids)b::text[] is null then {mine} else blobid = any(%(blobids)b) end
        and not exists (
            select from ntt_backup.failures f
            where f.target = %(target)s and f.blobid = blobs.blobid and f.reason = 'pruned'
        )
    order by blobid limit %(limit)s
    for no key update
), marked as (
    update {blobs} set {copy_failed} = false
    where blobid in (select blobid from locked)
    returning blobid, not {copy_failed} as done
), counted as {counted}, unchanged as (
    select blobid from locked except all select blobid from marked where done
)
select (select count(*) from locked), (select max(blobid) from locked),
    (select count(*) from marked), count(*), min(blobid)
from unchanged;

-- name: mark_checked
-- Remembers that blobs were found right.
with marked as (
    update {blobs} set {last_checked} = now() where blobid = any(%(blobids)b::text[]) and {copied}
    returning blobid
), counted as {counted}
select count(*) from marked;

-- name: forget_unchecked
-- Forgets tries of a year ago: what they were about may be gone.
delete from ntt_backup.unchecked
where target = %(target)s and tried_at < now() - interval '1 year';

-- name: note_unchecked
-- Notes what could not be checked.
insert into ntt_backup.unchecked (target, name, tried_at)
select %(target)s, name, now() from unnest(%(names)s::text[]) as name
order by name
on conflict (target, name) do update set tried_at = excluded.tried_at;

-- name: mark_lost
-- Blobs that the remote has not, or not right: pending again, with the reason, which is forgotten
-- when they are copied. Those that are not copied any more are left as they are.
with locked as materialized (
    select blobid from {blobs} where blobid = any(%(blobids)b::text[]) and {copied}
    order by blobid for no key update
), marked as (
    update {blobs} set {copied} = false, {copy_failed} = false, {last_checked} = now()
    where blobid in (select blobid from locked)
    returning blobid, {copied} as still
), counted as {counted}, said as (
    insert into ntt_backup.failures as known (target, blobid, reason, detail)
    select %(target)s, f.blobid, f.reason, f.detail
    from unnest(%(blobids)b::text[], %(reasons)b::text[], %(details)b::text[])
        as f (blobid, reason, detail)
    where f.blobid in (select blobid from locked)
    order by f.blobid
    on conflict (target, blobid) do update
    set reason = excluded.reason, detail = excluded.detail, last_at = excluded.last_at
), unchanged as (
    select blobid from locked except select blobid from marked where not still
)
select (select count(*) from marked where not still), count(*), min(blobid) from unchanged;
