"""The `stream` strategy has this probe; see `probe.Probe`.

One connection answers everything: the receiver says what it is and how much is free, and takes two
trial batches, which it reads, checks and writes into its workspace. They are called back then, so
that nothing gets a name: this works behind a forced command, too, where a scratch directory cannot
be made. Giving names and syncing cannot be tried; the first batch's receipt tells of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Final

from ntt_backup.client.bootstrap import Banner
from ntt_backup.client.receiver_connection import ReceiverConnection, identity_in
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.name_hash import hash_of_names
from ntt_backup.upload.strategies.probe import Facts, described, trial
from ntt_backup.upload.strategies.stream import StreamSession, connect
from ntt_backup.wire.framing import IDENTITY_BYTES
from ntt_backup.wire.messages import Field

_NAMES_UNCHECKED: Final = "checks by SHA-256 (no BLAKE3 on the remote)"


class StreamProbe:
    """See `probe.SessionProbe`."""

    strategy = "stream"

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._connection: ReceiverConnection | None = None
        self.lingers = False

    def connect(self) -> None:
        self._connection = connect(self._spec)

    def facts(self) -> Facts:
        if self._connection is None:
            self.connect()
        assert self._connection is not None
        before = time.time()
        said = self._connection.hello()
        asked = (before, time.time())
        return receiver_facts(self._connection.banner, said, asked, ours=self._spec.names)

    def try_out(self) -> str:
        with trial(self._spec.names or "blake3") as (store, batches):
            session = StreamSession(self._open(), store)
            session.begin_trial(batches)
            session.end_trial()
        return f"{described(batches)} by stream, then discarded"

    def make_place(self) -> str:
        connection = self._open()
        if identity_in(connection.said) is None:
            connection.place()
            return ""
        return identity_in(connection.place(secrets.token_bytes(IDENTITY_BYTES))) or ""

    def hand_over(self) -> ReceiverConnection | None:
        connection, self._connection = self._connection, None
        return None if connection is None or connection.channel.ended else connection

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            self.lingers = connection.channel.lingers

    def _open(self) -> ReceiverConnection:
        """Returns the connection; another one where it was lost meanwhile."""
        if self._connection is None or self._connection.channel.ended:
            self._connection = connect(self._spec)
            self._connection.hello()
        return self._connection


def receiver_facts(
    banner: Banner,
    facts: Mapping[str, Field],
    asked: tuple[float, float],
    *,
    packs: bool = False,
    ours: str = "",
) -> Facts:
    """Returns what a receiver says about itself and its machine.

    Args:
        banner: The greeting of the receiver.
        facts: The fields of its READY.
        asked: When READY was asked for, and when it had come, in Unix seconds.
        packs: Whether the layout is `packs`.
        ours: The hash of names in the store.
    """
    before, after = asked
    clock = _whole(facts, "clock_us") / 1e6
    by = "" if "blake3" in banner.hashes else f" ({banner.checking})"
    inodes = facts.get("free_inodes")
    checks = f"checks by BLAKE3{by}" if banner.can_hash else _NAMES_UNCHECKED
    checks = "checks by SHA-256" if ours == "sha256" else checks
    placed = [bool(_whole(facts, name)) for name in ("placed", "packs")]
    return Facts(
        system=str(facts.get("system", "unknown system")),
        program=f"receiver {banner.version}, Python {banner.python}, {checks}",
        free_bytes=_whole(facts, "free_bytes"),
        # The remote's clock was read somewhere between.
        skew_s=max(0.0, before - clock, clock - after),
        placed=placed[packs],
        free_inodes=inodes if isinstance(inodes, int) and inodes >= 0 else None,
        other_layout=placed[not packs],
        identity=identity_in(facts),
        empty=facts.get("empty") == 1 and not packs,
        names=hash_of_names(facts["names"]) if facts.get("names") else "",
    )


def _whole(facts: Mapping[str, Field], name: str) -> int:
    value = facts.get(name)
    return value if isinstance(value, int) else 0
