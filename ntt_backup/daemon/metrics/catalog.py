"""The catalog tells what no run does: what is failed, when all was last copied and checked."""

from __future__ import annotations

from contextlib import closing, suppress
from threading import Event, Thread
from typing import Final

from ntt_backup.catalog import connection, history, stats
from ntt_backup.catalog.check_history import last_checks
from ntt_backup.catalog.dump_history import last_dumps
from ntt_backup.config import Settings, identity
from ntt_backup.daemon.metrics.figures import Figures
from ntt_backup.errors import CatalogError
from ntt_backup.newest import missed
from ntt_backup.snapshot.last_take import last

_EVERY_SECONDS: Final = 60.0
_STATEMENT_MILLISECONDS: Final = 10_000


class CatalogFigures:
    """Asks the catalog for what it knows of all targets, by a thread of its own.

    wanted: it is asked for now, and not only in a minute. answered: it was asked once.
    """

    def __init__(self, settings: Settings, figures: Figures) -> None:
        self._settings = settings
        self._figures = figures
        self.wanted = Event()
        self.answered = Event()
        Thread(target=self._ask_on_and_on, daemon=True).start()

    def _ask_on_and_on(self) -> None:
        self.wanted.wait()
        while True:
            self.wanted.clear()
            with suppress(CatalogError):
                self._ask()
            self.answered.set()
            self.wanted.wait(_EVERY_SECONDS)

    def _ask(self) -> None:
        name = identity.application("metrics")
        with closing(connection.connect(self._settings.catalog.url, name)) as conn:
            connection.configure(conn, "statement_timeout", _STATEMENT_MILLISECONDS)
            for target in sorted(self._figures.targets):
                self._ask_for(conn, target)

    def _ask_for(self, conn: connection.Connection, target: str) -> None:
        figures = self._figures
        of_target = self._settings.model_copy(update={"target": target})
        figures.set("missed_on_target", len(missed(of_target)), target=target)
        for name in self._settings.snapshots:
            if (taken := last(of_target, name).taken_at) is not None:
                figures.note("last_snapshot_timestamp_seconds", taken.timestamp(), target, name)
        if (end := history.last_end(conn, target)) is not None:
            figures.note_end(target, end.ended_at.timestamp(), end.exit_code)
            if end.succeeded_at is not None:
                when = end.succeeded_at.timestamp()
                figures.note("last_success_timestamp_seconds", when, target)
        for dump in last_dumps(conn, target):
            if dump.name:
                when = dump.ended_at.timestamp()
                figures.note("last_dump_timestamp_seconds", when, target)
        for one in sorted(last_checks(conn, target), key=lambda one: one.ended_at):
            figures.set("last_check_wrong_blobs", one.wrong, target=target, command=one.command)
            if one.exit_code == 0:
                when = one.ended_at.timestamp()
                figures.note("last_check_timestamp_seconds", when, target, one.command)
        figures.set("blobs_still_failed", stats.still_failed(conn, target), target=target)
