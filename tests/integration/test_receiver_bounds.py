"""Each bound of what a receiver answers, in this process: on it, before it and beyond."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup.blobdir.walk import StrayKind
from ntt_backup.receiver import (
    file_areas,
    file_session,
    large_blob,
    question_session,
    read_session,
    write_session,
)
from ntt_backup.receiver.connection import Connection
from ntt_backup.receiver.file_areas import AREAS, FileArea
from ntt_backup.receiver.file_session import FileSession
from ntt_backup.receiver.large_blob import open_partial
from ntt_backup.receiver.question_session import QuestionSession
from ntt_backup.receiver.terms import ALLOWED
from ntt_backup.receiver.workspace import Refusal
from ntt_backup.wire import messages
from ntt_backup.wire.stored_names import MAX_RECORD
from tests.helpers.blobs import noise
from tests.helpers.receivers import (
    BYE,
    PLACE,
    ScriptedSession,
    a_dump,
    a_file,
    a_record,
    abort,
    commit,
    digest_of,
    failure,
    frames,
    litter,
    names_under,
    place_of,
    put,
)

LOW, HIGH = bytes(32), b"\xff" * 32
VERSION = "db/20260304T120000Z-0badcafe"
DUMP = "20260304T120000Z-0badcafe.dump"


@pytest.fixture
def client(root: Path) -> ScriptedSession:
    (root / "by-hash").mkdir()
    return ScriptedSession(root, ALLOWED)


def stored(root: Path, *sizes: int) -> list[bytes]:
    """The digests of blobs of these sizes that lie on the receiver."""
    digests = []
    for seed, size in enumerate(sizes):
        content = noise(size, seed)
        digests.append(digest_of(content))
        put(root, digests[-1], content)
    return digests


def of(client: ScriptedSession, kind: int) -> list[bytes]:
    return [payload for one, payload in client.answers if one == kind]


# --- contents -------------------------------------------------------------------------------------


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_session, "PACK_BYTES", 1000)
    monkeypatch.setattr(question_session, "MAX_CHUNK", 400)


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ([0], [[0]]),
        ([964], [[964]]),
        ([965], []),
        ([464, 464], [[464, 464]]),
        ([464, 465], [[464], [465]]),
        ([5, 965, 6], [[5, 6]]),
        ([300, 300, 300, 300], [[300, 300], [300, 300]]),
    ],
)
@pytest.mark.usefixtures("small_packs")
def test_small_contents_go_together_up_to_a_pack(
    root: Path, client: ScriptedSession, sizes: list[int], together: list[list[int]]
) -> None:
    client.read(messages.GET.frame(0, stored(root, *sizes)))
    packs = [
        [len(content) for _, content in messages.CONTENTS.read(memoryview(one))]
        for one in of(client, messages.CONTENTS)
    ]
    assert packs == together
    assert of(client, messages.GIVEN) == [len(sizes).to_bytes(4, "big")]


@pytest.mark.parametrize(
    ("offset", "lengths"),
    [
        (0, [400, 400, 200]),
        (1, [400, 400, 199]),
        (200, [400, 400]),
        (999, [1]),
        (1000, []),
        (1001, []),
        (1 << 60, []),
    ],
)
@pytest.mark.usefixtures("small_packs")
def test_a_content_is_given_from_an_offset_on(
    root: Path, client: ScriptedSession, offset: int, lengths: list[int]
) -> None:
    (digest,) = stored(root, 1000)
    client.read(messages.GET.frame(offset, [digest]))
    (begun,) = map(messages.BLOB.read, of(client, messages.BLOB))
    assert begun == (digest, 1000, min(offset, 1000))
    pieces = [messages.PIECE.read(memoryview(one)) for one in of(client, messages.PIECE)]
    assert [len(one) for one in pieces] == lengths
    assert b"".join(pieces) == noise(1000, 0)[offset:]
    assert of(client, messages.BLOB_END) == [bytes([messages.COMPLETE])]


@pytest.mark.parametrize("left", [0, 399, 400, 999])
@pytest.mark.usefixtures("small_packs")
def test_a_file_that_has_become_shorter_is_broken_off(tmp_path: Path, left: int) -> None:
    path = tmp_path / "blob"
    path.write_bytes(bytes(left))
    with path.open("rb") as file:
        sent = b"".join(question_session.pieces(file.fileno(), 0, 1000))
    *pieces, (kind, end) = frames(sent, messages.to_client(messages.READING))
    assert [kind for kind, _ in pieces] == [messages.PIECE] * (left // 400)
    ends_before = min((left // 400 + 1) * 400, 1000)
    assert kind == messages.BLOB_END
    assert messages.BLOB_END.read(end) == (
        messages.BROKEN,
        f"it ends before byte {ends_before}",
    )


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 4, 5, 6])
def test_names_come_in_pages_up_to_the_number_that_was_asked_for(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(messages, "MAX_NAMES", 2)
    digests = sorted(stored(root, 1, 2, 3, 4, 5))
    client.read(messages.LIST.frame(LOW, HIGH, most))
    pages = [[*messages.NAMES.read(one)] for one in of(client, messages.NAMES)]
    count = min(most or 5, 5)
    assert [digest for page in pages for digest, _ in page] == digests[:count]
    assert [len(page) for page in pages] == [2] * (count // 2) + [1] * (count % 2)
    (end,) = map(messages.LISTED.read, of(client, messages.LISTED))
    assert end == (count, sum(size for page in pages for _, size in page), 0, count < 5)


@pytest.mark.parametrize(("low", "high"), [(1, 3), (0, 4), (2, 2), (3, 1)])
def test_names_are_listed_from_one_end_to_the_other(
    root: Path, client: ScriptedSession, low: int, high: int
) -> None:
    digests = [b"\x01\x02" + bytes([n]) * 30 for n in range(4)] + [b"\x01\x03" + bytes(30)]
    for digest in digests:
        put(root, digest, b"")
    client.read(messages.LIST.frame(digests[low], digests[high], 0))
    found = [name for one in of(client, messages.NAMES) for name, _ in messages.NAMES.read(one)]
    assert found == digests[low : high + 1]


def test_strays_are_told_up_to_a_number_and_counted_beyond_it(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_STRAYS", 2)
    for count in range(5):
        client.read(messages.LIST.frame(LOW, HIGH, 0))
        assert len(of(client, messages.STRAY)) == min(count, 2)
        (end,) = map(messages.LISTED.read, of(client, messages.LISTED))
        assert end.strays == count
        (root / "by-hash" / f"stray-{count}").write_bytes(b"")


@pytest.mark.parametrize(
    ("place", "from_", "told"),
    [
        ("aa", b"\xaa" + bytes(31), True),
        ("aa", b"\xaa" + bytes(30) + b"\x01", False),
        ("aa/bb", b"\xaa\xbb" + bytes(30), True),
        ("aa/bb", b"\xaa\xbb" + bytes(29) + b"\x01\0", False),
        ("aa/bb", b"\xaa\xba" + b"\xff" * 30, True),
    ],
)
def test_a_stray_is_told_with_the_page_in_which_its_directory_begins(
    root: Path, client: ScriptedSession, place: str, from_: bytes, told: bool
) -> None:
    (root / "by-hash" / "aa" / "bb").mkdir(parents=True)
    (root / "by-hash" / place / "stray").write_bytes(b"")
    client.read(messages.LIST.frame(from_, HIGH, 0))
    strays = [messages.STRAY.read(one) for one in of(client, messages.STRAY)]
    kinds = [*StrayKind]
    assert [(kinds[kind], path) for kind, path in strays] == (
        [(StrayKind.NOT_A_BLOBID, f"{place}/stray")] if told else []
    )


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_files_of_snapshots_are_listed_in_pages(
    client: ScriptedSession, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(file_session, "MAX_FILE_NAMES", 2)
    names = [f"{VERSION}/pack-{number:05}" for number in range(count)]
    client.snapshots(*(a_file(b"x", name) for name in names), messages.FILES.frame(""))
    pages = [
        len([*messages.FILE_NAMES.read(one, "snapshots")])
        for one in of(client, messages.FILE_NAMES)
    ]
    assert pages == [2] * (count // 2) + [1] * (count % 2)
    assert [name for name, _ in client.listed()] == names
    assert of(client, messages.DONE) == [count.to_bytes(4, "big")]


@pytest.mark.parametrize(
    "below", ["", "db/", f"{VERSION}/", "other/", "db/20260305T120000Z-0badcafe/", "none/"]
)
def test_files_of_snapshots_are_listed_below_what_was_asked_for(
    client: ScriptedSession, below: str
) -> None:
    names = [f"{VERSION}/map", "db/20260305T120000Z-0badcafe/map", f"other{VERSION[2:]}/map"]
    client.snapshots(*(a_file(b"x", name) for name in names), messages.FILES.frame(below))
    assert [name for name, _ in client.listed()] == [n for n in names if n.startswith(below)]


@pytest.mark.parametrize(
    ("start", "length", "given"),
    [
        (0, 7, b"content"),
        (0, 8, b"content"),
        (0, 6, b"conten"),
        (6, 1, b"t"),
        (6, 2, b"t"),
        (7, 1, b""),
        (3, 0, b""),
        (8, 1, b""),
        (2**63, 2**63, b""),
    ],
)
def test_a_file_of_a_snapshot_is_read_up_to_its_end(
    client: ScriptedSession, start: int, length: int, given: bytes
) -> None:
    name = f"{VERSION}/map"
    client.snapshots(a_file(b"content", name), messages.READ.frame(start, length, name))
    pieces = [messages.PIECE.read(memoryview(one)) for one in of(client, messages.PIECE)]
    assert b"".join(pieces) == given
    assert of(client, messages.BLOB_END) == [bytes([messages.COMPLETE])]


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_record_is_taken_up_to_its_bound(root: Path, client: ScriptedSession, extra: int) -> None:
    record = a_record(b"good")[:-1].ljust(MAX_RECORD + extra - 1) + b"}"
    client.dumps(a_file(record, f"{DUMP}.json"))
    assert client.error == ("protocol" if extra > 0 else "")
    assert (root / "pgdump" / f"{DUMP}.json").exists() == (extra <= 0)
    # Somebody else may have put a longer one there: it vouches for no dump.
    (root / "pgdump").mkdir(exist_ok=True)
    (root / "pgdump" / f"{DUMP}.json").write_bytes(record)
    client.dumps(a_file(b"good", DUMP))
    assert client.error == ("protocol" if extra > 0 else "")


def test_dumps_are_counted(client: ScriptedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_areas, "MAX_DUMPS", 2)
    names = [DUMP.replace("0bad", f"{number:04}") for number in range(3)]
    assert [client.dumps(a_dump(b"good", name)).error for name in names] == ["", "", "dump"]
    client.dumps(messages.FILES.frame(""))
    assert of(client, messages.DONE) == [(4).to_bytes(4, "big")]


@pytest.fixture(params=[*AREAS.values()], ids=[*AREAS])
def area(request: pytest.FixtureRequest) -> type[FileArea]:
    found: type[FileArea] = request.param
    return found


@pytest.mark.parametrize("cut", [1, 9, 10, 11, 25])
def test_a_file_is_summed_from_the_disk_however_it_comes(
    root: Path, monkeypatch: pytest.MonkeyPatch, area: type[FileArea], cut: int
) -> None:
    monkeypatch.setattr(file_areas, "_STEP", 10)
    top = os.open(root, os.O_RDONLY)
    directory = area(top)
    file = directory.begin()
    content = noise(100, 1)
    for at in range(0, 100, cut):
        file.write(memoryview(content)[at : at + cut])
        assert at + cut >= 10 or file._behind is None
        if cut == 10:  # What is behind the writing ends before the next piece.
            file._wait()
            assert file._summed == at + 10
    assert file.sync() == (100, hashlib.sha256(content).digest())
    file.remove()
    directory.close()
    assert not (root / area.called).exists()
    os.close(top)


def test_a_directory_that_was_there_stays(root: Path, area: type[FileArea]) -> None:
    (root / area.called).mkdir()
    top = os.open(root, os.O_RDONLY)
    directory = area(top)
    directory.begin().remove()
    directory.close()
    assert [*(root / area.called).iterdir()] == []
    os.close(top)


@pytest.mark.parametrize(("age", "stays"), [(0, True), (3590, True), (3610, False)])
def test_what_the_killed_left_goes_after_an_hour(
    root: Path, area: type[FileArea], age: int, stays: bool
) -> None:
    (root / area.called).mkdir()
    left = root / area.called / ".incoming-0badcafe"
    left.write_bytes(b"")
    os.utime(left, (time.time() - age,) * 2)
    top = os.open(root, os.O_RDONLY)
    directory = area(top)
    directory.begin().remove()
    directory.close()
    assert left.exists() == stays
    os.close(top)


class Work:
    """What is done aside: it ends once somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended = False
        self._awaited = threading.Event()
        join = threading.Thread.join

        def joining(thread: threading.Thread, timeout: float | None = None) -> None:
            self._awaited.set()
            join(thread, timeout)

        monkeypatch.setattr(threading.Thread, "join", joining)

    def __call__(self) -> bytes:
        self._awaited.wait(10)
        self.ended = True
        return b"answer"


