"""The health of a target is judged by its facts, in words: what is so, and what to do about it.

A target is healthy, or waits for something that passes by itself, or somebody has to act. `status`,
`why`, the page and the notices show the same judgement. Pure.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, Final

from ntt_backup.catalog.failures import UNKNOWN
from ntt_backup.catalog.history import Run
from ntt_backup.catalog.proofs import RECONCILE, ProofCount
from ntt_backup.errors import CatalogUnavailable, WaitsToStart, complete
from ntt_backup.events import with_detail
from ntt_backup.formatting import about, duration, many, moment, printable
from ntt_backup.process.pid_lock import process_exists
from ntt_backup.report.target_facts import TargetFacts

# An outage that lasts longer may not pass by itself.
_LONG_OUTAGE: Final = timedelta(hours=1)
# A run that was not heard of for so long, or for three of its progress events, has died.
_SILENT: Final = timedelta(minutes=10)
# Blobs may wait so long for the next run of a timer.
_BETWEEN_RUNS: Final = timedelta(hours=26)
_AWAY: Final = {
    "remote": "The remote",
    "catalog": "The catalog",
    "source": "The local store",
    "preflight": "Something that the start needs",
}


class Health(IntEnum):
    """Says how much a person is needed; the larger, the more."""

    HEALTHY = 0
    WAITING = 1
    ACTION_REQUIRED = 2

    @property
    def words(self) -> str:
        """Returns the level for people: `Action required`."""
        return self.name.replace("_", " ").capitalize()


@dataclass(frozen=True, slots=True)
class Point:
    """One finding. do: the remedy; "" where no action is required."""

    level: Health
    what: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """All there is to know of a target at once, the worst first.

    Attributes:
        points: The findings.
        safety: A sentence about copies, proofs, dump and drill; "" where they are not known.
    """

    points: tuple[Point, ...]
    safety: str = ""

    @property
    def level(self) -> Health:
        return self.points[0].level

    @property
    def headline(self) -> str:
        """Returns the state and its first reason, in a line."""
        return printable(f"{self.level.words}: {self.points[0].what}")

    @property
    def fields(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        points = [
            {"level": one.level.name.lower(), "what": printable(one.what), "do": one.do}
            for one in self.points
        ]
        return {"level": self.level.name.lower(), "safety": self.safety, "points": points}

    @property
    def lines(self) -> list[str]:
        """The verdict for people: the headline and its remedy, the other findings, the safety."""
        lines = [self.headline]
        for nth, one in enumerate(self.points):
            lines += [f"  {one.level.words}: {one.what}"] if nth else []
            lines += [f"    {one.do}"] if one.do else []
        return lines + ([f"  {self.safety}"] if self.safety else [])


def judge(facts: TargetFacts, now: datetime) -> HealthVerdict:
    """Returns the verdict. Its command lines get the options of this moment, see `complete`."""
    found = [*_catalog(facts, now), *_runs(facts, now), *_blobs(facts), *_others(facts, now)]
    if all(point.level == Health.HEALTHY for point in found):
        found.insert(0, Point(Health.HEALTHY, _all_well(facts, now)))
    points = (Point(one.level, one.what, complete(one.do)) for one in found)
    return HealthVerdict(
        tuple(sorted(points, key=lambda point: -point.level)), printable(_safety(facts, now))
    )


def _act(what: str, do: str) -> Point:
    return Point(Health.ACTION_REQUIRED, what, do)


def _wait(what: str, do: str = "") -> Point:
    return Point(Health.WAITING, what, do)


def lives(facts: TargetFacts, run: Run) -> bool:
    """Returns whether a run has not ended, as far as that can be known."""
    silent = max(_SILENT, timedelta(seconds=3 * facts.settings.log.progress_interval))
    if run.ended_at is not None or run.read_at - run.updated_at > silent:
        return False
    if run.host != socket.gethostname():
        return True
    if facts.daemon is not None:
        return facts.daemon.run_id == str(run.run_id)
    return process_exists(run.pid)


def under_way(facts: TargetFacts) -> Run | None:
    """Returns the latest run that lives, of whatever host."""
    return next((run for run in facts.runs if lives(facts, run)), None)


def _catalog(facts: TargetFacts, now: datetime) -> Iterator[Point]:
    if facts.trouble is not None:
        trouble, read_at = facts.trouble, facts.read_at
        when = "; these figures are older" if read_at is not None else ""
        # A server that starts anew is reachable again by itself.
        short = read_at is not None and now - read_at < _LONG_OUTAGE
        waits = short and isinstance(trouble, CatalogUnavailable)
        level = Health.WAITING if waits else Health.ACTION_REQUIRED
        yield Point(level, _sentence(trouble.message) + when, trouble.hint)
    # What is missing has several readers.
    for lack in {(one.detail or one.message, one.hint): one for one in facts.lacks}.values():
        yield _act(_sentence(str(lack)), lack.hint)


def _runs(facts: TargetFacts, now: datetime) -> Iterator[Point]:
    """Yields the findings on the run that is under way, or on the last run."""
    run = under_way(facts)
    if facts.daemon is not None:
        yield from _daemon(facts, now)
    elif run is not None and run.host == socket.gethostname() and facts.silence is not None:
        yield _wait(_sentence(str(facts.silence)), facts.silence.hint)
    elif run is None and facts.runs:
        last = facts.runs[0]
        if last.ended_at is None:
            yield _act(
                f"The last run, on {last.host}, recorded no end: last heard of"
                f" {_ago(last.updated_at, now)}",
                "Start it again: `ntt-backup-remote run`. The journal or the log of that time says"
                " why it ended, unless the catalog was restored from a dump that this run made",
            )
        elif last.outcome == "error":
            why = f": {last.reason}" if last.reason else f", with exit code {last.exit_code}"
            # A daemon may wait to start it again.
            waits = isinstance(facts.silence, WaitsToStart)
            restart = f"; {facts.silence.message}" if waits and facts.silence else ""
            yield _act(
                f"The last run ended early, {_ago(last.ended_at, now)}{why}{restart}",
                "`ntt-backup-remote check` says what is in the way",
            )


def _daemon(facts: TargetFacts, now: datetime) -> Iterator[Point]:
    assert facts.daemon is not None
    if facts.daemon.paused:
        yield _wait("Somebody paused it", "`ntt-backup-remote resume` ends the pause")
    for what, since in facts.daemon.unreachable.items():
        long = now - since >= _LONG_OUTAGE
        lasts = duration(max(0.0, (now - since).total_seconds()))
        why = [one.reason for one in facts.daemon.outages if one.what == what][-1]
        yield Point(
            Health.ACTION_REQUIRED if long else Health.WAITING,
            with_detail(f"{_AWAY.get(what, what)} has been unreachable for {lasts}", why)
            + "; it is tried again and again",
            "`ntt-backup-remote check` says why" if long else "",
        )
    for worker in facts.workers:
        if worker.state == "stalled":
            what = f"Worker {worker.worker} has said nothing for a long time"
            yield _wait(what, "The last lines of the log say what it did")


def _blobs(facts: TargetFacts) -> Iterator[Point]:
    totals = facts.totals
    if totals is None:
        return
    if unknown := facts.unknown + totals.failed_by_reason.get(UNKNOWN, 0):
        yield _act(
            f"{many(unknown, 'blob')} could not be copied",
            "Fix the causes that `ntt-backup-remote failed` lists, then run `ntt-backup-remote"
            " requeue`. To silence failures that cannot be fixed, run `ntt-backup-remote failed"
            " --known`",
        )
    elif totals.failed:
        yield Point(
            Health.HEALTHY,
            f"{many(totals.failed, 'blob')} could not be copied, which somebody said is known",
            "`ntt-backup-remote failed` lists them",
        )
    if facts.files is not None and facts.files.failed:
        yield _act(
            f"{many(facts.files.failed, 'listed file')} could not be read, or was changed since",
            "Fix the causes that `ntt-backup-remote failed` lists, then run `ntt-backup-remote"
            " requeue`",
        )
    yield from _marks(facts)
    again = _found_wrong(facts)
    if again and all(check.wrong != again for check in facts.checks):
        yield _wait(
            f"A check found {many(again, 'blob')} missing or wrong on the remote;"
            " they will be sent again",
        )


def _found_wrong(facts: TargetFacts) -> int:
    """Returns the number of blobs that a check has found wrong, and that are pending since."""
    return sum(facts.totals.pending_by_reason.values()) if facts.totals is not None else 0


def known_failures(facts: TargetFacts) -> int:
    """Returns the number of failed blobs that somebody said are known."""
    totals = facts.totals
    assert totals is not None
    return totals.failed - facts.unknown - totals.failed_by_reason.get(UNKNOWN, 0)


def _marks(facts: TargetFacts) -> Iterator[Point]:
    """Yields the findings on marks that are no proof."""
    unproved = facts.unproved
    if facts.contact is not None and (said := facts.contact.warning(facts.checks)):
        yield _act(_sentence(said), f"run {RECONCILE}")
    elif unproved is not None and unproved.blobs:
        count = about(unproved.blobs) if unproved.estimated else unproved.blobs
        said = f"{many(count, 'copied blob was', 'copied blobs were')} never checked"
        what = "About " * unproved.estimated + said
        yield Point(Health.HEALTHY, what, "`ntt-backup-remote verify` checks them")


def _others(facts: TargetFacts, now: datetime) -> Iterator[Point]:
    """Yields the findings on waiting blobs, dumps, snapshots and checks."""
    if not facts.workers and under_way(facts) is None and (totals := facts.totals):
        ended = facts.runs[0].ended_at or facts.runs[0].updated_at if facts.runs else None
        late = ended is None or now - ended > _BETWEEN_RUNS
        unread = many(_unread(facts), "file is", "files are")
        if (totals.pending or _unread(facts)) and late:
            when = f"the last run was {_ago(ended, now)}" if ended else "there never was a run"
            count = _blobs_pending(facts) if totals.pending else unread
            yield _act(f"{count} not copied yet, and {when}", "`ntt-backup-remote run` copies them")
        elif totals.pending > _found_wrong(facts):
            yield _wait(f"{_blobs_pending(facts)} waiting for the next run")
        elif _unread(facts):
            yield _wait(
                f"{unread} not read yet, and so not copied",
                "`ntt-backup-remote run` copies them, but not before `source.grace` has passed"
                " since they were changed",
            )
    yield from _dumps(facts, now)
    yield from _policy(facts, now)
    for name, known in facts.snapshots.items():
        every = facts.settings.scheduled.get(name)
        if known.error:
            what = f"The last snapshot of {name} failed: {known.error}"
            yield _act(what, f"`ntt-backup-remote snapshot take {name}`")
        elif facts.settings.media:
            continue  # A medium is late as long as others have their turn.
        elif every and known.taken_at and now - known.taken_at > timedelta(seconds=2 * every):
            what = f"The snapshot of {name} is late: the last one was {_ago(known.taken_at, now)}"
            yield _act(what, f"`ntt-backup-remote snapshot take {name}`")
    if (lock := facts.lock) is not None and lock.ends_soon(now):
        left = (lock.until - now).total_seconds()
        when = f"end in {duration(left)}" if left > 0 else f"have ended, on {moment(lock.until)}"
        what = f"Object locks {when}: what was stored before can be removed then"
        yield _act(what, "`ntt-backup-remote protect --for 90d` renews them")
    for one in facts.missed:
        yield _act(_sentence(str(one)), "who can change the target? `ntt-backup-remote check`")
    commands = set()
    for check in facts.checks:
        if check.command == "policy":
            continue  # What is known of it is newer.
        newest = check.command not in commands
        commands.add(check.command)
        if check.command == "heal" and facts.totals and check.wrong <= known_failures(facts):
            continue  # What could not be healed is known to fail.
        if newest and check.exit_code and check.exit_code < 128:
            found = (
                f"found {many(check.wrong, 'blob')} missing or wrong" if check.wrong else "failed"
            )
            what = f"The last {check.command}, {_ago(check.ended_at, now)}, {found}"
            again = "; they will be sent again" if check.wrong == _found_wrong(facts) != 0 else ""
            do = f"`ntt-backup-remote {check.command}` says more{again}"
            yield _act(with_detail(what, check.detail), do)
        elif newest and not check.exit_code and check.doubts:
            what = f"The last {check.command}, {_ago(check.ended_at, now)}, did not prove all"
            yield Point(Health.HEALTHY, with_detail(what, check.detail))


def _safety(facts: TargetFacts, now: datetime) -> str:
    """Returns how safe the blobs are, by what is known without a long query."""
    if facts.totals is None:
        return ""
    copied = [run.updated_at for run in facts.runs if run.copied]
    count = facts.count
    # A count from before the last copies would tell of fewer.
    if (
        count is not None
        and count.blobs
        and count.counted_at >= max(copied, default=count.counted_at)
    ):
        said = _proved_copies(count, now)
    else:
        said = _copies_here(facts, now)
    dump = max((one for one in facts.dumps if one.name), key=lambda one: one.ended_at, default=None)
    made = "no dump of the catalog"
    if dump is not None:
        made = f"dump of {_ago(dump.started_at, now)}"
        marked = max(copied, default=dump.started_at)
        if marked > dump.started_at:
            older = duration((marked - dump.started_at).total_seconds())
            made += f", {older} before the last copies"
    drill = next(
        (one for one in facts.checks if one.command == "drill" and not one.exit_code), None
    )
    proved = f"drill {_ago(drill.ended_at, now)}" if drill is not None else "no drill"
    part = str(facts.settings.part)
    return f"{f'Of {part}: ' if part else ''}{said}; {made}; {proved}"


def _proved_copies(count: ProofCount, now: datetime) -> str:
    *_, most = numbers = count.by_proofs()
    parts = [f"{most:,} of {many(count.blobs, 'blob')} proved on {len(numbers) - 1}"]
    parts += [
        f"{blobs:,} on {proofs}"
        for proofs, blobs in reversed(list(enumerate(numbers[:-1])))
        if blobs
    ]
    of = many(len(count.targets), "target")
    within = duration(count.proved_s)
    counted = _ago(count.counted_at, now)
    return f"{', '.join(parts)} of {of} within {within} (counted {counted})"


def _copies_here(facts: TargetFacts, now: datetime) -> str:
    totals = facts.totals
    assert totals is not None
    rough = bool({"copied", "pending"} & set(totals.estimated))
    copied, rest = totals.copied, totals.pending + totals.failed
    counts = [about(one) if rough else one for one in (copied, copied + rest)]
    said = f"{'About ' * rough}{counts[0]:,} of {many(counts[1], 'blob')} on {facts.target}"
    unproved = facts.unproved
    if unproved is not None and unproved.blobs:
        number = about(unproved.blobs) if unproved.estimated else unproved.blobs
        said += f", {'about ' * unproved.estimated}{number:,} of them never checked"
    verify = next((one for one in facts.checks if one.command == "verify"), None)
    return f"{said}, " + (f"verified {_ago(verify.ended_at, now)}" if verify else "no verify yet")


def _policy(facts: TargetFacts, now: datetime) -> Iterator[Point]:
    """Yields the findings on the promise of the settings, by the last count."""
    copies, count = facts.settings.policy.copies, facts.count
    if copies is None or count is None:
        return
    if now - count.counted_at > max(
        _BETWEEN_RUNS, timedelta(seconds=3 * facts.settings.policy.every)
    ):
        what = f"Proved copies were last counted {_ago(count.counted_at, now)}"
        yield _wait(what, "A run with --watch counts them, or `ntt-backup-remote status --policy`")
    if not (short := count.short(copies)):
        return
    blobs = sum(one.blobs for one in short)
    when = _ago(count.counted_at, now)
    what = f"{many(blobs, 'blob has', 'blobs have')} fewer than {copies} proved copies ({when})"
    if count.broken(copies, facts.contact):
        yield _act(what, "`ntt-backup-remote status --policy` says on which targets")
    else:
        yield _wait(what)


def _dumps(facts: TargetFacts, now: datetime) -> Iterator[Point]:
    settings = facts.settings
    do = "`ntt-backup-remote dump` makes one"
    oldest = timedelta(seconds=2 * max(settings.dump.max_age, settings.dump.interval))
    last = max(facts.dumps, key=lambda one: one.started_at, default=None)
    if last is not None and last.error:
        what = f"The catalog could not be dumped: {last.error}"
        yield _act(what, do)
    elif settings.run.skip_pgdump or facts.read_at is None or facts.daemon or under_way(facts):
        return
    elif facts.runs and last is None:
        what = "There is no dump of the catalog: after the loss of this host nobody could tell"
        yield _act(f"{what} what the blobs are", do)
    elif last is not None and now - last.ended_at > oldest:
        what = f"The last dump of the catalog is old: {_ago(last.ended_at, now)}"
        yield _act(what, do)


def _blobs_pending(facts: TargetFacts) -> str:
    assert facts.totals is not None
    rough = "pending" in facts.totals.estimated
    count = about(facts.totals.pending) if rough else facts.totals.pending
    return "About " * rough + many(count, "blob is", "blobs are")


def _unread(facts: TargetFacts) -> int:
    """Returns the number of listed files that were never read."""
    return facts.files.unread if facts.files is not None else 0


def _all_well(facts: TargetFacts, now: datetime) -> str:
    if facts.daemon is not None:
        state = facts.daemon.state
        if state.pending:
            left = f", about {duration(state.eta_s)}" if state.eta_s is not None else ""
            return f"Sending: {many(state.pending, 'blob')} left{left}"
        if state.pending == 0 and (unread := _unread(facts)):
            return f"All blobs are copied, but {many(unread, 'file is', 'files are')} not read yet"
        if state.pending == 0:
            watches = "; it waits for new ones" if facts.daemon.watch else ""
            # They came since the daemon last asked the catalog.
            if facts.totals and facts.totals.pending and "pending" not in facts.totals.estimated:
                return f"{_blobs_pending(facts)} pending; it waits for its next look at the catalog"
            return f"All blobs are copied{watches}"
        does = {worker.state for worker in facts.workers}
        if does <= {"starting"}:
            return "A run is starting"
        if does <= {"idle"}:
            return "It waits for new blobs"
        return f"Sending: {many(state.copied, 'blob')} copied so far, what is left is not counted"
    if (run := under_way(facts)) is not None:
        return f"A run is under way on {run.host}"
    if facts.runs and facts.runs[0].ended_at is not None:
        return f"All blobs are copied; the last run ended {_ago(facts.runs[0].ended_at, now)}"
    return "All blobs are copied"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ago(when: datetime, now: datetime) -> str:
    past = (now - when).total_seconds()
    return f"{duration(max(0.0, past))} ago" if past < 7 * 86400 else f"on {moment(when)}"
