"""Named files beside blobs, on any kind of target: snapshots, dumps of the catalog."""
