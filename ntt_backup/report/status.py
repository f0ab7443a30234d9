"""The catalog's status becomes a table for people, and JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from ntt_backup.audit.object_locks import TargetLock
from ntt_backup.catalog.history import DumpRun, Run
from ntt_backup.catalog.identities import Place
from ntt_backup.catalog.listed_files import Files
from ntt_backup.catalog.proofs import COPY_STATES, Kind, ProofCount, Unproved
from ntt_backup.catalog.range_locks import range_name
from ntt_backup.catalog.stats import Totals
from ntt_backup.errors import complete
from ntt_backup.formatting import (
    about,
    amount,
    duration,
    json_value,
    many,
    moment,
    printable,
    rate,
    size,
)
from ntt_backup.report.health import judge
from ntt_backup.report.live import daemon_line, outage_lines
from ntt_backup.report.target_facts import TargetFacts
from ntt_backup.rollback_detection import Newest
from ntt_backup.snapshot.last_take import Last

_ID_SHOWN: Final = 64
_WORDS: Final = {
    "none": "has none",
    "unproved": "was never checked",
    "old": "was checked too long ago",
    "proved": "is proved",
}


class Status:
    """The state of a target. If the catalog could not be asked, all other facts are shown."""

    def __init__(self, facts: TargetFacts) -> None:
        self.facts = facts
        # Judged now, since the command lines in it get the options of this moment.
        self._verdict = judge(facts, datetime.now(UTC))

    def json(self) -> dict[str, Any]:
        """Returns plain JSON values: bytes are integers, times RFC 3339 in UTC."""
        facts = self.facts
        head = {"target": facts.target, "url": self._url, "health": self._verdict.fields}
        daemon = None if facts.daemon is None else facts.daemon.fields
        if facts.trouble is not None:
            error = facts.trouble
            return {**head, "error": error.fields, "exit_code": error.exit_code, "daemon": daemon}
        assert facts.totals is not None  # The catalog was read.
        return {
            **head,
            "identity": _plain(facts.place) if facts.place is not None else None,
            **asdict(facts.totals),
            "prefixes": str(facts.settings.part),
            "unproved": _plain(facts.unproved) if facts.unproved is not None else None,
            "policy": policy_fields(facts.count, facts.settings.policy.copies),
            "files": _plain(facts.files) if facts.files is not None else None,
            "objects": asdict(facts.stored) if facts.stored is not None else None,
            "last_run": _plain(self._fresh_runs[0]) if facts.runs else None,
            "under_way": [
                {**_plain(one), "mb_per_s": one.mb_per_s}
                for one in self._fresh_runs
                if one.ended_at is None
            ],
            "dumps": [_plain(one) for one in facts.dumps],
            "snapshots": [
                {"set": name, **_plain(one), "next_due": json_value(self._next_due(name))}
                for name, one in facts.snapshots.items()
            ],
            "missed": [_plain(one) for one in facts.missed],
            "lock": None if facts.lock is None else _plain(facts.lock),
            "ranges": [
                {"range": range_name(one.index), "holder": one.application_name, "pid": one.pid}
                for one in facts.holders
            ],
            "daemon": daemon,
        }

    def table(self) -> Table:
        """Returns a table with a row for each fact."""
        facts = self.facts
        table = Table(
            title=f"target {facts.target}", box=box.SIMPLE, show_header=False, title_justify="left"
        )
        table.add_column(justify="right")
        table.add_column(overflow="fold")
        for name, text in self._rows():
            # As Text: other programs write into the catalog, also markup and control sequences.
            table.add_row(name, Text(printable(text)))
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        facts = self.facts
        if self._url is not None:
            yield "url", self._url
        if facts.daemon is None:
            yield "daemon", facts.silence.message if facts.silence else "no daemon runs"
        else:
            yield "daemon", daemon_line(facts.daemon)
            yield from (("", line) for line in outage_lines(facts.daemon, datetime.now(UTC)))
        if facts.trouble is not None or facts.totals is None:
            yield "catalog", f"cannot be asked: {facts.trouble}"
            return
        if (place := facts.place) is not None:
            yield "identity", f"{place.id}, last seen {moment(place.seen_at)}"
        if facts.part:
            yield "part", facts.part
        yield "safety", self._verdict.safety
        for point in self._verdict.points:
            yield point.level.words, f"{point.what}{f'; {point.do}' if point.do else ''}"
        if (files := facts.files) is not None:
            yield "files", files_line(files)
        yield from _totals(facts.totals)
        yield from self._objects()
        yield from self._work()

    @property
    def _url(self) -> str | None:
        """Returns where the settings have the target, if they do."""
        remote = self.facts.settings.remote
        return None if remote is None else remote.url

    @property
    def _fresh_runs(self) -> list[Run]:
        """Returns the runs. The figures of the running daemon's own run are the present ones."""
        report, runs = self.facts.daemon, self.facts.runs
        if report is None:
            return list(runs)
        now = report.state
        return [
            replace(
                one, copied=now.copied, failed=now.failed, bytes=now.bytes, updated_at=one.read_at
            )
            if str(one.run_id) == report.run_id and one.ended_at is None
            else one
            for one in runs
        ]

    def _objects(self) -> list[tuple[str, str]]:
        if (stored := self.facts.stored) is None:
            return []
        said = f"{many(stored.packs, 'pack')}, {size(stored.pack_bytes)}"
        if stored.large_blobs is not None and stored.large_bytes is not None:
            large = many(stored.large_blobs, "large blob")
            said += f"; {large} as files of their own, {size(stored.large_bytes)}"
        return [("on the target", said)]

    def _work(self) -> list[tuple[str, str]]:
        rows = [("last run", run_line(one)) for one in self._fresh_runs] or [("last run", "none")]
        if not any(one.name for one in self.facts.dumps):
            rows.append(("last dump", "none"))
        rows += [("last dump", _dump(one)) for one in self.facts.dumps]
        rows += [row for name in self.facts.snapshots for row in self._snapshot(name)]
        if (lock := self.facts.lock) is not None:
            rows.append(("locks", f"objects are locked until {moment(lock.until)}"))
        rows += [("MISSED", str(one)) for one in self.facts.missed]
        grouped: dict[str, list[int]] = {}
        for one in self.facts.holders:
            grouped.setdefault(f"{one.application_name} (PID {one.pid})", []).append(one.index)
        return rows + [("at work", f"{who}: {_ranges(held)}") for who, held in grouped.items()]

    def _snapshot(self, name: str) -> Iterator[tuple[str, str]]:
        """Yields the rows of a snapshot set: its last version, and the error of a later try."""
        one, due = self.facts.snapshots[name], self._next_due(name)
        said = "none known to this host"
        if one.taken_at is not None:
            said = f"{moment(one.taken_at)}: {one.version}, {many(one.files, 'file')},"
            said += f" {size(one.bytes)}, {size(one.stored)} stored"
            if one.unreadable:
                said += f"; {many(one.unreadable, 'file')} could NOT be read"
        yield f"snapshot {name}", said + (f"; next due {moment(due)}" if due is not None else "")
        if one.error:
            when = f"{moment(one.failed_at)}: " if one.failed_at is not None else ""
            yield "", f"{when}FAILED, {one.error}"

    def _next_due(self, name: str) -> datetime | None:
        taken = self.facts.snapshots[name].taken_at
        every = self.facts.settings.scheduled.get(name)
        return None if taken is None or every is None else taken + timedelta(seconds=every)


