-- Queries of `catalog/move.py`.

-- name: our_sessions
-- The other sessions of our programs in this database.
select application_name from pg_stat_activity
where datname = current_database() and starts_with(application_name, 'ntt-backup-remote/')
    and pid <> pg_backend_pid();

-- name: lock_against_writing
-- Nobody changes the table until the end of the transaction.
lock table {table} in share mode;

-- name: write_plainly
-- Until the end of the transaction both servers write equal values as equal bytes.
select set_config('timezone', 'UTC', true), set_config('bytea_output', 'hex', true),
    set_config('extra_float_digits', '3', true);

-- name: copy_out
-- The rows of a table, as `copy_rows` takes them.
copy {table} ({columns}) to stdout with (format text, encoding {encoding});

-- name: count_rows
-- How many rows a table has.
select count(*) from {table};

-- name: clear_contacts
-- What init-db noted of targets that we met long ago.
delete from ntt_backup.contacts;
