-- A sample of the catalog, for measurements.

-- name: sample_from
-- Blobs that follow a point in the space of blobids, in whatever state but failed. Blobids are
-- hashes, so what follows any point is a fair sample of all.
select blobid, {size} from blobs
where blobid >= %(point)s and {copy_failed} is not true
order by blobid
limit %(limit)s;
