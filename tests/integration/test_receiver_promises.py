"""What a hostile client may say, row by row as docs/protocol.md has it, and what stops it."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
import zstandard

from ntt_backup.blobdir.layout import marker_text, read_marker, relative_path
from ntt_backup.filestore import by_directory
from ntt_backup.filestore import open as open_stores
from ntt_backup.filestore.by_directory import FileStoreByDirectory
from ntt_backup.receiver import b3sum, dispatcher, file_areas, file_session, group_commit
from ntt_backup.receiver.terms import ALLOWED
from ntt_backup.wire import framing, messages
from ntt_backup.wire.framing import FORMAT, IDENTITY
from ntt_backup.wire.stored_names import BY_HASH, DUMPS, MAX_RECORD, PACKS, SNAPSHOTS, STAMP
from tests.helpers.receivers import (
    BYE,
    PLACE,
    PROJECT,
    Frames,
    ScriptedSession,
    a_dump,
    a_file,
    a_record,
    abort,
    an_unnamed_file,
    ask_hashes,
    commit,
    digest_of,
    everything,
    place_of,
    put,
    verdicts,
)

CHECKING = ("blake3", "b3sum", "none")
HASHES = ("sha256", "blake3")
SYNCS = ("syncfs", "fsync")
OF_BLOBS = [word for word in ALLOWED if word not in ("dump", "snapshot", "packs")]
RIGHTS = [some for count in range(6) for some in itertools.combinations(OF_BLOBS, count)]
EVIL = b"evil content"
LOW, HIGH = bytes(32), b"\xff" * 32
GOOD, OTHER = "20260304T120000Z-0badcafe.dump", "20260304T120000Z-00000000.dump"
VERSION = "db/20260304T120000Z-0badcafe"
PACK = f"packs/ab/ab{'0' * 14}-ab{'f' * 14}-{'1' * 32}.tar"
LARGE_BLOB = f"blobs/ab/cd/abcd{'0' * 60}"
TRIAL = "packs/trial-0badcafe0bad"

TESTED: set[str] = set()


def stops(row: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks the test of a row of the table, which is called by its first cell."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        TESTED.add(row)
        return test

    return mark


@pytest.fixture(params=CHECKING)
def checking(request: pytest.FixtureRequest) -> str:
    """What the receiver has to check names with."""
    if request.param == "b3sum" and b3sum.find() is None:
        pytest.skip("b3sum is not installed")
    return str(request.param)


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
    new, good, damaged = digest_of(b"new"), digest_of(b"good"), digest_of(b"damaged")
    evil = digest_of(b"nobody has sent this yet")
    for number, allow in enumerate(RIGHTS):
        root = tmp_path / str(number)
        put(root, good, b"good")
        put(root, damaged, b"rotten")
        before = everything(root)
        client = ScriptedSession(root, allow, checking, hashed)
        contents = [b"new", EVIL, EVIL, b"damaged"]
        client.say(client.batch(1, contents, [new, evil, good, damaged], large), sync=sync)

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
        said = {}
        if checks:
            said[1] = said[2] = messages.MISMATCH
        else:
            expected[place_of(root, evil)] = EVIL
            said[2] = messages.REPLACED if trusted else messages.REFUSED
            if trusted:
                expected[place_of(root, good)] = EVIL
        mended = checks or trusted
        said[3] = messages.REPLACED if mended else messages.REFUSED
        expected[place_of(root, damaged)] = b"damaged" if mended else b"rotten"
        (receipt,) = client.receipts()
        assert verdicts(receipt) == said, allow
        assert receipt.hash == messages.HASHES[hashed]
        assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == expected, allow
        assert not (root / ".ntt-incoming").exists()


@stops("a frame that `--allow` does not list, or in a session of the other kind")
@pytest.mark.parametrize(
    ("checking", "hashed"),
    [
        ("blake3", "blake3"),
        ("none", "sha256"),
        pytest.param("b3sum", "sha256", marks=pytest.mark.long),
        pytest.param("blake3", "sha256", marks=pytest.mark.long),
    ],
    indirect=["checking"],
)
def test_each_right_is_asked_for(root: Path, checking: str, hashed: str) -> None:
    digest = digest_of(b"good")
    put(root, digest, b"good")
    before = everything(root)
    asked = {
        messages.LIST.frame(LOW, HIGH, 0): ("list", messages.LISTED),
        ask_hashes([digest]): ("verify", messages.HASHED),
        messages.VERIFY.frame(messages.BLAKE3, bytes(32), [digest]): ("verify", messages.SUMS),
        messages.GET.frame(0, [digest]): ("get", messages.GIVEN),
    }
    of_files = [messages.FILES.frame(""), a_file(EVIL, f"{VERSION}/map"), a_dump(EVIL, GOOD)]
    for allow in [*RIGHTS, ALLOWED]:
        client = ScriptedSession(root, allow, checking, hashed)
        for question, (right, answer) in asked.items():
            client.read(question)
            if right not in allow or (right == "verify" and checking == "none"):
                assert client.error == "refused"
                assert set(client.kinds) == {messages.READY, messages.ERROR}
            else:
                assert client.kinds[-1] == answer
        for frame in (client.batch(1, [b"good"]), PLACE, *of_files):
            assert client.read(frame).error == "protocol"
        if "put" in allow:
            for question in [*asked, *of_files]:
                assert client.say(question).error == "protocol"
        for area, right, others in (
            (DUMPS, "dump", f"{VERSION}/map"),
            (SNAPSHOTS, "snapshot", PACK),
            (PACKS, "packs", GOOD),
        ):
            expected = "protocol" if right in allow else "refused"
            for frame in (client.batch(1, [b"good"]), PLACE, *asked, a_file(EVIL, others)):
                assert client.say(frame, files=area).error == expected
            assert client.say(files=area, reading=1).error == "protocol"
        for no_area in ("blobs", "..", "pgdump/", 1):
            assert client.say(BYE, files=no_area).error == "protocol"
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

    monkeypatch.setattr(dispatcher, "can_syncfs", lambda device: reaches_the_disk)
    monkeypatch.setattr(group_commit, "syncfs", lambda fd: synced.append("all"))
    monkeypatch.setattr(os, "fsync", fsync)
    present = put(root, digest_of(b"present"), b"present")
    client = ScriptedSession(root)
    client.say(client.batch(1, [b"present", b"new"]), sync=asked)

    ready = messages.READY.read(client.answers[0][1])
    by_all = asked == "syncfs" and reaches_the_disk
    assert ready["sync"] == ("syncfs" if by_all else "fsync")
    assert client.receipts()[0].stored == 1
    if by_all:
        assert synced.count("all") >= 2  # Before the names, and after them.
    else:
        directory = place_of(root, digest_of(b"new")).parent
        for path in (present, directory, directory.parent, root / "by-hash"):
            assert str(path) in synced
        assert any(".ntt-incoming" in path for path in synced)


# --- the rest of what it may say


@stops("another `root`, or another spelling of the same")
def test_the_root_is_the_forced_commands(root: Path) -> None:
    """`link/..` is not the directory of `link`, where that is a symlink."""
    elsewhere = root.parent / "elsewhere"
    (elsewhere / "inner").mkdir(parents=True)
    (elsewhere / "root").mkdir()
    (root.parent / "link").symlink_to(elsewhere / "inner")
    client = ScriptedSession(root)
    client.say(PLACE, client.batch(1, [b"a"]), root=f"{root.parent}/link/../root")
    assert everything(elsewhere / "root") == {}
    if client.status == 0:
        assert place_of(root, digest_of(b"a")).read_bytes() == b"a"
    for other in ("/", "..", str(elsewhere), f"{root}/by-hash", f"{root}/..", "", "\0"):
        assert client.say(PLACE, root=other).error == "refused"


@stops("content that is there already, under its name")
def test_what_is_right_is_kept(root: Path, checking: str) -> None:
    path = put(root, digest_of(b"good"), b"good")
    inode = path.stat().st_ino
    client = ScriptedSession(root, checking=checking)
    client.say(client.batch(1, [b"good"]))
    assert verdicts(client.receipts()[0]) == {0: messages.PRESENT}
    client.say(client.batch(1, [EVIL], [digest_of(b"good")], large=True))
    assert client.receipts()[0].stored == 0
    assert path.read_bytes() == b"good"
    assert path.stat().st_ino == inode


@stops("another identity for the target, to have its copies taken for those of another disk")
@pytest.mark.parametrize("allow", [["put"], ["put", "replace", "packs", "dump", "snapshot"]])
def test_an_identity_is_given_once(root: Path, allow: Sequence[str]) -> None:
    one, other = bytes(range(16)), b"\xff" * 16
    client = ScriptedSession(root, allow)
    marker = root / IDENTITY

    def told() -> list[str]:
        frames = [payload for kind, payload in client.answers if kind == messages.READY]
        return [str(messages.READY.read(payload)["target"]) for payload in frames]

    client.say(messages.PLACE.frame(one), messages.PLACE.frame(other), PLACE)
    assert told() == ["", one.hex(), one.hex(), one.hex()]
    assert read_marker(marker.read_bytes()) == (1, one.hex(), "blake3")
    kept = marker.stat()
    client.say(messages.PLACE.frame(other))
    assert told() == [one.hex(), one.hex()]
    assert marker.stat().st_ino == kept.st_ino
    # What is there and is no marker stays, too: a link, a directory, other content.
    for lies in ("a link", "a directory", "no marker"):
        marker.rmdir() if marker.is_dir() else marker.unlink()
        if lies == "a link":
            marker.symlink_to("/etc/hostname")
        elif lies == "a directory":
            marker.mkdir()
        else:
            marker.touch()
        client.say(messages.PLACE.frame(other))
        assert told() == ["?", "?"], lies
    assert marker.read_bytes() == b""
    # The identity of packs is the identity of the target.
    (root / FORMAT).write_bytes(marker_text(one.hex()))
    marker.unlink()
    client.say(messages.PLACE.frame(other))
    assert told() == [one.hex(), one.hex()]
    assert not marker.exists()
    for words in (["list", "get"], ["packs"]):
        assert ScriptedSession(root, words).say(messages.PLACE.frame(other)).error == "refused"
    assert not (root / ".ntt-incoming").exists()


@stops("`names` of another hash than those of the target, to have its own content under a name")
@pytest.mark.parametrize("large", [False, True], ids=["pack", "large"])
@pytest.mark.parametrize("theirs", ["blake3", "sha256"])
def test_the_hash_of_names_is_that_of_the_marker(
    tmp_path: Path, checking: str, theirs: str, large: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    place = messages.PLACE.frame(bytes(range(16)))

    def said(client: ScriptedSession, names: str) -> bytes:
        client.names = names
        named = (b"right", b"another")
        digests = [sha256(one).digest() if names == "sha256" else digest_of(one) for one in named]
        return client.batch(1, [b"right", EVIL], digests, large)

    client = ScriptedSession(root, checking=checking)
    client.say(place, said(client, theirs))
    (receipt,) = client.receipts()
    if theirs == "sha256" or checking != "none":
        assert verdicts(receipt) == {1: messages.MISMATCH}
    assert read_marker((root / IDENTITY).read_bytes()).hash == theirs
    before = everything(root)
    other = ScriptedSession(root, ["put", "replace"], checking)
    other.say(place, said(other, "sha256" if theirs == "blake3" else "blake3"))
    assert other.error == "refused"
    assert everything(root) == before
    # What was there before there were markers is named by BLAKE3.
    (root / IDENTITY).unlink()
    other = ScriptedSession(root, ["put", "replace"], checking)
    other.say(place, said(other, "sha256"))
    assert other.error == "refused"
    other.names = "blake3"
    assert other.say(hash="blake3", names="sha256").error == "protocol"


@stops("a `codec` that was not offered, or content that unpacks to more than it announced")
def test_no_other_codec_and_no_bomb(root: Path) -> None:
    client = ScriptedSession(root)
    bomb = zlib.compress(bytes(50_000_000))
    small = zlib.compress(bytes(41))
    run = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    stream = run.compress(bytes(50_000_000)) + run.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    for codec, part, length in (
        (9, bomb, 41),
        (messages.ZLIB, bomb, 41),
        (messages.ZLIB, bomb, 50_000_000),
        (messages.ZLIB, small, 42),
        (messages.ZSTD_STREAM, stream, 41),
        (messages.ZSTD_STREAM, stream[4:], 41),
        (messages.RAW, bytes(41), 40),
    ):
        pack = client.raw_pack(bytes(41), codec, part, length)
        client.say(PLACE, messages.BATCH.frame(1, 10, 1000), pack)
        assert client.error == "protocol"
    assert everything(root / "by-hash") == {}


@stops("numbers and lengths: more than announced, beyond all bounds, below zero")
def test_lengths_are_bounded(root: Path) -> None:
    client = ScriptedSession(root)
    table, digest = messages.table, digest_of(b"abc")
    batch, large = messages.BATCH.frame, messages.LARGE.frame
    for said in (
        batch(1, framing.MAX_BLOBS + 1, 0),
        batch(1, 2**32 - 1, 0),
        batch(1, 1, framing.MAX_BLOB + 1),
        batch(2, 1, 3) + abort(2) + batch(1, 1, 3),
        batch(1, 1, 2) + client.pack([b"abc"]),
        batch(1, 1, 2) + large(digest, 3, 0),
        batch(1, 1, 3) + large(digest, 4, 0) + b"".join(client.pieces(b"abcd")),
        batch(1, 1, 3) + large(digest, 2, 0) + b"".join(client.pieces(b"abc")),
        batch(1, 1, 3) + large(digest, 2**63, 0),
        batch(1, 1, 3) + large(digest, 2**64 - 1, 0),
        messages.ASK_OFFSET.frame(digest, 2**64 - 1),
        framing.head(messages.PACK, framing.MAX_PAYLOAD + 33),
        framing.head(messages.PACK, 2**32 - 1),
        framing.head(messages.DATA, 2**32 - 1),
        framing.head(messages.BATCH, 17),
        *(
            batch(1, 10, 1000) + client.raw_pack(raw)
            for raw in (
                bytes(4),
                struct.pack("!I", 2**32 - 1) + bytes(100),
                table([LOW], [5]) + b"four",
                table([LOW], [2**32 - 1]),
                table([LOW] * 11, [0] * 11),
                table([LOW], [1001]) + bytes(1001),
                table([LOW], [2 << 20]) + bytes(2 << 20),
            )
        ),
        *(
            batch(1, 10, 1000) + client.raw_pack(bytes(41), length=length)
            for length in (0, 2**32 - 1)
        ),
    ):
        assert client.say(PLACE, said).error == "protocol", said[:40]
    assert everything(root / "by-hash") == {}


@stops("an `offset`, to have another's partial file end as it likes")
def test_a_part_that_is_there_is_checked_with_the_rest(root: Path, checking: str) -> None:
    (root / "by-hash").mkdir()
    prefix, rest = bytes(messages.RESUMABLE), b"the rest"
    digest = digest_of(prefix + rest)
    partial = root / ".ntt-incoming" / "partial" / digest.hex()
    partial.parent.mkdir(parents=True)
    partial.write_bytes(prefix)
    partial.with_name(f"{digest.hex()}.mark").write_text(f"{len(prefix):020}\n")
    client = ScriptedSession(root, checking=checking)
    size = len(prefix + rest)
    batch = messages.BATCH.frame(1, 1, size)
    ask = messages.ASK_OFFSET.frame(digest, size)

    client.say(batch, messages.LARGE.frame(digest, size, len(prefix)))
    assert client.error == "protocol"  # It was not asked for.
    client.say(batch, ask, messages.LARGE.frame(digest, size, len(prefix) - 1))
    assert client.error == "protocol"
    client.say(batch, ask, client.large(prefix + b"the evil", len(prefix), digest), commit(1))
    (receipt,) = client.receipts()
    if checking == "none":  # The client has seen to it that its own checksum fits.
        assert receipt.stored == 1
    else:
        assert verdicts(receipt) == {0: messages.MISMATCH}
        assert everything(root / "by-hash") == {}


@stops("`owner`, `run` and `slot`: paths, or another client's")
def test_names_of_sessions_lead_nowhere_and_end_one_at_most(root: Path) -> None:
    for name, values in {
        "owner": ("../x", "", "a" * 33, "A", "a.b", 1),
        "run": ("..", ".", "a/b", "", "a" * 65, "a\0"),
        "slot": (".", "..", "0/..", "", "0\n", 0),
        "protocol": (2, "1"),
        "hash": ("md5", "none", 1),
        "sync": ("none", ""),
        "root": (7,),
    }.items():
        for value in values:
            assert ScriptedSession(root).say(PLACE, **{name: value}).error == "protocol"
    for payload in (b"[[[[", b"{}", b'{"protocol":1}', b"\xff\xfe", b"[" * 60000):
        hello = framing.frame(messages.HELLO, payload)
        assert ScriptedSession(root).send(hello).error == "protocol"
    assert everything(root) == {}
    # The live session of another host keeps its stage.
    stage = root / ".ntt-incoming" / "0123456789ab.other.0.1"
    stage.mkdir(parents=True)
    (stage / "0").write_bytes(b"staged")
    lock = os.open(stage / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    ScriptedSession(root).say(PLACE, run="other")
    assert (stage / "0").read_bytes() == b"staged"
    os.close(lock)


# The forms of names, one by one: tests/unit/test_wire_bounds.py.
BAD_DUMPS = (f"../pgdump/{GOOD}", f"{GOOD[:-5]}/dump", f"{GOOD}\n", f"{VERSION}/manifest")
BAD_FILES = (f"../{VERSION}/map", f"db/../{VERSION}/map", f"{VERSION}/../map", f"{VERSION}/x", GOOD)


@stops("a file under a path, or a name that is taken")
@pytest.mark.parametrize(
    ("area", "good", "bad"),
    [(DUMPS, GOOD, BAD_DUMPS), (SNAPSHOTS, f"{VERSION}/manifest", BAD_FILES)],
    ids=["dumps", "snapshots"],
)
def test_files_have_names_of_one_form_and_their_own_directory(
    root: Path, area: str, good: str, bad: Sequence[str]
) -> None:
    client = ScriptedSession(root, ALLOWED)

    def say(*said: bytes) -> ScriptedSession:
        return client._files(area, *said)

    (root / "outside").mkdir()
    (root / "outside" / "map").write_bytes(b"secret")
    assert say((a_dump if area == DUMPS else a_file)(b"good", good)).error == ""
    links = [OTHER, f"{OTHER}.age"] if area == DUMPS else [f"{VERSION}/map", f"{VERSION}/map.age"]
    for name, to in zip(links, ("map", "new"), strict=True):
        (root / area / name).symlink_to(root / "outside" / to)
    if area == DUMPS:
        (root / area / f"{OTHER}.json").write_bytes(a_record(EVIL))
    (root / area / "linked").symlink_to(root / "outside")
    (root / area / "db").mkdir(exist_ok=True)
    (root / area / "db" / "20260305T120000Z-0badcafe").symlink_to(root / "outside")
    before = everything(root)
    for name in bad:
        raw = name.encode()
        publish = framing.frame(messages.PUBLISH, b"\0", raw)
        assert say(an_unnamed_file(EVIL), publish).error == "protocol"
        assert say(framing.frame(messages.READ, bytes(16), raw)).error == "protocol"
        removing = framing.frame(messages.REMOVE, f"{good}\n".encode(), raw)
        assert say(removing).error == "protocol"
        assert say(framing.frame(messages.FILES, raw)).error == "protocol"
    for name in (good, *links):
        assert say(a_file(EVIL if area != DUMPS or name != good else b"good", name)).said() == [
            messages.TAKEN
        ]
    if area == SNAPSHOTS:
        for of_set in ("linked/20260304T120000Z-0badcafe", "db/20260305T120000Z-0badcafe"):
            for frame in (
                a_file(EVIL, f"{of_set}/map"),
                messages.READ.frame(0, 9, f"{of_set}/map"),
                messages.REMOVE.frame([f"{of_set}/map"]),
            ):
                assert say(frame).error == "place"
    assert say(messages.READ.frame(0, 9, links[0])).said() == [messages.UNREADABLE]
    assert messages.PIECE not in client.kinds
    assert dict(say(messages.FILES.frame("")).listed()).keys() - {links[0]} == (
        {good} if area == SNAPSHOTS else {good, f"{good}.json", f"{OTHER}.json"}
    )
    assert everything(root) == before


BAD_PACKS = (
    "packs",
    "packs/",
    "packs/ab/",
    f"../{PACK}",
    f"/{PACK}",
    f"./{PACK}",
    f"{PACK}/..",
    f"{PACK}\0",
    f"{PACK}\n",
    f"{PACK}.json",
    f"{PACK}.age.age",
    PACK.replace("/ab/", "/cd/"),
    PACK.replace("/ab/", "/wide/"),
    PACK.replace("/ab/", "/../"),
    PACK.replace("/ab/", "/AB/"),
    PACK.replace("1", "\u0661"),
    f"packs/ab/ab{'f' * 14}-ab{'0' * 14}-{'1' * 32}.tar",
    "packs/ab/.incoming-00000000",
    "packs/.incoming-00000000",
    "packs/trial-",
    "packs/trial-../../x",
    f"packs/trial-{'a' * 65}",
    f"blobs/ab/ce/abcd{'0' * 60}",
    f"{LARGE_BLOB}.age",
    LARGE_BLOB.replace("blobs", "by-hash"),
    f"./{FORMAT}",
    f"packs/{FORMAT}",
    f"{FORMAT}.age",
    f"pgdump/{GOOD}",
    GOOD,
    f"{VERSION}/manifest",
    f"snapshots/{VERSION}/manifest",
    ".ntt-incoming/partial",
)


def proving(name: bytes | str, kind: int = messages.SHA256) -> bytes:
    raw = name if isinstance(name, bytes) else name.encode()
    return framing.frame(messages.PROVE, bytes([kind]), raw)


@stops("a file of packs under a path, of another area, or behind a link")
def test_files_of_packs_have_names_of_few_forms_and_lead_nowhere(root: Path) -> None:
    client, outside = ScriptedSession(root, ALLOWED), root / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")

    def say(*said: bytes) -> ScriptedSession:
        return client._files(PACKS, *said)

    assert say(a_file(b"good", PACK), a_file(b"good", LARGE_BLOB)).error == ""
    linked = PACK.replace("ab", "cd")
    behind = [linked, LARGE_BLOB.replace("abcd", "efcd").replace("ab/cd", "ef/cd")]
    link = PACK.replace("1", "2")
    (root / "packs" / "cd").symlink_to(outside)
    (root / "blobs" / "ef").symlink_to(outside)
    (root / link).symlink_to(outside / "secret")
    before = everything(root)
    for name in BAD_PACKS:
        raw = name.encode()
        publish = framing.frame(messages.PUBLISH, b"\0", raw)
        assert say(an_unnamed_file(EVIL), publish).error == "protocol", name
        assert say(framing.frame(messages.READ, bytes(16), raw)).error == "protocol", name
        assert say(proving(raw)).error == "protocol", name
        removing = framing.frame(messages.REMOVE, f"{TRIAL}\n".encode(), raw)
        assert say(removing).error == "protocol", name
        if name not in ("packs/", "packs/ab/"):
            assert say(framing.frame(messages.FILES, raw)).error == "protocol", name
    for name in behind:
        for frame in (a_file(EVIL, name), messages.READ.frame(0, 9, name), proving(name)):
            assert say(frame).error == "place"
    assert say(a_file(EVIL, link)).said() == [messages.TAKEN]
    assert say(messages.READ.frame(0, 9, link)).said() == [messages.UNREADABLE]
    assert say(proving(link)).said() == [messages.UNREADABLE]
    assert [name for name, _ in say(messages.FILES.frame("")).listed()] == [LARGE_BLOB, PACK]
    assert everything(root) == before


@stops("REMOVE for a blob or a pack, or another content for it; REMOVE for the marker")
@pytest.mark.parametrize(
    "allow", [["packs"], ["packs", "prune"], [one for one in ALLOWED if one != "prune"]]
)
def test_nothing_of_packs_is_removed_or_replaced(root: Path, allow: Sequence[str]) -> None:
    client = ScriptedSession(root, allow)

    def say(*said: bytes) -> ScriptedSession:
        return client._files(PACKS, *said)

    stored = (PACK, LARGE_BLOB, FORMAT, TRIAL)
    assert say(*(a_file(b"good", name) for name in stored)).said() == [messages.SUCCEEDED] * 4
    before = everything(root)
    # A sealed file beside a plain one would leave open which of them counts.
    taken = (*stored, f"{PACK}.age")
    assert say(*(a_file(EVIL, name) for name in taken)).said() == [messages.TAKEN] * 5
    for names in ([PACK], [LARGE_BLOB], [FORMAT], [TRIAL, PACK]):
        assert say(messages.REMOVE.frame(names)).error == "refused"
    assert everything(root) == before
    assert say(messages.REMOVE.frame([TRIAL])).error == ""
    assert not (root / TRIAL).exists()


@pytest.mark.parametrize("allow", [["prune"], ["replace", "put"], ["prune", "replace"], ALLOWED])
def test_blobs_are_removed_with_a_right_of_their_own(root: Path, allow: Sequence[str]) -> None:
    digests = [digest_of(one) for one in (b"one", b"two", b"three")]
    for digest, content in zip(digests, (b"one", b"two", b"three"), strict=True):
        put(root, digest, content)
    outside = root / "outside"
    outside.write_bytes(b"outside")
    link = place_of(root, digests[2])
    link.unlink()
    link.symlink_to(outside)
    names = [relative_path(digest.hex()) for digest in digests]
    client, before = ScriptedSession(root, allow), everything(root)

    def say(*said: bytes) -> ScriptedSession:
        return client.say(*said, files=BY_HASH)

    may = {"prune", "replace"} <= set(allow)
    for wrong in ("outside", f"../{names[0]}", f"by-hash/{names[0]}", f"blobs/{names[0]}", FORMAT):
        assert say(messages.REMOVE.frame([wrong])).error == (
            "protocol" if "prune" in allow else "refused"
        )
    for other in (
        messages.FILES.frame(""),
        messages.READ.frame(0, 9, names[0]),
        messages.PROVE.frame(messages.SHA256, names[0]),
        messages.FILE_DATA.frame(0, b"evil"),
        client.batch(1, [b"good"]),
        PLACE,
    ):
        assert say(other).error in ("refused", "protocol")
    assert everything(root) == before
    say(messages.REMOVE.frame([names[0], relative_path("0" * 64), names[2]]))
    assert client.error == ("" if may else "refused")
    assert place_of(root, digests[0]).exists() == (not may)
    assert link.is_symlink() == (not may)
    assert outside.read_bytes() == b"outside"
    assert place_of(root, digests[1]).read_bytes() == b"two"
    packs = ScriptedSession(root, [*allow, "packs"])
    assert (
        packs._files(PACKS, *(a_file(b"good", name) for name in (PACK, LARGE_BLOB, FORMAT))).error
        == ""
    )
    assert packs._files(PACKS, messages.REMOVE.frame([PACK, FORMAT])).error == "refused"
    assert packs._files(PACKS, messages.REMOVE.frame([PACK, LARGE_BLOB])).error == (
        "" if may else "refused"
    )
    assert [(root / name).exists() for name in (PACK, LARGE_BLOB, FORMAT)] == [
        not may,
        not may,
        True,
    ]


@stops("a marker, or files of checks, that are large or many")
def test_markers_and_trials_are_small_and_few(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedSession(root, ["packs"])
    for name in (FORMAT, TRIAL):
        assert client._files(PACKS, a_file(bytes(MAX_RECORD + 1), name)).error == "protocol"
    assert everything(root) == {}
    monkeypatch.setattr(file_areas, "MAX_TRIALS", 3)
    for number in range(3):
        assert client._files(PACKS, a_file(b"", f"packs/trial-{number}")).error == ""
    assert client._files(PACKS, a_file(b"", "packs/trial-9")).error == "packs"
    assert client._files(PACKS, a_file(b"good", PACK)).error == ""
    assert len(everything(root / "packs")) == 5
    monkeypatch.setattr(file_areas.PackArea, "levels", (2, 1, 1))
    assert client._files(PACKS, a_file(b"good", PACK.replace("ab", "cd"))).error == "packs"


@stops("content of packs without `get`: READ, or sums of what it does not know")
def test_packs_are_read_with_a_right_of_its_own(root: Path, checking: str) -> None:
    client = ScriptedSession(root, ["packs"], checking)
    stored = {PACK: b"good", FORMAT: b"{}"}
    client._files(PACKS, *(a_file(content, name) for name, content in stored.items()))
    assert client._files(PACKS, messages.READ.frame(0, 9, PACK)).error == "refused"
    assert client._files(PACKS, messages.READ.frame(0, 9, FORMAT)).error == ""
    assert messages.PIECE in client.kinds
    client._files(PACKS, proving(PACK), proving(PACK.replace("1", "2")))
    assert client.sums() == [(4, hashlib.sha256(b"good").digest())]
    assert client.said() == [messages.MISSING]
    assert messages.PIECE not in client.kinds
    client._files(PACKS, proving(PACK, messages.BLAKE3))
    assert client.error == ("" if checking == "blake3" else "protocol")
    assert client._files(PACKS, proving(PACK, 9)).error == "protocol"


def test_a_sum_is_of_the_disk_whatever_was_read_before(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this session has read lately lies in memory: its sum would prove the memory."""
    client, calls, pread = ScriptedSession(root, ["packs", "get"]), list[str](), os.pread

    def noted(fd: int, length: int, start: int) -> bytes:
        calls.append("read")
        return pread(fd, length, start)

    client._files(PACKS, a_file(b"good", PACK))
    for module in (file_areas, file_session):
        monkeypatch.setattr(module, "forget", lambda fd: calls.append("forget"))
    monkeypatch.setattr(os, "pread", noted)
    client._files(PACKS, messages.READ.frame(0, 9, PACK), proving(PACK))
    assert calls[-4:] == ["forget", "read", "read", "forget"]
    store = FileStoreByDirectory(str(root), open_stores.PACK_AREA)
    assert store.fetch(PACK, 0, 4) == b"good"
    monkeypatch.setattr(by_directory, "forget", lambda fd: calls.append("forget"))
    store.prove(PACK)
    store.close()
    assert calls[-4:] == ["forget", "read", "read", "forget"]


