"""The blobs of a target that has the layout `packs`: which pack has which, and their contents."""
