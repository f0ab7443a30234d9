"""Restores blobs and the catalog from the remote, and proves by a drill that this works."""
