"""The history of checks: the last call of each command, and the last one that found all right."""

from __future__ import annotations

from datetime import timedelta

from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.history import last_checks, note_check

TARGET = "remote"


def note(conn: Connection, command: str, exit_code: int, target: str = TARGET) -> None:
    note_check(conn, target, command, lasted=60, exit_code=exit_code, blobs=5, bytes=50, wrong=0)


def test_the_last_call_and_the_last_good_one_of_each_command_are_told(catalog: Connection) -> None:
    for code in (0, 0, 5, 7):
        note(catalog, "verify", code)
    note(catalog, "drill", 0)
    note(catalog, "verify", 0, "other")

    found = last_checks(catalog, TARGET)

    assert [(one.command, one.exit_code) for one in found] == [
        ("drill", 0),
        ("verify", 7),
        ("verify", 0),
    ]
    assert found[0].ended_at - found[0].started_at >= timedelta(seconds=60)


def test_a_catalog_without_the_table_has_no_history(catalog: Connection) -> None:
    catalog.execute("drop table ntt_backup.checks")

    assert last_checks(catalog, TARGET) == []
