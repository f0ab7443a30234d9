-- Which rows of blobs to send, check, compare or measure. Nothing is changed.

-- name: copied_blobs
-- What `verify` checks on the remote.
{copied};

-- name: copied_alone
-- What `verify` checks in a bucket beside the packs. A blob that is alone in a pack is one of these. A
-- copied blob whose size the column cannot hold has none.
{copied} and (
        size >= %(least)s::bigint
        or size is null and {largest_size} between %(least)s::bigint and 9223372036854775806
    )
    and blobid not in (
        select low from ntt_backup.packs where target = %(target)s and low = high
    );

-- name: blobs_of_the_store
-- What `verify --local` checks: whatever the store should have.
{copy_failed} is not true;

-- name: tries
-- What could not be checked, as a part of other queries.
(select name, tried_at from ntt_backup.unchecked where target = %(target)s) as tries

-- name: no_tries
-- The same where the catalog has no such table, or this role may not read it.
(select null::text as name, null::timestamptz as tried_at where false) as tries

-- name: may_read_tries
-- Whether there is a table of what could not be checked, and we may read it.
select coalesce(has_table_privilege(to_regclass('ntt_backup.unchecked'), 'select'), false);

-- name: begin_checks
-- The blobs to check of the session's part, those first that were checked, or tried in vain, longest ago. Held beyond its transaction, the
-- server keeps the list itself, in its own temporary space: a check takes hours, and a transaction
-- as long as that would keep vacuum from every table.
declare ntt_backup_checks scroll cursor with hold for
select blobid, {size} from {blobs} left join {tries} on name = blobid
where {chosen} and blobid is not null and starts_with(blobid, %(prefix)s::text)
    and blobid >= %(lo)s::text and (%(hi)s::text is null or blobid < %(hi)s::text)
    and {mine}
    and (
        %(older_than)s::float8 is null or {last_checked} is null
        or {last_checked} < now() - make_interval(secs => %(older_than)s::float8)
    )
    and (%(fraction)s::float8 is null or random() < %(fraction)s::float8)
order by greatest({last_checked}::timestamptz, tried_at) nulls first, blobid;

-- name: count_checks
-- Moves to the end of the list; the server answers how many rows that were.
move forward all in ntt_backup_checks;

-- name: rewind_checks
-- Moves back to the beginning of the list.
move absolute 0 in ntt_backup_checks;

-- name: next_checks
-- The next blobs of the list.
fetch forward {count} from ntt_backup_checks;

-- name: query_reads_only
-- Has the transaction of an operator's query change nothing.
set transaction read only;

-- name: limit_query
-- Ends an operator's query that takes too long, also while its rows are kept at the end.
set local statement_timeout = {limit};

-- name: path_of_query
-- Where the tables of an operator's query are looked for.
set local search_path = pg_catalog, {schema}, pg_temp;

-- name: begin_query
-- Runs an operator's query, and keeps its rows beyond the transaction.
declare ntt_backup_query cursor with hold for {query};

-- name: next_of_query
-- The next rows of an operator's query.
fetch forward {count} from ntt_backup_query;

-- name: rows_between
-- All rows of a range of blobids, in no order: size, whether copied, whether failed.
select blobid, {size}, {copied} is true, {copy_failed} is true from {blobs}
where blobid >= %(lo)s and (%(hi)s::text is null or blobid < %(hi)s::text);

-- name: sample_from
-- Blobs that follow points in the space of blobids, in whatever state but failed. Blobids are
-- hashes, so what follows any point is a fair sample of all.
select b.blobid, b.size
from unnest(%(points)s::text[]) as point
cross join lateral (
    select blobid, {size} as size from {blobs}
    where blobid >= point and {copy_failed} is not true
    order by blobid limit %(limit)s
) as b;

-- name: any_known
-- One row of the session's part, if there is any.
select 1 from {blobs} where {mine} limit 1;

-- name: copied_from
-- The first copied blob at or behind a point in the space of blobids.
select blobid from {blobs}
where {copied} and blobid >= %(first)s and blobid ~ '^[0-9a-f]{{64}}$' order by blobid limit 1;

-- name: any_copied
-- One copied blob, if there is any, in no order: the first that is met.
select 1 from {blobs} where {copied} limit 1;
