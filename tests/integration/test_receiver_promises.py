"""What a hostile client may say, row by row as docs/protocol.md has it, and what stops it.

The receiver runs in this process, which makes hundreds of sessions a matter of seconds. What each
session says is complete before it begins, so nothing here waits.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.receiver import b3sum, codec, hashing, session, sync_thread
from ntt_backup.receiver.session import ALLOWED, Receiver, Terms
from ntt_backup.wire import framing, read_messages, write_messages
from ntt_backup.wire.framing import Inbox
from tests.receiver_driver import PROJECT, digest_of, place_of, put

CHECKING = ("blake3", "b3sum", "none")
HASHES = ("sha256", "blake3")
SYNCS = ("syncfs", "fsync")
RIGHTS = [frozenset(some) for count in range(6) for some in itertools.combinations(ALLOWED, count)]
EVIL = b"evil content"
LOW, HIGH = bytes(32), b"\xff" * 32

TESTED: set[str] = set()


def stops(row: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks the test of a row of the table, which is called by its first cell."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        TESTED.add(row)
        return test

    return mark


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture(params=CHECKING)
def checking(request: pytest.FixtureRequest) -> str:
    """What the receiver has to check names with."""
    if request.param == "b3sum" and b3sum.find() is None:
        pytest.skip("b3sum is not installed")
    return str(request.param)


@dataclass
class Client:
    """Who may say anything to a receiver with these terms; answers are all frames of a session."""

    root: Path
    allow: frozenset[str] = frozenset(("put",))
    checking: str = "blake3"
    hash: str = "sha256"
    require: frozenset[str] = frozenset()
    status: int = -1
    answers: list[tuple[int, bytes]] = field(default_factory=list)

    def say(self, *said: bytes, **hello: Any) -> Client:
        """One session, from HELLO to the end of what is said."""
        fields: dict[str, Any] = {
            "protocol": framing.PROTOCOL,
            "root": str(self.root),
            "owner": "0123456789ab",
            "run": "run",
            "slot": "0",
            "hash": self.hash,
            "sync": "fsync",
            **hello,
        }
        hashes = hashing.available()
        if self.checking != "blake3":
            del hashes[write_messages.BLAKE3]
        program = b3sum.find() if self.checking == "b3sum" else None
        terms = Terms(
            str(self.root), self.allow, 60.0, hashes, codec.available(), program, self.require
        )
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as sink:
            source.write(write_messages.fields(framing.HELLO, fields) + b"".join(said))
            source.seek(0)
            self.status = Receiver(terms, source.fileno(), sink.fileno()).run()
            sink.seek(0)
            self.answers = list(self._frames(sink.read()))
        return self

    def read(self, *asked: bytes) -> Client:
        return self.say(*asked, reading=1)

    @staticmethod
    def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
        inbox = Inbox({**write_messages.TO_CLIENT, **read_messages.TO_CLIENT})
        inbox.space()[: len(data)] = data
        inbox.filled(len(data))
        while (frame := inbox.next()) is not None:
            if frame[0] != framing.BUSY:
                yield frame[0], bytes(frame[1])

    @property
    def kinds(self) -> list[int]:
        return [kind for kind, _ in self.answers]

    @property
    def error(self) -> str:
        """The code of the ERROR that ended the session; nothing where there was none."""
        kind, payload = self.answers[-1]
        assert (kind == framing.ERROR) == (self.status == 1)
        return write_messages.read_error(payload)[0] if kind == framing.ERROR else ""

    def receipts(self) -> list[write_messages.Receipt]:
        return [
            write_messages.read_receipt(said)
            for kind, said in self.answers
            if kind == framing.RECEIPT
        ]

    # --- what it may say

    def batch(self, number: int, blobs: dict[bytes, bytes], large: bool) -> bytes:
        """A batch of these contents under these digests, in one pack or as large blobs."""
        total = sum(map(len, blobs.values()))
        said = write_messages.batch(number, len(blobs), total)
        if large:
            said += b"".join(self.large(digest, content) for digest, content in blobs.items())
        else:
            said += self.pack(blobs)
        return said + write_messages.numbered(framing.COMMIT, number)

    def pack(self, blobs: dict[bytes, bytes]) -> bytes:
        sizes = [len(content) for content in blobs.values()]
        raw = write_messages.table(list(blobs), sizes) + b"".join(blobs.values())
        checksum = hashlib.sha256(raw).digest() if self.hash == "sha256" else b""
        return framing.frame(
            framing.PACK,
            write_messages.part_prefix(write_messages.RAW, len(raw), checksum),
            raw,
        )

    def large(self, digest: bytes, content: bytes, prefix: bytes = b"") -> bytes:
        """LARGE, DATA, END; prefix is what the receiver has of it already."""
        said = write_messages.large(digest, len(prefix + content), len(prefix))
        said += framing.frame(
            framing.DATA,
            write_messages.part_prefix(write_messages.RAW, len(content)),
            content,
        )
        checksum = hashlib.sha256(digest + prefix + content).digest()
        return said + write_messages.end(
            write_messages.COMPLETE, checksum if self.hash == "sha256" else b""
        )


PLACE = framing.frame(framing.PLACE)


def everything(root: Path) -> dict[str, bytes]:
    """What stands below the root, scratch space included."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b""
        for path in root.rglob("*")
    }


