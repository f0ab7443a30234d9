-- Passes over origins: how files that go by their paths are registered.
--
-- A place is a file at a path. Its blobid is null until a worker has read it. A place that was replaced, or
-- that its origin no longer gives, keeps its row: its blob was stored, and may be wanted.

-- name: stage
-- Where COPY puts what an origin gives; empty again after each transaction. nth: the order of the rows of a
-- query; null for a file of a walk. A directory of a walk has -1, as its size the number of its parent, and a
-- time if it is listed again in any case.
create temporary table if not exists ntt_backup_staged (
    path bytea, size bigint, checksum text, key text, nth bigint, mtime_ns bigint
) on commit delete rows;

-- name: copy_staged
-- Fills the temporary table, as the other database sends the rows.
copy ntt_backup_staged from stdin (format binary);

-- name: match_staged
-- Finds the place of each staged path, each path once. A place of another origin that is in use and still
-- gives it is left to that. By the offset each path is looked up, in the order of the index: before it has
-- statistics, the server takes places that were not replaced for few, and would compare each with each path.
create temporary table ntt_backup_matched on commit drop as
select staged.path, staged.size, nullif(staged.checksum, '') as checksum,
    p.id, p.blobid is not null as is_read, p.failed,
    p.gone_at is not null as was_gone,
    (staged.size is not null and p.size is distinct from staged.size)
        or (
            nullif(staged.checksum, '') is not null and p.checksum is distinct from staged.checksum
            and (p.checksum is not null or p.blobid is null)
        )
        or coalesce(p.mtime_ns <> staged.mtime_ns, false)
        as differs
from (
    select distinct on (path) path, size, checksum, nth, mtime_ns from ntt_backup_staged
    where path is not null and nth is distinct from -1
    order by path, nth desc
) as staged
left join lateral (
    select * from ntt_backup.places as o where o.path = staged.path and o.replaced_at is null offset 0
) as p on true
where p.id is null or p.gone_at is not null or p.origin <> all(%(others)s::text[]);

-- name: come_back
-- Notes that places that were gone are there again, and takes over those of origins that are no longer
-- used. What was never read is tried again. Returns their blobs.
update ntt_backup.places as p
set gone_at = null, origin = %(origin)s, failed = case when m.is_read then p.failed end, wait_until = null
from ntt_backup_matched as m where p.id = m.id and (m.was_gone or p.origin <> %(origin)s)
returning p.blobid;

-- name: unchanged_again
-- Forgets that files were changed that are as they were when they were read.
update ntt_backup.places as p set failed = null, detail = null
from ntt_backup_matched as m
where p.id = m.id and m.is_read and not m.differs and p.failed = 'changed';

-- name: correct_unread
-- Takes over what the origin now says of files that were not read yet, or could not be.
update ntt_backup.places as p
set size = coalesce(m.size, p.size), checksum = coalesce(m.checksum, p.checksum),
    failed = null, detail = null, wait_until = null
from ntt_backup_matched as m where p.id = m.id and m.differs and not m.is_read;

-- name: note_checksums
-- Takes over checksums that the origin did not have yet when it first gave a file.
update ntt_backup.places as p set checksum = m.checksum
from ntt_backup_matched as m
where p.id = m.id and m.is_read and not m.differs and p.checksum is null and m.checksum is not null;

-- name: report_changed
-- Notes which files were changed since they were read. Their blobs stay as they are.
update ntt_backup.places as p
set failed = 'changed', detail = 'its size, time or checksum is another than when it was read'
from ntt_backup_matched as m
where p.id = m.id and m.differs and m.is_read and p.failed is distinct from 'changed';

-- name: replace_changed
-- Puts a new version into the place of each file that was changed since it was read.
update ntt_backup.places as p set replaced_at = now()
from ntt_backup_matched as m where p.id = m.id and m.differs and m.is_read;

