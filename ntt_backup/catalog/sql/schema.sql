-- What init-db looks at, and what it makes or prints.

-- name: surroundings
-- The database and its owner, the owner of our schema (null: it does not exist), whether we may read
-- which version that is, the schema where a new table would be, whether we may make it, and who we
-- are.
select current_database(), pg_get_userbyid(d.datdba), pg_get_userbyid(n.nspowner),
    coalesce(
        has_schema_privilege(n.oid, 'usage') and has_table_privilege(v.oid, 'select'), false
    ),
    coalesce(%(schema)s, 'public'),
    coalesce(has_schema_privilege(to_regnamespace(quote_ident(%(schema)s))::oid, 'create'), false),
    current_user
from pg_database d
left join pg_namespace n on n.nspname = 'ntt_backup'
left join pg_class v on v.relnamespace = n.oid and v.relname = 'schema_version'
where d.datname = current_database();

-- name: absent_roles
-- Those of the named roles that the server does not have.
select name from unnest(%(names)s::text[]) as name
where not exists (select from pg_roles where rolname = name);

-- name: create_role
-- A role without any right but to log in.
create role {role} login;

-- name: create_table
-- The catalog, where no other program has made it. A scan registers blobs in order, which fills the
-- pages of an index; each mark then adds an entry to the key. A full page is searched for dead ones,
-- in vain, and split: so there is room.
create table if not exists {table} (
    blobid text primary key with (fillfactor = 70),
    size bigint,
    created_at timestamptz default now(),
    {copied} boolean,
    {last_checked} timestamptz,
    {copy_failed} boolean
);

-- name: add_column
-- One column more, as a part of ALTER TABLE. Without a default no row is rewritten.
add column if not exists {column} {type};

-- name: alter_table
-- All missing columns at once: one short exclusive lock.
alter table {table} {changes};

-- name: default_created_at
-- New rows get a date; earlier rows keep none, since nobody knows it any more.
alter column created_at set default now();

-- name: create_index
-- The index of what is still to be sent. Failed blobs are in it too: they are few, and requeued.
create index concurrently if not exists {index} on {table} (blobid) where {uncopied};

-- name: drop_index
-- Removes what an interrupted CREATE INDEX CONCURRENTLY left.
drop index concurrently if exists {index};

-- name: owner_of_database
-- Who owns this database, as a part of other queries.
(select pg_get_userbyid(datdba) from pg_database where datname = current_database())

-- name: guard
-- Ends a script where other roles have put something into our schema whose code its statements would run.
-- A privileged role trusts no other role.
declare found text;
begin
    select string_agg(line, ', ') into found from ({code_of_others}) as of_others (line, owned)
    where owned or {privileged};
    if found is not null then
        raise exception 'the schema ntt_backup, or an event trigger, has what roles with other rights can put'
            ' code into: %', left(found, 500)
        using hint = 'Let the owner run init-db; if nobody knows the schema, drop it as a superuser: drop schema ntt_backup cascade;';
    end if;
end;

-- name: do
-- Executes a body that is a text.
do {body};

-- name: trusted_by_script
-- The roles that a script trusts, as a part of other queries.
case when {privileged} then array[session_user] else array[session_user, {names}] end

-- name: create_schema
-- Where our own tables are.
create schema if not exists ntt_backup;

-- name: create_own_tables
-- Our own tables, in the schema ntt_backup.

-- Why blobs failed. A blob is failed because its row in blobs says so; this is what we know about
-- it.
create table if not exists ntt_backup.failures (
    target text not null,
    blobid text not null,
    reason text not null,
    detail text not null default '',
    attempts integer not null default 1,
    first_at timestamptz not null default now(),
    last_at timestamptz not null default now(),
    primary key (target, blobid)
);
alter table ntt_backup.failures add column if not exists known_at timestamptz;

-- The history of runs.
create table if not exists ntt_backup.runs (
    run_id uuid primary key,
    target text not null,
    host text not null,
    pid integer not null,
    strategy text not null,
    workers integer not null,
    started_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    ended_at timestamptz,
    outcome text,
    exit_code integer,
    copied bigint not null default 0,
    failed bigint not null default 0,
    bytes bigint not null default 0
);
alter table ntt_backup.runs add column if not exists reason text;
-- Of a host that holds a part of the store; null for all of it.
alter table ntt_backup.runs add column if not exists prefixes text;

