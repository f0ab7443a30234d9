-- Which marks are proofs: those of other programs are not.

-- name: contact
-- When we first met the marks of a target, and how many there were.
select met_at, marked from ntt_backup.contacts where target = %(target)s;

-- name: first_run
-- When the first of our runs of a target began; null before any.
select min(started_at) from ntt_backup.runs where target = %(target)s;

-- name: note_contact
-- Notes when we first met the marks of a target. The first note stays.
insert into ntt_backup.contacts (target, met_at, marked)
values (%(target)s, coalesce(%(met_at)s, now()), %(marked)s)
on conflict do nothing;

-- name: unproved
-- Copied blobs that nobody has checked since we met the target, of all.
select count(*) from {blobs}
where {copied} and ({last_checked} is null or {last_checked} < %(met_at)s::timestamptz);

-- name: unproved_sample
-- The same of a sample of whole pages: its rows, and those of them. The sample is the same each time.
select count(*), count(*) filter (
    where {copied} and ({last_checked} is null or {last_checked} < %(met_at)s::timestamptz)
)
from {blobs} tablesample system (%(percent)s) repeatable (1);
