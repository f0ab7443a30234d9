"""A look at a remote that the `stream` strategy will send to; see `session.Probe`.

One connection answers everything: the receiver says what it is and how much is free, and takes two
trial batches, which it reads, checks and writes into its scratch space. They are called back then,
so that nothing gets a name: this also works behind a forced command, where there is no scratch
directory to be had. What it cannot try, giving names and syncing them, the first batch's receipt
tells.
"""

from __future__ import annotations

import time
from typing import Final

from ntt_backup.format import many
from ntt_backup.upload.strategies.probe import Deadline, trial
from ntt_backup.upload.strategies.session import Facts, SessionPlan
from ntt_backup.upload.strategies.stream import StreamSession
from ntt_backup.wire import write_messages

_NAMES_UNCHECKED: Final = "checks by SHA-256 (no BLAKE3 there)"


class StreamProbe:
    """See `session.Probe`."""

    def __init__(self, plan: SessionPlan) -> None:
        self._plan = plan
        self._session: StreamSession | None = None
        self.lingers = False

    def facts(self, *, will_try_out: bool) -> Facts:
        self._session = session = StreamSession(self._plan)
        before = time.time()
        facts = session.hello()
        after = time.time()
        theirs = _whole(facts, "clock_us") / 1e6
        banner = session.banner
        by = "" if "blake3" in banner.hashes else f" ({banner.checking})"
        checks = f"checks by BLAKE3{by}" if banner.can_hash else _NAMES_UNCHECKED
        return Facts(
            system=str(facts.get("system", "unknown system")),
            program=f"receiver {banner.version}, Python {banner.python}, {checks}",
            free_bytes=_whole(facts, "free_bytes"),
            # Their clock was read somewhere between.
            skew_s=max(0.0, before - theirs, theirs - after),
            placed=bool(_whole(facts, "placed")),
        )

    def try_out(self) -> str:
        deadline = Deadline()
        with trial(self._plan, self._plan.root) as (plan, batches):
            self._open.try_out(plan.store, batches, deadline.check)
        blobs = sum(len(batch.blobs) for batch in batches)
        trial_batches = many(len(batches), "batch", "batches")
        return f"{many(blobs, 'trial blob')} in {trial_batches} by stream, called back"

    def make_place(self) -> None:
        self._open.place()

    @property
    def _open(self) -> StreamSession:
        """The session; another one where it was lost meanwhile."""
        if self._session is None or not self._session.usable:
            self._session = StreamSession(self._plan)
            self._session.hello()
        return self._session

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
            self.lingers = session.lingers


def _whole(facts: dict[str, write_messages.Field], name: str) -> int:
    value = facts.get(name)
    return value if isinstance(value, int) else 0
