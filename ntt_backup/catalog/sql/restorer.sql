-- The role that restores a dump, and the tables into which the rows of a stranger's dump go.

-- name: rights_beyond
-- Whether this session's role is a superuser, and the roles that let it do more than what belongs to
-- a database: those that it may become.
select
    (select rolsuper from pg_roles where rolname = current_user),
    array(
        select m.rolname::text from pg_roles as m
        where pg_has_role(m.oid, 'member') and (
            {dangerous} or m.rolreplication or m.rolbypassrls
        )
        order by 1
    );

-- name: owners
-- The owners of this database and of its schema public, where it has one.
select pg_get_userbyid(d.datdba), (
    select pg_get_userbyid(n.nspowner) from pg_namespace as n
    where n.nspname = 'public'
)
from pg_database as d
where d.datname = current_database();

-- name: create_restorer
-- Makes a role that may do nothing but log in, for some time.
create role {role} login password {password} valid until {until}
nosuperuser nocreatedb nocreaterole noinherit noreplication nobypassrls;

-- name: give_database
-- Gives a database to a role.
alter database {database} owner to {role};

-- name: give_public
-- Gives the schema public to a role.
alter schema public owner to {role};

-- name: end_sessions
-- Ends the sessions of a role: what they have not committed is undone.
select pg_terminate_backend(pid) from pg_stat_activity
where usename = %(role)s;

-- name: definers
-- The routines of a role that run with the rights of their owner.
select format(
    '%%I.%%I(%%s)', n.nspname, p.proname, pg_get_function_identity_arguments(p.oid)
)
from pg_proc as p join pg_namespace as n
    on n.oid = p.pronamespace
where p.prosecdef
    and pg_get_userbyid(p.proowner) = %(role)s
order by 1;

-- name: as_caller
-- Has a routine run with the rights of who calls it.
alter routine {routine} security invoker;

-- name: as_owner
-- Has a routine run with the rights of its owner.
alter routine {routine} security definer;

-- name: hand_over
-- Gives all that a role owns in this database to another one.
reassign owned by {role} to {other};

-- name: drop_grants
-- Drops what else refers to a role in this database.
drop owned by {role};

-- name: drop_role
-- Drops a role.
drop role {role};

-- name: tables_of_ours
-- The columns of blobs and of our own tables.
select n.nspname::text, c.relname::text, array_agg(a.attname::text order by a.attnum)
from pg_class as c
join pg_namespace as n on n.oid = c.relnamespace
join pg_attribute as a on a.attrelid = c.oid
where c.relkind = 'r'
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