@stops("files without end or name: slots, what follows an end, a name before it")
@pytest.mark.parametrize(("area", "name"), [(PACKS, PACK), (SNAPSHOTS, f"{VERSION}/map")])
def test_files_under_way_are_few_and_in_order(root: Path, area: str, name: str) -> None:
    client = ScriptedSession(root, ["packs", "snapshot"])
    data, end = messages.FILE_DATA.frame(0, EVIL), messages.FILE_END.frame(0)
    publish = messages.PUBLISH.frame(0, name)
    over = bytes([messages.MAX_OPEN])
    for said in (
        [framing.frame(messages.FILE_DATA, over, EVIL)],
        [framing.frame(messages.FILE_END, over)],
        [framing.frame(messages.PUBLISH, over, name.encode())],
        [framing.frame(messages.DISCARD, over)],
        [publish],
        [data, publish],
        [data, end, data],
        [data, end, end],
        [data, end, messages.DISCARD.frame(0), publish],
        [data, end, publish, publish],
    ):
        assert client._files(area, *said).error == "protocol"
        for left in (path for path in root.rglob("*") if path.is_file()):
            assert str(left.relative_to(root)).endswith(name), left
    slots = range(messages.MAX_OPEN)
    client._files(area, *(messages.FILE_DATA.frame(slot, EVIL) for _ in "12" for slot in slots))
    assert client.error == ""
    assert not list(root.rglob(".incoming-*"))


