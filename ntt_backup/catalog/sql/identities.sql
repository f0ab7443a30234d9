-- What the catalog knows of the places of targets.

-- name: identities
-- The identity of each target.
select target, id from ntt_backup.targets;

-- name: note_identity
-- Notes the identity of a target, and when its place was last seen.
insert into ntt_backup.targets (target, id) values (%(target)s, %(id)s)
on conflict (target) do update set id = excluded.id, seen_at = now();
