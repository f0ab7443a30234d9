"""All errors are of one hierarchy, so that each failure has an exit code and a next step.

An operator reads three things: what happened, what the system answered, and what to do about it.
They are the fields of every error (`message`, `detail`, `hint`). The daemon reads two more: whether
it may pass by itself (`retryable`), and the code with which the process ends otherwise
(`exit_code`). Both belong to the class, so that no caller decides them again.

Drivers' own exceptions (psycopg, OSError from a pipe, an ssh exit status) are translated once, at
the edge that met them, and kept as `__cause__`.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any, Final

# All was tried, and some of it failed, or is not as it should be.
SOME_FAILED: Final = 7

# Of exit codes, the better before the worse.
_WORSE: Final = (0, 143, 130, 8, SOME_FAILED, 3, 5, 6, 4, 2, 1)

_OF_DESTINATIONS: Final = {
    errno.ENOSPC: "free space, and call it again: what is there already is kept",
    errno.EDQUOT: "raise the quota, and call it again",
    errno.EROFS: "remount it for writing, or name another directory",
    errno.EACCES: "let this user write to it, or name another directory",
    errno.ENOENT: "make the directory that shall hold it",
    errno.EXDEV: "mount one file system at the destination itself, not below it",
    errno.ELOOP: "links below the destination are not followed: remove it",
}

# In text for people, the program's name before a command always begins a line to be typed.
_COMMAND_LINE: Final = re.compile(r"\bntt-backup-remote (?=[a-z])")
_global_options: list[str] = []


def worst(codes: Iterable[int]) -> int:
    """Returns the exit code of several: an error comes before what is only incomplete, and that
    before a stop. What is no code of ours is as bad as the worst.
    """
    return max(codes, key=lambda code: _WORSE.index(code if code in _WORSE else 1))


def remember_global_options(options: Sequence[str]) -> None:
    """Sets the options before the command that `complete` adds from now on."""
    _global_options[:] = options


def complete(text: str) -> str:
    """Returns text with the options before the command added to every command line of ours in it:
    without them it would read another configuration, or work on another target.
    """
    words = " ".join(["ntt-backup-remote", *map(shlex.quote, _global_options), ""])
    return _COMMAND_LINE.sub(lambda _: words, text) if _global_options else text


class BackupError(Exception):
    """Anything that ends or delays a run. message: what happened, one line. detail: what the
    failing side answered, bounded. hint: what to do; its command lines get the options before the
    command.
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
        """Returns the fields of an event, and of the message to another process."""
        return {name: getattr(self, name) for name in ("exit_code", "message", "detail", "hint")}

    def __str__(self) -> str:
        return f"{self.message}: {self.detail}" if self.detail else self.message


class ConfigError(BackupError):
    """A setting is missing, malformed or contradicts another one."""

    exit_code = 2


class SourceError(BackupError):
    """The store itself cannot be used. A single blob's trouble is a `Failure` in a receipt."""

    exit_code = 2


class StoreSuspect(SourceError):
    """Most blobs that were tried cannot be read, though the store can: it may be incomplete."""


class LockHeld(BackupError):
    """Another process of ours does what only one may do: a run for a target, a take of a snapshot
    set, a restore into a directory.
    """

    exit_code = 3

    @classmethod
    def restoring(cls, path: object) -> LockHeld:
        """Returns the error for a directory into which another restore writes."""
        return cls(
            f"another restore into {path} is at work",
            hint="wait for it or stop it (a dead one holds no lock), or name another directory",
        )


class NotRunning(BackupError):
    """No daemon of this target answers on this host."""

    exit_code = 8


class WaitsToStart(NotRunning):
    """The daemon of this target has ended by an error, and will be started again."""


class CatalogError(BackupError):
    """The catalog cannot do what it is asked."""

    exit_code = 4


class CatalogUnavailable(CatalogError):
    """No connection to the catalog, or it was lost: it may come back."""

    retryable = True


class SessionExpired(CatalogUnavailable):
    """The catalog's server ended a session in which nothing was said for too long: this process was
    stopped or the host slept. A new session can be opened at once.
    """


class CatalogRefused(CatalogError):
    """The catalog answered, and said no: schema, privilege, type. Waiting does not help."""


class RemoteError(BackupError):
    """The remote cannot be reached, or will not let us in."""

    exit_code = 5


class RemoteUnreachable(RemoteError):
    """The link or the remote is down, busy or stalled: it may come back."""

    retryable = True


class ProtocolViolation(RemoteUnreachable):
    """The remote sent what the protocol does not allow. Retried, but not for ever."""

    def __init__(self, message: str = "the remote violates the protocol", **said: Any) -> None:
        super().__init__(message, **said)


class RemoteDenied(RemoteError):
    """Host key, authentication, or no usable shell: someone must change something."""


class Unsupported(RemoteDenied):
    """The remote lets us in, but lacks what this way of sending or reading needs."""


class RemoteCannotStore(RemoteError):
    """The remote let us in but cannot keep blobs: full, read-only, no permission, no tar."""

    exit_code = 6


class NameTaken(RemoteCannotStore):
    """The name of a file that was being sent was taken by somebody else."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"somebody else has taken the name of {what} that was being sent",
            detail=name,
            hint="check who may write to the target; the next attempt uses another name",
        )


class DestinationError(BackupError):
    """The directory that something is restored into cannot keep it."""

    exit_code = 6

    @classmethod
    def at(cls, path: object, error: OSError) -> DestinationError:
        """Returns what the system says about a path of that directory."""
        return cls(
            f"cannot restore into {path}",
            detail=error.strerror or str(error),
            hint=_OF_DESTINATIONS.get(error.errno or 0, "look at that path, and at its disk"),
        )


class BatchRejected(BackupError):
    """This one batch failed for itself; others may well pass. Retried, then split."""

    exit_code = SOME_FAILED
    retryable = True


class DumpFailed(BackupError):
    """The catalog could not be dumped, by pg_dump's own fault or the database's."""

    exit_code = SOME_FAILED


class DumpImpossible(ConfigError):
    """No dump can be made at all: a program is missing or too old, or the key leads to a forced
    command that takes none.
    """


class MountImpossible(ConfigError):
    """This machine cannot mount packs, or not there."""

    def __init__(self, message: str, *, detail: str = "", hint: str = "") -> None:
        super().__init__(
            message,
            detail=detail,
            hint=hint
            or "without a mount, blobs are written into a directory: ntt-backup-remote unpack, or"
            " ntt-backup-remote restore; and a snapshot: ntt-backup-remote snapshot restore",
        )


class WorkerFailed(BackupError):
    """A worker process ended for good: with the exit code it had, or 1 when it died too often."""


class Stopped(BackupError):
    """A signal asked for the end, and what was in flight is finished."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}", exit_code=128 + signum)
