-- What the catalog looks like.

-- name: find_tables
-- The table that the search path finds, else all that it might be: oid, kind, schema,
-- owner, the owner of its schema, whether the search path finds it.
select c.oid, c.relkind::text, n.nspname, pg_get_userbyid(c.relowner),
    pg_get_userbyid(n.nspowner), to_regclass({blobs_name}) is not null
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where case when to_regclass({blobs_name}) is not null then c.oid = to_regclass({blobs_name})
    else c.relname = 'blobs' and c.relkind in ('r', 'p') and exists (
        select from pg_attribute a
        where a.attrelid = c.oid and a.attname = 'blobid' and not a.attisdropped
    ) end
order by n.nspname;

-- name: tables_elsewhere
-- The schemas that have a table of this name.
select n.nspname from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relname = 'blobs' and c.relkind in ('r', 'p') order by n.nspname;

-- name: table_columns
-- The columns of the table of this oid, for whoever may not read it, too: name, type without length,
-- not null, collation (schema, name, whether equal means the same bytes).
select a.attname, format_type(a.atttypid, null), a.attnotnull,
    n.nspname, l.collname, coalesce(l.collisdeterministic, true)
from pg_attribute a
left join pg_collation l on l.oid = a.attcollation
left join pg_namespace n on n.oid = l.collnamespace
where a.attrelid = %(table)s and a.attnum > 0 and not a.attisdropped;

-- name: form_of_bytea
-- Of some blobids of the type bytea, how many there are, and how many of them are hex digits.
select count(*), count(*) filter (where encode(blobid, 'escape') ~ '^[0-9a-f]{{64}}$')
from (select blobid from {blobs} where blobid is not null limit 1000) as sample;

-- name: largest_size
-- The largest number of bytes that the column size can hold, also as a part of other queries. Live
-- tables have an integer, which ends at 2 GiB, or a number of so many digits, whose modifier
-- is (precision << 16 | scale) + 4.
(
    select case
        when atttypid = 'smallint'::regtype then 32767
        when atttypid = 'integer'::regtype then 2147483647
        when atttypid = 'numeric'::regtype and atttypmod >= 4 then least(
            10::numeric ^ (((atttypmod - 4) >> 16) - ((atttypmod - 4) & 2047)) - 1,
            9223372036854775807
        )
        else 9223372036854775807
    end::bigint
    from pg_attribute where attrelid = to_regclass({blobs_name}) and attname = 'size'
);

-- name: row_security
-- Whether policies decide which rows we see and change.
select row_security_active({blobs_name});

-- name: blobid_unique
-- Whether a valid unique index covers exactly blobid, for all rows.
select exists (
    select from pg_index i
    join pg_attribute a on a.attrelid = i.indrelid and a.attname = 'blobid'
    where i.indrelid = to_regclass({blobs_name}) and i.indisunique and i.indisvalid
        and i.indpred is null and i.indnkeyatts = 1 and i.indkey[0] = a.attnum
);

-- name: bounds_ascend
-- Whether the ranges' bounds ascend in the order of blobid. Not all languages agree: Danish sorts
-- aa after z, and ranges would overlap.
select bool_and(r.lo collate {collation} < r.hi collate {collation})
from unnest(%(los)s::text[], %(his)s::text[]) as r (lo, hi)
where r.hi is not null;

-- name: own_tables
-- Those of our tables that exist, and their columns as `table.column`, their indexes as `table.index`.
select c.relname from pg_class c
where c.relnamespace = to_regnamespace('ntt_backup') and c.relkind = 'r'
union all
select concat(c.relname, '.', a.attname) from pg_class c
join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where c.relnamespace = to_regnamespace('ntt_backup') and c.relkind = 'r'
union all
select concat(c.relname, '.', of_index.relname) from pg_class c
join pg_index i on i.indrelid = c.oid
join pg_class of_index on of_index.oid = i.indexrelid
where c.relnamespace = to_regnamespace('ntt_backup');

-- name: schema_version
-- Which version of our schema this is, and the schema of the table that it serves.
select version, blobs_schema from ntt_backup.schema_version;

-- name: building
-- Sessions that are building an index on the table at this moment.
select p.pid from pg_stat_progress_create_index p
join pg_locks l on l.pid = p.pid and l.relation = to_regclass({blobs_name})
    and l.database = (select oid from pg_database where datname = current_database())
where p.pid <> pg_backend_pid()
group by p.pid;

-- name: lock_holders
-- Sessions that hold a lock on the table: pid, application_name.
select l.pid, coalesce(max(a.application_name), '')
from pg_locks l left join pg_stat_activity a on a.pid = l.pid
where l.relation = to_regclass({blobs_name}) and l.granted and l.pid <> pg_backend_pid()
    and l.database = (select oid from pg_database where datname = current_database())
group by l.pid order by l.pid;
