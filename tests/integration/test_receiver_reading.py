"""A session that reads: names, verdicts and contents, and what it cannot be made to do."""

from __future__ import annotations

import errno
import hmac
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from ntt_backup.blobdir.descriptors import syncfs
from ntt_backup.blobdir.walk import StrayKind, Tree
from ntt_backup.receiver import b3sum, read_session
from ntt_backup.receiver.read_session import listing
from ntt_backup.receiver.workspace import Workspace
from ntt_backup.wire import framing, messages
from tests.helpers.receivers import (
    RemoteReceiver,
    ScriptedSession,
    ask_hashes,
    digest_of,
    forced_command,
    litter,
    place_of,
    put,
)

pytestmark = pytest.mark.usefixtures("placed")

LOW, HIGH = bytes(32), b"\xff" * 32
MIB = 1 << 20


@pytest.fixture
def receiver(root: Path) -> Iterator[RemoteReceiver]:
    with RemoteReceiver(root) as receiver:
        receiver.hello(reading=True)
        yield receiver


def fill(root: Path, count: int, seed: int = 1) -> dict[bytes, bytes]:
    chance = random.Random(seed)
    blobs = {}
    for _ in range(count):
        content = chance.randbytes(chance.choice((0, 1, 1000, 20_000)))
        blobs[digest_of(content)] = content
        put(root, digest_of(content), content)
    return blobs


def listed(
    receiver: RemoteReceiver, low: bytes = LOW, high: bytes = HIGH, most: int = 0
) -> tuple[list[tuple[bytes, int]], list[tuple[int, str]], messages.Listed]:
    names: list[tuple[bytes, int]] = []
    strays: list[tuple[int, str]] = []
    receiver.write(messages.LIST.frame(low, high, most))
    while True:
        kind, payload = receiver.answer()
        if kind == messages.NAMES:
            names += messages.NAMES.read(payload)
        elif kind == messages.STRAY:
            strays.append(messages.STRAY.read(payload))
        else:
            assert kind == messages.LISTED, (kind, payload)
            return names, strays, messages.LISTED.read(payload)


def hashed(receiver: RemoteReceiver, digests: list[bytes]) -> list[messages.BlobHash]:
    kind, payload = receiver.ask(ask_hashes(digests))
    assert kind == messages.HASHED, (kind, payload)
    return messages.HASHED.read(payload)


def given(
    receiver: RemoteReceiver, digests: list[bytes], offset: int = 0
) -> dict[bytes, bytes | int | str]:
    """What came for each: content, the verdict of what is not given, or why it broke off."""
    receiver.write(messages.GET.frame(offset, digests))
    found: dict[bytes, bytes | int | str] = {}
    large, pieces = b"", bytearray()
    while True:
        kind, payload = receiver.answer()
        if kind == messages.CONTENTS:
            for digest, content in messages.CONTENTS.read(memoryview(payload)):
                found[digest] = bytes(content)
        elif kind == messages.BLOB:
            large, pieces = messages.BLOB.read(payload).digest, bytearray()
        elif kind == messages.PIECE:
            pieces += messages.PIECE.read(memoryview(payload))
        elif kind == messages.BLOB_END:
            status, text = messages.BLOB_END.read(payload)
            found[large] = text if status else bytes(pieces)
        elif kind == messages.NOT_GIVEN:
            digest, verdict, _ = messages.NOT_GIVEN.read(payload)
            found[digest] = verdict
        else:
            assert kind == messages.GIVEN, (kind, payload)
            assert int.from_bytes(payload, "big") == len(digests)
            return found


def test_names_are_listed_sorted_and_with_sizes(root: Path, receiver: RemoteReceiver) -> None:
    blobs = fill(root, 500)
    names, strays, said = listed(receiver)
    assert names == sorted((digest, len(content)) for digest, content in blobs.items())
    assert strays == []
    assert said == (len(blobs), sum(map(len, blobs.values())), 0, False)