@stops("REMOVE, to have no good snapshot left")
@pytest.mark.parametrize("allow", [("snapshot", "get"), ("snapshot", "get", "replace")])
def test_files_of_snapshots_are_removed_with_a_right_of_its_own(
    root: Path, allow: Sequence[str]
) -> None:
    client, name = ScriptedSession(root, allow), f"{VERSION}/map"
    assert client.snapshots(a_file(b"good", name)).error == ""
    client.snapshots(messages.REMOVE.frame([name]))
    assert client.error == ("" if "replace" in allow else "refused")
    assert (root / "snapshots" / name).exists() == ("replace" not in allow)


@stops("sets, versions and files of snapshots without end")
def test_sets_and_versions_are_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_areas.SnapshotArea, "levels", (2, 2))
    client = ScriptedSession(root, ["snapshot"])
    taken = [f"{each}/20260304T120000Z-{token:08x}/map" for each in "ab" for token in range(2)]
    for name in taken:
        assert client.snapshots(a_file(b"good", name)).error == ""
    for name in (f"c{taken[0][1:]}", f"a/20260304T120000Z-{2:08x}/map"):
        assert client.snapshots(a_file(EVIL, name)).error == "snapshot"
    client.snapshots(a_file(b"good", f"{taken[0][:-3]}manifest"), messages.FILES.frame(""))
    assert len(client.listed()) == 5