def test_each_row_of_the_table_has_a_test_and_each_test_a_row() -> None:
    text = (PROJECT / "docs" / "protocol.md").read_text()
    table = text.partition("| it may say | what stops it |\n")[2].partition("\n\n")[0]
    rows = {line.split("|")[1].strip() for line in table.splitlines()[1:]}
    assert rows == TESTED


# --- the hash, the kind of sync and the rights, in all combinations


@stops("a weaker `hash`, to have wrong content stored under a name")
@pytest.mark.parametrize("large", [False, True], ids=["pack", "large"])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("hashed", HASHES)
def test_names_are_checked_whatever_the_client_says(
    tmp_path: Path, checking: str, hashed: str, sync: str, large: bool
) -> None:
    checks = checking != "none"
    for number, allow in enumerate(RIGHTS):
        root = tmp_path / str(number)
        good, damaged = digest_of(b"good"), digest_of(b"damaged")
        put(root, good, b"good")
        put(root, damaged, b"rotten")
        before = everything(root)
        client = Client(root, allow, checking, hashed)
        new, evil = digest_of(b"new"), digest_of(b"nobody has sent this yet")
        blobs = {new: b"new", evil: EVIL, good: EVIL, damaged: b"damaged"}
        client.say(client.batch(1, blobs, large), sync=sync)

        if hashed == "blake3" and checking != "blake3":
            assert client.error == "protocol"  # It was not offered.
            assert everything(root) == before
            continue
        if "put" not in allow:
            assert client.error == "refused"
            assert everything(root) == before
            continue
        trusted = "replace" in allow
        expected = {place_of(root, new): b"new", place_of(root, good): b"good"}
        verdicts = {}
        if checks:
            verdicts[1] = verdicts[2] = write_messages.MISMATCH
        else:
            expected[place_of(root, evil)] = EVIL
            verdicts[2] = write_messages.REPLACED if trusted else write_messages.REFUSED
            if trusted:
                expected[place_of(root, good)] = EVIL
        mended = checks or trusted
        verdicts[3] = write_messages.REPLACED if mended else write_messages.REFUSED
        expected[place_of(root, damaged)] = b"damaged" if mended else b"rotten"
        (receipt,) = client.receipts()
        assert {each.position: each.verdict for each in receipt.exceptions} == verdicts, allow
        assert receipt.hash == write_messages.HASHES[hashed]
        assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == expected, allow
        assert not (root / ".ntt-incoming").exists()


@stops("a frame that `--allow` does not list, or in a session of the other kind")
@pytest.mark.parametrize("hashed", HASHES)
def test_each_right_is_asked_for(tmp_path: Path, checking: str, hashed: str) -> None:
    if hashed == "blake3" and checking != "blake3":
        return  # It was not offered: see above.
    root = tmp_path / "root"
    digest = digest_of(b"good")
    put(root, digest, b"good")
    before = everything(root)
    asked = {
        read_messages.listing(LOW, HIGH, 0): ("list", framing.LISTED),
        read_messages.verifying([digest]): ("verify", framing.VERDICTS),
        read_messages.getting([digest]): ("get", framing.GIVEN),
        read_messages.summing(digest): ("get", framing.GIVEN),
        read_messages.getting_blocks(digest, [0]): ("get", framing.GIVEN),
    }
    for allow in RIGHTS:
        client = Client(root, allow, checking, hashed)
        for question, (right, answer) in asked.items():
            client.read(question)
            if right not in allow or (right == "verify" and checking == "none"):
                assert client.error == "refused"
                assert set(client.kinds) == {framing.READY, framing.ERROR}
            else:
                assert client.kinds[-1] == answer
        for frame in (client.batch(1, {digest: b"good"}, large=False), PLACE):
            assert client.read(frame).error == "protocol"
        if "put" in allow:
            for question in asked:
                assert client.say(question).error == "protocol"
        assert everything(root) == before


