-- What a role may do. The table is given by its oid, or it is the one that the search path finds.

-- name: lacking_on_columns
-- Of the wanted privileges on columns of the table those that the role lacks. What it may do with
-- the whole table it may do with a column that is still to be added.
select wanted.privilege, wanted.name
from unnest(%(privileges)s::text[], %(names)s::text[]) with ordinality
    as wanted (privilege, name, nth)
left join pg_class c on c.oid = coalesce(%(table)s::oid, to_regclass('blobs'))
left join pg_attribute a
    on a.attrelid = c.oid and a.attname = wanted.name and not a.attisdropped
where not coalesce(
    has_column_privilege({role}, c.oid, a.attnum, wanted.privilege),
    has_table_privilege({role}, c.oid, wanted.privilege),
    false
)
order by wanted.nth;

-- name: lacking_on_own
-- Of the wanted privileges on our own tables those that the role lacks, and where a table is absent.
select wanted.privilege, wanted.name
from unnest(%(privileges)s::text[], %(names)s::text[]) with ordinality
    as wanted (privilege, name, nth)
left join pg_class c
    on c.relnamespace = to_regnamespace('ntt_backup') and c.relkind = 'r' and c.relname = wanted.name
where not coalesce(has_table_privilege({role}, c.oid, wanted.privilege), false)
order by wanted.nth;

-- name: lacking_elsewhere
-- Whether the role may look into our schema, and may make temporary tables.
select
    coalesce(
        has_schema_privilege({role}, to_regnamespace('ntt_backup')::oid, 'usage'), false
    ),
    has_database_privilege({role}, current_database(), 'temporary');

-- name: read_only
-- Whether transactions of this session may only read, whether that is so because the server is a
-- standby, and else where it was set.
select current_setting('transaction_read_only')::boolean, pg_is_in_recovery(),
    (select source from pg_settings where name = 'default_transaction_read_only'),
    current_database(), current_user;
