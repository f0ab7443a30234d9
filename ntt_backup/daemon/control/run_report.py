"""A run tells of itself to whoever asks while it lasts. Pure, but for the clock.

It is a listener that keeps little: the last lines, the bytes of the last hour, which side is
unreachable since when. All of it is bounded, for a daemon that runs for years.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

from ntt_backup import events
from ntt_backup.daemon.listeners import Listener
from ntt_backup.daemon.open_outages import OpenOutages
from ntt_backup.daemon.progress import RunProgress, RunState
from ntt_backup.format import utc
from ntt_backup.snapshot.events import SnapshotProgress

_RECENT: Final = 20
_MINUTES: Final = 60
_LINE_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class Away:
    """A side that is missed: what is remote, catalog, source or preflight. since: RFC 3339, UTC.
    worker: who misses it; None before the workers start. reason: of the last attempt.
    """

    what: str
    worker: int | None
    since: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DaemonReport:
    """A running daemon at a moment. strategy: `auto` until it is found. bwlimit: bytes a second
    that hold now, None for no limit. jobs: which of the side jobs are at work. recent: the last
    lines, each with its time and level. minutes: of the last hour, each with its time of the epoch
    and the bytes of content that were sent in it.
    """

    target: str
    run_id: str
    pid: int
    started_at: str
    watch: bool
    strategy: str
    paused: bool
    bwlimit: int | None
    jobs: Mapping[str, bool]
    state: RunState
    outages: Sequence[Away]
    recent: Sequence[tuple[str, str, str]]
    minutes: Sequence[tuple[int, int]]

    @property
    def fields(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the report whose `fields` these are. Raises TypeError, KeyError and ValueError
        for those of another version.
        """
        found = {
            "state": RunState.of(fields["state"]),
            "outages": [Away(**one) for one in fields["outages"]],
            "recent": [(when, level, line) for when, level, line in fields["recent"]],
            "minutes": [(int(minute), int(sent)) for minute, sent in fields["minutes"]],
        }
        return cls(**{**fields, **found})


class RunReport(Listener):
    """Collects the report of a run. clock: returns seconds since the epoch."""

    def __init__(self, run_id: str, workers: int, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._run_id = run_id
        self._started_at = _utc(clock())
        self._watch = False
        self._strategy = "auto"
        self._state = RunProgress(0.0, workers).state(0.0)
        self._outages = OpenOutages()
        self._recent: deque[tuple[str, str, str]] = deque(maxlen=_RECENT)
        self._minutes: deque[list[int]] = deque(maxlen=_MINUTES)
        self._sent = 0

    def event(self, event: events.Event) -> None:
        now = self._clock()
        line = event.line
        if line is not None and not isinstance(event, events.Progress | SnapshotProgress):
            self._recent.append((_utc(now), event.level, line[:_LINE_CHARS]))
        self._outages.take(event, now)
        match event:
            case events.RunStart():
                self._watch, self._strategy = event.watch, event.strategy
            case events.WorkerStart():
                self._strategy = event.strategy

    def connect(self, side: str) -> None:
        """Notes that a side accepts connections again."""
        self._outages.connect(side, self._clock())

    def refresh(self, state: RunState) -> None:
        minute = int(self._clock()) // 60 * 60
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append([minute, 0])
        # Less than before was sent, where a batch has to be sent again.
        self._minutes[-1][1] += max(0, state.sent - self._sent)
        self._sent = state.sent
        self._state = state

    def report(
        self, target: str, *, paused: bool, bwlimit: int | None, jobs: Mapping[str, bool]
    ) -> DaemonReport:
        """Returns the report of this moment."""
        return DaemonReport(
            target=target,
            run_id=self._run_id,
            pid=os.getpid(),
            started_at=self._started_at,
            watch=self._watch,
            strategy=self._strategy,
            paused=paused,
            bwlimit=bwlimit,
            jobs=jobs,
            state=self._state,
            outages=[
                Away(event.what, event.worker, _utc(since), event.why[:_LINE_CHARS])
                for since, event in self._outages.all
            ],
            recent=list(self._recent),
            minutes=[(minute, sent) for minute, sent in self._minutes],
        )


def _utc(seconds: float) -> str:
    return utc(datetime.fromtimestamp(int(seconds), UTC))
