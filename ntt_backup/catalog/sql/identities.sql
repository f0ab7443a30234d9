-- What the catalog knows of the places of targets.

-- name: identities
-- The identity of each target.
select target, id from ntt_backup.targets;

-- name: place_of
-- The identity of a target, and when a run last found its place.
select id, seen_at from ntt_backup.targets where target = %(target)s;

-- name: note_identity
-- Notes the identity of a target, and when its place was last seen.
insert into ntt_backup.targets (target, id) values (%(target)s, %(id)s)
on conflict (target) do update set id = excluded.id, seen_at = now();
