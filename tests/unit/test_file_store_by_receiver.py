"""An answer of a receiver about files is bounded, and is that of the question."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup.client.receiver_connection import SLOW, ReceiverConnection
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config.sections import RunSettings
from ntt_backup.dump.store import DUMPS
from ntt_backup.errors import (
    DumpImpossible,
    NameTaken,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
    Unsupported,
)
from ntt_backup.filestore.by_receiver import FileByReceiver, FileStoreByReceiver, _Question
from ntt_backup.filestore.contract import (
    Area,
    FileMissing,
    FileUnreadable,
    Range,
    StoredFile,
    Sum,
)
from ntt_backup.filestore.open import PACK_AREA
from ntt_backup.process.threads import Cancelled
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.wire import messages
from ntt_backup.wire.framing import HEADER, MAX_CHUNK, Inbox, ProtocolError
from ntt_backup.wire.stored_names import is_told
from tests.helpers.receivers import frames as frames_in

VERSION = "db/20260304T120000Z-0badcafe"
FIRST, LAST = f"{VERSION}/manifest", f"{VERSION}/map"
DUMP = "20260304T120000Z-0badcafe.dump"
DONE = messages.DONE
PACK = f"packs/ab/ab{'0' * 14}-ab{'f' * 14}-{'1' * 32}.tar"
FILE_OF = {SNAPSHOTS: FIRST, DUMPS: DUMP, PACK_AREA: PACK}
AREAS = pytest.mark.parametrize("area", FILE_OF, ids=["snapshots", "dumps", "packs"])
GIVEN = messages.FILE_SAID.frame(messages.SUCCEEDED)


def heard(kind: int, most: int, frames: Sequence[bytes]) -> _Question:
    """Returns a question after these frames of an answer."""
    question = _Question(kind, SNAPSHOTS.name, most)
    inbox = Inbox(messages.to_client(messages.WITH_FILES))
    for frame in frames:
        assert question.end is None
        inbox.space()[: len(frame)] = frame
        inbox.filled(len(frame))
        found = inbox.next()
        assert found is not None
        question.hear(*found)
    return question


def names(*files: str) -> bytes:
    return messages.FILE_NAMES.frame([(name, 5, 0) for name in files])


def count(number: int) -> bytes:
    return messages.DONE.frame(number)


def piece(size: int) -> bytes:
    return messages.piece(bytes(size))


def test_names_are_heard_up_to_their_number() -> None:
    files = [StoredFile(one, 5, datetime.fromtimestamp(0, UTC)) for one in (FIRST, LAST)]
    for frames in ([names(FIRST, LAST)], [names(FIRST), names(LAST)]):
        question = heard(messages.FILES, 2, [*frames, count(2)])
        assert question.files == files
        assert question.end == (DONE, 2, "")
    assert heard(messages.FILES, 2, [count(0)]).files == []
    assert heard(messages.FILES, 2, [names(FIRST, LAST)]).end is None


def test_content_is_heard_up_to_what_was_asked_for() -> None:
    for end in (0, 1):
        question = heard(messages.READ, 9, [piece(4), piece(5), messages.BLOB_END.frame(end, "x")])
        assert b"".join(question.pieces) == bytes(9)
        assert question.end == (messages.BLOB_END, end, "x")
    missing = messages.FILE_SAID.frame(messages.MISSING, "gone")
    question = heard(messages.READ, 9, [piece(4), missing])
    assert question.end == (messages.FILE_SAID, messages.MISSING, "gone")
    summed = heard(messages.FILE_END, 0, [messages.FILE_SUM.frame(7, bytes(32))])
    assert (summed.sum, summed.end) == (Sum(7, bytes(32)), (messages.FILE_SUM, 0, ""))
    assert heard(messages.PUBLISH, 0, [GIVEN]).end == (messages.FILE_SAID, 0, "")
    assert heard(messages.REMOVE, 0, [count(7)]).end == (DONE, 7, "")


@pytest.mark.parametrize(
    ("kind", "most", "frames", "why"),
    [
        (messages.FILES, 2, [names(FIRST), count(2)], "another number"),
        (messages.FILES, 2, [names(FIRST), count(0)], "another number"),
        (messages.FILES, 2, [names(FIRST, FIRST)], "out of order"),
        (messages.FILES, 2, [names(LAST), names(FIRST)], "out of order"),
        (messages.FILES, 1, [names(FIRST, LAST)], "more than was asked for"),
        (messages.FILES, 2, [names(DUMP)], "is not a file of a snapshot"),
        (messages.FILES, 2, [piece(1)], "in another answer"),
        (messages.FILES, 2, [messages.FILE_SAID.frame(0)], "in another answer"),
        (messages.READ, 9, [piece(4), piece(6)], "more than was asked for"),
        (messages.READ, 9, [count(0)], "in another answer"),
        (messages.READ, 9, [names(FIRST)], "in another answer"),
        (messages.READ, 9, [messages.FILE_SUM.frame(7, bytes(32))], "in another answer"),
        (messages.FILE_END, 0, [count(0)], "in another answer"),
        (messages.FILE_END, 0, [GIVEN], "in another answer"),
        (messages.FILE_END, 0, [messages.BLOB_END.frame(0)], "in another answer"),
        (messages.PUBLISH, 0, [messages.FILE_SUM.frame(7, bytes(32))], "in another answer"),
        (messages.PUBLISH, 0, [count(0)], "in another answer"),
        (messages.REMOVE, 0, [messages.FILE_SAID.frame(0)], "in another answer"),
    ],
)
def test_an_answer_to_another_question_or_a_longer_one_is_refused(
    kind: int, most: int, frames: list[bytes], why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        heard(kind, most, frames)


# --- a session ------------------------------------------------------------------------------------


class Connection:
    """A connection to a receiver. answers: the frames that come, each once it is waited for; early:
    those that come while something is sent. sent: the frames that were said, by kind.
    """

    def __init__(self, *allowed: str) -> None:
        self.answers: list[bytes] = []
        self.early = b""
        self.sent: list[int] = []
        self._begun = b""
        self.closed = False
        self.asked: dict[str, Any] = {}
        self.banner = SimpleNamespace(allowed={"snapshot", "dump", "packs", *allowed})
        self.received = 0
        self.channel = SimpleNamespace(
            hear=self._hear, heard=float("inf"), ended=False, pace=None, on_bytes=None
        )

    def hello(self, **asked: Any) -> dict[str, Any]:
        self.asked = asked
        return {"placed": 1}

    def checked(self) -> Any:
        return nullcontext()

    def send(self, data: bytes, hear: Callable[[bytes], object]) -> None:
        self._begun += data
        length, kind = HEADER.unpack_from(self._begun)
        if len(self._begun) < HEADER.size + length:
            return  # A part of a frame.
        self._begun = b""
        self.sent.append(kind)
        if self.early:
            hear(self.early)

    def _hear(self, hear: Any, _: float, beside: object = ()) -> None:
        if self.answers:
            hear(self.answers.pop(0))

    def frames(self, data: bytes) -> Any:
        return frames_in(data, messages.to_client(messages.WITH_FILES))

    def close(self) -> None:
        self.closed = True


def by_connection(
    monkeypatch: pytest.MonkeyPatch, connection: Connection, area: Area = SNAPSHOTS
) -> FileStoreByReceiver:
    def connect(store: ReceiverConnection, spec: SessionSpec, _: object) -> None:
        store.spec, store.received, store.said = spec, 0, {}
        for name in ("banner", "channel", "hello", "checked", "send", "frames"):
            setattr(store, name, getattr(connection, name))

    monkeypatch.setattr(ReceiverConnection, "__init__", connect)
    monkeypatch.setattr(ReceiverConnection, "close", lambda _: connection.close())
    spec = SimpleNamespace(cancelled=lambda: None, run=RunSettings(), identity="")
    return FileStoreByReceiver(cast(SessionSpec, spec), area)


@AREAS
def test_a_session_is_for_one_area(monkeypatch: pytest.MonkeyPatch, area: Area) -> None:
    connection = Connection("get")
    with closing(by_connection(monkeypatch, connection, area)) as store:
        assert connection.asked == {"files": area.name}
        assert store.placed
        other = DUMPS if area is SNAPSHOTS else SNAPSHOTS
        with pytest.raises(ValueError, match="is no"):
            list(store.read([Range(FILE_OF[other], 0, 1)]))
    connection.banner.allowed.remove(area.word)
    with pytest.raises(area.denied, match=f"takes no {area.files}") as caught:
        by_connection(monkeypatch, connection, area)
    assert f"add {area.word} to --allow" in caught.value.hint
    assert ("skip_pgdump" in caught.value.hint) == (area is DUMPS)
    assert DUMPS.denied is DumpImpossible


def test_a_command_that_is_ending_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(by_connection(monkeypatch, Connection())) as store:

        def cancelled() -> None:
            raise Cancelled

        monkeypatch.setattr(store.spec, "cancelled", cancelled)
        with pytest.raises(Cancelled):
            store.list()


@AREAS
def test_what_a_receiver_says_of_a_file_is_told(
    monkeypatch: pytest.MonkeyPatch, area: Area
) -> None:
    connection, name = Connection("get"), FILE_OF[area]
    with closing(by_connection(monkeypatch, connection, area)) as store:
        for answer, kind, why in (
            (messages.FILE_SAID.frame(messages.MISSING, "gone"), FileMissing, name),
            (messages.FILE_SAID.frame(messages.TAKEN, "odd"), FileUnreadable, "cannot be read"),
            (
                messages.FILE_SAID.frame(messages.UNREADABLE, "EIO"),
                FileUnreadable,
                "cannot be read",
            ),
            (messages.BLOB_END.frame(messages.BROKEN, "EIO"), FileUnreadable, "cannot be read"),
        ):
            connection.answers = [answer]
            with pytest.raises(kind, match=why):
                list(store.read([Range(name, 0, 1)]))
        connection.answers = [piece(3), piece(4), messages.BLOB_END.frame(0)]
        assert list(store.read([Range(name, 0, 9)])) == [bytes(7)]


@AREAS
def test_a_file_is_compared_and_gets_its_name(monkeypatch: pytest.MonkeyPatch, area: Area) -> None:
    connection, name = Connection(), FILE_OF[area]
    ours = Sum(7, sha256(b"content").digest())
    errors: dict[bytes, type[Exception] | None] = {
        messages.FILE_SAID.frame(messages.TAKEN): NameTaken,
        messages.FILE_SAID.frame(messages.MISSING): ProtocolError,
        messages.FILE_SAID.frame(messages.UNREADABLE, "EIO"): ProtocolError,
        GIVEN: None,
    }
    with closing(by_connection(monkeypatch, connection, area)) as store:
        for answer, error in errors.items():
            file = store.write(name)
            file.add(b"con")
            file.add(b"tent")
            connection.answers = [messages.FILE_SUM.frame(*ours)]
            assert file.finish() == ours
            connection.answers = [answer]
            if error is None:
                file.publish()
            else:
                with pytest.raises(error):
                    file.publish()
            connection.sent.clear()
            file.discard()  # It has its name, or the receiver has forgotten it.
            assert connection.sent == []
        for other in (Sum(6, ours.sha256), Sum(7, bytes(32))):
            file = store.write(name)
            file.add(b"content")
            connection.answers = [messages.FILE_SUM.frame(*other)]
            with pytest.raises(RemoteCannotStore, match="not what was sent"):
                file.finish()
            connection.sent.clear()
            file.discard()
            file.discard()
            assert connection.sent == [messages.DISCARD]


def test_as_many_files_are_under_way_as_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the slot of one that was ended in any way is there for another."""
    connection = Connection()
    with closing(by_connection(monkeypatch, connection)) as store:
        for _ in range(3):
            files = [store.write(FIRST) for _ in range(messages.MAX_OPEN)]
            assert len({one._slot for one in files}) == messages.MAX_OPEN
            connection.answers = [GIVEN, messages.FILE_SAID.frame(messages.TAKEN)]
            files[0].publish()
            with pytest.raises(NameTaken):
                files[1].publish()
            for one in files:
                one.discard()


