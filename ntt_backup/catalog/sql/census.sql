-- Comparing the catalog with what lies on disks.

-- name: rows_between
-- All rows of a range of blobids, in no order: size, whether copied, whether failed.
select blobid, {size}, {copied} is true, {copy_failed} is true from blobs
where blobid >= %(lo)s and (%(hi)s::text is null or blobid < %(hi)s::text);
