"""What is answered is on the disk, what is visible is complete, and a failing disk is told of.

strace shows the order of the system calls, and makes single ones fail: a disk that fails in a sync,
a kernel that lacks a call.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ntt_backup.wire import framing, messages
from tests.helpers.receivers import (
    Events,
    RemoteReceiver,
    ScriptedSession,
    Trace,
    a_dump,
    a_file,
    assert_complete,
    commit,
    digest_of,
    failure,
    litter,
    lock_only,
    names_under,
    place_of,
    put,
    trace,
)

__all__ = ["trace"]
MIB = 1 << 20


def make_directories(root: Path, *contents: bytes) -> None:
    """Those where these blobs belong, as earlier batches have left them."""
    for content in contents:
        place_of(root, digest_of(content)).parent.mkdir(parents=True)


# --- the order


@pytest.mark.usefixtures("placed")
def test_a_file_system_that_cannot_sync_directories_takes_all_kinds_of_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def as_on_a_share(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", as_on_a_share)
    client = ScriptedSession(root, ["put", "dump", "snapshot"])
    client.say(client.batch(1, [b"content"]), sync="fsync")
    assert client.receipts()[0].stored == 1
    client.dumps(a_dump(b"content", "20260304T120000Z-0badcafe.dump"))
    assert client.said() == [messages.SUCCEEDED, messages.SUCCEEDED]
    client.snapshots(a_file(b"content", "a/20260304T120000Z-0badcafe/map"))
    assert client.said() == [messages.SUCCEEDED]


@pytest.mark.parametrize("there", [False, True], ids=["new directories", "directories are there"])
def test_a_batch_is_written_synced_published_synced_and_answered(
    trace: Trace, root: Path, tmp_path: Path, there: bool
) -> None:
    with RemoteReceiver(root, trace("-y", "-e", "trace=write,syncfs,renameat2")) as receiver:
        (root / "by-hash").mkdir()
        if there:
            make_directories(root, b"a", b"b", b"c")
        assert receiver.hello()["sync"] == "syncfs"
        receiver.write(receiver.batch(1, [b"a", b"b", b"c"]))
        assert receiver.receipt().stored == 3
        assert receiver.bye() == 0
    seen = Events(tmp_path / "trace")
    ready = seen.first("write", "free_bytes")
    named = seen.first("renameat2", "", ready, ended=False)
    receipt = seen.first("write", "(1<", ready, ended=False)
    written = seen.last("write", ".ntt-incoming", named)
    first = seen.first("syncfs", "", written, ended=False)
    last_named = seen.last("renameat2", "", receipt)
    second = seen.first("syncfs", "", last_named, ended=False)

    assert written < first <= seen.first("syncfs", "", first - 1) < named
    assert last_named < second <= seen.first("syncfs", "", second - 1) < receipt
    assert seen.count("write", ".ntt-incoming", ready, first) == 3
    assert seen.count("renameat2", "", ready, receipt) == 3
    assert seen.count("syncfs", "", ready, receipt) == 2


@pytest.mark.parametrize("there", [False, True], ids=["new directories", "directories are there"])
def test_without_syncfs_every_file_and_directory_is_synced(
    trace: Trace, root: Path, tmp_path: Path, there: bool
) -> None:
    kept = put(root, digest_of(b"kept"), b"kept")
    if there:
        make_directories(root, b"a", b"b")
    with RemoteReceiver(
        root, trace("-y", "-e", "trace=write,close,fsync,syncfs,renameat2")
    ) as receiver:
        assert receiver.hello(sync="fsync")["sync"] == "fsync"
        receiver.write(receiver.batch(1, [b"a", b"b", b"kept"]))
        assert receiver.receipt().stored == 2
        assert receiver.bye() == 0
    seen = Events(tmp_path / "trace")
    ready = seen.first("write", "free_bytes")
    named = seen.first("renameat2", "", ready, ended=False)
    receipt = seen.first("write", "(1<", ready, ended=False)
    last_named = seen.last("renameat2", "", receipt)

    assert seen.count("fsync", ".ntt-incoming", ready, named) == 3
    assert seen.count("fsync", str(kept), named, receipt) == 1
    for content in (b"a", b"b", b"kept"):
        path = place_of(root, digest_of(content))
        for directory in (path.parent, path.parent.parent, root / "by-hash"):
            assert seen.count("fsync", f"{directory}>", last_named, receipt) == 1
    assert seen.count("fsync", f"{root}>", last_named, receipt) == 1
    assert not seen.count("syncfs", "", -1, receipt)


# --- a disk that fails


@pytest.mark.parametrize(
    ("name", "when", "visible"), [("EIO", 1, set()), ("ENOSPC", 2, {"a", "b"})]
)
def test_a_failed_sync_fails_the_batch(
    trace: Trace, root: Path, name: str, when: int, visible: set[str]
) -> None:
    with RemoteReceiver(root, trace("-e", f"inject=syncfs:error={name}:when={when}")) as receiver:
        receiver.hello()
        receiver.write(receiver.batch(1, [b"a", b"b"]))

        assert failure(receiver.receipt()).startswith(f"{name}: ")

        assert names_under(root) == {digest_of(text.encode()).hex() for text in visible}
        assert lock_only(root)
        receiver.write(receiver.batch(2, [b"a", b"c"]))
        assert receiver.receipt().outcome == messages.SETTLED
        assert receiver.bye() == 0
    assert_complete(root)


def test_a_failed_sync_fails_what_was_written_meanwhile_too(trace: Trace, root: Path) -> None:
    # The system tells of a lost page once, and not whose it was.
    slow = "inject=syncfs:error=EIO:when=1:delay_exit=1000000"
    with RemoteReceiver(root, trace("-e", slow)) as receiver:
        receiver.hello()
        receiver.write(receiver.batch(1, [b"a"]))
        receiver.write(receiver.batch(2, [b"b"]))
        receiver.write(messages.BATCH.frame(3, 2, 2) + receiver.pack([b"c"]))
        receiver.ping()
        receipts = [receiver.receipt() for _ in range(3)]

        assert sorted(receipt.number for receipt in receipts) == [1, 2, 3]
        assert all(failure(receipt).startswith("EIO: ") for receipt in receipts)
        receiver.write(receiver.pack([b"d"]) + commit(3))
        receiver.write(receiver.batch(4, [b"e"]))
        assert receiver.receipt().stored == 1
    assert names_under(root) == {digest_of(b"e").hex()}


@pytest.mark.parametrize(
    ("name", "hashed"), [("EDQUOT", "sha256"), ("ENOSPC", "blake3"), ("EACCES", "blake3")]
)
def test_no_room_for_a_directory_fails_the_batch(
    trace: Trace, root: Path, name: str, hashed: str
) -> None:
    # The fourth directory: after by-hash, .ntt-incoming and the stage.
    with RemoteReceiver(root, trace("-e", f"inject=mkdirat,mkdir:error={name}:when=4")) as receiver:
        receiver.hello(hash=hashed)
        receiver.write(receiver.batch(1, [b"a", b"b"]))
        assert failure(receiver.receipt()).startswith(f"{name}: ")
        assert lock_only(root)
        receiver.write(receiver.batch(2, [b"a", b"b"]))
        assert receiver.receipt().stored == 2


def test_a_limit_of_directories_in_one_is_no_failure(trace: Trace, root: Path) -> None:
    """A file system may limit them, and a batch may have more. The first of two does not fit."""
    with RemoteReceiver(root, trace("-e", "inject=mkdirat,mkdir:error=EMLINK:when=4")) as receiver:
        receiver.hello()
        receiver.write(receiver.batch(1, [b"a", b"b"]))
        assert receiver.receipt().stored == 2
        assert lock_only(root)
    assert names_under(root) == {digest_of(b"a").hex(), digest_of(b"b").hex()}


def test_a_name_that_cannot_be_given_is_refused_alone(trace: Trace, root: Path) -> None:
    # As for a name in a directory that was made immutable.
    refusing = ("-e", "inject=renameat2:error=EPERM:when=1", "-e", "inject=linkat:error=EPERM")
    rename = ("-e", "inject=renameat:error=EPERM:when=1")
    make_directories(root, b"a", b"b")
    with RemoteReceiver(root, trace(*refusing, *rename)) as receiver:
        receiver.hello()
        receiver.write(receiver.batch(1, [b"a", b"b"]))
        receipt = receiver.receipt()
        assert [exception.verdict for exception in receipt.exceptions] == [messages.REFUSED]
        assert receipt.exceptions[0].text.startswith("EPERM: ")
        assert receipt.stored == 1
        assert lock_only(root)


# --- a system that lacks something


@pytest.mark.parametrize(
    "lacking",
    [
        ["renameat2:error=ENOSYS"],
        ["renameat2:error=EINVAL"],
        ["renameat2:error=EINVAL", "linkat:error=EPERM"],
        ["renameat2:error=ENOSYS", "linkat:error=EOPNOTSUPP"],
    ],
    ids=" ".join,
)
def test_an_older_kernel_or_a_simpler_file_system_gives_the_same_verdicts(
    trace: Trace, root: Path, tmp_path: Path, lacking: list[str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    contents = [b"new", b"right", b"wrong", b"link", b"strange"]
    put(root, digest_of(b"right"), b"right")
    put(root, digest_of(b"wrong"), b"WRONG")
    place_of(root, digest_of(b"link")).parent.mkdir(parents=True)
    place_of(root, digest_of(b"link")).symlink_to(outside)
    strange = place_of(root, digest_of(b"strange")).parent
    strange.parent.mkdir(parents=True)
    strange.symlink_to(outside)
    options = [part for call in lacking for part in ("-e", f"inject={call}")]
    with RemoteReceiver(root, trace(*options)) as receiver:
        receiver.hello()
        receiver.write(receiver.batch(1, contents))

        receipt = receiver.receipt()

        assert {exception[:2] for exception in receipt.exceptions} == {
            (1, messages.PRESENT),
            (2, messages.REPLACED),
            (3, messages.REPLACED),
            (4, messages.REFUSED),
        }
        assert receipt.stored == 1
        assert lock_only(root)
        assert receiver.bye() == 0
    assert list(outside.iterdir()) == []
    for content in contents[:4]:
        assert place_of(root, digest_of(content)).read_bytes() == content


# --- a disk that is full, or read-only


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a small file system in memory, with these options."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True
        )
        if done.returncode != 0:
            pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize(
    ("size", "hashed"),
    [
        (300, "blake3"),
        (100_000, "sha256"),
        (3 * MIB, "sha256"),
        pytest.param(messages.RESUMABLE + MIB, "blake3", marks=pytest.mark.long),
    ],
)
def test_a_full_disk_fails_the_batch_and_leaves_nothing_of_it(
    disk: Callable[[str], Path], tmp_path: Path, size: int, hashed: str
) -> None:
    room = max(4 * MIB, 3 * size)
    root = disk(f"size={room}")
    count = min(3000, room // size + 20)
    contents = [number.to_bytes(4, "big") + os.urandom(100) for number in range(count)]
    contents = [(seed * (size // len(seed) + 1))[:size] for seed in contents[: max(count, 2)]]
    per_batch = max(1, min(1000, MIB // size))
    ballast = root / "ballast"
    ballast.write_bytes(bytes(room // 2))
    with RemoteReceiver(root) as receiver:
        receiver.hello(hash=hashed)
        outcomes = []
        parts = [contents[at : at + per_batch] for at in range(0, len(contents), per_batch)]
        for number, part in enumerate(parts):
            one_large = size > MIB
            receiver.write(
                receiver.batch(number, part[:1], large=True)
                if one_large
                else receiver.batch(number, part)
            )
            outcomes.append(receiver.receipt())
            assert_complete(root)
            if outcomes[-1].outcome == messages.FAILED:
                break
        assert failure(outcomes[-1]).startswith("ENOSPC: ")
        assert all(receipt.outcome == messages.SETTLED for receipt in outcomes[:-1])
        left = [path for path in litter(root) if path != "partial" and "." in path]
        assert len(left) == 2, left  # The stage and its lock.
        assert len(litter(root)) - len(left) <= 1

        ballast.unlink()
        receiver.write(
            receiver.batch(9999, part[:1], large=True) if one_large else receiver.batch(9999, part)
        )
        assert receiver.receipt().outcome == messages.SETTLED
        assert receiver.bye() == 0
    assert_complete(root)
    assert not (root / ".ntt-incoming").exists()


@pytest.mark.parametrize("prepared", [False, True])
def test_a_read_only_file_system_is_an_error_of_storage(
    disk: Callable[[str], Path], prepared: bool
) -> None:
    root = disk("size=1m")
    if prepared:
        (root / "by-hash").mkdir()
        (root / ".ntt-incoming").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    with RemoteReceiver(root) as receiver:
        receiver.write(receiver.hello_frame())
        code, text = receiver.error()
    assert code == "storage"
    assert text.startswith("EROFS: ")


# --- killed


@pytest.mark.parametrize("hashed", ["sha256", "blake3"])
def test_a_receiver_killed_at_any_moment_leaves_only_complete_blobs(
    root: Path, hashed: str
) -> None:
    chance = random.Random(f"kill -9 {hashed}")
    contents = [chance.randbytes(chance.choice([10, 3000, 60_000])) for _ in range(400)]
    answered: set[str] = set()
    for turn in range(6):
        with RemoteReceiver(root) as receiver:
            receiver.hello(hash=hashed)
            said = b"".join(
                receiver.batch(number, contents[at : at + 20])
                for number, at in enumerate(range(0, len(contents), 20))
            )
            cut = chance.randrange(len(said))
            answers = chance.randrange(
                said.count(framing.head(messages.COMMIT, 4 + framing.CRC_BYTES), 0, cut) + 1
            )
            receiver.write(said[:cut])
            for _ in range(answers):
                receipt = receiver.receipt()
                assert receipt.outcome == messages.SETTLED
                blobs = contents[receipt.number * 20 : receipt.number * 20 + 20]
                answered.update(digest_of(content).hex() for content in blobs)
            receiver.child.kill()
            receiver.child.wait()
        assert_complete(root)
        assert answered <= names_under(root), turn
    assert answered
    with RemoteReceiver(root) as receiver:
        receiver.hello(hash=hashed)
        assert lock_only(root)
        for number, at in enumerate(range(0, len(contents), 20)):
            receiver.write(receiver.batch(number, contents[at : at + 20]))
            assert receiver.receipt().outcome == messages.SETTLED
        assert receiver.bye() == 0
    assert names_under(root) == {digest_of(content).hex() for content in contents}
    assert not (root / ".ntt-incoming").exists()
