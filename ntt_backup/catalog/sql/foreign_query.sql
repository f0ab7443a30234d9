-- What is asked of another database, whose query lists files.

-- name: describe_query
-- The columns of the query of another database, without a row.
select * from ({query}
) as given limit 0;

-- name: set_role
-- Has the query run as another role, which the role that logged in is a member of.
set role {role};

-- name: listen_to
-- Has the other database tell us when it has new rows.
listen {channel};

-- name: type_name
-- What the server calls a type.
select typname from pg_catalog.pg_type where oid = %(oid)s::oid;

-- name: bytes_of
-- The bytes of a text as that database keeps them, as a part of other queries.
pg_catalog.convert_to({column}::pg_catalog.text, pg_catalog.getdatabaseencoding())

-- name: hex_of
-- The hex digits of a bytea, as a part of other queries.
pg_catalog.encode({column}, 'hex')

-- name: text_of
-- Anything as text, as a part of other queries.
{column}::pg_catalog.text

-- name: first_of
-- The beginning of a value, as a part of other queries: an application may keep a text of any length.
pg_catalog.substr({column}, 1, {most})

-- name: begin_snapshot
-- Has all statements of a transaction in the other database see the same rows.
begin isolation level repeatable read read only;

-- name: end_snapshot
-- Ends that transaction.
commit;

-- name: sum_of_rows
-- How many rows the query of another database gives, and a sum by which others, in any order, differ.
select count(*), sum(pg_catalog.hashtextextended(given::pg_catalog.text, 0)) from ({query}
) as given;

-- name: any_without_key
-- Whether the query of another database gives a row without a key.
select exists (select from ({query}
) as given where given.key is null);

-- name: number_of
-- A size, as a part of other queries; one that no file can have is none.
case when {column} between 0 and 9223372036854775807 then {column}::pg_catalog.int8 end

-- name: unknown
-- A value that is not known, as a part of other queries.
null::pg_catalog.{type}

-- name: rows_of_query
-- The next rows that the query of another database gives, in the form of the staged rows.
select {path}, {size}, {checksum}, {key}, row_number() over ({order}), null::pg_catalog.int8
from ({query}
) as given
{past} {order} {limit}

-- name: copy_from_query
-- Sends rows of the query.
copy ({rows}) to stdout (format binary);
