"""The receiver: the program that runs on the remote, for sessions that write and that read.

Its source, and that of `wire` and `blobdir`,
travels with the connection and is run by the remote's own Python, or it is installed
there as the forced command `ntt-backup-receive`. So it uses the standard library only, runs on
Python 3.8, and imports nothing else of ours. `docs/protocol.md` describes what goes
over the wire; `ntt_backup.client.bootstrap` sends them on their way.
"""
