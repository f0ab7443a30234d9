"""What became of the last dumps, as `status` shows it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ntt_backup.catalog import dump_history
from ntt_backup.catalog.connection import Connection

NOW = datetime.now(UTC)


def note(conn: Connection, started_at: datetime, *, name: str = "", error: str = "") -> None:
    dump_history.note(conn, "remote", started_at, name=name, bytes=0, sha256="", error=error)


def test_a_clock_that_was_ahead_once_hides_nothing(catalog: Connection) -> None:
    note(catalog, NOW + timedelta(days=90), name="ahead.dump")
    note(catalog, NOW, error="the remote is full")
    assert [one.name or one.error for one in dump_history.last_dumps(catalog, "remote")] == [
        "ahead.dump",
        "the remote is full",
    ]
    note(catalog, NOW + timedelta(days=1), name="right.dump")
    assert [one.name for one in dump_history.last_dumps(catalog, "remote")] == ["right.dump"]
