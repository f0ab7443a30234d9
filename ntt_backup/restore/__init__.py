"""Blobs and catalog come back from the remote, and the drill proves it."""
