-- Questions about files that go by their paths.

-- name: places_of
-- A few paths where the given blobs lie, those that their origin still gives first. Many files may be equal.
-- With a limit for each blob the server would expect to find so many soon, and read the table from its start.
-- Before it has statistics, it takes a row that was not replaced for rare, and each blob of a list that it can
-- see for common. So replaced rows are left out last, and the list is selected.
select blobid, path
from (
    select blobid, path, replaced_at, row_number() over (
        partition by blobid order by replaced_at is not null, gone_at is not null, id
    ) as nth
    from ntt_backup.places
    where blobid = any((select %(blobids)b::text[])::text[])
) as p
where nth <= %(each)s and replaced_at is null
order by nth;

-- name: file_at
-- What is known of the file at a path.
select blobid, size, failed, coalesce(detail, ''), registered_at, read_at, gone_at
from ntt_backup.places where path = %(path)s and replaced_at is null;

-- name: files_of_origins
-- How many files there are: listed, as the server estimates it where they are many, still to be read,
-- failed, gone; and when the last pass has ended. The last three are counted up to a limit.
select
    case when reltuples > %(limit)s then reltuples::bigint else (
        select count(*) from ntt_backup.places where gone_at is null and replaced_at is null
    ) end,
    (select count(*) from (select from ntt_backup.places where {unread} limit %(limit)s) as u),
    (select count(*) from (select from ntt_backup.places where {failed} limit %(limit)s) as f),
    (select count(*) from (select from ntt_backup.places where {gone} limit %(limit)s) as g),
    (select max(ended_at) from ntt_backup.origins)
from pg_class where oid = 'ntt_backup.places'::regclass;

-- name: gone
-- Whether a file is no longer listed, as a part of other queries.
gone_at is not null and replaced_at is null

-- name: failed
-- Whether a listed file could not be read, or was changed, as a part of other queries.
failed is not null and gone_at is null and replaced_at is null

-- name: failed_files
-- The next files that failed.
select id, path, failed, coalesce(detail, ''), registered_at from ntt_backup.places
where {failed} and id > %(past)s and (%(reason)s::text is null or failed = %(reason)s)
order by id limit %(limit)s;

-- name: listed_blobs
-- The blobs with a prefix of which a file is listed, in order of bytes.
select blobid, max(size) from ntt_backup.places
where blobid >= %(prefix)s and blobid < %(prefix)s || 'g' and gone_at is null and replaced_at is null
group by blobid order by blobid collate "C";

-- name: begin_files
-- Lists the files, in the order of the bytes of their blobids; last, those that were never read.
declare ntt_backup_files no scroll cursor for
select p.blobid, p.path, p.size, p.mtime_ns, p.mode, p.origin, p.gone_at is not null
from ntt_backup.places as p
where p.replaced_at is null and (p.blobid is not null or p.gone_at is null) {of_query}
order by p.blobid collate "C", p.path;

-- name: files_of_query
-- Whether an operator's query gives the blob of a file, as a part of other queries.
and p.blobid in (select * from ({query}
) as given)

-- name: next_files
-- The next files of the list.
fetch forward 5000 from ntt_backup_files;
