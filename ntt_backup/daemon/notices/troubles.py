"""Notices tell an operator what matters of a run: not every event, and nothing twice.

Pure: it takes in events, states and the time, and returns notices. A target is in trouble from the
first event that says so until the last trouble is over; `first_failure` and `recovery` are told at
these two moments alone. Troubles are a run that failed, a dump or snapshot that failed, a side that
is away for longer than `notify.outage_after`, and a worker that stalls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ntt_backup import events
from ntt_backup.daemon.events import TargetRestart
from ntt_backup.daemon.open_outages import OpenOutages
from ntt_backup.daemon.run_state import RunState
from ntt_backup.dump.events import DumpComplete, DumpFailed, DumpRecovered, DumpSkipped
from ntt_backup.events import Event
from ntt_backup.model import Reason
from ntt_backup.snapshot.events import SnapshotComplete, SnapshotFailed, SnapshotsRecovered

# After this time a daemon that copies has recovered from the failure of the last run: one whose
# target is full may copy a few small blobs with each new start.
_SOUND_SECONDS: Final = 60.0
# A daemon that fails blobs says so once a day, not with each of them.
_FAILED_BLOBS_SECONDS: Final = 86400.0
_RUN: Final = "run"
_DUMP: Final = "dump"
_SNAPSHOT: Final = "snapshot "


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to be told. kind: one of `config.sections.NoticeKind`, or `start` and `alive`,
    which only a ping is made of. fields: of the event behind it, or what a check found.
    """

    kind: str
    target: str
    text: str
    fields: Mapping[str, Any]
    watch: bool = False


@dataclass(slots=True)
class _Target:
    watch: bool = False
    # What is wrong, by what it is about.
    troubles: dict[str, str] = field(default_factory=dict)
    outages: OpenOutages = field(default_factory=OpenOutages)
    error: str = ""
    reason: str = ""
    rotten: bool = False
    failed_blobs_at: float | None = None


class Notices:
    """Finds what is to be told of the runs of several targets.

    outage_after: seconds. last_failure: returns why the last run of a target failed;
    "" where the last run did not fail.
    """

    def __init__(self, outage_after: float, last_failure: Callable[[str], str]) -> None:
        self._outage_after = outage_after
        self._last_failure = last_failure
        self._targets: dict[str, _Target] = {}

    def well(self, target: str) -> bool:
        """Returns whether nothing is known to be wrong with the target."""
        return not self._targets.setdefault(target, _Target()).troubles

    def take(self, target: str, what: Event | RunState, now: float) -> Iterator[Notice]:
        """Takes in what a run does, and yields what is to be told. now: monotonic seconds."""
        one = self._targets.setdefault(target, _Target())
        if isinstance(what, RunState):
            yield from self._long_outages(target, one, now)
            # A daemon has no good end.
            copies = what.copied and what.elapsed_s >= _SOUND_SECONDS
            if one.watch and (copies or what.pending == 0):
                yield from _over(_RUN, target, one, what.event())
            return
        one.outages.take(what, now)
        # Before its outages end with it. One that ended by an error has told so.
        if isinstance(what, TargetRestart) and _RUN not in one.troubles:
            yield from _failure(_RUN, target, one, what, text=one.error)
        for side in events.SIDES:
            if side not in one.outages.sides:
                yield from _over(f"outage {side}", target, one, what)
        match what:
            case events.RunStart():
                one.watch, one.rotten, one.error, one.reason = what.watch, False, "", ""
                if not one.troubles and (why := self._last_failure(target)):
                    one.troubles[_RUN] = why
                yield _notice("start", target, one, what)
            case events.RunStop():
                yield from self._end(target, one, what)
            case events.Outage():  # Before the workers start there are no states.
                yield from self._long_outages(target, one, now)
            case events.Error():
                one.error = what.line or ""
                one.reason = events.with_detail(what.message, what.detail)
            case DumpFailed():
                yield from _failure(_DUMP, target, one, what)
            case DumpComplete() | DumpSkipped() | DumpRecovered():
                yield from _over(_DUMP, target, one, what)
            case SnapshotFailed():
                yield from _failure(f"{_SNAPSHOT}{what.set}", target, one, what)
            case SnapshotComplete():
                yield from _over(f"{_SNAPSHOT}{what.set}", target, one, what)
            case SnapshotsRecovered():
                for about in [key for key in one.troubles if key.startswith(_SNAPSHOT)]:
                    yield from _over(about, target, one, what)
            case events.WorkerStall():
                if f"stall {what.worker}" not in one.troubles:
                    yield _notice("stall", target, one, what)
                yield from _failure(f"stall {what.worker}", target, one, what, told=True)
            case (
                events.WorkerStallEnd()
                | events.WorkerRestart()
                | events.WorkerStop()
                | events.WorkerStart()  # Of a coordinator in the place of one that was killed.
            ):
                yield from _over(f"stall {what.worker}", target, one, what)
            case events.BlobFailed():
                yield from self._failed_blob(target, one, what, now)

    def _long_outages(self, target: str, one: _Target, now: float) -> Iterator[Notice]:
        for since, outage in one.outages.all:
            key = f"outage {outage.what}"
            if now - since >= self._outage_after and key not in one.troubles:
                yield _notice("outage", target, one, outage)
                yield from _failure(key, target, one, outage, told=True)

    def _failed_blob(
        self, target: str, one: _Target, event: events.BlobFailed, now: float
    ) -> Iterator[Notice]:
        """Yields a notice of rot once a run; of any other failed blob only while a daemon runs,
        since the end of a single run tells of them.
        """
        if event.reason == Reason.CORRUPT_SOURCE:
            if not one.rotten:
                one.rotten = True
                yield _notice("source_rot", target, one, event)
        elif one.watch:
            last = one.failed_blobs_at
            if last is None or now - last >= _FAILED_BLOBS_SECONDS:
                one.failed_blobs_at = now
                yield _notice("failure", target, one, event)

    def _end(self, target: str, one: _Target, event: events.RunStop) -> Iterator[Notice]:
        if event.outcome == "stopped":
            return
        if event.exit_code:
            text = one.error or event.line or ""
            yield from _failure(_RUN, target, one, event, text=text, reason=one.reason)
            return
        yield _notice("success", target, one, event)
        if one.troubles:
            one.troubles.clear()
            yield _notice("recovery", target, one, event)


def _failure(
    about: str,
    target: str,
    one: _Target,
    event: Event,
    *,
    text: str = "",
    reason: str = "",
    told: bool = False,
) -> Iterator[Notice]:
    """Notes a trouble, and yields its notices: none where the same trouble was told before for the
    same reason. reason: without what changes from one time to the next; the text where it is empty.
    told: another kind of notice tells of it.
    """
    first, reason = not one.troubles, reason or text or event.line or ""
    known, one.troubles[about] = one.troubles.get(about), reason
    if not told and known != reason:
        yield _notice("failure", target, one, event, text)
    if first:
        yield _notice("first_failure", target, one, event, text)


def _over(about: str, target: str, one: _Target, event: Event) -> Iterator[Notice]:
    """Ends a trouble, and yields a notice where it was the last one."""
    if one.troubles.pop(about, None) is not None and not one.troubles:
        yield _notice("recovery", target, one, event)


def _notice(kind: str, target: str, one: _Target, event: Event, text: str = "") -> Notice:
    fields = {"event": event.kind, **event.fields}
    return Notice(kind, target, text or event.line or "", fields, one.watch)
