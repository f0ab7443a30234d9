"""One hierarchy of errors, so that every failure has an exit code and a next step.

An operator reads three things: what happened, what the system answered, and what to do about it.
They are the fields of every error (`message`, `detail`, `hint`). The daemon reads two more: whether
it may pass by itself (`retryable`), and the code with which the process ends otherwise
(`exit_code`). Both belong to the class, so that no caller decides them again.

Drivers' own exceptions (psycopg, OSError from a pipe, an ssh exit status) are translated once, at
the edge that met them, and kept as `__cause__`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any, Final

# All was tried, and some of it failed, or is not as it should be.
SOME_FAILED: Final = 7

# In text for people, the program's name before a command always begins a line to be typed.
_COMMAND_LINE: Final = re.compile(r"\bntt-backup-remote (?=[a-z])")
_global_options: list[str] = []


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
        """The fields of an event, and of the message to another process."""
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
    """Another coordinator of this target runs on this host."""

    exit_code = 3


class CatalogError(BackupError):
    """The catalog cannot do what it is asked."""

    exit_code = 4


class CatalogUnavailable(CatalogError):
    """No connection to the catalog, or it was lost: it may come back."""

    retryable = True


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


class DestinationError(BackupError):
    """The directory that blobs are restored into cannot keep them."""

    exit_code = 6


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
            " ntt-backup-remote restore",
        )


class WorkerFailed(BackupError):
    """A worker process ended for good: with the exit code it had, or 1 when it died too often."""


class Stopped(BackupError):
    """A signal asked for the end, and what was in flight is finished."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}", exit_code=128 + signum)
