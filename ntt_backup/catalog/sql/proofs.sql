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
-- Copied blobs that nobody has checked since we met the target, of all, or of the session's part.
select count(*) from {blobs}
where {copied} and ({last_checked} is null or {last_checked} < %(met_at)s::timestamptz)
    and (%(all)s or {mine});

-- name: unproved_sample
-- The same of a sample of whole pages: its rows, and those of them. The sample is the same each time.
select count(*), count(*) filter (
    where {copied} and ({last_checked} is null or {last_checked} < %(met_at)s::timestamptz)
        and (%(all)s or {mine})
)
from {blobs} tablesample system (%(percent)s) repeatable (1);

-- name: columns_of_blobs
-- The columns of the table.
select attname::text from pg_attribute
where attrelid = to_regclass({blobs_name}) and attnum > 0 and not attisdropped;

-- name: state_of_copy
-- The two bits of the state of the copy on one target, as a part of count_proofs: 0 none, 1 never
-- proved, 2 proved too long ago, 3 proved. A date that lies ahead is none.
({copied} and {last_checked} >= {met_at} and {last_checked} <= {ahead}) is true,
({copied} and (
    {last_checked} is null or {last_checked} < {met_at} or {last_checked} >= {since}
    or {last_checked} > {ahead}
)) is true

-- name: count_proofs
-- All blobs by the states of their copies: how many, the first of them, the states. Reads the whole
-- table once, in parallel: of groups by conditions the planner knows that they are few.
select count(*), min(blobid collate "C"), {states}
from {blobs} where blobid is not null and {mine} group by {columns};

-- name: time_of_count
-- The time of a transaction.
select now();

-- name: keep_counts
-- Puts a new count of proofs in the place of the last one. Counts that nobody renews are forgotten.
with gone as (
    delete from ntt_backup.proofs
    where (targets = %(targets)s and proved_s = %(proved_s)s)
        or counted_at < now() - interval '90 days'
)
insert into ntt_backup.proofs as known (targets, proved_s, counted_at, kind, blobs, first)
select %(targets)s, %(proved_s)s, %(counted_at)s, one.*
from unnest(%(kinds)s::bigint[], %(blobs)s::bigint[], %(firsts)s::text[]) as one
on conflict (targets, proved_s, counted_at, kind) do nothing;

-- name: kept_counts
-- The last count of proofs.
select counted_at, kind, blobs, first from ntt_backup.proofs
where targets = %(targets)s and proved_s = %(proved_s)s
    and counted_at = (
        select max(counted_at) from ntt_backup.proofs
        where targets = %(targets)s and proved_s = %(proved_s)s
    );