-- What the runs of a target did in each hour; outage_s: seconds in which something was away.
create table if not exists ntt_backup.hours (
    target text not null,
    hour timestamptz not null,
    copied bigint not null default 0,
    failed bigint not null default 0,
    bytes bigint not null default 0,
    outage_s double precision not null default 0,
    primary key (target, hour)
);

-- How far the scan of a store got. directory is the last one that is done with.
create table if not exists ntt_backup.scans (
    root text primary key,
    directory text,
    registered bigint not null default 0,
    strays bigint not null default 0,
    started_at timestamptz not null default now(),
    finished_at timestamptz
);

-- The history of dumps: those that were made, and with an error those that were not.
create table if not exists ntt_backup.dumps (
    target text not null,
    started_at timestamptz not null,
    ended_at timestamptz not null default now(),
    name text not null,
    bytes bigint not null,
    sha256 text not null,
    error text not null,
    primary key (target, started_at)
);

-- The history of checks: verify, reconcile, drill and restore, a row a call.
create table if not exists ntt_backup.checks (
    target text not null,
    command text not null,
    started_at timestamptz not null,
    ended_at timestamptz not null default clock_timestamp(),
    exit_code integer not null,
    blobs bigint not null,
    bytes bigint not null,
    wrong bigint not null,
    detail text not null,
    primary key (target, command, started_at)
);
alter table ntt_backup.checks add column if not exists prefixes text;

-- When we first met the marks of each target, and how many another program had made until then.
create table if not exists ntt_backup.contacts (
    target text primary key,
    met_at timestamptz not null,
    marked bigint not null
);

-- How many blobs have their copies on the targets in which states, when that was last counted. kind: the
-- states, a digit to the base 4 for each target, the first target's is the lowest.
create table if not exists ntt_backup.proofs (
    targets text not null,
    proved_s double precision not null,
    counted_at timestamptz not null,
    kind bigint not null,
    blobs bigint not null,
    first text not null,
    primary key (targets, proved_s, counted_at, kind)
);

-- The packs in buckets, a row each. key: the object's. low and high: its smallest and largest blobid.
-- checksum: the SHA-256 that the server keeps, or `md5:` or `etag:` and its ETag. Which blobs are in it, the pack itself says.
create table if not exists ntt_backup.packs (
    target text not null,
    pack_id text not null,
    key text not null,
    low text not null,
    high text not null,
    blobs integer not null,
    size bigint not null,
    checksum text not null,
    sealed_at timestamptz not null default now(),
    checked_at timestamptz,
    primary key (target, pack_id)
);

-- What no check could check, blobs by blobid and packs by key, and when that was tried last: it waits for
-- its turn as all else does, and counts as no check.
create table if not exists ntt_backup.unchecked (
    target text not null,
    name text not null,
    tried_at timestamptz not null,
    primary key (target, name)
);

-- The identity of each target, which tells its place from another one; seen_at: by a run.
create table if not exists ntt_backup.targets (
    target text primary key,
    id text not null unique,
    seen_at timestamptz not null default now()
);

-- Files that go by their paths, a row for each file, and one more for each version that was replaced.
-- id: grows from row to row; of no sequence, which a role that dumps would have to read as well. origin: '' for the query, or the name of a table [files.NAME]. path: below source.root. blobid: null until
-- the file was read, which also tells size, mtime_ns and mode. failed: why it could not be read, or
-- 'changed'. wait_until: when a file is looked at again that was too young. gone_at: when its origin no
-- longer gave it.
create table if not exists ntt_backup.places (
    id bigint primary key,
    origin text not null,
    path bytea not null,
    size bigint,
    checksum text,
    blobid text,
    mtime_ns bigint,
    mode integer,
    registered_at timestamptz not null default now(),
    read_at timestamptz,
    failed text,
    detail text,
    wait_until timestamptz,
    gone_at timestamptz,
    replaced_at timestamptz
);
create unique index if not exists places_path on ntt_backup.places (path) where replaced_at is null;
create index if not exists places_blobid on ntt_backup.places (blobid);
create index if not exists places_unread on ntt_backup.places (id)
    where blobid is null and failed is null and gone_at is null and replaced_at is null;
create index if not exists places_failed on ntt_backup.places (id) where failed is not null;
create index if not exists places_gone on ntt_backup.places (gone_at) where gone_at is not null;
create index if not exists places_replaced on ntt_backup.places (replaced_at) where replaced_at is not null;