@stops("a name whose time lies in the future, to stay the newest file")
def test_no_name_is_of_a_time_more_than_a_day_ahead(root: Path) -> None:
    client = ScriptedSession(root, ["dump", "snapshot"])
    now = datetime.now(UTC)
    far = now + timedelta(days=1, minutes=1)
    for moment in (far, datetime(9999, 12, 31, 23, 59, 59)):
        stamp = f"{moment:{STAMP}}"
        for ending in ("", ".age", ".json"):
            assert client.dumps(a_file(EVIL, f"{stamp}-0badcafe.dump{ending}")).error == "time"
        for file in ("map", "manifest", "pack-00001"):
            assert client.snapshots(a_file(EVIL, f"db/{stamp}-0badcafe/{file}")).error == "time"
    assert everything(root) == {}
    near = f"{now + timedelta(hours=23):{STAMP}}-0badcafe"
    assert client.dumps(a_dump(b"good", f"{near}.dump")).error == ""
    assert client.snapshots(a_file(b"good", f"db/{near}/map")).said() == [messages.SUCCEEDED]


@stops("a record that is not that of the dump it sent")
def test_a_dump_is_named_with_its_own_size_and_sum(root: Path) -> None:
    client = ScriptedSession(root, ["dump"])
    for record in ({"bytes": 3}, {"sha256": "00" * 32}, {"bytes": "4"}, {"sha256": None}):
        assert client.dumps(a_dump(EVIL, GOOD, **record)).error == "protocol"
        (root / "pgdump" / f"{GOOD}.json").unlink()
    for text in (b"", b"[]", b"{", b"[" * 4000, b"{}" + bytes(MAX_RECORD - 2)):
        assert client.dumps(a_file(text, f"{GOOD}.json"), a_file(EVIL, GOOD)).error == "protocol"
        (root / "pgdump" / f"{GOOD}.json").unlink()
    assert client.dumps(a_file(b"{}" + bytes(MAX_RECORD), f"{GOOD}.json")).error == "protocol"
    for ending in ("", ".age"):
        assert client.dumps(a_file(EVIL, GOOD + ending)).error == "protocol"
    assert list((root / "pgdump").iterdir()) == []
    # Nobody but who has a key knows what is in a sealed one.
    client.dumps(a_file(a_record(EVIL), f"{GOOD}.json"), a_file(b"sealed", f"{GOOD}.age"))
    assert client.said() == [messages.SUCCEEDED, messages.SUCCEEDED]


