"""Blobs and catalog back from the remote, and the drill that proves it."""
