"""Checks stored blobs by their hashes, and compares the catalog, the store and the remote."""
