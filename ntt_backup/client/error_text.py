"""What the remote's tools say when they cannot store, and what it means.

mkdir, tar, cp and sync have exit status 1 for everything; the reason is in their words, which are
those of the C library in the C locale that we ask for. Told apart are what stops a run (full,
read-only, no permission, a broken disk, a missing program), what passes (short of resources), and
the rest, which is the batch's own trouble.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ntt_backup.errors import BackupError, BatchRejected, RemoteCannotStore, RemoteUnreachable

# Of a long complaint so many characters are shown, and so many of these before what tells why.
_SHOWN: Final = 300
_BEFORE: Final = 100


@dataclass(frozen=True, slots=True)
class _Case:
    pattern: str
    error: type[BackupError]
    message: str
    hint: str = ""


_CASES: Final = (
    _Case(
        r"cannot be replaced: .*(permission denied|operation not permitted)",
        BatchRejected,
        "something on the remote that is not ours to replace stands in a blob's place",
        "look at it there: its owner, its mode, and chattr +i",
    ),
    _Case(
        r"on another file system|cross-device link",
        RemoteCannotStore,
        "by-hash on the remote is not one file system",
        "mount the disk at remote.path itself: a batch is made durable by syncing one file system",
    ),
    _Case(
        r"no space left|disk quota exceeded",
        RemoteCannotStore,
        "the remote is full",
        "free space or inodes there (df, df -i), or raise the quota; nothing is lost",
    ),
    _Case(
        r"read-only file system",
        RemoteCannotStore,
        "the remote's file system is read-only",
        "remount it for writing",
    ),
    _Case(
        r"permission denied|operation not permitted",
        RemoteCannotStore,
        "the remote account may not write there",
        "give it the directory remote.path (chown), or set remote.path to one that it owns",
    ),
    _Case(
        r"input/output error|structure needs cleaning",
        RemoteCannotStore,
        "the remote's disk reports errors",
        "look at the remote's kernel log before anything else",
    ),
    _Case(
        r"cannot allocate memory|resource temporarily unavailable|too many open files|cannot fork"
        r"|terminated|killed",
        RemoteUnreachable,
        "the remote is short of resources",
    ),
    _Case(
        r"stale file handle|transport endpoint is not connected|remote i/o error|host is down"
        r"|timed out|no such device|no route to host|network is unreachable"
        r"|software caused connection abort",
        RemoteUnreachable,
        "the remote's disk is away",
        "it may be a network file system whose server does not answer",
    ),
    _Case(
        r": (command )?not found",
        RemoteCannotStore,
        "a program is missing on the remote",
        "the tar strategy needs sh, tar and the core utilities in the PATH of the remote account",
    ),
)


def explain_root(text: str) -> BackupError:
    """The error for text said about remote.path itself."""
    error = explain_batch(text)
    if not isinstance(error, BatchRejected):
        return error
    return RemoteCannotStore(
        "remote.path cannot be used",
        detail=text,
        hint="create it there once (mkdir -p); it is never created for you, because a missing"
        " directory may mean a disk that is not mounted",
    )


def explain_gone(text: str) -> BackupError:
    """The error for a remote.path that was there and is not any more: an outage, no more."""
    return RemoteUnreachable(
        "remote.path is gone",
        detail=text,
        hint="is its disk mounted? by-hash there is only made anew while nothing is copied yet",
    )


def explain_batch(text: str) -> BackupError:
    """The error for text said while a batch was stored; BatchRejected when it is the batch's
    own.
    """
    said = text.lower()
    for case in _CASES:
        if found := re.search(case.pattern, said):
            return case.error(case.message, detail=_around(text, found.start()), hint=case.hint)
    return BatchRejected("the remote refused a batch", detail=text)


def _around(text: str, place: int) -> str:
    """The part of text that begins shortly before place: tar complains of every single file."""
    start = max(0, place - _BEFORE)
    end = start + _SHOWN
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
