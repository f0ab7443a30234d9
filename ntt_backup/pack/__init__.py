"""The pack format: many blobs in one file, which is a tar archive with an index at its end."""
