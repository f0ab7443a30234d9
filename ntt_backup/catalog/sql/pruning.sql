-- Blobs whose files are gone, and that a target no longer needs.
--
-- A blob that is being removed from a target is failed there for the reason `pruned`, and nobody has said
-- that this is known. Once it is removed, it is known; or its row is deleted, if no other target has it.

-- name: doubtful_origins
-- The origins of which it is not known which files are gone, each with the reason: the last pass, or the last
-- one that saw all, is missing or older than it should be, or could not read all.
select name, why
from unnest(
    %(names)s::text[], %(definitions)s::text[], %(every)s::float8[], %(whole_every)s::float8[]
) as wanted (name, definition, every, whole_every)
left join ntt_backup.origins as o on o.origin = wanted.name
cross join lateral (
    select case
        when o.ended_at is null or o.whole_at is null then 'it was never read as a whole'
        when o.definition <> wanted.definition
            then 'it is another one in the settings than it was when it was read last'
        when o.problem is not null then 'not all of it could be read: ' || o.problem
        when abs(extract(epoch from clock_timestamp() - o.ended_at)) > 2 * every + %(late)s
            or abs(extract(epoch from clock_timestamp() - o.whole_at))
                > 2 * greatest(every, wanted.whole_every) + %(late)s
            then format('it was last read at %%s, and as a whole at %%s', o.ended_at, o.whole_at)
    end as why
) as doubt
where why is not null;

-- name: create_prunable
-- The blobs that may be removed from the target, of this session. begun: an earlier call was interrupted
-- while it removed the blob.
create temporary table ntt_backup_prunable (
    blobid text primary key, size bigint not null, path bytea not null, begun boolean not null
);

-- name: fill_prunable
-- Lists the blobs of which each place is gone, or was replaced, before a time. There is an index for either.
insert into ntt_backup_prunable
select b.blobid, greatest(coalesce(max(b.size), max(p.size), 0), 0), min(p.path), false
from ntt_backup.places as p
join (select blobid, {size} as size from {blobs} where {copied}) as b on b.blobid = p.blobid
where p.blobid in (
    select blobid from ntt_backup.places
    where gone_at < now() - %(gone_for)s * interval '1 s' or replaced_at < now() - %(gone_for)s * interval '1 s'
)
group by b.blobid
having bool_and(
    coalesce(least(p.gone_at, p.replaced_at) < now() - %(gone_for)s * interval '1 s', false)
    and p.origin = any(%(origins)s::text[])
);

-- name: add_begun
-- Lists the blobs, too, whose removal was interrupted, and of which no file is listed.
insert into ntt_backup_prunable
select f.blobid, greatest(coalesce(max(b.size), 0), 0), min(p.path), true
from ntt_backup.failures as f
join (select blobid, {size} as size from {blobs}) as b on b.blobid = f.blobid
join ntt_backup.places as p on p.blobid = f.blobid
where f.target = %(target)s and f.reason = 'pruned' and {known_at} is null
group by f.blobid
having bool_and(least(p.gone_at, p.replaced_at) is not null)
on conflict (blobid) do update set begun = true;

-- name: analyze_prunable
-- Has the planner know how many there are.
analyze ntt_backup_prunable;

-- name: look_at_prunable
-- How many blobs may be removed, their bytes, both of those whose removal was not begun, and the first paths
-- where they were.
select count(*), coalesce(sum(size), 0)::bigint,
    count(*) filter (where not begun), coalesce(sum(size) filter (where not begun), 0)::bigint,
    (select array_agg(path) from (select path from ntt_backup_prunable order by path limit %(limit)s) as first)
from ntt_backup_prunable;

-- name: keep_prunable
-- Takes blobs off the list.
delete from ntt_backup_prunable where blobid = any(%(blobids)s::text[]);

-- name: next_prunable
-- The next blobs of the list after a blobid, of at least a given size in bytes.
select blobid from ntt_backup_prunable
where blobid > %(past)s and size >= %(least)s order by blobid limit %(limit)s;

-- name: which_prunable
-- Which of these blobs are on the list, and whether their removal was begun before.
select blobid, begun from ntt_backup_prunable where blobid = any(%(blobids)s::text[]);

-- name: begun_prunable
-- The blobs whose removal was begun, and not ended.
select f.blobid from ntt_backup.failures as f
where f.target = %(target)s and f.reason = 'pruned' and {known_at} is null and f.blobid > %(past)s
order by f.blobid limit %(limit)s;

