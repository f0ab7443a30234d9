"""A directory is listed as it is, also where a descriptor lists what was there at its opening."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.blobdir.descriptors import closing as closing_fd
from ntt_backup.blobdir.descriptors import names_in
from ntt_backup.blobdir.walk import Tree
from ntt_backup.receiver.file_areas import DumpArea, SnapshotArea
from ntt_backup.restore.destination import RestoreTarget, TargetWriter
from ntt_backup.restore.unpack import unpack
from ntt_backup.snapshot.restore.tree import DestinationTree
from ntt_backup.wire import messages
from tests.helpers.blobs import MIX, pack, put_as, tree
from tests.helpers.file_system import stale_listings
from tests.helpers.receivers import ScriptedSession, a_dump, a_file, put

__all__ = ["stale_listings"]
pytestmark = pytest.mark.usefixtures("stale_listings")

DUMP = "20260304T120000Z-0badcafe.dump"
FILE = "db/20260304T120000Z-0badcafe/map"
CONTENT = b"content"
DIGEST = blake3(CONTENT).digest()


@pytest.fixture
def top(root: Path) -> int:
    """A descriptor of the root, from before anything was made in it; pytest's end closes it."""
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY)


def test_the_fixture_lists_what_there_was_and_names_in_what_there_is(root: Path, top: int) -> None:
    (root / "late").touch()
    assert os.listdir(top) == []
    with os.scandir(top) as found:
        assert list(found) == []
    assert names_in(top) == ["late"]


def test_a_session_lists_the_dumps_that_it_has_stored(root: Path) -> None:
    client = ScriptedSession(root, ("dump",))
    listing = messages.FILES.frame("")
    client.dumps(listing, a_dump(CONTENT, DUMP), listing)
    assert [name for name, _ in client.listed()] == [DUMP, f"{DUMP}.json"]


def test_a_session_lists_the_files_of_snapshots_that_it_has_stored(root: Path) -> None:
    client = ScriptedSession(root, ("snapshot",))
    names = [FILE, FILE.replace("map", "manifest"), FILE.replace("0304", "0305")]
    client.snapshots(*(a_file(CONTENT, name) for name in names), messages.FILES.frame(""))
    assert client.listed() == [(name, len(CONTENT)) for name in sorted(names)]


def test_what_another_session_has_stored_meanwhile_is_listed(root: Path, top: int) -> None:
    (root / "pgdump").mkdir()
    (root / "snapshots").mkdir()
    with closing(DumpArea(top)) as dumps, closing(SnapshotArea(top)) as snapshots:
        assert list(dumps.found()) == []
        assert list(snapshots.found()) == []
        ScriptedSession(root, ("dump",)).dumps(a_dump(CONTENT, DUMP))
        ScriptedSession(root, ("snapshot",)).snapshots(a_file(CONTENT, FILE))
        assert [one.name for one in dumps.found()] == [DUMP, f"{DUMP}.json"]
        assert [one.name for one in snapshots.found()] == [FILE]


def test_old_files_without_a_name_are_found(root: Path, top: int) -> None:
    with closing(DumpArea(top)) as directory:
        directory.begin().remove()
        left = root / "pgdump" / ".incoming-00000000"
        left.touch()
        os.utime(left, (0, 0))
        directory.begin().remove()
    assert not left.exists()


def test_blobs_that_came_since_are_listed(root: Path) -> None:
    (root / "by-hash").mkdir()
    with closing_fd(os.open(root / "by-hash", os.O_RDONLY)) as fd:
        walk = Tree(fd)
        put(root, DIGEST, CONTENT)
        (place,) = walk.directories()
        assert list(walk.entries(str(place))) == [DIGEST.hex()]
        put(root, DIGEST[:31] + b"\0", CONTENT)
        assert len(list(walk.entries(str(place)))) == 2
        walk.close()


def test_a_pack_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(pack(MIX))
    to = tmp_path / "to"
    put_as(to, DIGEST.hex(), CONTENT)  # One directory is there already.
    done = unpack([tmp_path / "a.tar"], to, jobs=1, verify=True, on_progress=lambda _: None)
    assert done.unpacked == len(MIX)
    assert set(tree(to).values()) == {CONTENT, *MIX}


def test_a_restore_leaves_no_scratch_space(root: Path) -> None:
    target = RestoreTarget(root)
    writer = TargetWriter(target, "0", lambda _: None)
    writer.close()
    target.close()
    assert list(root.iterdir()) == []


def test_a_restore_of_a_snapshot_sees_what_it_has_made(root: Path, top: int) -> None:
    destination = DestinationTree(top, make=True)
    (root / "late").mkdir()
    found = destination.enter("").find("late")
    assert found is not None
    destination.close()
