"""The remote's own sh keeps `pgdump/`; see `remote_dir`.

Each question is a connection. A dump travels as all that follows a script on stdin, and its end is
the end of the input; its name is asked for over another connection, while the first one stays.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Final

from ntt_backup.client.channel import Channel
from ntt_backup.client.connection import SLOW, SessionSpec
from ntt_backup.client.error_text import explain_root
from ntt_backup.client.shell import ANSWER, ScriptAnswer, ask, shell_script
from ntt_backup.dump.record import Contents, DumpRecord, Stored, read
from ntt_backup.errors import BackupError, RemoteUnreachable
from ntt_backup.wire.dump_messages import is_name, read_arrival
from ntt_backup.wire.framing import ProtocolError

_DOING: Final = "about the catalog's dumps"
_SUMMED: Final = re.compile(rb"^size=.*\n", re.MULTILINE)
_LIMIT: Final = 1 << 22


class DumpsByShell:
    """Has the methods of `DumpsByReceiver`, except those of an upload."""

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec

    def contents(self) -> Contents:
        said = _ask(self._spec, "list")
        dumps = []
        for line in said.get("dump", []):
            name, size, arrived, record = (*line.split(" ", 3), "", "", "")[:4]
            if is_name(name):
                dumps.append(Stored(name, _number(size), read(record), _arrival(arrived)))
        return Contents.of(dumps, placed=said.get("by-hash") == ["present"])

    def try_out(self) -> None:
        _require(_ask(self._spec, "try", token=secrets.token_hex(4)), "tried")

    def upload(self, name: str) -> UploadByShell:
        return UploadByShell(self._spec, name)

    def drop(self, names: Sequence[str]) -> int:
        safe = [name for name in names if is_name(name)]
        if safe:
            _require(_ask(self._spec, "drop", names=" ".join(safe)), "dropped")
        return len(safe)

    def fetch(self, name: str) -> Generator[bytes, None, None]:
        channel, answer = _open(self._spec, "get", name=name)
        patience = self._spec.run.receipt_timeout
        try:
            channel.end_input()
            while data := answer.hear(channel, time.monotonic() + patience):
                yield data
            if data is None:
                raise RemoteUnreachable(
                    "the remote has stalled: a dump of the catalog",
                    detail=f"nothing came for {patience:.0f} s",
                )
            if answer.status is None:  # What has come would be taken for a damaged dump.
                raise channel.lost()
        finally:
            channel.abort()

    def close(self) -> None:
        """Does nothing: no connection outlives its question."""


class UploadByShell:
    """Has the methods of `DumpsByReceiver` for an upload."""

    sealed = 0

    def __init__(self, spec: SessionSpec, name: str) -> None:
        self._spec = spec
        self._name = name
        self._token = secrets.token_hex(4)
        self._channel, self._answer = _open(spec, "put", token=self._token)
        self._said = b""
        self._sent = 0

    def send(self, data: bytes) -> None:
        try:
            patience = self._spec.run.stall_timeout
            self._channel.send(memoryview(data), self._hear, patience=patience)
        except BackupError:
            self._explain()
            raise
        self._sent += len(data)

    def poll(self) -> None:
        try:
            self._channel.hear(self._hear, 0.0)
        except BackupError:
            self._explain()
            raise

    def finish(self) -> tuple[int, str]:
        self._channel.end_input()
        patience = self._spec.run.receipt_timeout + self._sent / SLOW
        deadline = time.monotonic() + patience
        while not _SUMMED.search(self._said):
            data = self._answer.hear(self._channel, deadline)
            if data is None:
                raise RemoteUnreachable(
                    f"the remote did not answer in time: {_DOING}",
                    detail=f"waited {patience:.0f} s",
                    hint="its disk may be very slow; run.receipt_timeout is how long it may take",
                )
            self._said = (self._said + data)[-_LIMIT:]
            if not data:
                break
        answers = _answers(self._said)
        return int(_require(answers, "size")), _require(answers, "sum")

    def name(self, record: DumpRecord) -> None:
        text, size = record.to_json(), str(record.bytes)
        said = _ask(self._spec, "name", token=self._token, name=self._name, record=text, bytes=size)
        _require(said, "named")
        self._channel.abort()

    def give_up(self) -> None:
        self._channel.abort()
        # Not for long: somebody may have asked for the end.
        patience = self._spec.transport.connect_timeout
        with suppress(BackupError):
            _ask(self._spec, "drop", patience=patience, token=self._token, names="")

    def _hear(self, data: bytes) -> None:
        self._said = (self._said + self._answer.take(data))[-_LIMIT:]

    def _explain(self) -> None:
        """Raises what the remote said itself, which explains more than the end of the link."""
        _answers(self._said + self._answer.rest())


def _ask(
    spec: SessionSpec, action: str, *, patience: float | None = None, **values: str
) -> dict[str, list[str]]:
    """Returns the answers of the script for an action, by name. Raises what a `problem` says."""
    said = ask(
        spec.transport,
        _script(),
        {"action": action, "root": spec.root, **values},
        doing=_DOING,
        timeout=spec.run.receipt_timeout if patience is None else patience,
        limit=_LIMIT,
    )
    return _answers(said)


def _open(spec: SessionSpec, action: str, **values: str) -> tuple[Channel, ScriptAnswer]:
    """Returns the connection of the script for an action, and its answer."""
    answer = ScriptAnswer()
    script = answer.script(_script())
    command, source = shell_script(script, {"action": action, "root": spec.root, **values})
    channel = spec.channel(command)
    try:
        channel.greet(source, ANSWER, spec.transport.connect_timeout, doing=_DOING)
    except BaseException:
        channel.abort()
        raise
    return channel, answer


@cache
def _script() -> str:
    return resources.files(__package__).joinpath("remote_dir.sh").read_text("utf-8")


def _answers(said: bytes) -> dict[str, list[str]]:
    """Returns what was answered, by name. Raises what a `problem` says."""
    found: dict[str, list[str]] = {}
    for line in said.decode("utf-8", "backslashreplace").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found.setdefault(name, []).append(value)
    for problem in found.get("problem", []):
        raise explain_root(problem)
    return found


def _number(text: str) -> int | None:
    # No file system has larger files; int() itself takes long for thousands of digits.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _arrival(text: str) -> datetime | None:
    seconds = _number(text)
    with suppress(ProtocolError):
        return None if seconds is None else read_arrival(seconds * 1_000_000)
    return None


def _require(said: dict[str, list[str]], name: str) -> str:
    if not said.get(name, [""])[0]:
        raise RemoteUnreachable(
            "the connection to the remote was lost",
            detail="it ended before it had answered about a dump",
        )
    return said[name][0]