def _plain(
    record: Run | DumpRun | Files | Last | Newest | TargetLock | Unproved | Place,
) -> dict[str, Any]:
    return {name: json_value(value) for name, value in asdict(record).items()}


def policy_fields(count: ProofCount | None, copies: int | None) -> dict[str, Any] | None:
    """Returns a count of proved copies as JSON values. copies: The promise, if there is one."""
    if count is None:
        return None
    short = [] if copies is None else count.short(copies)
    return {
        "copies": copies,
        "proved_s": count.proved_s,
        "counted_at": json_value(count.counted_at),
        "blobs": count.blobs,
        "short": sum(one.blobs for one in short),
        "by_proofs": count.by_proofs(),
        "targets": {name: count.of_target(name) for name in count.targets},
        "kinds": [
            {
                "blobs": one.blobs,
                "first": printable(one.first[:_ID_SHOWN]),
                "targets": _states(count, one),
            }
            for one in short
        ],
    }


def policy_lines(count: ProofCount, copies: int, now: datetime) -> Iterator[str]:
    """Yields what the policy promises, and what is short of it."""
    blobs = sum(one.blobs for one in count.short(copies))
    age = max(0.0, (now - count.counted_at).total_seconds())
    promise = f"{many(copies, 'proved copy', 'proved copies')} within {duration(count.proved_s)}"
    yield (
        f"{many(blobs, 'blob has', 'blobs have')} less than {promise}"
        if blobs
        else f"all of {many(count.blobs, 'blob')} have {promise}"
    )
    yield f"counted {moment(count.counted_at)}, {duration(age)} ago"
    for proofs, number in enumerate(count.by_proofs()):
        yield f"{number:>14,} with {many(proofs, 'proved copy', 'proved copies')}"
    if len(count.targets) < copies:
        yield f"the settings have {many(len(count.targets), 'target')}: add another"
    for one in count.short(copies):
        where = ", ".join(f"{name} {_WORDS[state]}" for name, state in _states(count, one).items())
        yield f"{one.blobs:>14,} {where}; the first is {printable(one.first[:_ID_SHOWN])}"