@stops("a weaker `sync`, to have content called durable that is not")
@pytest.mark.parametrize("asked", SYNCS)
@pytest.mark.parametrize("reaches_the_disk", [False, True])
def test_a_receipt_comes_after_a_sync_of_all_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, asked: str, reaches_the_disk: bool
) -> None:
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    def syncfs(fd: int) -> None:
        synced.append("all")

    monkeypatch.setattr(session, "can_syncfs", lambda device: reaches_the_disk)
    monkeypatch.setattr(sync_thread, "syncfs", syncfs)
    monkeypatch.setattr(os, "fsync", fsync)
    present = digest_of(b"present")
    put(root, present, b"present")
    blobs = {present: b"present", digest_of(b"new"): b"new"}
    client = Client(root)
    client.say(client.batch(1, blobs, large=False), sync=asked)

    ready = write_messages.read_fields(client.answers[0][1])
    by_all = asked == "syncfs" and reaches_the_disk
    assert ready["sync"] == ("syncfs" if by_all else "fsync")
    assert client.receipts()[0].stored == 1
    if by_all:
        assert synced.count("all") >= 2  # Before the names, and after them.
    else:
        directory = place_of(root, digest_of(b"new")).parent
        for place_ in (place_of(root, present), directory, directory.parent, root / "by-hash"):
            assert str(place_) in synced
        assert any(".ntt-incoming" in path for path in synced)


def test_a_session_that_names_another_sync_or_hash_is_none(root: Path) -> None:
    for hello in ({"sync": "none"}, {"sync": ""}, {"hash": "md5"}, {"hash": "none"}):
        assert Client(root).say(PLACE, **hello).error == "protocol"
    assert everything(root) == {}


# --- the rest of what it may say


@stops("another `root`, or another spelling of the same")
def test_the_root_is_the_forced_commands(root: Path) -> None:
    """`there/..` is not where `there` lies, where that is a symlink."""
    elsewhere = root.parent / "elsewhere"
    (elsewhere / "inner").mkdir(parents=True)
    (elsewhere / "root").mkdir()
    (root.parent / "there").symlink_to(elsewhere / "inner")
    client = Client(root)
    client.say(
        PLACE,
        client.batch(1, {digest_of(b"a"): b"a"}, large=False),
        root=f"{root.parent}/there/../root",
    )
    assert everything(elsewhere / "root") == {}
    if client.status == 0:
        assert place_of(root, digest_of(b"a")).read_bytes() == b"a"
    for other in ("/", str(elsewhere), f"{root}/by-hash", f"{root}/..", "", "\0"):
        assert client.say(PLACE, root=other).error == "refused"


@stops("content that is there already, under its name")
def test_what_is_right_is_kept(root: Path, checking: str) -> None:
    path = put(root, digest_of(b"good"), b"good")
    inode = path.stat().st_ino
    client = Client(root, checking=checking)
    client.say(client.batch(1, {digest_of(b"good"): b"good"}, large=False))
    assert [each.verdict for each in client.receipts()[0].exceptions] == [write_messages.PRESENT]
    client.say(client.batch(1, {digest_of(b"good"): EVIL}, large=True))
    assert client.receipts()[0].stored == 0
    assert path.read_bytes() == b"good"
    assert path.stat().st_ino == inode


@stops("a `codec` that was not offered, or content that unpacks to more than it announced")
def test_no_other_codec_and_no_bomb(root: Path) -> None:
    client = Client(root)
    for number, announced in (
        (9, 41),
        (write_messages.ZLIB, 41),
        (write_messages.ZLIB, 50_000_000),
    ):
        part = zlib.compress(bytes(50_000_000))
        prefix = write_messages.part_prefix(number, announced, bytes(32))
        client.say(
            PLACE,
            write_messages.batch(1, 10, 1000),
            framing.frame(framing.PACK, prefix, part),
        )
        assert client.error == "protocol"
    assert everything(root / "by-hash") == {}


@stops("numbers and lengths: more than announced, beyond all bounds, below zero")
def test_lengths_are_bounded(root: Path) -> None:
    client = Client(root)
    digest = digest_of(b"abc")
    batch = write_messages.batch(1, 1, 2)
    for said in (
        write_messages.batch(1, framing.MAX_BLOBS + 1, 0),
        write_messages.batch(1, 1, framing.MAX_BLOB + 1),
        batch + client.pack({digest: b"abc"}),
        batch + write_messages.large(digest, 3, 0),
        write_messages.batch(1, 1, 3) + client.large(digest, b"abcd"),
        write_messages.batch(1, 1, 3) + write_messages.large(digest, 2**64 - 1, 0),
        framing.head(framing.PACK, framing.MAX_PAYLOAD + 33),
        framing.head(framing.DATA, 2**32 - 1),
        write_messages.batch(2, 1, 3)
        + write_messages.numbered(framing.ABORT, 2)
        + write_messages.batch(1, 1, 3),
    ):
        assert client.say(PLACE, said).error == "protocol", said[:40]
    assert everything(root / "by-hash") == {}


