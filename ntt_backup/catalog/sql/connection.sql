-- Settings of the session, and what `init-db` asks of it.

-- name: begin_session
-- The first statement of each session: its search path, and the schema in which this finds the table
-- blobs, else would create it. From then on all names are those of the server itself. Until then
-- the path may lead anywhere, so each name has its schema; two statements in one message, since a
-- pooler may refuse a search path at connecting.
select
    pg_catalog.current_setting('search_path'),
    coalesce(
        (
            select n.nspname
            from pg_catalog.pg_class c
            join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace
            where c.oid operator(pg_catalog.=) pg_catalog.to_regclass('blobs')
        ), pg_catalog.current_schema()
    );
set search_path = pg_catalog, pg_temp;

-- name: set_defaults
-- What every session of ours starts with, as far as the server knows it. What the connection string
-- sets (source `client`) is left alone.
--
-- A role or database may have limits that are meant for people. A statement of ours may read the
-- whole table; a session that is idle may be waiting for the remote. The limit of a transaction that
-- is idle stays: ours never are, unless we hang.
--
-- When our host dies, the claims of its workers last until the server notices. By default that
-- takes hours. The check of the client while a statement runs is only known to work on Linux.
select set_config(s.name, ours.value, false)
from pg_settings s
join (values
    ('statement_timeout', '0'),
    ('transaction_timeout', '0'),
    ('idle_session_timeout', '0'),
    ('lock_timeout', '30s'),
    ('tcp_keepalives_idle', '10'),
    ('tcp_keepalives_interval', '5'),
    ('tcp_keepalives_count', '4'),
    ('tcp_user_timeout', '30s'),
    ('client_connection_check_interval', case when version() ~ '-linux-' then '10s' end)
) as ours (name, value) on ours.name = s.name and ours.value is not null
where s.source <> 'client';

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

-- name: unlock
-- Gives one advisory lock of this session back.
select pg_advisory_unlock(%(class)s, %(key)s);

-- name: one_snapshot
-- Lets the queries of this transaction see one and the same moment.
set transaction isolation level repeatable read, read only;
