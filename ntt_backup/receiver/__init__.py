"""The receiver is the program on the remote, for sessions that write and that read.

Its source, and that of `wire` and `blobdir`, travels with the connection and is run by the remote's
own Python, or it is installed on the remote as the forced command `ntt-backup-receive`. So all of
it uses the standard library only, and runs on Python 3.8.
"""
