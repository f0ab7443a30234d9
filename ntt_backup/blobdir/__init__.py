"""A directory of blobs, `aa/bb/<blobid>`, and the system calls that it takes."""
