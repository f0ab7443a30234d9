"""`ntt-backup-remote bench` measures the link to the remote, and the ways to send blobs over it.

Content does not compress, or is a sample of the user's own blobs. The clock stops when the remote
has said that it has read or stored everything. Everything that is compared is measured in each of
several rounds, so that a busy minute of the machine falls on all alike. A figure is a median with
its least and greatest value. Nothing is marked in the catalog, and nothing stays on the remote.
"""
