"""A pack is many blobs in one file, a tar archive with an index at its end."""
