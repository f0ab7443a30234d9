"""The JSONL log has one event a line, for `tail -f`, jq and whatever collects logs.

Only the coordinator writes it, so lines never interleave, and a batch's line comes after its
commit. The ledger is the truth and this file is derived from it: when it cannot be written, the
backup goes on and says so once on stderr.

logrotate may rename the file at any time: each line is appended to the file that has the name at
that moment. The directory may belong to another account, so this user may be able to write into
the file, and not to make it: until logrotate has made the new one, the renamed file gets the lines.

The directory has logs of other programs, and a variable of theirs may name one. Lines of ours in it
would spoil it for those who read it, so a file that has a line of another program is refused.

Small batches of a run that watches are told together, so that a quiet daemon logs little. Blobs
that other programs insert one by one make batches of one or two blobs, and a line for each of these
batches would be nearly all of the log. So the first small batch of a worker is told at once, and
what follows within a minute is summed up to one line. Larger batches are told one by one. A line
never comes before its commit; it may come a minute after it.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final

from ntt_backup.blobdir.descriptors import closing
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
# How each line begins, and each that a full disk has cut after that.
_BEGINNING: Final = b'{"timestamp": "'
_OURS: Final = re.compile(
    _BEGINNING + rb'[^"]{1,40}", "level": "[a-z]+", "event": "[a-z_]+", "run_id": "'
)
# A log is looked at before each run: so many bytes at its beginning, and as many at its end.
_LOOKED_AT: Final = 8 << 20
# Where standard output is the log, whatever it leads to was chosen by the caller.
_NOT_LOOKED_AT: Final = ("/dev/stdout", "/dev/stderr", "/dev/fd", "/proc")
_MAKE_IT: Final = "`ntt-backup-remote install-service --log`, as root, makes it for the service"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_LOG: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_LOG: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# The file is not there, and this user may not make it.
_NOT_OURS_TO_MAKE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
# So long after its name was made a new file may still be somebody else's.
_HANDED_OVER_SECONDS: Final = 5.0


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
        # When the file of the name was first refused, in monotonic seconds.
        self._refused: float | None = None
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
            ConfigError: The file cannot be opened, or has lines of another program. The log
                continues with the former settings.
        """
        path, fd = settings.jsonl, -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = _open(path)
        except _ForeignLog as error:
            raise ConfigError(
                f"the log {path} has lines of another program",
                detail=str(error.strerror),
                hint=f"set log.jsonl (NTT_BACKUP_LOG) to a file of this program alone; {_MAKE_IT}",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # Else each line tries again.
                raise ConfigError(
                    f"the log {path} cannot be written",
                    detail=error.strerror or str(error),
                    hint=f"set log.jsonl (NTT_BACKUP_LOG) to a file of this user; {_MAKE_IT}",
                ) from error
        self.close()
        self._fd, self._path = fd, path
        self._written = _LEVELS[_LEVELS.index(settings.level) :]

    def event(self, event: Event) -> None:
        if event.level in self._written:
            self._logger.info(event.kind, level=event.level, **event.fields)

    def write(self, line: str) -> None:
        """Appends a line. Where that fails, the line is dropped and the operator told once."""
        data = ("\n" + line if self._torn else line).encode()
        try:
            if not self._has_the_name():
                self._follow_the_name()
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

    def _follow_the_name(self) -> None:
        """Opens the file that has the name now; raises OSError.

        While there is none, and this user may not make it, a file that was renamed is kept; so it
        is for some seconds where there is one, which may have been made at this moment, and be
        given to this user in the next.
        """
        try:
            fd = _open(self._path)
        except OSError as error:
            now = time.monotonic()
            self._refused = now if self._refused is None else self._refused
            soon = now - self._refused < _HANDED_OVER_SECONDS
            waits = error.errno in _NOT_OURS_TO_MAKE and (soon or not os.path.lexists(self._path))
            if waits and self._fd >= 0 and os.fstat(self._fd).st_nlink:
                return
            raise
        self._refused = None
        self.close()
        self._fd = fd

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


class _ForeignLog(OSError):
    """The log has a line that is no event of this program."""


def _open(path: Path) -> int:
    """Opens a log to append to it, and makes it where it is missing. Raises OSError."""
    # Not blocking: a FIFO in its place would hold us until somebody reads it.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        if not _is_trusted(path):
            raise OSError(errno.ELOOP, "another user may have put a symlink there") from error
        fd = os.open(path, flags, 0o644)
    try:
        found = os.fstat(fd)
        looked_at = stat.S_ISREG(found.st_mode) and not any(
            map(path.is_relative_to, _NOT_LOOKED_AT)
        )
        if looked_at and found.st_size:
            with path.open("rb") as file:
                at = foreign_line(file)
            if at is not None:
                raise _ForeignLog(errno.EEXIST, f"the line at byte {at} is no event of ntt-backup")
    except BaseException:
        os.close(fd)
        raise
    return fd


def foreign_line(log: BinaryIO) -> int | None:
    """Returns where a line begins, in bytes, that is no event of this program; None without one.

    Of a large file the beginning and the end are looked at. A line that a full disk has cut, and
    the zeros that a power cut has left, are no line of another program.
    """
    size = log.seek(0, os.SEEK_END)
    for begin in (0, max(_LOOKED_AT, size - _LOOKED_AT)):
        at = log.seek(begin)
        if begin:
            at += len(log.readline(_LOOKED_AT))  # Its beginning was cut off.
        while at < begin + _LOOKED_AT and (line := log.readline(_LOOKED_AT)):
            if not _is_ours(line.strip(b"\0\r\n ")):
                return at
            at += len(line)
    return None


def _is_ours(line: bytes) -> bool:
    if _OURS.match(line) is not None:
        return True
    cut = not line.endswith(b"}")
    return cut and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line))