-- How far the passes over each origin of places got. definition: of what. whole: whether the pass that
-- began_at (null: none is under way) sees all rows, and how many it has seen that were known. key: of its last row. mark, last_mark: the keys at the
-- ends of earlier passes, from the older of which a pass begins that does not see all rows. problem: what
-- a walk could not read.
create table if not exists ntt_backup.origins (
    origin text primary key,
    definition text not null,
    whole boolean not null,
    began_at timestamptz,
    seen bigint not null default 0,
    key text,
    mark text,
    last_mark text,
    last_mark_at timestamptz,
    whole_at timestamptz,
    ended_at timestamptz,
    problem text
);

-- The directories of each walk [files.NAME]. path: below source.root. mtime_ns, ctime_ns: its times when it
-- was listed last; mtime_ns is null where they are not trusted, and ctime_ns then a sum of its entries, or null where it is
-- to be listed again in any case. mounted: whether another file system
-- began there. A part of a large directory has as its path that of the directory, a NUL, and the name at which it
-- begins, and a sum of its names and inode numbers as its mtime_ns.
create table if not exists ntt_backup.directories (
    origin text not null,
    path bytea not null,
    mtime_ns bigint,
    ctime_ns bigint,
    mounted boolean not null default false,
    primary key (origin, path)
);

-- The places that the pass under way has seen.
create unlogged table if not exists ntt_backup.seen_places (
    origin text not null,
    id bigint not null
);

-- How many rows of blobs we have updated ourselves, in all: the sum over the slots. A session has one
-- of a few slots, so that workers do not wait for each other to count.
create table if not exists ntt_backup.marks (
    slot integer primary key,
    marked bigint not null
);

-- Which version of our schema this is, and which table blobs it is about: one row.
create table if not exists ntt_backup.schema_version (
    singleton boolean primary key default true check (singleton),
    version integer not null,
    blobs_schema text not null
);

-- name: set_version
-- Notes the version, where none is noted, and where the table is now.
insert into ntt_backup.schema_version as known (version, blobs_schema)
values ({version}, {schema})
on conflict (singleton) do update set blobs_schema = excluded.blobs_schema
where known.blobs_schema <> excluded.blobs_schema;

-- name: trigger_state
-- Whether inserts already wake the daemon, whether the function for it exists, and whether we may
-- give the table such a trigger.
select
    exists (select from pg_trigger where tgrelid = %(table)s and tgname = 'ntt_backup_notify'),
    exists (
        select from pg_proc
        where pronamespace = to_regnamespace('ntt_backup') and proname = 'notify_blobs'
    ),
    coalesce(
        has_table_privilege(%(table)s::oid, 'trigger')
        and has_schema_privilege(to_regnamespace('ntt_backup')::oid, 'usage'), false
    );

-- name: create_notify
-- The function that wakes the daemon.
create or replace function ntt_backup.notify_blobs() returns trigger language plpgsql
set search_path = pg_catalog, pg_temp as $$
begin
    perform pg_catalog.pg_notify('ntt_backup_blobs', '');
    return null;
end
$$;

-- name: create_trigger
-- Wakes the daemon once a statement. Asked for by --notify only: transactions that notify commit
-- one after the other, in the whole cluster, which a busy writer may not want.
create trigger ntt_backup_notify after insert on {table}
for each statement execute function ntt_backup.notify_blobs();

-- name: drop_unfinished
-- Returns the statement that drops what an interrupted CREATE INDEX CONCURRENTLY left, if anything.
select format('drop index concurrently %s', i.indexrelid::regclass)
from pg_index i where i.indexrelid = to_regclass({index}) and not i.indisvalid;

-- name: create_trigger_once
-- Returns the statement that makes the trigger, where it does not exist.
select {create}
where not exists (
    select from pg_trigger where tgrelid = {table}::regclass and tgname = 'ntt_backup_notify'
);

-- name: set_search_path
-- What comes after names all that is not the server's own with its schema, whatever path the session
-- of a superuser has.
set search_path = pg_catalog, pg_temp;

-- name: brief_lock
-- A change that cannot have its lock soon gives up, rather than have all others wait behind it.
set lock_timeout = '5s';

-- name: unhurried
-- An index waits for old transactions, and blocks nobody meanwhile.
set lock_timeout = 0;
