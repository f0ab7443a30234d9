"""The events of a run: a class for each, with its level, its fields, and its line for people.

The lines of the JSONL log, the lines on a terminal and docs/jsonl.schema.json are made from these
classes, so a new event is one class: its docstring and the descriptions of its fields go into the
schema (`python -m tests.helpers.documents` writes it). Names and fields are a contract: events
and fields may be added, none may be changed or removed. Events of a daemon are in `daemon.events`,
of a dump in `dump.events`, of snapshots in `snapshot.events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from signal import SIGINT
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field

from ntt_backup.errors import BackupError, BatchRejected, ProtocolViolation, complete
from ntt_backup.formatting import duration, many, printable, rate, size
from ntt_backup.model import OF_CHECKS, OF_THE_STORE, Failure, FileReason, Reason, Receipt
from ntt_backup.process.messages import Count, ErrorFields, Message, Positive, doc

_MEGA: Final = 10**6


def one_of(*values: str) -> Any:
    """Describes a field by its valid values."""
    return Field(json_schema_extra={"enum": list(values)})


Amount = Annotated[float, Field(ge=0)]
Seconds = Annotated[Amount, doc("seconds")]
Content = Annotated[Count, doc("bytes of the copied blobs")]
BatchName = Annotated[str, doc("unique within the run")]
_UNREACHABLE_AND_AGAIN: Final = {
    "remote": ("remote is unreachable", "remote is reachable again"),
    "catalog": ("catalog is unreachable", "catalog is reachable again"),
    "source": ("store is unreachable", "store is reachable again"),
    "preflight": ("cannot begin yet", "can begin"),
}
SIDES: Final = tuple(_UNREACHABLE_AND_AGAIN)
Side = Annotated[str, one_of(*SIDES)]
# The cause of a retry of a batch, by the class of its error.
RETRY_CAUSES: Final[Mapping[type[BackupError], str]] = {
    ProtocolViolation: "protocol",
    BatchRejected: "rejected",
    BackupError: "link",
}
_OUTCOMES: Final = (
    "done",
    "some_failed",
    "dump_failed",
    "snapshot_failed",
    "check_failed",
    "files_failed",
    "stopped",
    "error",
)


def unreachable(what: str) -> str:
    """Returns the text for a side that is unreachable."""
    return _UNREACHABLE_AND_AGAIN[what][0]


Level = Literal["info", "warning", "error"]


class Event(Message):
    """A message that is logged, and shown if it has a line for people."""

    level: ClassVar[Level] = "info"
    # The text of the line for people, where the fields say nothing to it.
    text: ClassVar[str | None] = None

    @property
    def line(self) -> str | None:
        """One printable line for people; None if the event is not shown."""
        return "; ".join(self._parts()) or None

    @property
    def lines(self) -> list[str]:
        """The lines for a mail or a terminal, with the hint on a line of its own."""
        text, *hint = self._parts() or [""]
        return [one for one in (text, *(f"hint: {part}" for part in hint)) if one]

    def _parts(self) -> list[str]:
        parts = (self._text(), self.hint if isinstance(self, ErrorFields) else "")
        return [printable(complete(part)) for part in parts if part]

    def _text(self) -> str | None:
        return self.text


class FailureFields(ErrorFields):
    """The fields of an event that reports a failure. text: How its line for people begins."""

    level: ClassVar[Level] = "error"
    text: ClassVar[str | None] = None

    def _text(self) -> str:
        return f"{self.text}: {with_detail(self.message, self.detail)}"


class RunStart(Event):
    """A coordinator holds the lock and starts the run."""

    version: str
    target: str
    strategy: Annotated[str, doc("run.strategy, also `auto`")]
    workers: Positive
    watch: bool
    source: Annotated[str, doc("the store's directory")]
    remote: Annotated[str, doc("host:path, or the URL of what has no host")]
    prefixes: Annotated[str, doc("the part of the store that is sent; empty for all of it")] = ""

    def _text(self) -> str:
        part = f" ({self.prefixes} alone)" if self.prefixes else ""
        return (
            f"{many(self.workers, 'worker')}, strategy {self.strategy},"
            f" target {self.target}: {self.source}{part} to {self.remote}"
        )


class StillFailed(Event):
    """Blobs are failed at the end of a run, also blobs of earlier runs.

    Repeated by each run until the blobs are requeued.
    """

    level = "warning"
    blobs: Positive

    def _text(self) -> str:
        blobs = many(self.blobs, "blob is", "blobs are")
        hint = "`ntt-backup-remote failed` says why, `ntt-backup-remote requeue` tries them again"
        return f"{blobs} still failed: {hint}"


class BlobsFailed(Event):
    """Blobs were failed since the last such line, or since the hundredth blob_failed of the run.

    They have no lines of their own; the ledger has all of them.
    """

    level = "warning"
    count: Positive
    reasons: Annotated[dict[str, Positive], doc("how many for each reason of blob_failed")]

    def _text(self) -> str:
        reasons = ", ".join(f"{n:,} {why}" for why, n in sorted(self.reasons.items()))
        failed = many(self.count, "blob")
        return f"{failed} more failed: {reasons}; `ntt-backup-remote failed` lists them"


class Progress(Event):
    """The progress of the run.

    Reported every log.progress_interval seconds while there is work, once when the work is done,
    and then every hour.
    """

    copied: Count
    failed: Count
    pending: Annotated[Count | None, doc("null until it is known")]
    estimated: Annotated[bool, doc("pending is an estimate: a count would have taken too long")]
    bytes: Content
    mb_per_s: Annotated[Amount, doc("10^6 bytes a second on the wire, over the last minute")]
    blobs_per_s: Annotated[Amount, doc("copied and failed, over the last minute")]
    eta_s: Annotated[
        Amount | None,
        doc(
            "seconds, by the content that was sent since there was work; null until it is known and"
            " while nothing moves, 0 where nothing is pending"
        ),
    ]
    active_workers: Annotated[Count, doc("workers that send or wait for answers")]
    paused: Annotated[bool, doc("whether the run is paused")] = False

    def _text(self) -> str:
        about = "about " if self.estimated else ""
        known = self.pending is not None
        parts = [
            f"{self.copied:,} copied",
            f"{self.failed:,} failed",
            f"{about}{self.pending:,} pending" if known else "pending not counted yet",
            size(self.bytes),
            rate(self.mb_per_s),
            f"{self.blobs_per_s:,.0f} files/s",
        ]
        if self.pending and self.eta_s is not None:
            parts.append(f"about {duration(self.eta_s)} left")
        return ", ".join(["paused", *parts] if self.paused else parts)


class BlobsPruned(Event):
    """`prune --apply` has removed blobs from the target whose files are gone."""

    blobs: Annotated[Count, doc("blobs that were removed")]
    bytes: Annotated[Count, doc("bytes of these blobs")]
    exit_code: Annotated[Count, doc("7: something is left to the next call, or damaged")]
    duration_s: Seconds


class Stopping(Event):
    """A signal ends the run; the batches in flight are finished."""

    signal: Positive
    within_s: Annotated[
        Amount | None,
        doc("the most seconds until the end at the present speed; null while nothing is sent"),
    ]
    workers: Annotated[Count, doc("workers that finish a batch")] = 0
    bytes: Annotated[Count, doc("content that was sent, and has no receipt yet")] = 0

    def _text(self) -> str:
        takes = f", at most about {duration(max(1.0, self.within_s))}" if self.within_s else ""
        sent = f", {size(self.bytes)} of them without a receipt" if self.bytes else ""
        who = f": waiting for {many(self.workers, 'worker')}" if self.workers else ""
        again = "Ctrl-C again" if self.signal == SIGINT else "a second signal"
        return (
            f"stopping after the batches in flight{sent}{who}{takes}; {again} stops at once and"
            " loses nothing: batches without an answer are sent again by the next run"
        )


class Error(FailureFields, Event):
    """An error ended the run."""

    text = "error"


class RunStop(Event):
    """The last line of the run, except for warnings of notices and metrics that failed."""

    outcome: Annotated[str, one_of(*_OUTCOMES)]
    exit_code: Count
    copied: Count
    failed: Count
    bytes: Content
    duration_s: Seconds
    young: Annotated[Count, doc("files by path that source.grace has left to the next run")] = 0

    def _text(self) -> str:
        mb_per_s = self.bytes / _MEGA / max(self.duration_s, 1e-3)
        young = f", {many(self.young, 'file')} left to the next run, too young (source.grace)"
        # Only the line of the error itself begins with "error:".
        outcome = "ended early" if self.outcome == "error" else self.outcome.replace("_", " ")
        return (
            f"{outcome}: {self.copied:,} copied,"
            f" {self.failed:,} failed, {size(self.bytes)} in {duration(self.duration_s)}"
            f" ({rate(mb_per_s)}){young if self.young else ''}, exit code {self.exit_code}"
        )


# --- events of a worker ---------------------------------------------------------------------------


class WorkerEvent(Event):
    """An event of a worker. The coordinator adds the number of the worker.

    Attributes:
        always: Whether only workers report such events.
    """

    always: ClassVar[bool] = True
    worker: Annotated[Count | None, doc("counted from 0")] = None


class Warning(WorkerEvent):  # The log knows it by this name.
    """A warning of the preflight, or a line that a worker printed and that is no event."""

    always = False
    level = "warning"
    reason: str

    def _text(self) -> str:
        return f"warning: {self.reason}"


class WorkerStart(WorkerEvent):
    """A worker has started."""

    strategy: Annotated[str, doc("how batches travel: what run.strategy auto became")]


class BatchComplete(WorkerEvent):
    """A batch is settled: it is on the remote's stable storage, and committed in the ledger.

    In a run with --watch, small batches of a worker (at most 16 blobs and 1 MB each) within a
    minute share one line: numbers are sums, the name is the name of the last batch.
    """

    batch: BatchName
    blobs: Positive
    copied: Count
    failed: Count
    bytes: Content
    wire_bytes: Annotated[Count, doc("bytes handed to the transport")]
    duration_s: Annotated[
        Amount, doc("seconds from the batch's start to its answer, of several batches their sum")
    ]
    mb_per_s: Annotated[Amount, doc("10^6 bytes of content a second")]
    attempt: Annotated[Positive, doc("of several batches the highest one")]
    pack: Annotated[str, doc("the key of the pack in the bucket; empty where there is none")] = ""
    answer_s: Annotated[
        Amount, doc("seconds from the batch's last byte to its answer, of several the mean")
    ] = 0.0
    batches: Annotated[Positive, doc("how many batches the line stands for")] = 1

    @classmethod
    def of(cls, receipt: Receipt) -> Self:
        return cls(
            batch=receipt.batch.name,
            blobs=len(receipt.batch.blobs),
            copied=len(receipt.stored),
            failed=len(receipt.failed),
            bytes=receipt.stored_bytes,
            wire_bytes=receipt.wire_bytes,
            duration_s=receipt.duration_s,
            mb_per_s=receipt.stored_bytes / max(receipt.duration_s, 1e-6) / _MEGA,
            attempt=receipt.batch.attempt,
            pack=receipt.packs[0].key if receipt.packs else "",
            answer_s=receipt.answer_s,
        )


class CatalogMoved(WorkerEvent):
    """The catalog is served by another primary: a standby was promoted, or it is another cluster.

    What the old primary had committed and the new one lacks is done again.
    """

    level = "warning"
    server: Annotated[str, doc("the host and port of the new primary")]
    timeline: Annotated[Positive, doc("its timeline")]
    before: Annotated[Positive, doc("the timeline of the primary before")]
    same_cluster: Annotated[bool, doc("false if it is no standby of the one before")] = True

    def _text(self) -> str:
        cluster = "" if self.same_cluster else "another cluster, "
        return (
            f"the catalog has moved to {self.server} ({cluster}timeline {self.timeline}, before"
            f" {self.before}): marks that the new primary lacks are made again"
        )


class MarksLost(WorkerEvent):
    """The server of the catalog crashed, or a standby took its place, and the last marks are lost.

    Blobs that batch_complete counted as copied are pending, and are sent again. They do not count
    as copied until then.
    """

    level = "warning"
    blobs: Positive
    bytes: Content

    def _text(self) -> str:
        blobs = many(self.blobs, "blob")
        return f"the catalog has lost the marks of {blobs} in a crash; they are sent again"


class BatchRetry(WorkerEvent):
    """A batch will be sent again as a whole."""

    level = "warning"
    batch: BatchName
    blobs: Positive
    attempt: Annotated[Positive, doc("the number of the next attempt")]
    reason: str
    wait_s: Seconds
    cause: Annotated[str, one_of(*RETRY_CAUSES.values())] = "link"

    def _text(self) -> str:
        return (
            f"batch {self.batch} again in {duration(self.wait_s)}"
            f" (attempt {self.attempt}): {self.reason}"
        )


class BatchSplit(WorkerEvent):
    """A batch that is refused repeatedly is sent again in halves."""

    level = "warning"
    batch: BatchName
    blobs: Positive
    reason: str

    def _text(self) -> str:
        return f"batch {self.batch} split ({many(self.blobs, 'blob')}): {self.reason}"


class BlobsYoung(WorkerEvent):
    """Blobs that cannot be sent yet, because their files may still be being written."""

    blobs: Positive
    wait_s: Seconds
    blobid: Annotated[str, doc("one of them")]
    reason: Annotated[str, one_of(*(one.value for one in sorted(OF_THE_STORE)))]

    def _text(self) -> str:
        return (
            f"{many(self.blobs, 'blob')} may still be being written, and will be examined again in"
            f" {duration(self.wait_s)}: {self.blobid} {self.reason}"
        )


class BlobFailed(WorkerEvent):
    """A blob was failed, and marked as failed in the ledger."""

    level = "warning"
    blobid: Annotated[str, doc("as it stands in the catalog, also where it is malformed")]
    reason: Annotated[str, one_of(*(one.value for one in Reason if one not in OF_CHECKS))]
    detail: str

    @classmethod
    def of(cls, failure: Failure) -> Self:
        return cls(blobid=failure.blobid, reason=failure.reason.value, detail=failure.detail)

    def _text(self) -> str:
        return f"failed, {self.reason}: {self.blobid} {self.detail}"


class FileFailed(WorkerEvent):
    """A file that goes by its path cannot be read, or not as its origin says. It has no blob."""

    level = "warning"
    path: Annotated[str, doc("below source.root; what is not UTF-8 is escaped")]
    reason: Annotated[str, one_of(*(one.value for one in FileReason))]
    detail: str

    def _text(self) -> str:
        return f"not read, {self.reason}: {self.path}: {self.detail}"


class Outage(WorkerEvent):
    """The remote, the catalog or the store (source) is unreachable.

    Before the workers start, something else that the preflight needs may be unreachable. Nothing is
    failed; the work waits.
    """

    always = False
    level = "warning"
    what: Side
    reason: str
    detail: str
    attempt: Positive
    wait_s: Seconds

    @property
    def why(self) -> str:
        """Reason and detail in one line."""
        return with_detail(self.reason, self.detail)

    def _text(self) -> str:
        return f"{unreachable(self.what)}, again in {duration(self.wait_s)}: {self.why}"


class OutageEnd(WorkerEvent):
    """A side that was unreachable has answered again.

    The first success of any worker, or of the dump or a snapshot, ends the outage for all. The end
    of the run, or of all workers that had reported the outage, ends it, too.
    """

    always = False
    what: Side
    duration_s: Annotated[Amount, doc("seconds from the first failure to the first answer")]

    def _text(self) -> str:
        _, back = _UNREACHABLE_AND_AGAIN[self.what]
        return f"{back} after {duration(self.duration_s)}"


class RestartFields(Message):
    """The fields of a process that ended and will be restarted."""

    status: Annotated[int | None, doc("exit status, negative for a signal")]
    detail: str
    attempt: Positive
    wait_s: Seconds

    def restarts(self, ended: str) -> str:
        """Returns what ended, how, and when the process is restarted."""
        text = f"{ended} (status {self.status}), a new one starts in {duration(self.wait_s)}"
        return with_detail(text, self.detail)


class WorkerRestart(RestartFields, WorkerEvent):
    """A worker died and will be restarted."""

    level = "warning"

    def _text(self) -> str:
        return self.restarts(f"worker {self.worker} died")


class WorkerStall(WorkerEvent):
    """A worker has reported nothing for longer than run.stall_timeout, without a declared wait.

    Reported once, until the worker reports again.
    """

    level = "warning"
    silent_s: Seconds
    hint: Annotated[str, doc("what to do")]

    def _text(self) -> str:
        who = f"worker {self.worker} (PID {self.pid})"
        return f"{who} has reported nothing for {duration(self.silent_s)}: {self.hint}"


class WorkerStallEnd(WorkerEvent):
    """A worker that had stalled reports again."""

    duration_s: Seconds

    def _text(self) -> str:
        return f"worker {self.worker} reports again after {duration(self.duration_s)}"


class WorkerStop(WorkerEvent):
    """A worker has ended in good order."""


def with_detail(message: str, detail: str) -> str:
    """Returns message and detail as one text."""
    return f"{message}: {detail}" if detail else message