def _is_trusted(link: Path) -> bool:
    """Returns whether only root and this user can have created or changed a symlink.

    A trusted symlink, such as /dev/stdout, is followed. Through any other symlink, root would write
    into any file.
    """
    above, users = link.parent.stat(), (0, os.geteuid())
    ours = above.st_uid in users and link.lstat().st_uid in users
    return ours and not above.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_log(
    path: Path, uid: int, gid: int, former: Collection[int] = (), *, of_any: bool = False
) -> str:
    """Makes the log for an account, and its directory where that is missing. Returns the action.

    The new file is readable for the group of the directory. A log of a former account is given to
    the account if this program has written all of its lines; any other file stays as it is.

    Args:
        path: The log.
        uid: The user id of the account.
        gid: The group id of a new directory.
        former: The user ids of accounts for which a log may have been made before.
        of_any: Whether a log that has lines may be of any account.

    Raises:
        OSError: The log cannot be made.
    """
    if (above := _open_to_others(path.parent)) is not None:
        return f"not made, since others may change {above}: make it by hand"
    path.parent.parent.mkdir(0o755, parents=True, exist_ok=True)
    try:
        path.parent.mkdir(0o700)
    except FileExistsError:
        made = False
    else:
        made = True
    with closing(os.open(path.parent.resolve(), _DIRECTORY)) as directory:
        if made:
            os.fchown(directory, uid, gid)
            os.fchmod(directory, 0o750)
        try:
            fd = os.open(path.name, _NEW_LOG, 0o600, dir_fd=directory)
        except FileExistsError:
            return _give_log(path, directory, uid, former, of_any)
        with closing(fd):
            os.fchown(fd, uid, os.fstat(directory).st_gid)
            os.fchmod(fd, 0o640)
        return "made"


def _open_to_others(directory: Path) -> Path | None:
    """Returns the directory above this one that others than root may change, or None.

    They could put a symlink there, and root would make the log in any other directory.
    """
    for one in (directory, directory.resolve()):
        for below in [one, *one.parents][-2::-1]:
            above = below.parent.stat()
            if not os.path.lexists(below):  # Then root makes it.
                return below.parent if above.st_uid or above.st_mode & stat.S_IWOTH else None
            # In a directory as /tmp everybody may make names, and change none of root's.
            kept = above.st_mode & stat.S_ISVTX and not below.lstat().st_uid
            if above.st_uid or (above.st_mode & stat.S_IWOTH and not kept):
                return below.parent
    return None


def _give_log(path: Path, directory: int, uid: int, former: Collection[int], of_any: bool) -> str:
    try:
        fd = os.open(path.name, _OLD_LOG, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "kept, since it is a symlink"
    with open(fd, "rb") as log:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return "kept, since it is no ordinary file"
        known = found.st_uid in (uid, *former)
        if (foreign_line(log) is not None if found.st_size else not known) or found.st_nlink > 1:
            name = path.with_stem(f"{path.stem}-2")
            return f"kept, since it is another program's: set log.jsonl to another file, as {name}"
        if not (known or of_any):
            return f"kept, since it belongs to the account {found.st_uid}"
        if found.st_uid == uid:
            return "unchanged"
        os.fchown(fd, uid, -1)
        return "given to the account of the service"


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
