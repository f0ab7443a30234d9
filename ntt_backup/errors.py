"""All errors are of one hierarchy, so that each failure has an exit code and a next step.

Each error has three fields for operators: what happened (`message`), what the system answered
(`detail`), and the remedy (`hint`); and two for the daemon: whether the work can be retried
(`retryable`), and the exit code otherwise (`exit_code`). The last two belong to the class, so that
no caller decides them again.

Exceptions of drivers (psycopg, OSError of a pipe, an exit status of ssh) are translated once, where
they are caught first, and kept as `__cause__`.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any, Final

# The exit code if all work was done, and some of it failed or has findings.
SOME_FAILED: Final = 7

# The exit codes from the best to the worst.
_WORSE: Final = (0, 143, 130, 8, SOME_FAILED, 3, 5, 6, 4, 2, 1)

_OF_DESTINATIONS: Final = {
    errno.ENOSPC: "free space, and run the command again: what is there already is kept",
    errno.EDQUOT: "raise the quota, and run the command again",
    errno.EROFS: "remount it for writing, or name another directory",
    errno.EACCES: "let this user write to it, or name another directory",
    errno.EPERM: "call the command as root: only root gives files to another owner or group",
    errno.ENOENT: "make the directory that shall hold it",
    errno.EXDEV: "mount one file system at the destination itself, not below it",
    errno.ELOOP: "links below the destination are not followed: remove it",
}

# A command line in text for people: the name of the program before a command.
_COMMAND_LINE: Final = re.compile(r"\bntt-backup-remote (?=[a-z])")
_global_options: list[str] = []


def worst(codes: Iterable[int]) -> int:
    """Returns the worst of several exit codes.

    An error is worse than an incomplete result, which is worse than a stop. An unknown code counts
    as 1.
    """
    return max(codes, key=_rank)


def mildest(codes: Iterable[int]) -> int:
    """Returns the mildest of several exit codes."""
    return min(codes, key=_rank)


def _rank(code: int) -> int:
    return _WORSE.index(code if code in _WORSE else 1)


def remember_global_options(options: Sequence[str]) -> None:
    """Sets the global options that `complete` adds from now on."""
    _global_options[:] = options


def complete(text: str) -> str:
    """Returns text with the global options added to each of its command lines.

    Without these options a command would read another configuration, or work on another target.
    """
    words = " ".join(["ntt-backup-remote", *map(shlex.quote, _global_options), ""])
    return _COMMAND_LINE.sub(lambda _: words, text) if _global_options else text


class BackupError(Exception):
    """An error that ends or delays a run.

    Args:
        message: What happened, in one line.
        detail: The answer of the failing side, bounded.
        hint: The remedy. Its command lines get the global options.
        exit_code: The exit code; None for the code of the class.
    """

    exit_code: int = 1
    retryable: bool = False

    def __init__(
        self, message: str, *, detail: str = "", hint: str = "", exit_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = complete(hint)
        if exit_code is not None:
            self.exit_code = exit_code

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of an event, and of a message to another process."""
        return {name: getattr(self, name) for name in ("exit_code", "message", "detail", "hint")}

    def __str__(self) -> str:
        return f"{self.message}: {self.detail}" if self.detail else self.message


class ConfigError(BackupError):
    """A setting is missing, malformed, or contradicts another setting."""

    exit_code = 2


class SourceError(BackupError):
    """The store cannot be used. The error of a single blob is a `Failure` in a receipt."""

    exit_code = 2


class StoreSuspect(SourceError):
    """Most blobs cannot be read, although the store can: it may be incomplete."""


class LockHeld(BackupError):
    """Another process holds a lock.

    The lock is that of a run for a target, of a take of a snapshot set, or of a restore into a
    directory.
    """

    exit_code = 3

    @classmethod
    def restoring(cls, path: object) -> LockHeld:
        """Returns the error for a directory that another restore writes to."""
        return cls(
            f"another restore into {path} is running",
            hint="wait for it or stop it (a dead process holds no lock), or name another directory",
        )


class NotRunning(BackupError):
    """No daemon of this target answers on this host."""

    exit_code = 8


class WaitsToStart(NotRunning):
    """The daemon of this target has ended by an error, and will be restarted."""


