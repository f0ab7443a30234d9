"""Dumps of the catalog are made on the remote, checked, kept for a while, and found again.

See `dump.job` for how, `docs/design.md` for why.
"""
