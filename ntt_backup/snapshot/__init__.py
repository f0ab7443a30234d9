"""Snapshots keep what changes in place: files and trees as versions, in packs of their own."""
