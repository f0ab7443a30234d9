-- Registering what the store has and the catalog lacks, and how far that got.

-- name: missing
-- Which of the given blobids the catalog lacks, and of which it lacks the size: each with whether it
-- is there.
select found.blobid, blobs.blobid is not null
from unnest(%(blobids)b::text[]) as found (blobid) left join {blobs} on blobs.blobid = found.blobid
where blobs.size is null;

-- name: known_digest
-- The SHA-256 of all blobids from the first to the last that have a size, in the order of bytes. Where
-- nothing is new, it is that of the store's names: none of them travels, and the index is read once.
select encode(sha256(convert_to(coalesce(string_agg(blobid, '' order by blobid collate "C"), ''),
    getdatabaseencoding())), 'hex')
from {blobs} where blobid >= %(first)s and blobid <= %(last)s and size is not null;

-- name: create_found
-- Where COPY puts the blobs that a scan found; empty again after each transaction.
create temporary table if not exists ntt_backup_found (blobid text, size bigint) on commit delete
rows;

-- name: copy_found
-- Fills the temporary table.
copy ntt_backup_found (blobid, size) from stdin;

-- name: register_found
-- Inserts what the catalog lacks. The first condition is for a table without a unique index, the
-- second for a program that inserts the same at this moment. A size that the column cannot hold is
-- left out.
insert into {blobs} (blobid, size)
select blobid, max(case when size <= {largest_size} then size end) from ntt_backup_found as found
where not exists (select from {blobs} where blobs.blobid = found.blobid)
group by blobid
order by blobid
on conflict do nothing;

-- name: load_scan
-- The progress of the scan of a root.
select directory, registered, strays, finished_at is not null
from ntt_backup.scans where root = %(root)s;

-- name: begin_scan
-- Starts the scan of a root anew.
insert into ntt_backup.scans (root) values (%(root)s)
on conflict (root) do update
set directory = null, registered = 0, strays = 0, started_at = now(), finished_at = null;

-- name: save_scan
-- Notes how far the scan of a root got.
update ntt_backup.scans
set directory = %(directory)s, registered = %(registered)s, strays = %(strays)s,
    finished_at = case when %(finished)s then now() end
where root = %(root)s;
