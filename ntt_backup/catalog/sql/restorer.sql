-- The role that restores a dump, and the tables into which the rows of a stranger's dump go.

-- name: rights_beyond
-- Whether whoever logged in is a superuser; the roles that allow more than what belongs to a database and that
-- this role is or may become, as each predefined one but that of a database's owner; and as which other
-- role the session began, which code in a dump can undo.
select
    (select rolsuper from pg_roles where rolname = session_user),
    array(
        select m.rolname::text from pg_roles as m
        where pg_has_role(session_user, m.oid, 'member') and (
            {role_is_privileged} or m.rolreplication or m.rolbypassrls
            or starts_with(m.rolname::text, 'pg_') and m.rolname <> 'pg_database_owner'
        )
        order by 1
    ),
    nullif(current_user, session_user)::text;

-- name: given_extensions
-- The extensions that whoever logged in does not own.
select extname::text from pg_extension where not pg_has_role(extowner, 'usage');

-- name: impossible_extensions
-- The extensions that are not in this database and that this session's role cannot create, each with
-- whether the server has it. Up to PostgreSQL 12 none is trusted.
select wanted.name, offered.allowed is not null
from unnest(%(names)s::text[]) as wanted (name)
left join lateral (
    select not v.superuser or coalesce((to_jsonb(v) ->> 'trusted')::boolean, false) as allowed
    from pg_available_extensions as a
    join pg_available_extension_versions as v
        on v.name = a.name and v.version = a.default_version
    where a.name = wanted.name
) as offered on true
where not exists (select from pg_extension as e where e.extname = wanted.name)
    and (
        offered.allowed is null
        or not (
            offered.allowed
            or (select r.rolsuper from pg_roles as r where r.rolname = current_user)
        )
    )
order by 1;

-- name: relations_there
-- The wanted relations that are there, and null for those of which only the schema is.
select n.nspname::text, c.relname::text
from unnest(%(schemas)s::text[], %(names)s::text[]) as wanted (schema, name)
join pg_namespace as n on n.nspname = wanted.schema
left join pg_class as c on c.relnamespace = n.oid and c.relname = wanted.name;

-- name: owner_of_public
-- The owner of the schema public of this database, if it has one.
select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'public';

-- name: create_restorer
-- Makes a role that may do nothing but restore into a database.
create role {role} nologin
nosuperuser nocreatedb nocreaterole noinherit noreplication nobypassrls;
grant connect, create, temporary on database {database} to {role};

-- name: unused_restorers
-- Roles of former restores that own nothing in any database, and have no members.
select rolname::text from pg_roles as r
where rolname ~ %(prefix)s and not rolcanlogin
    and not exists (
        select from pg_shdepend as d
        where d.refclassid = 'pg_authid'::regclass and d.refobjid = r.oid
    )
    and not exists (select from pg_auth_members as m where m.roleid = r.oid);

-- name: enable_login
-- Lets a role log in for some time.
alter role {role} login password {password} valid until {until};

-- name: disable_login
-- Disables the login of a role, and removes what it set for its later sessions.
alter role {role} nologin password null valid until 'infinity';
alter role {role} reset all;
alter role {role} in database {database} reset all;

-- name: members
-- The members of a role.
select pg_get_userbyid(member) from pg_auth_members where pg_get_userbyid(roleid) = %(role)s;

-- name: revoke_membership
-- Revokes a role's membership in another role.
revoke {role} from {member} cascade;

-- name: revoke_create
-- Revokes the right to create schemas in a database.
revoke create on database {database} from {role};

-- name: set_owner_of_public
-- Makes a role the owner of the schema public.
alter schema public owner to {role};

-- name: grant_public
-- Lets a role go on to make indexes and tables in the schema public.
grant usage, create on schema public to {role};

-- name: end_sessions
-- Ends the sessions of a role: what they have not committed is undone.
select pg_terminate_backend(pid) from pg_stat_activity
where usename = %(role)s;

-- name: drop_owned
-- Drops what belongs to a role in this database, and its grants.
drop owned by {role};

-- name: drop_role
-- Drops a role.
drop role {role};

-- name: tables_of_ours
-- The columns of blobs and of our own tables, as far as this session's role has made them.
select n.nspname::text, c.relname::text, array_agg(a.attname::text order by a.attnum)
from pg_class as c
join pg_namespace as n on n.oid = c.relnamespace
join pg_attribute as a on a.attrelid = c.oid
where c.relkind = 'r' and pg_get_userbyid(c.relowner) = current_user
    and a.attnum > 0 and not a.attisdropped
    and (
        n.nspname = 'ntt_backup'
        or (
            c.relname = 'blobs'
            and not starts_with(n.nspname::text, 'pg_')
        )
    )
group by 1, 2;

-- name: copy_rows
-- Takes rows of a table, in the encoding of a dump.
copy {table} ({columns}) from stdin with (format text, encoding {encoding});

-- name: drop_table
-- Drops a table that was made for a restore.
drop table {table};

-- name: drop_own_schema
-- Drops our own tables, which were made for a restore.
drop schema ntt_backup cascade;
