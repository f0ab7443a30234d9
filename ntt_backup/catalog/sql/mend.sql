-- SQL for the operator: shown in hints, never executed by us.

-- name: mend_large_objects
-- Lets a role read the large objects of today; needs a superuser.
do $$ declare one oid; begin for one in select oid from pg_catalog.pg_largeobject_metadata loop
execute pg_catalog.format('grant select on large object %s to %I', one, {role}); end loop; end $$;

-- name: mend_read_only
-- Lets a role, or whoever uses a database, write.
alter {scope} set default_transaction_read_only = off;

-- name: mend_search_path
-- Has a role find the table in its schema, from the next connection on.
alter role {user} in database {database} set search_path = {schema};

-- name: mend_row_security
-- Frees a role from all policies; needs a superuser.
alter role {user} bypassrls;

-- name: mend_blobid_bytea
-- Turns a binary id into the text we need, whether it is the hash or the hash's hex digits. Rewrites
-- the table under an exclusive lock.
alter table blobs alter column blobid type text using case pg_catalog.octet_length(blobid)
when 64 then pg_catalog.encode(blobid, 'escape') else pg_catalog.encode(blobid, 'hex') end;

-- name: mend_blobid_uuid
-- Turns a uuid into its hex digits. Rewrites the table under an exclusive lock.
alter table blobs alter column blobid type text using pg_catalog.replace(blobid::text, '-', '');

-- name: mend_blobid_other
-- Turns an id of another type, such as char(64), into text. Rewrites the table under an exclusive
-- lock.
alter table blobs alter column blobid type text using blobid::text;

-- name: mend_collation
-- Gives blobid an order in which 00, 01 ... ff ascend. Builds the indexes anew under an exclusive
-- lock.
alter table blobs alter column blobid type text collate "C";

-- name: mend_partitioned_index
-- Our index where the table is partitioned, and CONCURRENTLY is not to be had. Writers wait for it.
-- An index that has this name was never finished.
drop index if exists {old};
create index {index} on {table} (blobid) where {uncopied};

-- name: mend_unique
-- Makes blobid the key it is meant to be; needs the rows to be free of NULL and repetition. There is
-- room for marks, as in `create_table`.
alter table blobs add primary key (blobid) with (fillfactor = 70);

-- name: mend_column_type
-- Gives one of our columns the type it must have. Rewrites the table under an exclusive lock.
alter table blobs alter column {column} type {type} using {column}::{type};
