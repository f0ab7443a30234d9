"""The JSONL log has one event a line, for `tail -f`, jq and whatever collects logs.

Only the coordinator writes it, so lines never interleave, and a batch's line comes after its
commit. The ledger is the truth and this file is derived from it: when it cannot be written, the
backup goes on and says so once on stderr.

logrotate may rename the file at any time: each line is appended to the file that has the name at
that moment.

Small batches of a run that watches are told together, so that a quiet daemon logs little. Blobs
that other programs insert one by one make batches of one or two blobs, and a line for each of these
batches would be nearly all of the log. So the first small batch of a worker is told at once, and
what follows within a minute is summed up to one line. Larger batches are told one by one. A line
never comes before its commit; it may come a minute after it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ntt_backup.config.sections import LogSettings
from ntt_backup.daemon.listeners import Listener
from ntt_backup.errors import ConfigError
from ntt_backup.events import BatchComplete, BlobFailed, BlobsFailed, Event, MarksLost

# The number of failed blobs of a run that have a line each.
FAILURES_LOGGED: Final = 100

_LEADING: Final = ("timestamp", "level", "event", "run_id", "target", "host", "pid", "worker")
_LEVELS: Final = ("info", "warning", "error")
_SUMS: Final = ("batches", "blobs", "copied", "failed", "bytes", "wire_bytes", "duration_s")
SMALL_BLOBS: Final = 16
SMALL_BYTES: Final = 1_000_000
TOGETHER_SECONDS: Final = 60.0


class EventLog(Listener):
    """Appends events to the JSONL file of the settings.

    The file is found by its name, also after a rotation. Each line is one write(2), so that the
    line stays whole.

    Raises:
        ConfigError: As `reopen` raises.
    """

    def __init__(self, settings: LogSettings, run_id: str, target: str) -> None:
        self._run_id = run_id
        self._target = target
        self._path = settings.jsonl
        self._complained = False
        self._torn = False
        self._fd = -1
        self.reopen(settings)

    @cached_property
    def _logger(self) -> Any:
        """Gives each event to `write`, as one line of JSON.

        The logger is made for the first line: structlog takes a while to load, and the remote is
        asked before.
        """
        # Where structlog finds rich, it loads it, and pygments, for a renderer that is not used.
        rich = sys.modules.get("rich")
        sys.modules["rich"] = None  # type: ignore[assignment]  # as Python notes what is missing
        try:
            import structlog
        finally:
            del sys.modules["rich"]
            if rich is not None:
                sys.modules["rich"] = rich
        return structlog.wrap_logger(
            structlog.WriteLogger(self),  # type: ignore[arg-type]  # only write and flush are used
            processors=[
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                _lead,
                structlog.processors.JSONRenderer(ensure_ascii=True, default=str),
            ],
            wrapper_class=structlog.BoundLogger,
            context_class=dict,
            run_id=self._run_id,
            target=self._target,
            host=socket.gethostname(),
        )

    def reopen(self, settings: LogSettings) -> None:
        """Opens the log file of the settings for later lines, and uses their level for these lines.

        Raises:
            ConfigError: The file cannot be opened. The log continues with the former settings.
        """
        old, self._path = self._path, settings.jsonl
        self.close()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # Else each line tries again.
                self._path = old
                raise ConfigError(
                    f"the log {settings.jsonl} cannot be written",
                    detail=error.strerror or str(error),
                    hint="create its directory for this user, or set log.jsonl (NTT_LOG_JSON)",
                ) from error
        self._written = _LEVELS[_LEVELS.index(settings.level) :]

    def event(self, event: Event) -> None:
        if event.level in self._written:
            self._logger.info(event.kind, level=event.level, **event.fields)

    def write(self, line: str) -> None:
        """Appends a line. Where that fails, the line is dropped and the operator told once."""
        data = ("\n" + line if self._torn else line).encode()
        try:
            if not self._has_the_name():
                self.close()
                self._fd = self._open()
            written = os.write(self._fd, data)
        except OSError as error:
            if not self._complained:
                with suppress(OSError):  # stderr may lie on the same disk
                    print(f"cannot write the log {self._path}: {error.strerror}", file=sys.stderr)
            self._complained = True
        else:
            self._torn = written < len(data)
            if not self._torn:
                self._complained = False

    def flush(self) -> None:
        """Does nothing: `write` keeps nothing back."""

    def close(self) -> None:
        """Closes the file. The next event opens the file that has the name then."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _open(self) -> int:
        # Not blocking: a FIFO in its place would hold us until somebody reads it.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return os.open(self._path, flags | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            if not _is_trusted(self._path):
                raise OSError(errno.ELOOP, "another user may have put a symlink there") from error
        return os.open(self._path, flags, 0o644)

    def _has_the_name(self) -> bool:
        if self._fd < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        except FileNotFoundError:
            return False


