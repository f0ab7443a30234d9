"""The catalog: what is to be sent, who sends it, and the ledger of what came of it.

The only package that speaks to PostgreSQL. Every error that leaves it is a `CatalogUnavailable` (it
may come back), a `CatalogRefused` (someone must act) or a `ConfigError` (the connection string).
"""

from __future__ import annotations

from ntt_backup.catalog.connection import Connection, connect, describe
from ntt_backup.catalog.history import Run, end_run, last_run, start_run, update_run
from ntt_backup.catalog.ledger import Ledger, requeue
from ntt_backup.catalog.range_locks import Claims, Holder, holders
from ntt_backup.catalog.scan_state import (
    ScanProgress,
    begin_scan,
    load_scan,
    missing,
    register,
    save_scan,
)
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.schema_check import verify_rights, verify_schema
from ntt_backup.catalog.selection import iter_pending
from ntt_backup.catalog.stats import PendingEstimate, Totals, exact_totals, pending_estimate

__all__ = [
    "Claims",
    "Connection",
    "Holder",
    "Ledger",
    "PendingEstimate",
    "Run",
    "ScanProgress",
    "Totals",
    "begin_scan",
    "connect",
    "describe",
    "end_run",
    "exact_totals",
    "holders",
    "init_db",
    "iter_pending",
    "last_run",
    "load_scan",
    "missing",
    "pending_estimate",
    "register",
    "requeue",
    "save_scan",
    "start_run",
    "update_run",
    "verify_rights",
    "verify_schema",
]
