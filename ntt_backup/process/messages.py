"""The processes of a run send each other messages: lines of JSON on a pipe.

Each kind of message is a class. Messages that are also logged are in `events`; the messages of this
module are exchanged between processes only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Self, dataclass_transform

from pydantic import Field

from ntt_backup import errors

_INNER_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")


def doc(text: str) -> Any:
    """Describes a field, with its unit."""
    return Field(description=text)


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Message:
    """A message, with the PID of the process that it is about. Each subclass is a frozen dataclass.

    Attributes:
        kind: The name in JSON: `BatchStart` is `batch_start`.
    """

    kind: ClassVar[str] = ""
    pid: Annotated[Positive, doc("of the process the event is about")] = field(
        default_factory=os.getpid
    )

    def __init_subclass__(cls) -> None:
        cls.kind = _INNER_CAPITAL.sub("_", cls.__name__).lower()
        dataclass(frozen=True, kw_only=True)(cls)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields in JSON, without `worker` if the message is not of a worker."""
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in vars(self).items()
            if (name, value) != ("worker", None)
        }

    def encode(self) -> bytes:
        """Returns the line of JSON that `decode` reads."""
        return (json.dumps({"event": self.kind, **self.fields}) + "\n").encode()

    def write(self, fd: int) -> None:
        """Writes the whole line to a pipe."""
        data = self.encode()
        while data:
            data = data[os.write(fd, data) :]


def kinds(base: type[Message]) -> Iterator[type[Message]]:
    """Yields the classes below base that have no subclass: one for each kind of message."""
    for one in base.__subclasses__():
        if one.__subclasses__():
            yield from kinds(one)
        else:
            yield one


def decode(line: bytes) -> Message | None:
    """Returns the message on a line; None for another line, which a library may have printed."""
    try:
        fields = json.loads(line)
        return _kind_of(fields.pop("event"))(**fields)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


@cache
def _kind_of(name: str) -> type[Message]:
    # Not kept for all names, since more classes may be loaded later.
    return {one.kind: one for one in kinds(Message)}[name]


class Tick(Message):
    """A worker is alive.

    Attributes:
        state: sending, waiting, idle or outage.
        sent: The bytes on the link since the last tick.
        content: The bytes of blobs since the last tick.
        quiet: The seconds for which the worker may now be silent.
    """

    state: str
    sent: int = 0
    content: int = 0
    quiet: float = 0.0


class BatchStart(Message):
    """A worker begins to send a batch. bytes: the content, as far as sizes are known."""

    batch: str
    blobs: int
    bytes: int


class Answered(Message):
    """A side, as in `events.Outage`, answered a worker.

    settled: whether work was done; otherwise the side only accepted a connection.
    """

    what: str
    settled: bool


class Drained(Message):
    """A worker has found no pending blob in the catalog."""


class ErrorFields(Message):
    """The fields of a BackupError, for messages that report an error."""

    exit_code: Positive
    message: str
    detail: str
    hint: str


class Fatal(ErrorFields):
    """A worker ends by a non-retryable error, or by any error before its first batch."""

    error_class: str = ""

    @classmethod
    def of(cls, error: errors.BackupError) -> Self:
        return cls(error_class=type(error).__name__, **error.fields)

    @property
    def error(self) -> errors.BackupError:
        """The error; of its own class if that is a class of `errors`."""
        kind = getattr(errors, self.error_class, None)
        if not (isinstance(kind, type) and issubclass(kind, errors.BackupError)):
            kind = errors.WorkerFailed
        # Some classes make their message themselves.
        error = kind.__new__(kind)
        errors.BackupError.__init__(
            error, self.message, detail=self.detail, hint=self.hint, exit_code=self.exit_code
        )
        return error


class RemoteProbed(Message):
    """A worker has probed the remote. facts: the fields of `probe.Facts`."""

    strategy: str
    facts: dict[str, Any]


class Done(Message):
    """A worker has completed a question of the preflight. text: the result in a few words."""

    text: str


class ProcessEnded(Message):
    """A child process has ended. A parent passes on only an end without a last message.

    Attributes:
        status: The exit status, negative for a signal; None if the process could not be started.
        detail: The end of its stderr.
    """

    status: int | None
    detail: str


class JobOver(Message):
    """A side job has ended.

    Attributes:
        failed: Whether something should have been made and was not.
        again_s: The seconds until the next start; None: as usual.
        away: The side whose outage stopped the job, so that the job waits for it; "" for none.
        reason: The message of the error of the outage; detail: its detail.
        displaced: Whether another target is in the place of the remote.
    """

    failed: bool
    again_s: float | None = None
    away: str = ""
    reason: str = ""
    detail: str = ""
    displaced: bool = False

    @classmethod
    def of_outage(cls, error: errors.BackupError, *, failed: bool = False) -> Self:
        """Returns the end of a job that a retryable error has stopped."""
        return cls(
            failed=failed,
            away="catalog" if isinstance(error, errors.CatalogUnavailable) else "remote",
            reason=error.message,
            detail=error.detail,
            displaced=isinstance(error, errors.AnotherTarget),
        )
