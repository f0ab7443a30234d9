"""The remote's own sh keeps the files of an area; see `contract.FileStore`.

This is for remotes without a Python that runs the receiver. Each question is a connection. A file
travels as all that follows a script on stdin, and its end is the end of the input; its name is
asked for over another connection, while the first one stays.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Final

from ntt_backup.client.channel import Channel
from ntt_backup.client.receiver_connection import SLOW
from ntt_backup.client.remote_errors import explain_another, explain_root
from ntt_backup.client.remote_shell import ANSWER, ScriptAnswer, ask, shell_script
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.errors import BackupError, NameTaken, RemoteUnreachable
from ntt_backup.filestore.contract import (
    UNKNOWN_ARRIVAL,
    Area,
    Buffer,
    FileMissing,
    Range,
    StoredFile,
    Sum,
    not_what_was_sent,
)
from ntt_backup.wire.stored_names import read_arrival

_SUMMED: Final = re.compile(rb"^size=.*\n", re.MULTILINE)
_LIMIT: Final = 1 << 22

# What was answered, by name.
Answers = dict[str, list[str]]


class FileStoreByShell:
    """See the module."""

    def __init__(self, spec: SessionSpec, area: Area) -> None:
        self.spec = spec
        self.area = area
        # What comes with a listing: the content of small files, and whether blobs have a place.
        self._small: dict[str, bytes] = {}
        self._placed: bool | None = None

    @property
    def placed(self) -> bool:
        if self._placed is None:
            self.list()
        return bool(self._placed)

    def list(self, below: str = "") -> Iterator[StoredFile]:
        files = []
        said = self.ask("list")
        self._placed = said.get("by-hash") == ["present"]
        self._small.clear()
        for line in said.get("file", []):
            name, size, arrived, content = (*line.split(" ", 3), "", "", "")[:4]
            bytes_ = _number(size)
            if bytes_ is None:
                continue
            if below not in ("", name):
                continue
            with suppress(ValueError):
                self.area.require_name(name)
                files.append(StoredFile(name, bytes_, _arrival(arrived)))
                if content:
                    self._small[name] = content.encode()
        return iter(sorted(files))

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        name, at = "", 0
        source: Iterator[bytes] | None = None
        held = bytearray()
        for one in ranges:
            if one.name in self._small:
                yield self._small[one.name][one.start :][: one.length]
                continue
            if source is None or (one.name, one.start) != (name, at):
                source, held = self._content(one.name, one.start), bytearray()
            while len(held) < one.length and (data := next(source, None)) is not None:
                held += data
            data = bytes(held[: one.length])
            del held[: one.length]
            name, at = one.name, one.start + len(data)
            yield data

    def write(self, name: str) -> FileByShell:
        return FileByShell(self, self.area.require_name(name))

    def try_out(self) -> None:
        _require(self.ask("try", token=secrets.token_hex(4)), "tried")

    def remove(self, names: Sequence[str]) -> int:
        checked = [self.area.require_name(name) for name in names]
        self._small.clear()
        said = self.ask("drop", names=" ".join(checked))
        _require(said, "dropped")
        return len(said.get("removed", []))

    def close(self) -> None:
        """Does nothing: no connection outlives its question."""

    def ask(self, action: str, *, patience: float | None = None, **values: str) -> Answers:
        """Returns the answers of the script for an action, by name. Raises what a `problem` says.
        patience: seconds; None: run.receipt_timeout. values: the variables of the script.
        """
        said = ask(
            self.spec.transport,
            _script(),
            self._values(action, values),
            doing=f"about {self.area.files}",
            timeout=self.spec.run.receipt_timeout if patience is None else patience,
            limit=_LIMIT,
        )
        return _answers(said)

    def open(self, action: str, **values: str) -> tuple[Channel, ScriptAnswer]:
        """Returns the connection of the script for an action, and its answer."""
        answer = ScriptAnswer()
        script = answer.script(_script())
        command, source = shell_script(script, self._values(action, values))
        channel = self.spec.channel(command)
        try:
            timeout = self.spec.transport.connect_timeout
            channel.greet(source, ANSWER, timeout, doing=f"about {self.area.files}")
        except BaseException:
            channel.abort()
            raise
        return channel, answer

    def _values(self, action: str, values: dict[str, str]) -> dict[str, str]:
        root = self.spec.root
        return {"action": action, "root": root, "place": f"{root}/{self.area.name}"} | {
            "identity": self.spec.identity,
            **values,
        }

    def _content(self, name: str, start: int) -> Iterator[bytes]:
        """Yields a file from a byte on. Raises FileMissing."""
        safe = self.area.require_name(name)
        channel, answer = self.open("get", name=safe, first=str(start + 1))
        patience = self.spec.run.receipt_timeout
        head: bytes | None = b""
        try:
            channel.end_input()
            while data := answer.hear(channel, time.monotonic() + patience):
                if head is not None:
                    head, newline, data = (head + data).partition(b"\n")
                    if not newline:
                        continue
                    if head != b"found":
                        _answers(head)
                        raise FileMissing(name)
                    head = None
                yield data
            if data is None:
                raise RemoteUnreachable(
                    f"the remote has stalled: {self.area.file}",
                    detail=f"nothing came for {patience:.0f} s",
                )
            if answer.status is None:  # What has come would be taken for a damaged file.
                raise channel.lost()
        finally:
            channel.abort()


class FileByShell:
    """A file on its way; see `contract.NewFile`."""

    def __init__(self, store: FileStoreByShell, name: str) -> None:
        self._store = store
        self._name = name
        self._token = secrets.token_hex(4)
        self._channel, self._answer = store.open("put", token=self._token)
        self._said = b""
        self._digest = sha256()
        self._size = 0
        self._open = True

    def add(self, data: Buffer) -> None:
        self._digest.update(data)
        self._size += len(memoryview(data))
        try:
            patience = self._store.spec.run.stall_timeout
            self._channel.send(memoryview(data), self._hear, patience=patience)
        except BackupError:
            self._explain()
            raise

    def poll(self) -> None:
        try:
            self._channel.hear(self._hear, 0.0)
        except BackupError:
            self._explain()
            raise

    def finish(self) -> Sum:
        area = self._store.area
        self._channel.end_input()
        patience = self._store.spec.run.receipt_timeout + self._size / SLOW
        deadline = time.monotonic() + patience
        while not _SUMMED.search(self._said):
            data = self._answer.hear(self._channel, deadline)
            if data is None:
                raise RemoteUnreachable(
                    f"the remote did not answer in time: {area.files}",
                    detail=f"waited {patience:.0f} s",
                    hint="its disk may be very slow; run.receipt_timeout is how long it may take",
                )
            self._said = (self._said + data)[-_LIMIT:]
            if not data:
                break
        answers = _answers(self._said)
        size, digest = _require(answers, "size"), _require(answers, "sum")
        ours = Sum(self._size, self._digest.digest())
        if (size, digest) != (str(ours.size), ours.sha256.hex()):
            found = f"{size[:20]} bytes with {digest[:64]}"
            raise not_what_was_sent(area, self._name, ours, found)
        return ours

    def publish(self) -> None:
        size = str(self._size)
        said = self._store.ask("name", token=self._token, name=self._name, bytes=size)
        if "taken" in said:
            raise NameTaken(self._name, self._store.area.file)
        _require(said, "named")
        self._open = False
        self._channel.abort()

    def discard(self) -> None:
        if not self._open:
            return
        self._open = False
        self._channel.abort()
        # Not for long: somebody may have asked for the end.
        patience = self._store.spec.transport.connect_timeout
        with suppress(BackupError):
            self._store.ask("drop", patience=patience, token=self._token, names="")

    def _hear(self, data: bytes) -> None:
        self._said = (self._said + self._answer.take(data))[-_LIMIT:]

    def _explain(self) -> None:
        """Raises what the remote said itself, which explains more than the end of the link."""
        _answers(self._said + self._answer.rest())


@cache
def _script() -> str:
    return resources.files(__package__).joinpath("by_shell.sh").read_text("utf-8")


def _answers(said: bytes) -> Answers:
    """Returns what was answered, by name. Raises what a `problem` says."""
    found: Answers = {}
    for line in said.decode("utf-8", "backslashreplace").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found.setdefault(name, []).append(value)
    for another in found.get("another", []):
        raise explain_another(*another.split(" ", 1))
    for problem in found.get("problem", []):
        raise explain_root(problem)
    return found


def _number(text: str) -> int | None:
    # No file system has larger files; int() itself takes long for thousands of digits.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _arrival(text: str) -> datetime:
    with suppress(ValueError):
        return read_arrival((_number(text) or 0) * 1_000_000)
    return UNKNOWN_ARRIVAL


def _require(said: Answers, name: str) -> str:
    if not said.get(name, [""])[0]:
        raise RemoteUnreachable(
            "the connection to the remote was lost",
            detail="it ended before it had answered about a file",
        )
    return said[name][0]
