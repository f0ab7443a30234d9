-- One look at everything that init-db makes, and the SQL for those who may make it.

-- name: surroundings
-- The database and its owner, the owner of our schema (null: it is not there), whether we may read
-- which version that is, the schema where a new table would be, whether we may make it, and who we
-- are.
select current_database(), pg_get_userbyid(d.datdba), pg_get_userbyid(n.nspowner),
    coalesce(
        has_schema_privilege(n.oid, 'usage') and has_table_privilege(v.oid, 'select'), false
    ),
    coalesce(current_schema(), 'public'),
    coalesce(has_schema_privilege(current_schema(), 'create'), false),
    current_user
from pg_database d
left join pg_namespace n on n.nspname = 'ntt_backup'
left join pg_class v on v.relnamespace = n.oid and v.relname = 'schema_version'
where d.datname = current_database();

-- name: find_tables
-- The table that the search path finds, else all that it might be: oid, schema, owner, whether it is
-- partitioned, the owner of its schema, whether the search path finds it.
select c.oid, n.nspname, pg_get_userbyid(c.relowner), c.relkind = 'p',
    pg_get_userbyid(n.nspowner), to_regclass('blobs') is not null
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where case when to_regclass('blobs') is not null then c.oid = to_regclass('blobs')
    else c.relname = 'blobs' and c.relkind in ('r', 'p') and exists (
        select from pg_attribute a
        where a.attrelid = c.oid and a.attname = 'blobid' and not a.attisdropped
    ) end
order by n.nspname;

-- name: column_names
-- The columns of the table of this oid, for whoever may not read it, too.
select attname from pg_attribute
where attrelid = %(table)s and attnum > 0 and not attisdropped;

-- name: acts_as
-- Whether a role may do what another may, as the owner of something.
select pg_has_role({role}, %(other)s::name, 'usage');

-- name: may_make
-- Whether a role may make schemas in this database, may connect to it, and may use a schema.
select has_database_privilege({role}, current_database(), 'create'),
    has_database_privilege({role}, current_database(), 'connect'),
    has_schema_privilege({role}, %(schema)s, 'usage');

-- name: names_schema
-- Whether the search path of a role names a schema: the one that we have, or is set for another.
select exists (
    select from regexp_split_to_table(
        coalesce(
            case when {role} = current_user then current_setting('search_path') end,
            (
                select substr(one, length('search_path=') + 1)
                from pg_db_role_setting s cross join unnest(s.setconfig) as one
                where starts_with(one, 'search_path=')
                    and (s.setrole = 0 or pg_get_userbyid(s.setrole) = {role})
                    and (s.setdatabase = 0 or s.setdatabase = (
                        select oid from pg_database where datname = current_database()
                    ))
                order by s.setrole = 0, s.setdatabase = 0
                limit 1
            ),
            '"$user", public'
        ), ','
    ) as part
    where trim(part) in (%(schema)s, quote_ident(%(schema)s))
        or trim(both ' "' from part) = '$user' and {role} = %(schema)s
);

-- name: drop_unfinished
-- For psql: drops an index that an interrupted CREATE INDEX CONCURRENTLY left, if there is one.
select format('drop index concurrently %s', i.indexrelid::regclass)
from pg_index i where i.indexrelid = to_regclass({index}) and not i.indisvalid \gexec

-- name: create_trigger_once
-- For psql: makes the trigger where it is not there yet.
select {create}
where not exists (
    select from pg_trigger where tgrelid = {table}::regclass and tgname = 'ntt_backup_notify'
) \gexec

-- name: brief_lock
-- A change that cannot have its lock soon gives up, rather than have all others wait behind it.
set lock_timeout = '5s';

-- name: unhurried
-- An index waits for old transactions, and blocks nobody meanwhile.
set lock_timeout = 0;

-- name: grant
-- One privilege or several on one object.
grant {privileges} on {object} to {role};

-- name: grant_all_of_schema
-- What pg_dump reads in a schema.
grant select on all {kind} in schema {schema} to {role};