def test_a_receiver_that_answers_before_a_file_has_ended_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Connection()
    with closing(by_connection(monkeypatch, connection)) as store:
        file = store.write(FIRST)
        connection.answers = [count(1)]
        with pytest.raises(ProtocolError, match="without a question"):
            file.poll()
        connection.early = GIVEN
        with pytest.raises(ProtocolError, match="without a question"):
            file.add(bytes(MAX_CHUNK))


def test_a_receiver_that_names_others_or_answers_unasked_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Connection("get", "replace")
    with closing(by_connection(monkeypatch, connection)) as store:
        connection.answers = [messages.FILE_NAMES.frame([(FIRST, 1, 0)]), count(1)]
        with pytest.raises(ProtocolError, match="not asked for"):
            store.list("etc/")
        connection.answers = [count(1)]
        assert store.remove([FIRST]) == 1
        assert store.remove([]) == 0
        connection.answers = [count(1) + count(1)]
        with pytest.raises(ProtocolError, match="without a question"):
            store.remove([FIRST])


@AREAS
def test_without_replace_no_file_of_a_snapshot_is_asked_to_be_removed(
    monkeypatch: pytest.MonkeyPatch, area: Area
) -> None:
    """Which ones, the receiver decides."""
    connection, name = Connection(), FILE_OF[area]
    connection.answers = [count(1)]
    with closing(by_connection(monkeypatch, connection, area)) as store:
        if area is not SNAPSHOTS:
            assert store.remove([name]) == 1
            return
        with pytest.raises(RemoteDenied, match="append-only"):
            store.remove([name])
        assert messages.REMOVE not in connection.sent


