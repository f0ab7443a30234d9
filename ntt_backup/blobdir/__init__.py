"""A directory of blobs has the layout `aa/bb/<blobid>`, and needs system calls of its own."""
