-- Which blobs are still to be sent.
--
-- PostgreSQL uses a partial index only for a query that repeats the index's predicate in the same
-- form. It does not see that `c is not true` and `c = false or c is null` mean one thing, and where
-- a query says both, it multiplies their estimates. Live tables have an index of either form, so
-- the query follows the index: these are the forms we know, all of the same meaning.

-- name: uncopied_is_false
-- The form of our own index.
({copied} is false or {copied} is null)

-- name: uncopied_equals_false
-- A form met in live tables.
({copied} = false or {copied} is null)

-- name: uncopied_is_not_true
-- A form met in live tables.
({copied} is not true)

-- name: uncopied_negated
-- A form met in live tables.
(not {copied} or {copied} is null)

-- name: pending
-- A pending blob: not yet copied, and not failed either.
({uncopied} and {copy_failed} is not true)

-- name: read_size
-- The size of a row, as a part of other queries. A numeric may hold what no bigint does, or NaN:
-- that is no blob's size, and shows as -1.
(
    case
        when size not between -9223372036854775808 and 9223372036854775807 then -1 else size
    end::bigint
)

-- name: rows_about
-- About how many rows the table has, by the planner's figures and the size of its files now. Where
-- ANALYZE was never run, as many as are usual.
select coalesce(sum(
    case when c.reltuples > 0 and c.relpages > 0 then c.reltuples / c.relpages else 70 end
    * (pg_relation_size(c.oid) / current_setting('block_size')::integer)
), 0)::bigint
from pg_class c
where c.oid = coalesce(%(table)s::oid, to_regclass({blobs_name})) or c.oid in (
    select relid from pg_partition_tree(coalesce(%(table)s::oid, to_regclass({blobs_name}))) where isleaf
);

-- name: indexes
-- The indexes of the table: predicate (null for a whole index), whether they may be used (valid),
-- and whether they can walk a range of blobids in order (ordered).
select
    c.relname,
    pg_get_expr(i.indpred, i.indrelid),
    i.indisvalid and i.indisready and i.indislive as valid,
    am.amname = 'btree' and i.indkey[0] = a.attnum and opc.opcdefault
        and i.indcollation[0] = a.attcollation as ordered
from pg_index i
join pg_class c on c.oid = i.indexrelid
join pg_am am on am.oid = c.relam
join pg_opclass opc on opc.oid = i.indclass[0]
join pg_attribute a on a.attrelid = i.indrelid and a.attname = 'blobid'
where i.indrelid = coalesce(%(table)s::oid, to_regclass({blobs_name}))
order by c.relname;
