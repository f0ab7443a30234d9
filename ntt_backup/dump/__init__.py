"""Dumps of the catalog on the remote: made, checked, kept for a while, found again.

See `dump.job` for how, `docs/design.md` for why.
"""

from __future__ import annotations

from ntt_backup.dump.job import Dumped, dump
from ntt_backup.dump.place import DumpPlace
from ntt_backup.dump.record import DumpRecord, Stored

__all__ = ["DumpPlace", "DumpRecord", "Dumped", "Stored", "dump"]