@stops("an `offset`, to have another's partial file end as it likes")
def test_a_part_that_is_there_is_checked_with_the_rest(root: Path, checking: str) -> None:
    (root / "by-hash").mkdir()
    prefix, rest = bytes(write_messages.RESUMABLE), b"the rest"
    digest = digest_of(prefix + rest)
    partial = root / ".ntt-incoming" / "partial" / digest.hex()
    partial.parent.mkdir(parents=True)
    partial.write_bytes(prefix)
    partial.with_name(f"{digest.hex()}.mark").write_text(f"{len(prefix):020}\n")
    client = Client(root, checking=checking)
    size = len(prefix + rest)
    batch = write_messages.batch(1, 1, size)
    ask, commit = (
        write_messages.ask_offset(digest, size),
        write_messages.numbered(framing.COMMIT, 1),
    )

    client.say(batch + write_messages.large(digest, size, len(prefix)))
    assert client.error == "protocol"  # It was not asked for.
    client.say(batch, ask, write_messages.large(digest, size, len(prefix) - 1))
    assert client.error == "protocol"
    client.say(batch, ask, client.large(digest, b"the evil", prefix), commit)
    (receipt,) = client.receipts()
    if checking == "none":  # The client has seen to it that its own checksum fits.
        assert receipt.stored == 1
    else:
        assert [each.verdict for each in receipt.exceptions] == [write_messages.MISMATCH]
        assert everything(root / "by-hash") == {}


@stops("`owner`, `run` and `slot`: paths, or another client's")
def test_names_of_sessions_lead_nowhere_and_end_one_at_most(root: Path) -> None:
    for name, values in {
        "owner": ("../x", "", "a" * 33, "A", "a.b", 1),
        "run": ("..", "a/b", "", "a" * 65, "a\0"),
        "slot": (".", "0/..", "", "0\n", 0),
    }.items():
        for value in values:
            assert Client(root).say(PLACE, **{name: value}).error == "protocol"
    assert everything(root) == {}
    # Another host's live session: its stage stays, and it ends with a word of why.
    stage = root / ".ntt-incoming" / "0123456789ab.other.0.1"
    stage.mkdir(parents=True)
    (stage / "0").write_bytes(b"staged")
    lock = os.open(stage / "lock", os.O_RDWR | os.O_CREAT)
    import fcntl

    fcntl.flock(lock, fcntl.LOCK_EX)
    Client(root).say(PLACE, run="other")
    assert (stage / "0").read_bytes() == b"staged"
    os.close(lock)


@stops("frames out of order, of no known type, or with another checksum")
def test_what_is_not_in_order_ends_the_session(root: Path) -> None:
    client = Client(root)
    commit = write_messages.numbered(framing.COMMIT, 1)
    altered = bytearray(PLACE)
    altered[-1] ^= 1
    for said in (
        commit,
        framing.frame(99),
        framing.frame(framing.READY, b"{}"),
        write_messages.batch(1, 1, 3) + write_messages.batch(2, 1, 3),
        write_messages.batch(1, 1, 3) + framing.frame(framing.BYE),
        framing.frame(framing.BYE) + PLACE,
        write_messages.fields(framing.HELLO, {"protocol": 1}),
        bytes(altered),
    ):
        assert client.say(said).error in ("protocol", "gone"), said
    assert not (root / "by-hash").exists()


@stops("nothing of BLAKE3, where `--require blake3` asks for it")
@pytest.mark.parametrize("hashed", HASHES)
def test_what_is_required_and_lacking_serves_nobody(root: Path, checking: str, hashed: str) -> None:
    (root / "by-hash").mkdir()
    client = Client(root, frozenset(ALLOWED), checking, hashed, frozenset(("blake3",)))
    for reading in (0, 1):
        client.say(framing.frame(framing.BYE), reading=reading)
        if checking == "none":
            assert client.error == "refused"
            text = write_messages.read_error(client.answers[-1][1])[1]
            assert re.search(r"no BLAKE3.*apt-get install b3sum", text)
        elif hashed == "blake3" and checking == "b3sum":
            assert client.error == "protocol"
        else:
            assert client.error == ""
    assert [path.name for path in root.iterdir()] == ["by-hash"]