@stops("REMOVE, to have no good dump left, after putting worthless ones beside them")
@pytest.mark.parametrize("allow", [("dump",), ("dump", "replace")])
def test_what_was_the_newest_dump_lately_stays(root: Path, allow: Sequence[str]) -> None:
    client, day = ScriptedSession(root, allow), 86400
    noon = time.time() // day * day - day // 2
    good = {f"20260304T120000Z-{number:08x}.dump": noon - number * day for number in range(12)}
    *_, oldest = good  # All of them need it: they are a series.
    for name, arrived in good.items():
        assert client.dumps(a_dump(b"good", name, base=oldest)).error == ""
        os.utime(root / "pgdump" / name, (arrived, arrived))
    stamp = f"{datetime.now(UTC) + timedelta(hours=23):{STAMP}}"
    evil = [f"{stamp}-{number:08x}.dump" for number in range(20)]
    client.dumps(*(a_dump(EVIL, name, number=10**9) for name in evil))
    assert client.error == ""

    # Something that is put beside a good dump makes it no younger.
    client.dumps(*(a_file(EVIL, f"{name}.age") for name in good))
    endings = ("", ".age", ".json")
    for name in (*good, *evil):
        client.dumps(messages.REMOVE.frame([f"{name}.json"]))
    client.dumps(messages.REMOVE.frame(one + end for one in (*good, *evil) for end in endings))

    assert client.error == ""
    left = {path.name for path in (root / "pgdump").glob("*.dump")}
    if "replace" in allow:
        assert left == set()
    else:
        assert left & set(good) == {*list(good)[:6], oldest}
        assert len(left & set(evil)) <= 3