def test_removals_go_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection("replace")
    many = [f"{VERSION}/pack-{number:05}" for number in range(messages.MAX_FILE_NAMES + 1)]
    connection.answers = [count(messages.MAX_FILE_NAMES), count(1)]
    with closing(by_connection(monkeypatch, connection)) as store:
        assert store.remove(many) == len(many)


def test_records_alone_are_read_without_get(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection()
    names = {SNAPSHOTS: [FIRST], DUMPS: [DUMP, f"{DUMP}.age", f"{DUMP}.json"]}
    for area, files in names.items():
        with closing(by_connection(monkeypatch, connection, area)) as store:
            for name in files:
                connection.answers = [piece(2), messages.BLOB_END.frame(0)]
                asking = partial(store.read, [Range(name, 0, 2)])
                if is_told(area.name, name):
                    assert list(asking()) == [bytes(2)]
                    continue
                with pytest.raises(Unsupported, match="may not get"):
                    list(asking())
    assert is_told(DUMPS.name, f"{DUMP}.json")


# --- files that get their names while others are sent ---------------------------------------------

OURS = Sum(7, sha256(b"content").digest())
OTHERS = (Sum(6, OURS.sha256), Sum(7, bytes(32)))


def committed(store: FileStoreByReceiver, *, look: bool = False) -> FileByReceiver:
    """Returns a file with `content` whose commit has begun."""
    file = store.write(PACK, look=look)
    file.add(b"content")
    file.commit()
    return file


def settled(store: FileStoreByReceiver, file: FileByReceiver) -> bool:
    """Returns whether a file is settled once all answers have been heard."""
    for _ in range(5):
        store.wait(0.0)
    return file.settled


def found(size: int = 7) -> list[bytes]:
    """The answers to the question for a file that is there."""
    return [messages.FILE_NAMES.frame([(PACK, size, 0)]), count(1)]


def test_a_sum_of_something_else_ends_the_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in OTHERS:
        connection = Connection()
        with closing(by_connection(monkeypatch, connection, PACK_AREA)) as store:
            file = committed(store)
            connection.answers = [messages.FILE_SUM.frame(*other)]
            for _ in "12":
                with pytest.raises(RemoteCannotStore, match="not what was sent"):
                    settled(store, file)
            assert messages.PUBLISH not in connection.sent
            assert not file.settled


def test_a_name_that_is_taken_needs_a_sum_of_our_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And so does a file that was there before anything was sent: nothing is sent of it then."""
    taken = [messages.FILE_SUM.frame(*OURS), messages.FILE_SAID.frame(messages.TAKEN)]
    refused = [messages.FILE_SAID.frame(one) for one in (messages.MISSING, messages.UNREADABLE)]
    for look in (False, True):
        for proof in (*(messages.FILE_SUM.frame(*one) for one in (OURS, *OTHERS)), *refused):
            connection = Connection()
            with closing(by_connection(monkeypatch, connection, PACK_AREA)) as store:
                connection.answers = found() if look else []
                file = committed(store, look=look)
                connection.answers = [*([] if look else taken), proof]
                assert settled(store, file)
                assert (messages.FILE_DATA in connection.sent) != look
                if proof == messages.FILE_SUM.frame(*OURS):
                    assert file.result().size == 7
                else:
                    with pytest.raises(NameTaken):
                        file.result()
                files = [store.write(PACK) for _ in range(messages.MAX_OPEN)]
                assert len({one._slot for one in files}) == messages.MAX_OPEN


def test_whether_a_file_is_there_is_awaited_with_its_first_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a link's round trip passes while a pack is read."""
    for answers, kind in (([count(0)], messages.FILE_END), (found(), messages.PROVE)):
        connection = Connection()
        with closing(by_connection(monkeypatch, connection, PACK_AREA)) as store:
            file = store.write(PACK, look=True)
            file.add(bytes(MAX_CHUNK - 1))
            assert connection.sent == [messages.FILES]
            connection.answers = list(answers)
            file.add(bytes(2 * MAX_CHUNK))
            assert not connection.answers
            file.commit()
            sent = [messages.FILE_DATA] * 3 if kind == messages.FILE_END else []
            assert connection.sent == [messages.FILES, *sent, kind]
            assert (store.progress.added, store.progress.unsent) == (3 * MAX_CHUNK - 1, 0)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([messages.FILE_SAID.frame(messages.SUCCEEDED)], "in another answer"),
        ([messages.FILE_SUM.frame(*OURS)] * 2, "in another answer"),
        ([messages.FILE_SUM.frame(*OURS), count(1)], "in another answer"),
        ([messages.FILE_SUM.frame(*OURS), messages.FILE_SAID.frame(messages.MISSING)], "status"),
        ([messages.FILE_SUM.frame(*OURS), GIVEN, GIVEN], "without a question"),
        ([messages.FILE_SUM.frame(*OURS) + GIVEN], "without a question"),
        ([names(FIRST)], "in another answer|no file of packs"),
    ],
)
def test_an_answer_that_no_commit_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, answers: list[bytes], why: str
) -> None:
    connection = Connection()
    with closing(by_connection(monkeypatch, connection, PACK_AREA)) as store:
        file = committed(store)
        connection.answers = list(answers)
        with pytest.raises(ProtocolError, match=why):
            file.poll() if settled(store, file) else settled(store, file)


