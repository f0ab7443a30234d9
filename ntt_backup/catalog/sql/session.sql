-- Settings of the session, and what `init-db` asks of it.

-- name: configure
-- Sets a server setting for the session, or for the transaction only.
select set_config(%(setting)s, %(value)s, %(local)s);

-- name: walk_indexes
-- Has the planner walk indexes, for the session or the transaction only, and spend no time on
-- compiling.
select set_config('enable_seqscan', 'off', %(local)s), set_config('enable_bitmapscan', 'off',
%(local)s),
    set_config('jit', 'off', %(local)s);

-- name: limits
-- The time limits of the session, as they can be set again.
select current_setting('lock_timeout'), current_setting('statement_timeout');

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