@stops("frames out of order, of no known type, or with another checksum")
def test_what_is_not_in_order_ends_the_session_and_leaves_nothing(root: Path) -> None:
    client = ScriptedSession(root)
    batch, pack = messages.BATCH.frame(1, 10, 1000), client.raw_pack(bytes(41))
    large, data = messages.LARGE.frame(LOW, 1000, 0), b"".join(Frames(root).pieces(b"abc"))
    end = messages.END.frame(messages.COMPLETE, LOW)
    altered = bytearray(PLACE)
    altered[-1] ^= 1
    for said in (
        *([each] for each in (pack, large, data, end, commit(1), abort(1))),
        *([batch, each] for each in (batch, data, end, BYE, commit(2), abort(0))),
        [batch, commit(1), commit(1)],
        [batch, commit(1), batch],
        *([batch, large, each] for each in (large, pack, commit(1), abort(0), BYE)),
        [batch, large, messages.ASK_OFFSET.frame(LOW, 1 << 30)],
        [batch, large, data, end],
        [batch, large, messages.END.frame(messages.COMPLETE)],
        [batch, large, messages.END.frame(messages.WITHDRAWN, LOW)],
        [batch, large, messages.END.frame(7)],
        [batch, messages.LARGE.frame(LOW, 1000, 500)],
        [messages.BATCH.frame(1, 1, 1 << 40), messages.LARGE.frame(LOW, 1 << 40, 1 << 30)],
        [BYE, BYE],
        [client.hello_frame()],
        *([framing.frame(kind, b"{}")] for kind in (messages.PONG, messages.READY, 99)),
        [bytes(altered)],
        [b"GET / HTTP/1.1\r\n"],
    ):
        assert client.say(PLACE, *said).error == "protocol", said
        assert everything(root) == {"by-hash": b""}