-- name: register_places
-- Registers the paths that have no place, or had one that was just replaced.
insert into ntt_backup.places (id, origin, path, size, checksum)
select (select coalesce(max(id), 0) from ntt_backup.places) + row_number() over (order by m.path),
    %(origin)s, m.path, m.size, m.checksum
from ntt_backup_matched as m
where m.id is null or (%(versions)s and m.differs and m.is_read)
order by m.path
on conflict do nothing;

-- name: note_seen
-- Remembers which places this pass has seen that were there before it.
insert into ntt_backup.seen_places (origin, id)
select %(origin)s, m.id from ntt_backup_matched as m
where m.id is not null and not (%(versions)s and m.differs and m.is_read);

-- name: last_staged
-- How many rows were staged, and the key of the last of them.
select (select count(*) from ntt_backup_staged where nth is distinct from -1),
    (select key from ntt_backup_staged order by nth desc limit 1);

-- name: count_seen
-- How many places this pass has seen: none where a crash of the server has emptied the table.
select count(*) from ntt_backup.seen_places where origin = %(origin)s;

-- name: forget_seen
-- Begins a pass.
delete from ntt_backup.seen_places where origin = %(origin)s;

-- name: mark_gone
-- Notes the places that a whole pass has not seen. Returns how many are gone by now.
with gone as (
    update ntt_backup.places as p set gone_at = now()
    where p.origin = %(origin)s and p.replaced_at is null and p.gone_at is null
        and p.registered_at < %(began)s
        and not exists (
            select from ntt_backup.seen_places as s where s.origin = %(origin)s and s.id = p.id
        )
    returning 1
)
select count(*) from gone;

-- name: next_directories
-- The next directories that a walk knows, in order.
select path, mtime_ns, ctime_ns, mounted from ntt_backup.directories
where origin = %(origin)s and (%(past)s::bytea is null or path > %(past)s)
order by path limit %(limit)s;

-- name: add_roots
-- Adds the directories that a walk begins with.
insert into ntt_backup.directories (origin, path)
select %(origin)s, path from unnest(%(paths)s::bytea[]) as roots (path) on conflict do nothing;

-- name: with_files
-- Which of the given directories have files, as far as is known.
select nth from unnest(%(nths)s::bigint[], %(los)s::bytea[], %(his)s::bytea[]) as given (nth, lo, hi)
where exists (
    select from ntt_backup.places as p
    where p.path >= given.lo and p.path < given.hi
        and p.origin = %(origin)s and p.gone_at is null and p.replaced_at is null
);

-- name: find_gaps
-- The ranges of paths below listed directories that are not below their subdirectories: what is there was
-- given by the listing, or is gone. The parts of a subdirectory follow it, with a NUL.
create temporary table ntt_backup_gaps on commit drop as
with listed as (
    select * from unnest(%(nths)s::bigint[], %(los)s::bytea[], %(his)s::bytea[]) as given (nth, lo, hi)
), edges as (
    select nth, lo as past, lo as until, hi from listed
    union all
    select l.nth, s.path || behind, s.path || before, l.hi
    from ntt_backup_staged as s join listed as l on l.nth = s.size
    cross join (values ('/'::bytea, '0'::bytea), ('\x00', '\x01')) as below (before, behind)
    where s.nth = -1 and s.path || before >= l.lo and s.path || behind <= l.hi
)
select past as lo, lead(until, 1, hi) over (partition by nth order by past) as hi from edges;

-- name: index_matched
-- Has a place that was matched looked up, whatever is estimated.
create index on ntt_backup_matched (id);

-- name: index_staged
-- Has a directory that was found looked up, whatever is estimated.
create index if not exists ntt_backup_staged_directories on ntt_backup_staged (path) where nth = -1;

-- name: mark_gone_from_gaps
-- Notes the places in listed directories that the listing has not given. Returns how many there are. By the
-- offset each range is looked up in the index, and never each place among the ranges.
with gone as (
    update ntt_backup.places as p set gone_at = now()
    from ntt_backup_gaps as g cross join lateral (
        select o.id from ntt_backup.places as o
        where o.path >= g.lo and o.path < g.hi
            and o.origin = %(origin)s and o.replaced_at is null and o.gone_at is null
        offset 0
    ) as had
    where p.id = had.id and not exists (select from ntt_backup_matched as m where m.id = had.id)
    returning 1
)
select count(*) from gone;

