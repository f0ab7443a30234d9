-- Files that go by their paths, and were not read yet.

-- name: number_places
-- Has no other transaction give numbers to places: each begins behind the last one.
select pg_advisory_xact_lock(%(class)s, %(key)s);

-- name: unread_places
-- The next files to be read for the first time. What a walk has seen of a file promises nothing: it may still
-- have been written.
select id, path, case when origin = '' then size end, checksum from ntt_backup.places
where {unread} and id > %(past)s and {due}
order by id limit %(limit)s;

-- name: unread
-- Whether a file is still to be read: the predicate of the index, as a part of other queries.
blobid is null and failed is null and gone_at is null and replaced_at is null

-- name: any_unread
-- Whether any file is still to be read, now.
select exists (
    select from ntt_backup.places
    where {unread} and {due}
);

-- name: count_young
-- How many files that are still to be read wait for their time, up to a limit.
select count(*) from (select from ntt_backup.places where {unread} and not {due} limit %(limit)s) as young;

-- name: due
-- Whether a file is to be read now, as a part of other queries. None waits for an hour, unless the clock was
-- ahead when it began to.
(wait_until is null or wait_until not between now() and now() + interval '1 hour')

-- name: record_read
-- Notes which blobs lie at the places that were read. No index serves the form of the last condition: before
-- the server has statistics, it takes files that were never read for few, and would look at all of them.
update ntt_backup.places as p
set blobid = r.blobid, size = r.size, mtime_ns = r.mtime_ns, mode = r.mode, read_at = now(),
    detail = null, wait_until = null
from unnest(
    %(ids)s::bigint[], %(blobids)s::text[], %(sizes)s::bigint[], %(mtimes)s::bigint[], %(modes)s::integer[]
) as r (id, blobid, size, mtime_ns, mode)
where p.id = r.id and coalesce(p.blobid, '') = '';

-- name: record_unreadable
-- Notes which places could not be read, and why; those with a time are to be looked at again then. It looks
-- places up as `record_read` does.
update ntt_backup.places as p
set failed = case when r.wait_s is null then r.reason end, detail = r.detail,
    wait_until = now() + r.wait_s * interval '1 s'
from unnest(%(ids)s::bigint[], %(reasons)s::text[], %(details)s::text[], %(waits)s::double precision[])
    as r (id, reason, detail, wait_s)
where p.id = r.id and coalesce(p.blobid, '') = '';

-- name: requeue_files
-- Has files that failed read again; those that were changed get a new version.
with failed as (
    select id, origin, path, blobid is not null as is_read from ntt_backup.places
    where {failed} and (%(reason)s::text is null or failed = %(reason)s)
), again as (
    update ntt_backup.places as p
    set failed = null, detail = null, replaced_at = case when f.is_read then now() end
    from failed as f where p.id = f.id
    returning p.id
)
select f.origin, f.path, f.is_read from failed as f join again as a on a.id = f.id;

-- name: register_again
-- Registers new versions of files.
insert into ntt_backup.places (id, origin, path)
select (select coalesce(max(id), 0) from ntt_backup.places) + row_number() over (order by path), origin, path
from unnest(%(origins)s::text[], %(paths)s::bytea[]) as again (origin, path)
on conflict do nothing;
