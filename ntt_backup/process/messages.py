"""The processes of a run send each other messages: on a pipe, each is one line of JSON.

Each message is one class. Messages that are also logged are `events`; those here stay between the
processes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Final, NoReturn, Self, dataclass_transform

from pydantic import Field

from ntt_backup import errors

_INNER_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")


def doc(text: str) -> Any:
    """Describes a field, with its unit."""
    return Field(description=text)


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class _Fields:
    """Each class below is a dataclass that never changes. A run starts sooner with one __init__ for
    all of them than with an __init__, an __eq__ and a __repr__ made for every class.
    """

    # By name; MISSING for a field that must be given.
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        made: Any = dataclass(kw_only=True, init=False, eq=False, repr=False)(cls)
        cls._defaults = {one.name: one.default for one in fields(made)}

    def __init__(self, **given: Any) -> None:
        values = self._defaults | {"pid": os.getpid()} | given
        if len(values) > len(self._defaults) or MISSING in values.values():
            raise TypeError(f"{type(self).__name__} has other fields than {', '.join(given)}")
        vars(self).update(values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"{name} cannot be set: a message never changes")


class Message(_Fields):
    """A message, with the PID of the process that it is about. `kind` is its name in JSON:
    `BatchStart` is `batch_start`.
    """

    kind: ClassVar[str] = ""
    pid: Annotated[Positive, doc("of the process the event is about")] = field(
        default_factory=os.getpid
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = _INNER_CAPITAL.sub("_", cls.__name__).lower()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields as they stand in JSON; without `worker` where the message is of no worker."""
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
    """Yields the classes below base that stand for one kind of message each."""
    for one in base.__subclasses__():
        if one.__subclasses__():
            yield from kinds(one)
        else:
            yield one


def decode(line: bytes) -> Message | None:
    """Returns the message on a line; None for anything else that a library may print."""
    try:
        fields = json.loads(line)
        return _kind_of(fields.pop("event"))(**fields)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


@cache
def _kind_of(name: str) -> type[Message]:
    # Asked for anew, since more classes may have been loaded since the last time.
    return {one.kind: one for one in kinds(Message)}[name]


class Tick(Message):
    """A worker is alive. state: sending, waiting, idle or outage. sent: bytes on the link, content:
    bytes of blobs, both since the last tick. quiet: seconds for which it may now say nothing.
    """

    state: str
    sent: int = 0
    content: int = 0
    quiet: float = 0.0


class BatchStart(Message):
    """A worker is about to send a batch. bytes: its content, as far as sizes are known."""

    batch: str
    blobs: int
    bytes: int


class Answered(Message):
    """A side answered a worker. what: the side, as in `events.Outage`. settled: work was done;
    otherwise the side only accepted a connection.
    """

    what: str
    settled: bool


class Drained(Message):
    """A worker has seen the catalog without a pending blob."""


class ErrorFields(Message):
    """The fields of a BackupError, for the messages that have them."""

    exit_code: Positive
    message: str
    detail: str
    hint: str


class Fatal(ErrorFields):
    """A worker ends by an error that waiting cannot mend, or by any error before it has begun to
    work. error_class: the error's class.
    """

    error_class: str = ""

    @classmethod
    def of(cls, error: errors.BackupError) -> Self:
        return cls(error_class=type(error).__name__, **error.fields)

    @property
    def error(self) -> errors.BackupError:
        """The error, of its class where that is known to us."""
        kind = getattr(errors, self.error_class, None)
        if not (isinstance(kind, type) and issubclass(kind, errors.BackupError)):
            kind = errors.WorkerFailed
        return kind(self.message, detail=self.detail, hint=self.hint, exit_code=self.exit_code)


class Found(Message):
    """A worker has probed the remote. strategy: that of the run. facts: the fields of
    `probe.Facts`.
    """

    strategy: str
    facts: dict[str, Any]


class Done(Message):
    """A worker has done on the remote what it was asked for. text: a few words on the result."""

    text: str


class ProcessEnded(Message):
    """A child process has ended; a parent passes on only an end without a goodbye. status: the exit
    status, negative for a signal; None: the process could not be started. detail: the end of its
    stderr.
    """

    status: int | None
    detail: str


class JobOver(Message):
    """A process beside the workers is done. failed: something should have been made and was not.
    again_s: seconds until it is to be started again; None: as usual. away: the side that was
    unreachable, so that the work waits for it, with the reason and the detail of the error; ""
    where the work was not stopped by an outage.
    """

    failed: bool
    again_s: float | None = None
    away: str = ""
    reason: str = ""
    detail: str = ""