@pytest.mark.parametrize("most", [1, 2, 7])
def test_names_can_be_listed_by_range_and_page_by_page(
    root: Path, receiver: RemoteReceiver, most: int
) -> None:
    alike = ["00" * 32, "0000" + "1" * 60, "0001" + "0" * 60, "0100" + "0" * 60, "ff" * 32]
    for name in alike:
        put(root, bytes.fromhex(name), b"")
    blobs = sorted([*fill(root, 300), *map(bytes.fromhex, alike)])
    low, high = blobs[40], blobs[200]
    assert [name for name, _ in listed(receiver, low, high)[0]] == blobs[40:201]
    strays = ["README", "00/x", "00/00/.tmp", "00/01/.tmp", "01/x", "ff/ff/" + "0" * 64]
    for name in strays:
        (root / "by-hash" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "by-hash" / name).touch()
    seen: list[bytes] = []
    told: list[str] = []
    low = LOW
    while True:
        names, met, said = listed(receiver, low, HIGH, most)
        seen += [name for name, _ in names]
        told += [path for _, path in met]
        if not said.more:
            break
        assert 0 < len(names) <= most
        low = (int.from_bytes(seen[-1], "big") + 1).to_bytes(32, "big")
    assert seen == blobs
    assert sorted(told) == sorted(strays)


def test_strays_are_listed_and_not_followed(root: Path, receiver: RemoteReceiver) -> None:
    (digest,) = fill(root, 1)
    by_hash = root / "by-hash"
    name = digest.hex()
    home = place_of(root, digest).parent
    (by_hash / "README").write_text("x")
    (home / "half.tmp").write_text("x")
    (by_hash / name[:2] / "zz").mkdir()
    os.symlink(home, by_hash / name[:2] / "link")
    wrong = "0" * 64 if name[:4] != "0000" else "1" * 64
    (home / wrong).write_text("x")
    link = name[:-1] + ("0" if name[-1] != "0" else "1")
    os.symlink("/etc/passwd", home / link)

    names, strays, said = listed(receiver)

    assert [name for name, _ in names] == [digest]
    assert said.strays == len(strays) == 6
    assert {path for _, path in strays} == {
        "README",
        f"{name[:2]}/zz",
        f"{name[:2]}/link",
        *(f"{name[:2]}/{name[2:4]}/{one}" for one in ("half.tmp", wrong, link)),
    }


