"""Files by descriptor, and a directory of blobs, which has the layout `aa/bb/<blobid>`."""