@stops("nothing of BLAKE3, where `--require blake3` asks for it")
@pytest.mark.parametrize("hashed", HASHES)
def test_what_is_required_and_lacking_serves_nobody(root: Path, checking: str, hashed: str) -> None:
    (root / "by-hash").mkdir()
    client = ScriptedSession(root, ALLOWED, checking, hashed, ["blake3"])
    for reading in (0, 1):
        client.say(BYE, reading=reading)
        if checking == "none":
            assert client.error == "refused"
            assert re.search(r"no BLAKE3.*apt-get install b3sum", client.error_text)
        elif hashed == "blake3" and checking == "b3sum":
            assert client.error == "protocol"
        else:
            assert client.error == ""
    assert [path.name for path in root.iterdir()] == ["by-hash"]


@stops("`names` of BLAKE3, where `--require sha256` asks for SHA-256")
def test_where_names_of_sha256_are_required_no_others_are_put(root: Path, checking: str) -> None:
    (root / "by-hash").mkdir()
    client = ScriptedSession(root, ALLOWED, checking, "sha256", ["sha256"])
    for said, error in (
        ({}, "refused"),
        ({"names": "sha256"}, ""),
        ({"reading": 1}, ""),
        ({"files": DUMPS}, ""),
    ):
        assert client.say(BYE, **said).error == error
    assert [path.name for path in root.iterdir()] == ["by-hash"]