def test_a_directory_with_files_that_have_no_size_is_told_as_unreadable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their inodes are damaged: they are no blobs that are gone."""
    blobs = fill(root, 3)
    good, bad, gone = sorted(blobs)
    size, files = len(blobs[good]), Tree._files
    codes = {bad.hex(): errno.EUCLEAN, gone.hex(): errno.ENOENT}

    class Damaged:
        def __init__(self, code: int) -> None:
            self._code = code

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            raise OSError(self._code, os.strerror(self._code))

    def damaged(tree: Tree, directory: str) -> Iterator[Any]:
        for blobid, entry in map(tuple, files(tree, directory)):
            yield blobid, Damaged(codes[blobid]) if blobid in codes else entry

    workspace = Workspace(str(root))
    monkeypatch.setattr(Tree, "_files", damaged)
    asked = messages.Range(LOW, HIGH, 0)
    answer = list(listing(workspace, asked, lambda: None))
    workspace.leave()

    place = f"{bad.hex()[:2]}/{bad.hex()[2:4]}"
    assert answer == [
        messages.STRAY.frame(list(StrayKind).index(StrayKind.UNREADABLE), place),
        messages.NAMES.frame([(good, size)]),
        messages.LISTED.frame(*messages.Listed(1, size, 1, False)),
    ]


@pytest.mark.parametrize("checking", ["blake3", "b3sum"])
def test_each_kind_of_damage_has_its_verdict(root: Path, checking: str) -> None:
    blobs = fill(root, 50)
    wrong, missing, link, fifo, cut, *right = blobs
    place_of(root, wrong).write_bytes(b"rotten")
    place_of(root, missing).unlink()
    place_of(root, link).unlink()
    place_of(root, link).symlink_to("/etc/passwd")
    place_of(root, fifo).unlink()
    os.mkfifo(place_of(root, fifo))
    big = random.Random(5).randbytes(3 * MIB)
    put(root, digest_of(big), big)
    place_of(root, cut).write_bytes(b"")
    asked = [*right, missing, wrong, digest_of(big), link, fifo]

    with RemoteReceiver(root, forced_command("--root", str(root), checking=checking)) as receiver:
        assert receiver.banner["check"] == checking
        receiver.hello(reading=True)
        said = hashed(receiver, asked)
        # A second question is answered too, and the empty blob's digest may be among them.
        again = hashed(receiver, right)

    right_sums = [messages.BlobHash(messages.WHOLE, len(blobs[one]), one) for one in right]
    assert said == [
        *right_sums,
        messages.BlobHash(messages.MISSING, 0, bytes(32), "it is not there"),
        messages.BlobHash(messages.WHOLE, 6, digest_of(b"rotten")),
        messages.BlobHash(messages.WHOLE, len(big), digest_of(big)),
        messages.BlobHash(messages.WRONG, 0, bytes(32), "a symlink or a socket is in its place"),
        messages.BlobHash(messages.WRONG, 0, bytes(32), "it is a FIFO"),
    ]
    assert again == right_sums
    assert litter(root) == []


@pytest.mark.parametrize("checking", ["blake3", "b3sum", "none"])
def test_sums_by_a_key_are_those_of_the_content(root: Path, checking: str) -> None:
    if checking == "b3sum" and b3sum.find() is None:
        pytest.skip("b3sum is not installed")
    blobs = fill(root, 70)
    wrong, missing, *right = blobs
    place_of(root, wrong).write_bytes(b"rotten")
    place_of(root, missing).unlink()
    key = bytes(range(32))
    by_key: dict[int, Callable[[bytes], bytes]] = {
        messages.BLAKE3: lambda content: blake3(content, key=key).digest(),
        messages.SHA256: lambda content: hmac.digest(key, content, "sha256"),
    }
    if checking == "none":
        del by_key[messages.BLAKE3]
    with RemoteReceiver(root, forced_command("--root", str(root), checking=checking)) as receiver:
        assert receiver.banner["check"] == checking
        receiver.hello(reading=True, hash="sha256")
        for kind, sum_of in by_key.items():
            question = messages.VERIFY.frame(kind, key, [*right, wrong, missing])
            answer, payload = receiver.ask(question)
            assert answer == messages.SUMS
            contents = [*(blobs[one] for one in right), b"rotten"]
            assert messages.SUMS.read(payload) == [
                *((messages.WHOLE, sum_of(content)[:12]) for content in contents),
                (messages.MISSING, bytes(12)),
            ]


def test_a_program_that_knows_no_keys_proves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blobs = fill(root, 3)
    program = tmp_path / "b3sum"
    program.write_text(f"#!/bin/sh\nfor each; do :; done\necho {'0' * 64}'  '$each\n")
    program.chmod(0o755)
    monkeypatch.setattr(b3sum, "find", lambda: b3sum.B3sum(str(program)))
    client = ScriptedSession(root, allow=["verify"], checking="b3sum")
    client.read(messages.VERIFY.frame(messages.BLAKE3, bytes(32), blobs))
    assert client.error == "internal"
    assert "gives wrong answers" in client.error_text


@pytest.mark.parametrize("checking", ["blake3", "b3sum"])
def test_what_is_hashed_comes_from_the_disk_and_stays_in_no_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch, checking: str
) -> None:
    """Else a blob that was written lately would be proved by the page cache."""
    if checking == "b3sum" and b3sum.find() is None:
        pytest.skip("b3sum is not installed")
    blobs = fill(root, 3)
    told: list[tuple[str, str]] = []
    advise, read = os.posix_fadvise, os.readv

    def forgets(fd: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        told.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, "forget"))
        advise(fd, offset, length, advice)

    def reads(fd: int, buffers: Any) -> int:
        told.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, "read"))
        return read(fd, buffers)

    monkeypatch.setattr(os, "posix_fadvise", forgets)
    monkeypatch.setattr(os, "readv", reads)
    client = ScriptedSession(root, allow=["verify"], checking=checking)
    client.read(ask_hashes(blobs))
    for digest in blobs:
        steps = [what for name, what in told if name == digest.hex()]
        reads_of_it = 0 if checking == "b3sum" else 1
        assert steps == ["forget", *["read"] * reads_of_it, "forget"]


@pytest.mark.parametrize("reaches_disk", [True, False])
def test_what_is_proved_is_durable_before_it_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, reaches_disk: bool
) -> None:
    """Another program may have put it there a moment ago, and a mark rests on the answer."""
    blobs = fill(root, 3)
    told: list[tuple[str, str]] = []

    def note(step: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *more: Any) -> Any:
            told.append((step, Path(os.readlink(f"/proc/self/fd/{fd}")).name))
            return real(fd, *more)

        return call

    monkeypatch.setattr(read_session, "can_syncfs", lambda device: reaches_disk)
    monkeypatch.setattr(read_session, "syncfs", note("sync", syncfs))
    for name, step in (("fsync", "sync"), ("readv", "read")):
        monkeypatch.setattr(os, name, note(step, getattr(os, name)))
    client = ScriptedSession(root, allow=["verify"])
    client.read(messages.VERIFY.frame(messages.SHA256, bytes(32), blobs))
    assert client.kinds == [messages.READY, messages.SUMS]
    for digest in blobs:
        name = digest.hex()
        before = told[: told.index(("read", name))]
        wanted = ["by-hash"] if reaches_disk else [name, name[2:4], name[:2], "by-hash"]
        assert {("sync", one) for one in wanted} <= set(before)
    told.clear()
    client.read(ask_hashes(blobs))
    assert not [step for step, _ in told if step == "sync"]


def test_a_failed_sync_proves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    blobs = fill(root, 3)
    monkeypatch.setattr(read_session, "can_syncfs", lambda device: True)
    monkeypatch.setattr(read_session, "syncfs", fail)
    client = ScriptedSession(root, allow=["verify"])
    client.read(messages.VERIFY.frame(messages.SHA256, bytes(32), blobs))
    assert client.kinds == [messages.READY, messages.ERROR]
    assert client.error == "storage"
    assert client.error_text.startswith("EIO")


def test_a_program_that_fails_says_nothing_of_any_blob(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = fill(root, 3)
    monkeypatch.setattr(b3sum, "find", lambda: b3sum.B3sum("/nowhere/b3sum"))
    client = ScriptedSession(root, allow=["verify"], checking="b3sum")
    client.read(ask_hashes(blobs))
    assert client.kinds == [messages.READY, messages.ERROR]
    assert client.error == "internal"
    assert "cannot be started" in client.error_text


def test_small_and_large_contents_are_sent_back(root: Path, receiver: RemoteReceiver) -> None:
    blobs: dict[bytes, bytes] = fill(root, 300)
    chance = random.Random(9)
    for size in (MIB - 37, MIB - 36, MIB - 35, MIB, MIB + 1, 5 * MIB + 17):
        content = chance.randbytes(size)
        blobs[digest_of(content)] = content
        put(root, digest_of(content), content)
    gone = digest_of(b"never stored")
    assert given(receiver, [*blobs, gone]) == {**blobs, gone: messages.MISSING}
    large = max(blobs, key=lambda one: len(blobs[one]))
    assert given(receiver, [large], 3 * MIB) == {large: blobs[large][3 * MIB :]}
    assert receiver.bye() == 0


def test_a_missing_by_hash_is_gone_and_not_made(root: Path) -> None:
    (root / "by-hash").rmdir()
    with RemoteReceiver(root) as receiver:
        assert receiver.hello(reading=True)["placed"] == 0
        receiver.write(messages.LIST.frame(LOW, HIGH, 0))
        assert receiver.error()[0] == "gone"
    assert list(root.iterdir()) == []


def test_a_question_that_cannot_be_ends_the_session(root: Path) -> None:
    for kind, payload in (
        (messages.VERIFY, bytes(34)),
        (messages.VERIFY, b"\2" + bytes(64)),
        (messages.GET, bytes(7)),
        (messages.GET, b"\0\0\0\0\0\0\0\1" + bytes(64)),
        (messages.LIST, bytes(67)),
        (messages.VERIFY, bytes(33 + 32 * (messages.MAX_DIGESTS + 1))),
    ):
        client = ScriptedSession(root, ["list", "verify", "get"])
        assert client.read(framing.frame(kind, payload)).error == "protocol"


def test_answers_that_the_client_does_not_read_fill_no_memory(
    root: Path, receiver: RemoteReceiver
) -> None:
    """Many times over the same blob, asked for and not taken: the receiver waits."""
    content = random.Random(3).randbytes(8 * MIB)
    put(root, digest_of(content), content)
    for _ in range(40):
        receiver.write(messages.GET.frame(0, [digest_of(content)]))
    taken = 0
    for _ in range(40):
        kind = 0
        while kind != messages.GIVEN:
            kind, payload = receiver.answer()
            taken += len(payload) if kind == messages.PIECE else 0
    assert taken > 40 * len(content)
    assert receiver.peak_kilobytes() < 100_000
