-- What a role may do. The table is given by its oid, or it is the one that the search path finds.

-- name: lacking
-- Of the wanted privileges those that the role lacks: on columns of the table, on tables of our schema,
-- on our schema, on the database; each with its kind and name. What does not exist is lacked; but
-- what a role may do with the whole table it may do with a column that is still to be added.
select wanted.kind, wanted.privilege, wanted.name
from unnest(%(kinds)s::text[], %(privileges)s::text[], %(names)s::text[]) with ordinality
    as wanted (kind, privilege, name, nth)
left join pg_class c on c.oid = case wanted.kind
    when 'column' then coalesce(%(table)s::oid, to_regclass({blobs_name}))
    when 'of_blobs' then coalesce(%(table)s::oid, to_regclass({blobs_name}))
    when 'table' then (
        select oid from pg_class
        where relnamespace = to_regnamespace('ntt_backup') and relname = wanted.name
    )
end
left join pg_attribute a
    on wanted.kind = 'column' and a.attrelid = c.oid and a.attname = wanted.name
    and not a.attisdropped
where not coalesce(
    case wanted.kind
        when 'schema' then
            has_schema_privilege({role}, to_regnamespace(wanted.name)::oid, wanted.privilege)
        when 'database' then
            has_database_privilege({role}, current_database(), wanted.privilege)
        else has_column_privilege({role}, c.oid, a.attnum, wanted.privilege)
    end,
    has_table_privilege({role}, c.oid, wanted.privilege),
    false
)
order by wanted.nth;

-- name: read_only
-- Whether transactions of this session may only read, whether that is so because the server is a
-- standby, and else where it was set.
select current_setting('transaction_read_only')::boolean, pg_is_in_recovery(),
    (select source from pg_settings where name = 'default_transaction_read_only'),
    current_database(), current_user;

-- name: grant_reading
-- Lets a role read what pg_dump reads in a schema, of what exists today.
grant usage on schema {schema} to {role};
grant select on all tables in schema {schema} to {role};
grant select on all sequences in schema {schema} to {role};

-- name: grant_reading_later
-- Lets a role read what another role will make in a schema, such as new partitions.
alter default privileges for role {owner} in schema {schema} grant select on tables to {role};
alter default privileges for role {owner} in schema {schema} grant select on sequences to {role};

-- name: makers
-- Schema and owner of tables that get more partitions, or lie in one of the given schemas, where the
-- role may not read what the owner makes there next.
select distinct n.nspname, pg_get_userbyid(c.relowner)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
    and (c.relkind = 'p' or c.relispartition or n.nspname = any(%(schemas)s::text[]))
    and not pg_has_role({role}, c.relowner, 'usage')
    and not exists (
        select from pg_roles where rolname = 'pg_read_all_data' and pg_has_role({role}, oid, 'usage')
    )
    and not exists (
        select from pg_default_acl d cross join aclexplode(d.defaclacl) a
        where d.defaclrole = c.relowner and d.defaclobjtype = 'r'
            and d.defaclnamespace in (0, n.oid) and a.privilege_type = 'SELECT'
            and (a.grantee = 0 or pg_has_role({role}, a.grantee, 'usage'))
    )
order by 1, 2;

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
            case when {role} = current_user then %(search_path)s::text end,
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

-- name: grant
-- One privilege or several on one object.
grant {privileges} on {object} to {role};

-- name: undumpable
-- What pg_dump would stumble over: tables and sequences that the role may not read, tables of which a
-- policy would hide rows from this session, large objects; each with its kind, quoted name, schema and
-- name, in order, the first of the last ones only. What belongs to an extension is not dumped, its
-- tables of settings apart.
with dumped as (
    select c.oid, c.relkind, n.nspname as schema, n.oid as schema_oid,
        c.relname as name, format('%I.%I', n.nspname, c.relname) as quoted
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.relkind in ('r', 'p', 'S') and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
        and (
            not exists (
                select from pg_depend d
                where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e'
            )
            or c.oid in (select unnest(extconfig) from pg_extension)
        )
), hidden as (
    select m.oid from pg_largeobject_metadata m
    where not current_setting('lo_compat_privileges')::boolean
        and not pg_has_role({role}, m.lomowner, 'usage') and not exists (
            select from aclexplode(m.lomacl) a where a.privilege_type = 'SELECT'
                and (a.grantee = 0 or pg_has_role({role}, a.grantee, 'usage'))
        )
    order by m.oid limit 1
)
select 'unreadable' as kind, quoted, schema, name from dumped
where not (has_schema_privilege({role}, schema_oid, 'usage') and has_table_privilege({role}, oid, 'select'))
union all
select 'policy', quoted, schema, name from dumped
where relkind = 'r' and has_table_privilege(oid, 'select') and row_security_active(oid)
union all
select 'large object', 'large object ' || oid, null, null from hidden
order by 1, 2;
