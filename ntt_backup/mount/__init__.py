"""Packs become a read-only file system: an EROFS image that points into them is mounted."""
