"""What a place of dumps answers is that of the question, or an error that tells what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup.client.connection import SessionSpec
from ntt_backup.config.sections import RunSettings
from ntt_backup.dump import by_shell
from ntt_backup.dump.by_objects import DumpsByObjects
from ntt_backup.dump.by_receiver import DumpsByReceiver
from ntt_backup.dump.by_shell import DumpsByShell, UploadByShell
from ntt_backup.errors import BackupError, RemoteDenied, RemoteUnreachable
from ntt_backup.objects.bucket import ObjectArchived
from ntt_backup.wire import dump_messages, framing, read_messages, write_messages
from ntt_backup.wire.framing import ProtocolError
from tests.fake_bucket import SMALLEST_PART, FakeBucket
from tests.receiver_driver import frames
from tests.unit.sample_records import RECORD

NAME = "20260304T120000Z-0badcafe.dump"
LOST = RemoteUnreachable("the link was lost")
SUM = dump_messages.dump_sum(7, bytes(32))
DONE = write_messages.numbered(framing.DONE, 1)

# --- the receiver ---------------------------------------------------------------------------------


class Connection:
    """A connection to a receiver. answers: the frames that come, each once it is waited for."""

    received = 0

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.early = b""
        self.closed = False
        self.banner = SimpleNamespace(allowed={"dump", "get"})
        self.channel = SimpleNamespace(hear=self._hear, heard=float("inf"))

    def hello(self, **_: int) -> dict[str, bool]:
        return {"placed": True}

    def checked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def send(self, _: bytes, hear: Callable[[bytes], object]) -> None:
        if self.early:
            hear(self.early)

    def _hear(self, hear: Callable[[bytes], object], _: float) -> None:
        hear(self.answers.pop(0))

    def frames(self, data: bytes) -> Iterator[tuple[int, memoryview]]:
        return frames(data, dump_messages.TO_CLIENT)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    connection = Connection()
    monkeypatch.setattr("ntt_backup.client.connection.ReceiverConnection", lambda *_: connection)
    return connection


@pytest.fixture
def place(connection: Connection) -> DumpsByReceiver:
    spec = SimpleNamespace(cancelled=lambda: None, run=RunSettings())
    return DumpsByReceiver(cast(SessionSpec, spec))


def test_a_receiver_takes_a_dump_names_it_and_gives_it_back(
    place: DumpsByReceiver, connection: Connection
) -> None:
    connection.answers = [SUM, DONE, read_messages.piece(b"con"), read_messages.piece(b"tent")]
    connection.answers += [read_messages.blob_end(0), DONE]
    upload = place.upload(NAME)
    upload.send(b"content")
    assert upload.finish() == (7, "00" * 32)
    upload.name(RECORD)
    assert b"".join(place.fetch(NAME)) == b"content"
    assert place.drop([NAME]) == 1
    assert place.drop([]) == 0
    assert not connection.closed
    upload.give_up()
    assert connection.closed


@pytest.mark.parametrize(
    ("ask", "answer", "why"),
    [
        (lambda place: list(place.fetch(NAME)), SUM, "within a dump"),
        (lambda place: place.upload(NAME).finish(), DONE, "for a sum"),
        (lambda place: place.upload(NAME).name(RECORD), SUM, "for what is done"),
        (lambda place: place.drop([NAME]), SUM, "for what is done"),
        (lambda place: place.upload(NAME).poll(), DONE, "within a dump"),
    ],
)
def test_a_receiver_that_answers_something_else_is_refused(
    place: DumpsByReceiver,
    connection: Connection,
    ask: Callable[[Any], object],
    answer: bytes,
    why: str,
) -> None:
    connection.answers = [answer, *[read_messages.blob_end(0)] * 2]
    with pytest.raises(ProtocolError, match=why):
        ask(place)


def test_a_receiver_that_answers_before_a_dump_has_ended_is_refused(
    place: DumpsByReceiver, connection: Connection
) -> None:
    connection.early = DONE
    with pytest.raises(ProtocolError, match="within a dump"):
        place.upload(NAME).send(b"content")


# --- the shell ------------------------------------------------------------------------------------


class Script:
    """A script on the remote, its channel and its answer. said: what comes, None for silence."""

    def __init__(self) -> None:
        self.said: list[bytes | None] = []
        self.status: int | None = 0
        self.answers = b""
        self.error: BackupError | None = None
        self.aborted = False

    def send(self, *_: object, **__: object) -> None:
        if self.error is not None:
            raise self.error

    def hear(self, *_: object) -> bytes | None:
        self.send()
        return self.said.pop(0) if self.said else b""

    greet = send

    def rest(self) -> bytes:
        return self.answers

    def lost(self) -> RemoteUnreachable:
        return LOST

    def end_input(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(by_shell, "_open", lambda *_, **__: (script, script))
    monkeypatch.setattr(by_shell, "ask", lambda *_, **__: script.answers)
    return script


SPEC = cast(
    SessionSpec,
    SimpleNamespace(root="/srv", run=RunSettings(), transport=SimpleNamespace(connect_timeout=1.0)),
)


def test_a_dump_of_which_nothing_comes_is_an_outage_and_not_its_end(script: Script) -> None:
    for said, status, why in (
        ([b"con", b"tent"], 0, ""),
        ([b"con", None], 0, "the remote has stalled"),
        ([b"con"], None, "the link was lost"),
    ):
        script.said, script.status, script.aborted = [*said], status, False
        got = DumpsByShell(SPEC).fetch(NAME)
        if why:
            with pytest.raises(RemoteUnreachable, match=why):
                list(got)
        else:
            assert b"".join(got) == b"content"
        assert script.aborted


@pytest.mark.parametrize("poll", [True, False])
def test_what_the_remote_says_explains_more_than_the_end_of_the_link(
    script: Script, poll: bool
) -> None:
    upload = UploadByShell(SPEC, NAME)

    def go_on() -> None:
        if poll:
            upload.poll()
        else:
            upload.send(b"content")

    go_on()
    script.error = LOST
    with pytest.raises(RemoteUnreachable, match="the link was lost"):
        go_on()
    script.answers = b"problem=unusable\n"
    with pytest.raises(BackupError) as caught:
        go_on()
    assert caught.value is not LOST


def test_a_sum_comes_in_time_and_as_a_whole(script: Script) -> None:
    upload = UploadByShell(SPEC, NAME)
    upload.send(b"content")
    script.said = [b"size=", b"7\nsum=ab\n"]
    assert upload.finish() == (7, "ab")
    for said, why in (
        ([b"size=7", None], "did not answer in time"),
        ([b"size=7"], "the connection to the remote was lost"),
    ):
        upload, script.said = UploadByShell(SPEC, NAME), [*said]
        with pytest.raises(RemoteUnreachable, match=why):
            upload.finish()


def test_what_is_not_confirmed_is_an_outage(script: Script) -> None:
    with pytest.raises(RemoteUnreachable, match="the connection to the remote was lost"):
        DumpsByShell(SPEC).try_out()
    script.answers = b"tried=\n"
    with pytest.raises(RemoteUnreachable, match="the connection to the remote was lost"):
        DumpsByShell(SPEC).try_out()
    script.answers = b"tried=yes\n"
    DumpsByShell(SPEC).try_out()
    upload = UploadByShell(SPEC, NAME)
    with pytest.raises(RemoteUnreachable, match="the connection to the remote was lost"):
        upload.name(RECORD)
    assert not script.aborted
    script.answers = b"named=yes\n"
    upload.name(RECORD)
    assert script.aborted
    script.aborted = False
    upload.give_up()
    assert script.aborted


def test_a_connection_that_is_not_greeted_is_ended() -> None:
    script = Script()
    script.error = RemoteDenied("not allowed")
    spec = SimpleNamespace(
        root="/srv", transport=SimpleNamespace(connect_timeout=1.0), channel=lambda _: script
    )
    with pytest.raises(RemoteDenied, match="not allowed"):
        UploadByShell(cast(SessionSpec, spec), NAME)
    assert script.aborted


# --- a bucket -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("archived", "why"), [(False, "is gone"), (True, "thaw it")])
def test_a_dump_that_cannot_be_read_from_its_bucket_says_why(archived: bool, why: str) -> None:
    bucket = FakeBucket()
    if archived:
        bucket.objects[f"pgdump/{NAME}"] = b"content"

    def refuse(verb: str, _: str) -> None:
        if verb == "get_range":
            raise ObjectArchived

    bucket.before = refuse if archived else bucket.before
    with pytest.raises(RemoteDenied, match="a dump cannot be read") as caught:
        list(DumpsByObjects(bucket, SMALLEST_PART).fetch(NAME))
    assert why in caught.value.detail
