"""The JSONL log: one object a line, for `tail -f`, jq and whatever collects logs.

Only the coordinator writes it; workers hand their events over, so lines never interleave and a
batch's line comes after its commit (the worker sends the event when the commit is done). The ledger
is the truth, this file is derived from it: when it cannot be written, the backup goes on and says
so once.

logrotate may rename the file at any time: each line is appended to whatever has the name now, and
SIGHUP reopens it at once. Fields are described in docs/jsonl.schema.json.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from ntt_backup.errors import ConfigError
from ntt_backup.format import level_of

_LEADING: Final = ("timestamp", "level", "event", "run_id", "host", "pid", "worker")


class EventLog:
    """Appends events to the JSONL file. Raises ConfigError when it cannot be opened at the
    start, unless a full disk is all that is wrong.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._file = _RotatableFile(path)
        self._logger = structlog.wrap_logger(
            structlog.WriteLogger(self._file),  # type: ignore[arg-type]  # only write and flush are used
            processors=[
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                _lead,
                structlog.processors.JSONRenderer(ensure_ascii=True, default=str),
            ],
            wrapper_class=structlog.BoundLogger,
            context_class=dict,
            run_id=run_id,
            host=socket.gethostname(),
        )

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write one line; fields without a value (None) are left out, except where null has a
        meaning.
        """
        level = level_of(event)
        self._logger.info(event, **{"pid": os.getpid(), **fields, "level": level})

    def reopen(self) -> None:
        """Let go of the file; the next line goes to what has its name then (SIGHUP)."""
        self._file.close()

    def close(self) -> None:
        self._file.close()


def _lead(_logger: object, _method: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """The common fields first, in the contract's order; people read these lines too."""
    head = {key: event[key] for key in _LEADING if key in event}
    return head | {key: value for key, value in event.items() if key not in head}


class _RotatableFile:
    """An append-only file that follows its name; each write is one write(2), so lines stay
    whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._complained = False
        self._torn = False
        self._fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return  # It passes, as it does later: each line tries again.
            raise ConfigError(
                f"the log {path} cannot be written",
                detail=error.strerror or str(error),
                hint="create its directory for this user, or set log.jsonl (NTT_LOG_JSON)",
            ) from error

    def _open(self) -> int:
        # Not blocking: a FIFO in its place would hold us until somebody reads it.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(self._path, flags, 0o644)

    def write(self, line: str) -> None:
        """Append; where that fails (a full disk), the line is dropped and the operator told
        once.
        """
        data = ("\n" + line if self._torn else line).encode()
        try:
            if self._moved():
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
        """Each write has gone out already."""

    def close(self) -> None:
        """Let go of the file; the next write opens what has its name then."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _moved(self) -> bool:
        if self._fd < 0:
            return True
        try:
            return not os.path.samestat(os.fstat(self._fd), self._path.stat())
        except FileNotFoundError:
            return True
