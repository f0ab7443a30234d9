"""Named files on any kind of target: packs, snapshots, dumps of the catalog."""
