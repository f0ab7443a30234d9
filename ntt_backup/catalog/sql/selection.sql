-- Checking what was copied: which blobs, in what order, and what came of it.

-- name: copied_there
-- What `verify` checks on the remote.
{copied};

-- name: anything_here
-- What `verify --local` checks in the store: whatever should be there.
{copy_failed} is not true;

-- name: begin_checks
-- The blobs to check, those first that were checked longest ago. Held beyond its transaction, the
-- server keeps the list itself, in its own temporary space: a check takes hours, and a transaction
-- as long as that would keep vacuum from every table.
declare ntt_backup_checks scroll cursor with hold for
select blobid, {size} from blobs
where {chosen} and blobid is not null and starts_with(blobid, %(prefix)s::text)
    and (
        %(older_than)s::float8 is null or {last_checked} is null
        or {last_checked} < now() - make_interval(secs => %(older_than)s::float8)
    )
    and (%(fraction)s::float8 is null or random() < %(fraction)s::float8)
order by {last_checked} nulls first, blobid;

-- name: count_checks
-- Goes to the end of the list; the server says how far that was.
move forward all in ntt_backup_checks;

-- name: rewind_checks
-- Back to its beginning.
move absolute 0 in ntt_backup_checks;

-- name: next_checks
-- The next blobs of the list.
fetch forward {count} from ntt_backup_checks;

-- name: mark_checked
-- Remembers that blobs were found right.
with marked as (
    update blobs set {last_checked} = now() where blobid = any(%(blobids)s::text[]) and {copied}
    returning blobid
), counted as {counted}
select count(*) from marked;

-- name: mark_lost
-- Blobs that the remote has not, or not right: pending again, with the reason, which is forgotten
-- when they are copied. Those that are not copied any more are left as they are.
with locked as materialized (
    select blobid from blobs where blobid = any(%(blobids)s::text[]) and {copied}
    order by blobid for no key update
), marked as (
    update blobs set {copied} = false, {copy_failed} = false, {last_checked} = now()
    where blobid in (select blobid from locked)
    returning blobid, {copied} as still
), counted as {counted}, said as (
    insert into ntt_backup.failures as known (target, blobid, reason, detail)
    select %(target)s, f.blobid, f.reason, f.detail
    from unnest(%(blobids)s::text[], %(reasons)s::text[], %(details)s::text[])
        as f (blobid, reason, detail)
    where f.blobid in (select blobid from locked)
    order by f.blobid
    on conflict (target, blobid) do update
    set reason = excluded.reason, detail = excluded.detail, last_at = excluded.last_at
), unchanged as (
    select blobid from locked except select blobid from marked where not still
)
select (select count(*) from marked where not still), count(*), min(blobid) from unchanged;