-- name: lock_places
-- Locks all places of the given blobs. Returns the blobs of which no other session holds a place, and
-- whether each place of them is gone or replaced for long enough.
with locked as materialized (
    select id, origin, least(gone_at, replaced_at) as ended_at from ntt_backup.places
    where blobid = any(%(blobids)s::text[]) order by id for update skip locked
)
select p.blobid,
    bool_and(coalesce(
        locked.ended_at is not null
        and (g.begun or locked.ended_at < now() - %(gone_for)s * interval '1 s')
        and (g.begun or locked.origin = any(%(origins)s::text[])),
        false
    ))
from ntt_backup.places as p
left join locked on locked.id = p.id
left join ntt_backup_prunable as g on g.blobid = p.blobid
where p.blobid = any(%(blobids)s::text[])
group by p.blobid having bool_and(locked.id is not null);

-- name: mark_pruned
-- Marks blobs as not copied, and not to be sent. Returns those that are marked so now.
with marked as (
    update {blobs} set {copied} = false, {copy_failed} = true
    where blobid = any(%(blobids)s::text[]) and (
        {copied} or exists (
            select from ntt_backup.failures as f
            where f.target = %(target)s and f.blobid = blobs.blobid and f.reason = 'pruned'
                and {known_at} is null
        )
    )
    returning blobid, {copied} is not true and {copy_failed} as done
), said as (
    insert into ntt_backup.failures as known (target, blobid, reason, detail)
    select %(target)s, blobid, 'pruned', %(detail)s from marked where done order by blobid
    on conflict (target, blobid) do update
    set reason = excluded.reason, detail = excluded.detail, last_at = excluded.last_at, known_at = null
)
select blobid from marked where done;

-- name: lock_for_deletion
-- Locks blobs whose removal was begun, so that nobody registers them meanwhile.
select blobid from {blobs}
where blobid = any(%(blobids)s::text[]) and exists (
    select from ntt_backup.failures as f
    where f.target = %(target)s and f.blobid = blobs.blobid and f.reason = 'pruned' and {known_at} is null
)
order by blobid for update;

-- name: send_pruned
-- Makes blobs pending again of which a file has come back.
with forgotten as (
    delete from ntt_backup.failures
    where target = %(target)s and blobid = any(%(blobids)s::text[]) and reason = 'pruned'
)
update {blobs} set {copy_failed} = false where blobid = any(%(blobids)s::text[]);

-- name: forget_pruned
-- Deletes blobs that no target has any more, and unsets their places; the others stay, and it is known that
-- this target has them no more. Returns how many were deleted, and the bytes of all.
with deleted as (
    delete from {blobs}
    where blobid = any(%(blobids)s::text[]) and not ({elsewhere}) and not exists (
        select from ntt_backup.failures as f
        where f.target <> %(target)s and f.blobid = blobs.blobid and f.reason = 'pruned'
            and {known_at} is null
    )
    returning blobid
), unset as (
    update ntt_backup.places set blobid = null where blobid in (select blobid from deleted)
), forgotten as (
    delete from ntt_backup.failures where blobid in (select blobid from deleted)
), known as (
    update ntt_backup.failures set known_at = clock_timestamp(), detail = %(detail)s
    where target = %(target)s and blobid = any(%(blobids)s::text[])
        and blobid not in (select blobid from deleted)
)
select (select count(*) from deleted), coalesce(sum(size), 0)::bigint from ntt_backup_prunable
where blobid = any(%(blobids)s::text[]);

-- name: note_returned
-- Notes which removed blobs have a file again. Returns the targets that they were removed from. The names of all
-- targets lead to the index.
with returned as (
    update ntt_backup.failures as f set detail = %(returned)s
    where target = any(array(
            select left(attname::text, -7) from pg_attribute
            where attrelid = to_regclass({blobs_name}) and attname ~ '._copied$'
        ))
        and blobid = any(%(blobids)s::text[]) and reason = 'pruned' and {known_at} is not null
    returning target
)
select distinct target from returned;

-- name: returned_blobs
-- The blobs that were removed from a target, and have a file again.
select blobid from ntt_backup.failures
where target = %(target)s and reason = 'pruned' and detail = %(returned)s;
