-- Settings of the session, and what `init-db` asks of it.

-- name: begin_session
-- The first statement of each session: its search path, the schema in which this finds the table
-- blobs, else would create it, whether the role may do more than what belongs to a database, and whether
-- it finds that table and may read which one is meant. From then on all names are those of the server
-- itself. Until then the path may lead anywhere, so each name has its schema; two statements in one
-- message, since a pooler may refuse a search path at connecting.
select
    pg_catalog.current_setting('search_path'),
    coalesce(
        (
            select n.nspname
            from pg_catalog.pg_class c
            join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace
            where c.oid operator(pg_catalog.=) pg_catalog.to_regclass('blobs')
        ), pg_catalog.current_schema()
    ),
    {privileged},
    pg_catalog.to_regclass('blobs') is not null and exists (
        select from pg_catalog.pg_class v
        join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) v.relnamespace
        where n.nspname operator(pg_catalog.=) 'ntt_backup'
            and v.relname operator(pg_catalog.=) 'schema_version'
            and pg_catalog.has_schema_privilege(n.oid, 'usage')
            and pg_catalog.has_table_privilege(v.oid, 'select')
    );
set search_path = pg_catalog, pg_temp;

-- name: server
-- Which server answers: its cluster, the timeline of a primary, 0 of a standby, and when it was started.
-- The last checkpoint may still be one of the timeline before, so the name of a file of the WAL tells.
select (pg_control_system()).system_identifier::text, case when pg_is_in_recovery() then 0
    else ('x' || lpad(left(pg_walfile_name(pg_current_wal_lsn()), 8), 16, '0'))::bit(64)::bigint end,
    pg_postmaster_start_time()::text;

-- name: other_table
-- The schema of the table that ours are about, where that is not the one the search path finds. A
-- table that does not exist any more has moved.
select v.blobs_schema from ntt_backup.schema_version v
join pg_namespace n on n.nspname = v.blobs_schema
join pg_class c on c.relnamespace = n.oid and c.relname = 'blobs' and c.relkind in ('r', 'p')
where c.oid is distinct from to_regclass({blobs_name});

-- name: privileged
-- Whether the role that logged in is, or may become, one that can do more than what belongs to a database,
-- as a part of other queries, whatever their search path.
exists (
    select from pg_catalog.pg_roles m
    where pg_catalog.pg_has_role(session_user, m.oid, 'member') and {role_is_privileged}
)

-- name: role_is_privileged
-- Whether a role m can do more than what belongs to a database, as a part of other queries.
(m.rolsuper or m.rolcreaterole or m.rolname operator(pg_catalog.=) any (array[
    'pg_execute_server_program', 'pg_write_server_files', 'pg_read_server_files'
]::pg_catalog.name[]))

-- name: code_of_others
-- What roles can put code into that runs when our tables are used, and blobs where its schema is given:
-- a line each, and whether it is what they own, but for roles that may become one of the trusted. The
-- server calls code in an index, a trigger, a rule, a check, a default or statistics with the rights of
-- whoever uses the table, and also when it plans a query; so only the system catalogs are asked: for all
-- that the tables need, directly or not, all that is a part of it, and tables above and below. Before
-- PostgreSQL 18 the deferred triggers of a table that refers to ours run with the rights of whoever
-- deletes from ours. Whoever owns a schema may drop what is in it, and make it anew: that counts where
-- we name what is in it. Without a schema of ours, only event triggers count: any DDL calls them.
--
-- From PostgreSQL 16 on a member may be one in name only, and become nothing.
with recursive needed (classid, objid) as (
    (
        select 'pg_class'::regclass::oid, c.oid
        from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where n.nspname = {schema} and c.relname = 'blobs'
        union all
        select classid, objid from pg_depend
        where refclassid = 'pg_namespace'::regclass and refobjid = to_regnamespace({ours})
        union all
        select 'pg_event_trigger'::regclass, oid from pg_event_trigger
        where evtenabled <> 'D' and {privileged}
    )
    union
    select more.classid, more.objid from needed n cross join lateral (
        select d.refclassid, d.refobjid from pg_depend d
        where d.classid = n.classid and d.objid = n.objid
        union all
        select d.classid, d.objid from pg_depend d
        where d.refclassid = n.classid and d.refobjid = n.objid and (
            d.deptype in ('a', 'i', 'P', 'S')
            or d.refclassid = 'pg_class'::regclass and (
                d.classid = 'pg_class'::regclass
                or d.classid = 'pg_constraint'::regclass and exists (
                    select from pg_class c where c.oid = d.refobjid
                    and c.relnamespace = to_regnamespace({ours})
                )
            )
        )
    ) more (classid, objid)
), owned (what, owner, holds) as (
    select 'schema ' || quote_ident(n.nspname), case pg_get_userbyid(n.nspowner)
        when 'pg_database_owner' then d.datdba else n.nspowner end, ' belongs to '
    from pg_namespace n join pg_database d on d.datname = current_database()
    where n.nspname in ({ours}, {schema})
    union all
    select concat(i.type, ' ', i.identity), o.owner, ' belongs to '
    from needed n join (
        select 'pg_class'::regclass, oid, relowner from pg_class where relkind not in ('i', 'I')
        union all
        select 'pg_proc'::regclass, oid, proowner from pg_proc
        union all
        select 'pg_type'::regclass, oid, typowner from pg_type
        where typrelid = 0 and typcategory <> 'A'
    ) o (classid, objid, owner) using (classid, objid)
    cross join pg_identify_object(n.classid, n.objid, 0) i
    union all
    select lower(a.privilege_type) || ' on ' || c.oid::regclass::text, a.grantee, ' is granted to '
    from needed n
    join pg_class c on n.classid = 'pg_class'::regclass and c.oid = n.objid
    cross join lateral (
        select c.relacl union all select attacl from pg_attribute where attrelid = c.oid
    ) l (acl)
    cross join aclexplode(l.acl) a
    where a.grantee <> c.relowner and (
        a.privilege_type = 'TRIGGER'
        or a.privilege_type = 'REFERENCES' and c.relnamespace = to_regnamespace({ours})
    )
)
select distinct what || holds || case owner when 0 then 'public' else pg_get_userbyid(owner) end,
    holds = ' belongs to '
