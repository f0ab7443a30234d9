"""The directory `pgdump/` on the remote: the dumps in it, and how one gets into it.

The job's own ssh and the remote's sh are enough, whatever the strategy. A dump's length is not
known before its end, so it travels as all that follows a script on stdin, and its end is the end of
the input. The remote cannot tell that end from a link that was cut; so what it has written gets
no name yet. It answers with size and SHA-256 of what is on its disk, and only the side
that has seen pg_dump end well asks, over another connection, for the name. Until then the first one
stays: when it ends, whoever sent the dump is gone, and the remote removes it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from ntt_backup.client.channel import Channel
from ntt_backup.client.error_text import explain_root
from ntt_backup.client.shell import Answer, shell_script
from ntt_backup.client.throttle import Pace
from ntt_backup.client.transport import Transport
from ntt_backup.dump.record import DumpRecord, Stored, is_name, read
from ntt_backup.errors import BackupError, DumpImpossible, RemoteUnreachable

_GREETING: Final = re.compile(rb"^NTT-(ANSWER|RECEIVE)\b.*$")
_SUMMED: Final = re.compile(rb"^size=.*\n", re.MULTILINE)
_LIMIT: Final = 1 << 22
# A slow disk reads this many bytes a second when it is asked for a sum.
_SLOW: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class Contents:
    """What lies in it, oldest first. placed: by-hash is beside it."""

    dumps: tuple[Stored, ...]
    placed: bool


class DumpPlace:
    """pgdump/ below root. patience: seconds that the remote may take to answer.

    Methods raise RemoteUnreachable, RemoteDenied, RemoteCannotStore, and DumpImpossible where the
    key leads to a forced command.
    """

    def __init__(self, transport: Transport, root: str, patience: float) -> None:
        self._transport = transport
        self._root = root
        self._patience = patience

    def contents(self) -> Contents:
        """Returns what lies in it, and changes nothing."""
        said = self._ask("list")
        dumps = []
        for line in said.get("dump", []):
            name, size, record = (*line.split(" ", 2), "", "")[:3]
            if is_name(name):
                dumps.append(Stored(name, int(size) if size.isdigit() else None, read(record)))
        dumps.sort(key=lambda one: one.age_key)
        return Contents(tuple(dumps), said.get("by-hash") == ["present"])

    def try_out(self, token: str) -> None:
        """Finds out whether a dump could be stored, and leaves nothing behind."""
        _require(self._ask("try", token=token), "tried")

    def upload(self, token: str, pace: Pace | None, stall_timeout: float) -> Upload:
        """Begins to send a dump under the temporary name that belongs to token."""
        values = {"action": "put", "root": self._root, "token": token}
        return Upload(*self._open(values, pace), self._patience, stall_timeout)

    def name(self, token: str, name: str, record: DumpRecord) -> None:
        """Gives what was uploaded its name; durable when this returns."""
        values = {"name": name, "record": record.to_json(), "bytes": str(record.bytes)}
        _require(self._ask("name", token=token, **values), "named")

    def forget(self, token: str) -> None:
        """Removes what was uploaded and is not named. Does not wait for long: somebody may have
        asked for the end.
        """
        values = {"action": "drop", "root": self._root, "token": token, "names": ""}
        _require(self._talk(values, self._transport.connect_timeout), "dropped")

    def drop(self, names: Sequence[str]) -> None:
        """Removes dumps, with their records."""
        safe = [name for name in names if is_name(name)]
        if safe:
            _require(self._ask("drop", names=" ".join(safe)), "dropped")

    def fetch(self, name: str) -> Iterator[bytes]:
        """Yields a dump's content as it comes. It is the caller who knows what it must be."""
        channel, answer = self._open({"action": "get", "root": self._root, "name": name}, None)
        try:
            channel.end_input()
            while data := answer.hear(channel, time.monotonic() + self._patience):
                yield data
            if data is None:
                raise RemoteUnreachable(
                    "the remote has stalled: a dump of the catalog",
                    detail=f"nothing came for {self._patience:.0f} s",
                )
        finally:
            channel.abort()

    def _ask(self, action: str, **values: str) -> dict[str, list[str]]:
        return self._talk({"action": action, "root": self._root, **values}, self._patience)

    def _talk(self, values: dict[str, str], patience: float) -> dict[str, list[str]]:
        channel, answer = self._open(values, None)
        try:
            channel.end_input()
            return _answers(_rest(channel, answer, b"", patience))
        finally:
            channel.abort()

    def _open(self, values: dict[str, str], pace: Pace | None) -> tuple[Channel, Answer]:
        answer = Answer()
        command, source = shell_script(answer.script(_script()), values)
        channel = Channel(self._transport, command, pace=pace)
        try:
            patience = self._transport.connect_timeout
            said = channel.greet(source, _GREETING, patience, doing="about the catalog's dumps")
        except BaseException:
            channel.abort()
            raise
        if said[1] == b"RECEIVE":
            channel.abort()
            raise DumpImpossible(
                "the key leads to a forced command, which takes no dumps",
                hint="dump the catalog by another way and set run.skip_pgdump, or give this host"
                " a key with a shell",
            )
        return channel, answer


