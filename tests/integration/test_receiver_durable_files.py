"""What is answered for dumps, snapshots and large blobs is on the disk, in an order that holds.

strace shows the order: content before its name, and the name before the answer.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from ntt_backup.wire import messages
from tests.helpers.receivers import (
    Events,
    RemoteReceiver,
    Trace,
    a_dump,
    a_file,
    commit,
    digest_of,
    place_of,
    trace,
)

__all__ = ["trace"]

MIB = 1 << 20
DUMP = "20260304T120000Z-0badcafe.dump"
VERSION = "db/20260304T120000Z-0badcafe"
CALLS = "trace=write,fsync,fdatasync,syncfs,renameat2,unlink,unlinkat"
# More than what is synced while more comes in, and what comes behind that.
SIZES = [1, 32 * MIB + 1]


def names_are_durable(seen: Events, directories: list[Path], after: int, before: int) -> None:
    """Each directory is synced between these lines, which tell of a name and of the answer."""
    for directory in directories:
        assert seen.count("fsync", f"{directory}>", after, before) == 1, directory


@pytest.mark.parametrize("size", SIZES)
def test_a_dump_is_written_synced_named_synced_and_answered(
    trace: Trace, root: Path, tmp_path: Path, size: int
) -> None:
    content = bytes(size)
    with RemoteReceiver(root, trace("-y", "-e", CALLS, allow="dump")) as receiver:
        receiver.hello(place=False, files="pgdump")
        receiver.write(a_dump(content, DUMP))
        for _ in ("the dump", "its record"):
            assert receiver.answer()[0] == messages.FILE_SUM
        for _ in ("the record", "its dump"):
            assert receiver.answer() == (messages.FILE_SAID, bytes([messages.SUCCEEDED]))
        assert receiver.bye() == 0
    seen = Events(tmp_path / "trace")
    record_named = seen.first("renameat2", f'"{DUMP}.json"', ended=False)
    named = seen.first("renameat2", f'"{DUMP}"', ended=False)
    assert record_named < named
    # Both were written and synced before they were named, and before their sums were told.
    summed = seen.first("write", "(1<", seen.last("write", ".incoming-", record_named), ended=False)
    assert summed < record_named
    between = seen.first("write", "(1<", record_named, ended=False)
    assert between < named
    names_are_durable(seen, [root / "pgdump", root], record_named, between)
    answer = seen.first("write", "(1<", named, ended=False)
    last_named = seen.last("renameat2", "", answer)
    names_are_durable(seen, [root / "pgdump", root], last_named, answer)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_a_snapshot_is_written_synced_named_synced_and_answered(
    trace: Trace, root: Path, tmp_path: Path, size: int
) -> None:
    with RemoteReceiver(root, trace("-y", "-e", CALLS, allow="snapshot")) as receiver:
        receiver.hello(place=False, files="snapshots")
        receiver.write(a_file(bytes(size), f"{VERSION}/map"))
        assert receiver.answer()[0] == messages.FILE_SUM
        assert receiver.answer() == (messages.FILE_SAID, bytes([messages.SUCCEEDED]))
        assert receiver.bye() == 0
    seen = Events(tmp_path / "trace")
    named = seen.first("renameat2", '"map"', ended=False)
    written = seen.last("write", ".incoming-", named)
    summed = seen.first("write", "(1<", written, ended=False)
    assert written < seen.first("fsync", ".incoming-", written) < summed < named
    answer = seen.first("write", "(1<", named, ended=False)
    place = root / "snapshots" / VERSION
    above = [place, place.parent, root / "snapshots", root]
    names_are_durable(seen, above, seen.last("renameat2", "", answer), answer)


def test_a_file_is_durable_before_its_sum_is_told(trace: Trace, root: Path, tmp_path: Path) -> None:
    """A sum may be the receipt of a file that an earlier session has named, and not synced."""
    name = f"packs/00/{0:016x}-{0:016x}-{0:032x}.tar"
    (root / name).parent.mkdir(parents=True)
    (root / name).write_bytes(b"content")
    with RemoteReceiver(root, trace("-y", "-e", CALLS, allow="packs")) as receiver:
        receiver.hello(place=False, files="packs")
        receiver.write(messages.PROVE.frame(messages.SHA256, name))
        _, payload = receiver.answer()
        assert messages.FILE_SUM.read(payload) == (7, sha256(b"content").digest())
        assert receiver.bye() == 0
    seen = Events(tmp_path / "trace")
    answer = seen.last("write", "(1<", len(seen.lines), ended=False)
    assert seen.count("fsync", f"{root / name}>", 0, answer) == 1
    names_are_durable(seen, [(root / name).parent, root / "packs", root], 0, answer)


def test_a_file_of_a_snapshot_is_gone_for_good_before_the_next_one_goes(
    trace: Trace, root: Path, tmp_path: Path
) -> None:
    """A manifest goes first: without it a version does not exist, whatever of it is left."""
    names = [f"{VERSION}/{file}" for file in ("manifest", "map", "pack-00001")]
    with RemoteReceiver(root, trace("-y", "-e", CALLS, allow="snapshot,replace")) as receiver:
        receiver.hello(place=False, files="snapshots")
        for name in names:
            receiver.write(a_file(b"content", name))
            assert receiver.answer()[0] == messages.FILE_SUM
            assert receiver.answer()[0] == messages.FILE_SAID
        receiver.write(messages.REMOVE.frame(names))
        kind, payload = receiver.answer()
        assert (kind, messages.DONE.read(payload)) == (messages.DONE, 3)
        assert receiver.bye() == 0
    seen = Events(tmp_path / "trace")
    place = f"{root / 'snapshots' / VERSION}>"
    removed = [seen.first("unlinkat", f'"{name.split("/")[2]}"') for name in names]
    answer = seen.first("write", "(1<", removed[-1], ended=False)
    for this, following in zip(removed, [*removed[1:], answer], strict=True):
        assert seen.count("fsync", place, this, following) == 1


def test_a_large_blob_is_synced_by_itself_where_there_is_no_syncfs(
    trace: Trace, root: Path, tmp_path: Path
) -> None:
    content = bytes(5 * MIB)
    with RemoteReceiver(root, trace("-y", "-e", CALLS)) as receiver:
        receiver.hello(sync="fsync")
        receiver.write(receiver.batch(1, [content], large=True))
        assert receiver.receipt().stored == 1
        assert receiver.bye() == 0
    assert_synced(Events(tmp_path / "trace"), root, content, "fsync", ".ntt-incoming")


@pytest.mark.parametrize("sync", ["fsync", "syncfs"])
def test_a_blob_that_was_resumed_is_synced_by_itself(
    trace: Trace, root: Path, tmp_path: Path, sync: str
) -> None:
    """syncfs alone need not flush a disk's cache where no block is new, as on xfs."""
    content = bytes(messages.RESUMABLE + 2 * MIB)
    digest = digest_of(content)
    with RemoteReceiver(root) as first:
        first.hello()
        first.write(messages.BATCH.frame(1, 1, len(content)))
        first.write(messages.LARGE.frame(digest, len(content), 0))
        first.write(*first.pieces(content[:-MIB]))
        first.hang_up()
    with RemoteReceiver(root, trace("-y", "-e", CALLS)) as receiver:
        receiver.hello(sync=sync)
        _, payload = receiver.ask(messages.ASK_OFFSET.frame(digest, len(content)))
        offset = messages.OFFSET.read(payload)[0]
        assert offset == len(content) - MIB
        receiver.write(messages.BATCH.frame(1, 1, len(content)), receiver.large(content, offset))
        receiver.write(commit(1))
        assert receiver.receipt().stored == 1
        assert receiver.bye() == 0
    assert place_of(root, digest).read_bytes() == content
    file = f"partial/{digest.hex()}>"
    assert_synced(Events(tmp_path / "trace"), root, content, "fdatasync", file, sync)


def assert_synced(
    seen: Events, root: Path, content: bytes, call: str, where: str, sync: str = "fsync"
) -> None:
    """The content is synced before its name is given, and the name before the receipt."""
    place = place_of(root, digest_of(content))
    named = seen.first("renameat2", f'"{place.name}"', ended=False)
    written = seen.last("write", where, named)
    assert written < seen.first(call, where, written) < named
    receipt = seen.first("write", "(1<", named, ended=False)
    last_named = seen.last("renameat2", "", receipt)
    if sync == "fsync":
        above = [place.parent, place.parent.parent, root / "by-hash", root]
        names_are_durable(seen, above, last_named, receipt)
    else:
        assert seen.count("syncfs", "", last_named, receipt) == 1