from owned
where not exists (
    select from unnest({trusted}::name[]) as trusted (name)
    where pg_has_role(owner, trusted.name, case
        when current_setting('server_version_num')::int >= 160000
        then 'set, usage, member with admin option' else 'member' end)
)
order by 1;

-- name: set_defaults
-- What every session of ours starts with, as far as the server knows it. What the connection string
-- sets (source `client`) is left alone.
--
-- A role or database may have limits that are meant for people. A statement of ours may read the
-- whole table; a session that is idle may be waiting for the remote. The limit of a transaction that
-- is idle stays: ours never are, unless we hang. Under a stricter isolation each row that another
-- session has changed meanwhile would be an error.
--
-- When our host dies, the claims of its workers last until the server notices. By default that
-- takes hours. The check of the client while a statement runs is only known to work on Linux.
--
-- The driver reads times of one style only.
select set_config(s.name, ours.value, false)
from pg_settings s
join (values
    ('DateStyle', 'ISO'),
    ('statement_timeout', '0'),
    ('transaction_timeout', '0'),
    ('default_transaction_isolation', 'read committed'),
    ('idle_session_timeout', '0'),
    ('lock_timeout', '30s'),
    ('tcp_keepalives_idle', '10'),
    ('tcp_keepalives_interval', '5'),
    ('tcp_keepalives_count', '4'),
    ('tcp_user_timeout', '30s'),
    ('client_connection_check_interval', case when version() ~ '-linux-' then '10s' end)
) as ours (name, value) on ours.name = s.name and ours.value is not null
where s.source <> 'client' or s.name = 'DateStyle';

-- name: end_when_idle
-- Limits the time without a statement: after it, the claims of a stopped host are free.
select set_config(name, %(value)s, false)
from pg_settings where name = 'idle_session_timeout' and source <> 'client';

-- name: backend
-- The process of the server that answers in this transaction; also asked of sessions that keep their
-- search path.
select pg_catalog.pg_backend_pid();

-- name: configure
-- Sets a server setting for the session, or for the transaction only.
select set_config(%(setting)s, %(value)s, %(local)s);

-- name: walk_indexes
-- Has the planner walk indexes, for the session or the transaction only, and spend no time on
-- compiling.
select set_config('enable_seqscan', 'off', %(local)s), set_config('enable_bitmapscan', 'off',
%(local)s),
    set_config('jit', 'off', %(local)s);

-- name: try_lock
-- Takes the session's advisory lock (class, key) if it is free. Asked again and again rather than
-- waited for: a session that waits inside a statement keeps a snapshot, and CREATE INDEX
-- CONCURRENTLY in the session that holds the lock would wait for that snapshot, for ever.
select pg_try_advisory_lock(%(class)s, %(key)s);

-- name: databases_like
-- Databases of a role of this user whose names match a pattern.
select datname from pg_database
where datname ~ %(pattern)s and pg_has_role(datdba, 'MEMBER')
order by datname;

-- name: lock_database
-- Takes the session's advisory lock of a database that a drill makes, if it is free. No other lock
-- has a key of 64 bits.
select pg_try_advisory_lock(%(key)s::bigint);

-- name: unlock
-- Gives one advisory lock of this session back.
select pg_advisory_unlock(%(class)s, %(key)s);

-- name: one_snapshot
-- Lets the queries of this transaction see one and the same moment.
set transaction isolation level repeatable read, read only;

-- name: create_database
-- A database for a drill.
create database {database};

-- name: drop_database
-- Drops the database of a drill.
drop database {database};