def _states(count: ProofCount, kind: Kind) -> dict[str, str]:
    states = (COPY_STATES[state] for state in kind.states)
    return dict(zip(count.targets, states, strict=True))


def _totals(totals: Totals) -> list[tuple[str, str]]:
    guessed = totals.estimated
    rows = []
    for state, blobs, bytes_, reasons in (
        ("pending", totals.pending, totals.pending_bytes, totals.pending_by_reason),
        ("copied", totals.copied, totals.copied_bytes, {}),
        ("failed", totals.failed, totals.failed_bytes, totals.failed_by_reason),
    ):
        said = amount(blobs, bytes_, estimated=state in guessed)
        if state == "pending" and blobs and not bytes_ and totals.unsized:
            said = f"{many(blobs, 'blob')}, size not known yet"
        rows.append((state, said))
        rows += [("", f"{count:,} {reason}") for reason, count in sorted(reasons.items())]
    if totals.unsized:
        guess = "unsized" in guessed
        unsized = about(totals.unsized) if guess else totals.unsized
        text = many(unsized, "pending blob has", "pending blobs have")
        rows.append(("", f"{'about ' * guess}{text} no size in the catalog yet"))
    if guessed:
        exact = complete("ntt-backup-remote status --exact")
        rows.append(("", f"figures with `about` are estimated; `{exact}` counts them"))
    if totals.without_blobid:
        text = many(totals.without_blobid, "row has", "rows have")
        rows.append(("", f"{text} no blobid: never sent"))
    return rows


def files_line(files: Files) -> str:
    """Returns a line about the files that go by their paths."""
    said = f"{many(files.listed, 'file')} listed"
    if files.registered_at is not None:
        said += f", last {moment(files.registered_at)}"
    rest = (("not read yet", files.unread), ("failed", files.failed), ("gone", files.gone))
    return "; ".join([said, *(f"{count:,} {what}" for what, count in rest if count)])


def run_line(run: Run, lasted: str = "") -> str:
    """Returns a line about a run. lasted: Words for the duration of a run that has ended."""
    began = f"{moment(run.started_at)} on {run.host}"
    did = f"{run.copied:,} copied, {run.failed:,} failed, {size(run.bytes)}"
    if run.ended_at is None:
        age = max(0.0, (run.read_at - run.updated_at).total_seconds())
        did += f", {rate(run.mb_per_s)}"
        return f"{began}, PID {run.pid}: no end yet; as of {duration(age)} ago {did}"
    if run.exit_code is None:
        last = moment(run.ended_at)
        return f"{began}, PID {run.pid}: {run.outcome}, last seen {last}, {did}{lasted}"
    why = f": {run.reason}" if run.reason else ""
    return f"{began}: {run.outcome} (exit code {run.exit_code}), {did}{lasted}{why}"


def _dump(one: DumpRun) -> str:
    began = moment(one.started_at)
    if one.error:
        return f"{began}: FAILED, {one.error}"
    return f"{began}: {one.name}, {size(one.bytes)}"


def _ranges(indexes: Sequence[int]) -> str:
    names = [range_name(index) for index in indexes[:16]]
    more = f" and {len(indexes) - 16} more" if len(indexes) > 16 else ""
    return "ranges " + " ".join(names) + more
