"""Dumps of the catalog on the remote: made, checked, kept for a while, found again.

See `dump.job` for how, `docs/design.md` for why.
"""
