"""Packs as a read-only file system: an EROFS image that points into them, and what mounts it."""