class Upload:
    """A dump on its way.

    When it ends without a name, by `abort` or by our death, the remote removes what it got.
    """

    def __init__(
        self, channel: Channel, answer: Answer, patience: float, stall_timeout: float
    ) -> None:
        self._channel = channel
        self._answer = answer
        self._patience = patience
        self._stall_timeout = stall_timeout
        self._said = b""
        self._sent = 0

    def send(self, data: bytes) -> None:
        """Hands data over."""
        try:
            self._channel.send(memoryview(data), self._hear, patience=self._stall_timeout)
        except BackupError:
            self._explain()
            raise
        self._sent += len(data)

    def look(self) -> None:
        """Notes what has come back meanwhile; raises where the connection has ended."""
        try:
            self._channel.hear(self._hear, 0.0)
        except BackupError:
            self._explain()
            raise

    def finish(self) -> tuple[int, str]:
        """Ends the dump; returns the size and the SHA-256 of what is on the remote's stable
        storage.
        """
        self._channel.end_input()
        patience = self._patience + self._sent / _SLOW
        said = _rest(self._channel, self._answer, self._said, patience, until=_SUMMED)
        answers = _answers(said)
        return int(_require(answers, "size")), _require(answers, "sum")

    def abort(self) -> None:
        """Ends the connection. Never raises."""
        self._channel.abort()

    def _hear(self, data: bytes) -> None:
        self._said = (self._said + self._answer.take(data))[-_LIMIT:]

    def _explain(self) -> None:
        """Raises what the remote said itself, which explains more than the end of the link."""
        _answers(self._said + self._answer.rest())


@cache
def _script() -> str:
    return resources.files(__package__).joinpath("remote_dir.sh").read_text("utf-8")


def _rest(
    channel: Channel,
    answer: Answer,
    said: bytes,
    patience: float,
    *,
    until: re.Pattern[bytes] | None = None,
) -> bytes:
    """Returns all that is said up to the end, or until that is in it."""
    deadline = time.monotonic() + patience
    while until is None or not until.search(said):
        data = answer.hear(channel, deadline)
        if data is None:
            break
        if not data:
            return said
        said = (said + data)[-_LIMIT:]
    else:
        return said
    raise RemoteUnreachable(
        "the remote did not answer in time: about the catalog's dumps",
        detail=f"waited {patience:.0f} s",
        hint="its disk may be very slow; run.receipt_timeout is how long it may take",
    )


def _answers(said: bytes) -> dict[str, list[str]]:
    """Returns what was answered, by name. Raises what a `problem` says."""
    found: dict[str, list[str]] = {}
    for name, value in _pairs(said.decode("utf-8", "backslashreplace").splitlines()):
        found.setdefault(name, []).append(value)
    for problem in found.get("problem", []):
        raise explain_root(problem)
    return found


def _pairs(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, equals, value = line.partition("=")
        if equals:
            yield name, value


def _require(said: dict[str, list[str]], name: str) -> str:
    if not said.get(name, [""])[0]:
        raise RemoteUnreachable(
            "the connection to the remote was lost",
            detail="it ended before it had answered about a dump",
        )
    return said[name][0]
