"""A repository keeps the files of snapshots: by a receiver, in a bucket, in a directory."""