-- name: forget_directories
-- Forgets the directories in listed directories that the listing has not given, or that are listed again in
-- any case.
delete from ntt_backup.directories as d
using ntt_backup_gaps as g cross join lateral (
    select o.path from ntt_backup.directories as o
    where o.origin = %(origin)s and o.path >= g.lo and o.path < g.hi
    offset 0
) as had
where d.origin = %(origin)s and d.path = had.path
    and not exists (
        select from ntt_backup_staged as s where s.nth = -1 and s.path = had.path and s.mtime_ns is null
    );

-- name: add_directories
-- Adds the directories that were found.
insert into ntt_backup.directories (origin, path)
select %(origin)s, path from ntt_backup_staged where nth = -1 order by path on conflict do nothing;

-- name: save_directories
-- Notes the times of the directories that were listed.
update ntt_backup.directories as d
set mtime_ns = l.mtime_ns, ctime_ns = l.ctime_ns, mounted = l.mounted
from unnest(
    %(paths)s::bytea[], %(mtimes)s::bigint[], %(ctimes)s::bigint[], %(mounted)s::boolean[]
) as l (path, mtime_ns, ctime_ns, mounted)
where d.origin = %(origin)s and d.path = l.path;

-- name: mark_outside
-- Notes the places of a walk that lie in none of its directories. Returns how many there are.
with roots as (
    select * from unnest(%(los)s::bytea[], %(his)s::bytea[]) as given (lo, hi)
), gone as (
    update ntt_backup.places as p set gone_at = now()
    where p.origin = %(origin)s and p.replaced_at is null and p.gone_at is null
        and not exists (select from roots as r where p.path >= r.lo and p.path < r.hi)
    returning 1
), forgotten as (
    delete from ntt_backup.directories as d
    where d.origin = %(origin)s and d.path <> all(%(paths)s::bytea[])
        and not exists (select from roots as r where d.path >= r.lo and d.path < r.hi)
)
select count(*) from gone;

-- name: problems_of_origins
-- What the last walks could not read.
select origin, problem from ntt_backup.origins
where origin = any(%(origins)s::text[]) and problem is not null order by origin;

-- name: load_origin
-- What is known of the passes over an origin.
select definition, whole, began_at, seen, key, mark, last_mark, last_mark_at, whole_at, problem
from ntt_backup.origins where origin = %(origin)s;

-- name: save_origin
-- Notes how far the passes over an origin got.
insert into ntt_backup.origins (
    origin, definition, whole, began_at, seen, key, mark, last_mark, last_mark_at, whole_at, problem, ended_at
)
values (
    %(origin)s, %(definition)s, %(whole)s, %(began_at)s, %(seen)s, %(key)s, %(mark)s,
    %(last_mark)s, %(last_mark_at)s, %(whole_at)s, %(problem)s,
    case when %(began_at)s::timestamptz is null then now() end
)
on conflict (origin) do update
set definition = excluded.definition, whole = excluded.whole, began_at = excluded.began_at,
    seen = excluded.seen, key = excluded.key, mark = excluded.mark,
    last_mark = excluded.last_mark, last_mark_at = excluded.last_mark_at,
    whole_at = excluded.whole_at, problem = excluded.problem, ended_at = coalesce(excluded.ended_at, origins.ended_at);

-- name: server_time
-- The clock of the server.
select clock_timestamp();

-- name: ages_of_passes
-- The seconds since the last pass over each origin has ended, if none is under way. A clock that was ahead must
-- not stop the passes for as long.
select origin, abs(extract(epoch from clock_timestamp() - ended_at)::double precision)
from ntt_backup.origins where ended_at is not null and began_at is null;
