"""The far side of the `stream` strategy: what runs on the remote.

Its source travels with the connection and is run by the remote's own Python, or it is installed
there as the forced command `ntt-backup-receive`. So it uses the standard library only, runs on
Python 3.8, and imports nothing of ours outside this package. `docs/protocol.md` describes what goes
over the wire; `ntt_backup.strategy.bundle` sends this package on its way.
"""