def aside(root: Path, work: Any) -> tuple[Any, int]:
    """The answer of a session that does work aside, and the descriptor that is told of its end."""
    told, wake = os.pipe()
    terms, connection = SimpleNamespace(allow=()), SimpleNamespace(wake=wake)
    area = cast(Any, SimpleNamespace(called="files", word="dump"))
    session = FileSession(area, cast(Any, terms), cast(Any, connection))
    return session._aside(work), told


@pytest.mark.parametrize("end", ["interrupt", "close"])
def test_work_aside_has_ended_when_its_answer_is_dropped(
    root: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    work = Work(monkeypatch)
    answer, told = aside(root, work)
    assert next(answer) == b""
    assert not work.ended
    session = QuestionSession(cast(Any, None), cast(Any, None))
    session.frames = answer
    getattr(session, end)()
    assert work.ended
    assert os.read(told, 1) == b"\0"


@pytest.mark.parametrize(
    ("problem", "code"),
    [(FileNotFoundError(2, "no"), "gone"), (OSError(28, "full"), "dump"), (None, "")],
)
def test_work_aside_is_answered_by_its_frame_or_its_error(
    root: Path, problem: OSError | None, code: str
) -> None:
    def work() -> bytes:
        if problem is not None:
            raise problem
        return b"answer"

    answer, _ = aside(root, work)
    if problem is None:
        assert [one for one in answer if one] == [b"answer"]
        return
    with pytest.raises(Refusal) as refused:
        list(answer)
    assert refused.value.code == code


# --- the session and its batches ------------------------------------------------------------------


@pytest.mark.parametrize(("field", "most"), [("owner", 32), ("run", 64), ("slot", 32)])
def test_names_of_sessions_have_lengths(client: ScriptedSession, field: str, most: int) -> None:
    for length in (1, most):
        assert client.say(BYE, **{field: "a" * length}).error == ""
    for length in (0, most + 1):
        assert client.say(BYE, **{field: "a" * length}).error == "protocol"


def test_a_batch_is_full_at_what_it_announced(root: Path, client: ScriptedSession) -> None:
    pack = client.pack([b"abc", b"d"])
    for blobs, size, error in ((2, 4, ""), (1, 4, "protocol"), (2, 3, "protocol")):
        client.say(PLACE, messages.BATCH.frame(1, blobs, size), pack, commit(1))
        assert client.error == error
    assert place_of(root, digest_of(b"abc")).read_bytes() == b"abc"


@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_large_blob_has_the_length_that_was_announced(
    root: Path, client: ScriptedSession, length: int
) -> None:
    content = b"abcd"[:length]
    digest = digest_of(content)
    said = [messages.LARGE.frame(digest, 3, 0), *client.pieces(content), client.end(content)]
    client.say(PLACE, messages.BATCH.frame(1, 1, 3), *said, commit(1))
    assert client.error == ("" if length == 3 else "protocol")
    assert place_of(root, digest).exists() == (length == 3)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_batches_have_numbers_that_grow(client: ScriptedSession, number: int) -> None:
    client.say(PLACE, client.batch(1, [b"a"]), client.batch(number, [b"b"]))
    assert client.error == ("" if number > 1 else "protocol")
    assert len(client.receipts()) == 1 + (number > 1)


def test_a_batch_that_is_called_back_leaves_nothing(root: Path, client: ScriptedSession) -> None:
    content = noise(5000, 1)
    large = messages.LARGE.frame(digest_of(content), 5000, 0)
    for rest in (
        [client.pack([b"abc"])],
        [large],
        [large, *client.pieces(content[:100])],
        [client.large(content)],
        [large, *client.pieces(content), messages.END.frame(messages.WITHDRAWN)],
    ):
        client.say(PLACE, messages.BATCH.frame(1, 9, 9000), *rest, abort(1))
        assert client.error == ""
        assert messages.ABORTED in client.kinds
        assert client.receipts() == []
        assert not (root / ".ntt-incoming").exists() or litter(root) == []
        assert list((root / "by-hash").iterdir()) == []


@pytest.fixture
def resumable(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (write_session, large_blob):
        monkeypatch.setattr(module, "RESUMABLE", 1000)
    monkeypatch.setattr(large_blob, "WORTH_KEEPING", 100)
    monkeypatch.setattr(large_blob, "_KEEP_EVERY", 500)
    return 1000


@pytest.mark.parametrize(
    ("size", "sent", "offset"),
    [
        (1000, 999, 0),
        (1001, 99, 0),
        (1001, 100, 100),
        (1001, 1000, 1000),
        (1001, 1001, 1001),
        (3000, 2999, 2999),
    ],
)
@pytest.mark.usefixtures("resumable")
def test_a_large_blob_is_offered_from_what_was_worth_keeping(
    root: Path, client: ScriptedSession, size: int, sent: int, offset: int
) -> None:
    content = noise(size, 1)
    digest = digest_of(content)
    batch = messages.BATCH.frame(1, 1, size)
    client.say(PLACE, batch, messages.LARGE.frame(digest, size, 0), *client.pieces(content[:sent]))
    client.say(PLACE, batch, messages.ASK_OFFSET.frame(digest, size))
    (found,) = map(messages.OFFSET.read, of(client, messages.OFFSET))
    assert found[0] == offset
    assert found[1] == large_blob_sum(digest, content[:offset])

    ask = messages.ASK_OFFSET.frame(digest, size)
    client.say(PLACE, batch, ask, client.large(content, offset), commit(1))
    assert client.receipts()[0].stored == 1
    assert place_of(root, digest).read_bytes() == content


def large_blob_sum(digest: bytes, content: bytes) -> bytes:
    return hashlib.sha256(digest + content).digest()


@pytest.mark.parametrize(
    ("offset", "error"), [(0, ""), (500, ""), (1, "protocol"), (499, "protocol"), (501, "protocol")]
)
@pytest.mark.usefixtures("resumable")
def test_a_large_blob_goes_on_from_the_offer_or_begins_anew(
    root: Path, client: ScriptedSession, offset: int, error: str
) -> None:
    content = noise(1001, 1)
    digest = digest_of(content)
    batch = messages.BATCH.frame(1, 1, 1001)
    client.say(PLACE, batch, messages.LARGE.frame(digest, 1001, 0), *client.pieces(content[:500]))
    ask = messages.ASK_OFFSET.frame(digest, 1001)
    client.say(PLACE, batch, ask, client.large(content, offset), commit(1))
    assert client.error == error
    assert place_of(root, digest).exists() == (not error)
    other = noise(1001, 2)
    client.say(batch, ask, client.large(other), commit(1))  # An offer is for its blob alone.
    assert place_of(root, digest_of(other)).exists()
    client.say(batch, ask, client.large(other, 500), commit(1))
    assert client.error == "protocol"


@pytest.mark.parametrize("problem", ["unreadable", "short"])
@pytest.mark.usefixtures("resumable")
def test_what_cannot_be_read_of_a_large_blob_is_not_offered(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    content = noise(1001, 1)
    digest = digest_of(content)
    batch = messages.BATCH.frame(1, 1, 1001)
    client.say(PLACE, batch, messages.LARGE.frame(digest, 1001, 0), *client.pieces(content[:500]))

    def pread(fd: int, length: int, at: int) -> bytes:
        if problem == "short":
            return b""
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", pread)
    client.say(batch, messages.ASK_OFFSET.frame(digest, 1001))
    (found,) = map(messages.OFFSET.read, of(client, messages.OFFSET))
    assert found == (0, large_blob_sum(digest, b""))
    assert not (root / ".ntt-incoming").exists()


@pytest.mark.usefixtures("resumable")
def test_only_so_many_blobs_of_a_batch_can_be_resumed(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_session, "_MOST_PARTIALS", 2)
    opened: list[Any] = []

    def opening(*args: Any) -> Any:
        opened.append(args)
        return open_partial(*args)

    monkeypatch.setattr(write_session, "open_partial", opening)
    contents = [noise(1001, seed) for seed in range(4)]
    client.say(PLACE, client.batch(1, contents, large=True), client.batch(2, contents[:1]))
    assert [receipt.stored for receipt in client.receipts()] == [4, 0]
    assert len(opened) == 2
    assert all(place_of(root, digest_of(one)).read_bytes() == one for one in contents)


@pytest.mark.usefixtures("resumable")
def test_a_disk_that_has_failed_offers_nothing(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = noise(1001, 1)
    digest = digest_of(content)
    batch = messages.BATCH.frame(1, 2, 2002)
    client.say(PLACE, batch, messages.LARGE.frame(digest, 1001, 0), *client.pieces(content[:500]))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(large_blob, "write_all", full)
    small = noise(999, 3)
    client.say(messages.BATCH.frame(1, 1, 999), client.large(small), commit(1))
    assert failure(client.receipts()[0]).startswith("ENOSPC: ")
    other = noise(1001, 2)
    begun = [messages.LARGE.frame(digest_of(other), 1001, 0), *client.pieces(other)]
    ask = messages.ASK_OFFSET.frame(digest, 1001)
    client.say(batch, *begun, client.end(other), ask, commit(1))
    (receipt,) = client.receipts()
    assert receipt.outcome == messages.FAILED
    (found,) = map(messages.OFFSET.read, of(client, messages.OFFSET))
    assert found[0] == 0


def test_a_large_blob_that_cannot_be_made_durable_fails_its_batch(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = large_blob.LargeBlob.seal

    def fails(blob: large_blob.LargeBlob, by_file: bool) -> None:
        seal(blob, by_file)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(large_blob.LargeBlob, "seal", fails)
    client.say(PLACE, client.batch(1, [b"content"], large=True))
    assert failure(client.receipts()[0]).startswith("EIO: ")
    assert not names_under(root)


def test_a_root_that_is_none_says_why(root: Path) -> None:
    for name, words in (
        ("none", "ENOENT: "),
        ("\0", "embedded null"),
        ("\ud800", "surrogates not allowed"),
    ):
        session = ScriptedSession(root / name, ALLOWED)
        session.say(BYE)
        assert session.error == "root"
        assert words in session.error_text


def test_directories_may_be_looked_into_by_others(root: Path) -> None:
    umask = os.umask(0)
    try:
        ScriptedSession(root).say(PLACE)
    finally:
        os.umask(umask)
    assert (root / "by-hash").stat().st_mode & 0o7777 == 0o755


@pytest.mark.usefixtures("resumable")
def test_life_is_shown_while_a_part_that_is_there_is_hashed(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = noise(1001, 1)
    digest = digest_of(content)
    batch = messages.BATCH.frame(1, 1, 1001)
    client.say(PLACE, batch, messages.LARGE.frame(digest, 1001, 0), *client.pieces(content[:500]))
    alive: list[int] = []
    monkeypatch.setattr(large_blob, "_READ_CHUNK", 100)
    monkeypatch.setattr(Connection, "show_life", lambda _: alive.append(1))
    client.say(batch, messages.ASK_OFFSET.frame(digest, 1001))
    (found,) = map(messages.OFFSET.read, of(client, messages.OFFSET))
    assert found == (500, large_blob_sum(digest, content[:500]))
    assert len(alive) >= 5