def _lead(_logger: object, _method: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Puts the common fields first, in the contract's order; people read these lines too."""
    head = {key: event[key] for key in _LEADING if key in event}
    return head | {key: value for key, value in event.items() if key not in head}


def _is_trusted(link: Path) -> bool:
    """Returns whether only root and this user can have created or changed a symlink.

    A trusted symlink, such as /dev/stdout, is followed. Through any other symlink, root would write
    into any file.
    """
    above, users = link.parent.stat(), (0, os.geteuid())
    ours = above.st_uid in users and link.lstat().st_uid in users
    return ours and not above.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


class FailedBlobs:
    """Bounds the lines about failed blobs: the first have one each, the others are counted."""

    def __init__(self) -> None:
        self._logged = 0
        self._counted: Counter[str] = Counter()

    def has_a_line(self, event: BlobFailed) -> bool:
        """Returns whether the event gets a line of its own. Other events are counted."""
        if self._logged < FAILURES_LOGGED:
            self._logged += 1
            return True
        self._counted[event.reason] += 1
        return False

    def rest(self) -> Iterator[BlobsFailed]:
        """Yields one event for the blobs that were counted since the last call, if any."""
        counted, self._counted = self._counted, Counter()
        if counted:
            yield BlobsFailed(count=counted.total(), reasons=dict(counted))


class BatchLines:
    """Holds back the events of small batches. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._held: dict[int | None, BatchComplete] = {}
        self._told: dict[int | None, float] = {}

    def take(
        self, event: BatchComplete | MarksLost, now: float
    ) -> Iterator[BatchComplete | MarksLost]:
        """Records a batch, or the loss of earlier ones, and yields the events that are due now."""
        worker, held = event.worker, self._held.pop(event.worker, None)
        small = event.blobs <= SMALL_BLOBS and event.bytes <= SMALL_BYTES
        # The key of its pack is told of each.
        if isinstance(event, MarksLost) or event.pack or not small:
            if held is not None:
                yield held
            yield event
            return
        self._held[worker] = event if held is None else _sum(held, event)
        yield from self.due(now, [worker])

    def due(
        self, now: float, workers: Iterable[int | None] | None = None
    ) -> Iterator[BatchComplete]:
        """Yields the batches that were held back for long enough. workers: None for all."""
        for worker in list(self._held) if workers is None else workers:
            if now - self._told.get(worker, -TOGETHER_SECONDS) >= TOGETHER_SECONDS:
                self._told[worker] = now
                yield self._held.pop(worker)

    def rest(self) -> Iterator[BatchComplete]:
        """Yields all batches that were held back, at the end of a run."""
        while self._held:
            yield self._held.pop(next(iter(self._held)))


def _sum(first: BatchComplete, second: BatchComplete) -> BatchComplete:
    """Returns one event for both, with the name of the later batch."""
    both = replace(second, **{name: getattr(first, name) + getattr(second, name) for name in _SUMS})
    answers_s = first.answer_s * first.batches + second.answer_s * second.batches
    return replace(
        both,
        mb_per_s=both.bytes / max(both.duration_s, 1e-6) / 1e6,
        attempt=max(first.attempt, second.attempt),
        answer_s=answers_s / both.batches,
    )
