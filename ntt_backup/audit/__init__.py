"""Checks of what was stored: hashes, and the comparison of catalog, store and remote."""