class CatalogError(BackupError):
    """The catalog cannot be used."""

    exit_code = 4


class CatalogUnavailable(CatalogError):
    """There is no connection to the catalog, or the connection was lost."""

    retryable = True


class FileListUnavailable(CatalogUnavailable):
    """There is no connection to the database of `catalog.from`, or the connection was lost."""


class SessionExpired(CatalogUnavailable):
    """The server of the catalog ended a session that was idle for too long.

    This process was stopped, or the host was suspended. A new session can be opened at once.
    """


class CatalogRefused(CatalogError):
    """The catalog refused: schema, privilege, type. The error is not retryable."""


class RemoteError(BackupError):
    """The remote cannot be reached, or refuses the login."""

    exit_code = 5


class RemoteUnreachable(RemoteError):
    """The link or the remote is down, busy or stalled."""

    retryable = True


class AnotherTarget(RemoteUnreachable):
    """Something else is in the place of the target: an outage, as for a disk that is not mounted.

    Args:
        expected: The identity that the catalog knows; "" for none.
        found: The identity that was found; "" for a place without one.
        whose: The target that has the identity that was found; "" for none in the catalog.
    """

    whose: str = ""
    found: str = ""

    def __init__(self, expected: str, found: str, whose: str = "") -> None:
        known = f"the catalog knows it as {expected}" if expected else "it has none in the catalog"
        there = found or "a place without an identity"
        super().__init__(
            f"the target {whose} is in the place of this one"
            if whose
            else "another target is in the place of this one",
            detail=f"{known}, and {there} is there",
            hint="mount its own disk there, or correct its url; until then nothing is sent to it,"
            " and nothing is recorded. To restore from this one, name it as a target of its own in"
            " the settings. If the disk was replaced or copied, see 'Another disk is"
            " in its place' in docs/first-aid.md",
        )
        self.whose = whose
        self.found = found


class ProtocolViolation(RemoteUnreachable):
    """The remote violated the protocol. Retried a limited number of times."""

    def __init__(self, message: str = "the remote violates the protocol", **said: Any) -> None:
        super().__init__(message, **said)


class RemoteDenied(RemoteError):
    """The login fails for its host key, its authentication or its shell. Not retryable."""


class Unsupported(RemoteDenied):
    """The login succeeds, but the remote lacks a program or a privilege that is needed."""


class RemoteCannotStore(RemoteError):
    """The login succeeds, but the remote cannot store: full, read-only, no permission, no tar."""

    exit_code = 6


class NameTaken(RemoteCannotStore):
    """The name of a file was taken by somebody else while the file was sent."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"somebody else has taken the name of {what} that was being sent",
            detail=name,
            hint="check who may write to the target; the next attempt uses another name",
        )


class DestinationError(BackupError):
    """The destination of a restore cannot be written."""

    exit_code = 6

    @classmethod
    def at(cls, path: object, error: OSError) -> DestinationError:
        """Returns the error for a path of the destination."""
        return cls(
            f"cannot restore into {path}",
            detail=error.strerror or str(error),
            hint=_OF_DESTINATIONS.get(error.errno or 0, "look at that path, and at its disk"),
        )


class BatchRejected(BackupError):
    """A batch was refused for its own sake. It is retried, then split."""

    exit_code = SOME_FAILED
    retryable = True


class DumpFailed(BackupError):
    """The catalog could not be dumped, because of pg_dump or the database."""

    exit_code = SOME_FAILED


class DumpImpossible(ConfigError):
    """No dump can be made.

    A program is missing or too old, or the key leads to a forced command that takes no dumps.
    """


class MountImpossible(ConfigError):
    """This machine cannot mount packs, or not at this path."""

    def __init__(self, message: str, *, detail: str = "", hint: str = "") -> None:
        super().__init__(
            message,
            detail=detail,
            hint=hint
            or "without a mount, blobs are written into a directory: ntt-backup-remote unpack, or"
            " ntt-backup-remote restore; and a snapshot: ntt-backup-remote snapshot restore",
        )


class WorkerFailed(BackupError):
    """A worker ended for good: with its exit code, or with 1 if it died too often."""


class Stopped(BackupError):
    """A signal ended the run after the batches in flight."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}", exit_code=128 + signum)
