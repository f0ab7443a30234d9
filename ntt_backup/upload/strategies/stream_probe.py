"""The `stream` strategy has this probe; see `probe.Probe`.

One connection answers everything: the receiver says what it is and how much is free, and takes two
trial batches, which it reads, checks and writes into its workspace. They are called back then, so
that nothing gets a name: this works behind a forced command, too, where a scratch directory cannot
be made. A run that has claimed its first blobs sends these instead: they are committed once it is
known that it may begin, or called back like the others. Giving names and syncing cannot be tried;
the first batch's receipt tells of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from ntt_backup.client.connection import Connection, SessionSpec
from ntt_backup.errors import BackupError, SourceError
from ntt_backup.model import Batch
from ntt_backup.source.inspection import Store
from ntt_backup.upload.strategies.probe import Facts, described, trial
from ntt_backup.upload.strategies.stream import StreamSession, connect
from ntt_backup.wire.write_messages import Field

_NAMES_UNCHECKED: Final = "checks by SHA-256 (no BLAKE3 on the remote)"


class StreamProbe:
    """See `probe.SessionProbe`."""

    strategy = "stream"

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._connection: Connection | None = None
        self._trial: StreamSession | None = None
        self._ahead: tuple[Store, Batch] | None = None
        self._tried = ""
        self.lingers = False

    def connect(self) -> None:
        self._connection = connect(self._spec)

    def send_ahead(self, store: Store, batch: Batch) -> None:
        self._ahead = store, batch

    def facts(self, *, will_try_out: bool) -> Facts:
        if self._connection is None:
            self.connect()
        assert self._connection is not None
        connection = self._connection
        banner = connection.banner
        before = time.time()
        connection.say_hello()
        if will_try_out:
            # On its way already while the remote opens the session: one round trip for both.
            with suppress(SourceError):  # `try_out` will tell of it.
                self._begin_trial(connection)
        facts = self._trial.ready() if self._trial is not None else connection.ready()
        after = time.time()
        clock = _whole(facts, "clock_us") / 1e6
        by = "" if "blake3" in banner.hashes else f" ({banner.checking})"
        inodes = facts.get("free_inodes")
        checks = f"checks by BLAKE3{by}" if banner.can_hash else _NAMES_UNCHECKED
        return Facts(
            system=str(facts.get("system", "unknown system")),
            program=f"receiver {banner.version}, Python {banner.python}, {checks}",
            free_bytes=_whole(facts, "free_bytes"),
            # The remote's clock was read somewhere between.
            skew_s=max(0.0, before - clock, clock - after),
            placed=bool(_whole(facts, "placed")),
            free_inodes=inodes if isinstance(inodes, int) and inodes >= 0 else None,
        )

    def try_out(self) -> str:
        if self._trial is None or not self._trial.usable:
            self._begin_trial(self._open())
        assert self._trial is not None
        if self._ahead is not None:
            return "the first batch was sent ahead by stream"
        self._trial.end_trial()
        return f"{self._tried} by stream, called back"

    def make_place(self) -> None:
        connection = self._open()
        if self._ahead is not None and self._trial is not None and self._trial.usable:
            self._trial.place()
        else:
            connection.place()

    def hand_over(self) -> Connection | StreamSession | None:
        connection, self._connection = self._connection, None
        if connection is None or connection.channel.ended:
            return None
        return connection if self._ahead is None else self._trial or connection

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._trial is not None:
                with suppress(BackupError):
                    self._trial.withdraw()
            connection.close()
            self.lingers = connection.channel.lingers

    def _begin_trial(self, connection: Connection) -> None:
        if self._ahead is not None:
            store, batch = self._ahead
            self._trial = StreamSession(connection, store)
            self._trial.begin(batch)
            return
        with trial() as (store, batches):
            session = StreamSession(connection, store)
            session.begin_trial(batches)
            self._trial, self._tried = session, described(batches)

    def _open(self) -> Connection:
        """Returns the connection; another one where it was lost meanwhile."""
        if self._connection is None or self._connection.channel.ended:
            self._connection = connect(self._spec)
            self._connection.hello()
        return self._connection


def _whole(facts: Mapping[str, Field], name: str) -> int:
    value = facts.get(name)
    return value if isinstance(value, int) else 0
