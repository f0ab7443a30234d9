"""What a helper process can be told to do, and what it answers: lines of JSON over its pipes.

A task opens its connection first and waits for the word to go, so that several begin at the same
moment and no start of a program is in a figure. Times are readings of the monotonic clock, which
all processes of a machine share.

Pure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ntt_backup.config import RemoteSettings, RunSettings

Content = Literal["random", "zeros", "halves"]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Reach(_Line):
    """The way to the far side: ssh to remote, or a shell on this machine where that is None.

    options: other values for options of ssh. account: a file on the remote for the CPU time that
    the far side used.
    """

    remote: RemoteSettings | None
    options: dict[str, str] = {}
    account: str | None = None
    patience: float = 60.0


class Upload(_Line):
    """Send for so many seconds, or so many bytes; over when the far side has read all.

    The clock starts when the far side has read warm bytes, which are not counted.
    """

    kind: Literal["upload"] = "upload"
    reach: Reach
    seconds: float | None = None
    size: int | None = None
    warm: int = 0
    content: Content = "random"


class Download(_Line):
    """Have random bytes sent, for so many seconds or so many bytes, after warm ones."""

    kind: Literal["download"] = "download"
    reach: Reach
    seconds: float | None = None
    size: int | None = None
    warm: int = 0


class Trips(_Line):
    """Send a byte and wait for it to come back, so many times, or for so many seconds."""

    kind: Literal["trips"] = "trips"
    reach: Reach
    count: int
    seconds: float


class Item(_Line):
    """One blob to be sent; size in bytes."""

    blobid: str
    size: int


class Send(_Line):
    """Send batches of blobs of the store into root/by-hash on the remote by some way.

    strategy: one of the registry; None for plain tars over ssh, see `ways.Way` for the rest.
    """

    kind: Literal["send"] = "send"
    reach: Reach
    store: Path
    root: str
    slot: str
    run: RunSettings
    strategy: str | None
    codec: str = ""
    reconnect: bool = False
    stored: bool = False
    batches: list[list[Item]]


class Fetch(_Line):
    """Bring what lies below root/by-hash in the directories of prefixes back, into a directory."""

    kind: Literal["fetch"] = "fetch"
    reach: Reach
    root: str
    prefixes: list[str]
    into: Path


Task = Upload | Download | Trips | Send | Fetch
TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])


class Answer(_Line):
    """What came of a task. opening_s: until the far side was ready. size: bytes of content.

    trips: seconds each. wire_bytes: what ssh sent and received, None where that is not known.
    cpu_s: of the helper and all that it started.
    """

    opening_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    size: int = 0
    trips: list[float] = []
    wire_bytes: int | None = None
    cpu_s: float = 0.0


class Said(_Line):
    """One line of a helper: ready to go, the answer, or what went wrong."""

    ready: bool = False
    answer: Answer | None = None
    message: str = ""
    detail: str = ""
    hint: str = ""
    exit_code: int = 0