def test_a_receiver_that_tells_of_other_files_of_packs_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The names of other areas, other files than were asked for, and more bytes."""
    other = PACK.replace("1", "2")
    for answers, why in (
        ([names(DUMP), count(1)], "is no file of packs"),
        ([names(f"../{PACK}"), count(1)], "is no file of packs"),
        ([names(other), count(1)], "not asked for"),
        ([names(PACK), names(other), count(2)], "not asked for"),
    ):
        connection = Connection("get")
        with closing(by_connection(monkeypatch, connection, PACK_AREA)) as store:
            connection.answers = answers
            with pytest.raises((ProtocolError, ValueError), match=why):
                store.stat(PACK)
    connection = Connection("get")
    with closing(by_connection(monkeypatch, connection, PACK_AREA)) as store:
        connection.answers = [piece(4), piece(6), messages.BLOB_END.frame(0)]
        with pytest.raises(ProtocolError, match="more than was asked for"):
            store.fetch(PACK, 0, 9)


def test_no_size_that_a_receiver_states_lets_it_show_mere_life_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Connection("get")
    with closing(by_connection(monkeypatch, connection, PACK_AREA)) as store:
        monkeypatch.setattr(store.spec, "run", RunSettings(receipt_timeout=60))
        # It speaks all the time. 10^15 bytes would be read for six years.
        now = time.monotonic()
        connection.channel.heard = now
        for waited, given_up in ((80_000, False), (90_000, True)):
            problem = pytest.raises(RemoteUnreachable, match="nothing but signs of life")
            with problem if given_up else nullcontext():
                store.require_life(now - waited, 10**15 / SLOW)


def test_a_receiver_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a file gets its name, and while its sum is awaited; signs of life suffice for long."""
    for waits in (lambda store, file: settled(store, file), lambda store, _: store.prove(PACK)):
        connection = Connection("get")
        with closing(by_connection(monkeypatch, connection, PACK_AREA)) as store:
            monkeypatch.setattr(store.banner, "hashes", {"sha256"}, raising=False)
            file = committed(store)
            connection.channel.heard = 0.0
            run = RunSettings(stall_timeout=1, receipt_timeout=1)
            monkeypatch.setattr(store.spec, "run", run)
            clock = iter(range(int(time.monotonic()) + 100, 10**9, 100))
            monkeypatch.setattr(time, "monotonic", lambda clock=clock: float(next(clock)))
            with pytest.raises(RemoteUnreachable, match="does not answer"):
                waits(store, file)
            monkeypatch.undo()
