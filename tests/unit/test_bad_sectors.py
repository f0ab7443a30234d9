"""A blob that the disk cannot read any more is replaced as one with other content is."""

from __future__ import annotations

import errno
import os
import random
from contextlib import closing
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.blobdir.descriptors import DIRECTORY
from ntt_backup.blobdir.publish import Publisher
from ntt_backup.errors import DestinationError
from ntt_backup.process import durable
from ntt_backup.restore import destination as target_module
from ntt_backup.restore.destination import RestoreTarget, TargetWriter
from ntt_backup.wire.messages import REFUSED, REPLACED
from tests.helpers.file_system import put_on_bad_sectors

CONTENT = random.Random(7).randbytes((512 << 10) + 5)
DIGEST = blake3(CONTENT).digest()


def blob_in(root: Path) -> Path:
    name = DIGEST.hex()
    path = root / name[:2] / name[2:4] / name
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize(
    ("may_replace", "verdict", "left"), [(True, REPLACED, []), (False, REFUSED, ["new"])]
)
def test_what_cannot_be_read_is_other_content_to_who_publishes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    may_replace: bool,
    verdict: int,
    left: list[str],
) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    (stage / "new").write_bytes(CONTENT)
    blob = blob_in(tmp_path / "by-hash")
    before = blob.stat().st_ino
    put_on_bad_sectors(blob, monkeypatch)
    ours, by_hash = (os.open(one, DIRECTORY) for one in (stage, tmp_path / "by-hash"))
    publisher = Publisher(by_hash, os.fstat(by_hash).st_dev, may_replace)
    taken = publisher.publish(DIGEST, ours, b"new")
    publisher.close()
    os.close(ours)
    os.close(by_hash)
    assert taken is not None
    assert taken[0] == verdict
    assert os.listdir(stage) == left
    assert (blob.stat().st_ino == before) == (verdict == REFUSED)


def test_a_part_of_a_large_blob_that_cannot_be_read_is_fetched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        closing(RestoreTarget(tmp_path)) as target,
        closing(TargetWriter(target, "w", lambda _: None)) as writer,
    ):
        part = tmp_path / target_module.SCRATCH / "partial" / DIGEST.hex()
        part.write_bytes(CONTENT)
        put_on_bad_sectors(part, monkeypatch)
        before = os.listdir("/proc/self/fd")
        assert writer.resume(DIGEST) == 0
        assert os.listdir("/proc/self/fd") == before
        assert not writer.has_part(DIGEST)


def test_a_disk_that_loses_what_was_written_stops_each_thread_of_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux tells each descriptor once, and who asks by one that was told hears nothing."""
    told: set[int] = set()

    def tell_once(fd: int) -> None:
        if fd not in told:
            told.add(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(durable, "can_syncfs", lambda _: True)
    monkeypatch.setattr(durable, "syncfs", tell_once)
    with (
        closing(RestoreTarget(tmp_path)) as target,
        closing(TargetWriter(target, "w1", lambda _: None)) as first,
        closing(TargetWriter(target, "w2", lambda _: None)) as second,
    ):
        for writer in (first, second):
            writer.whole(DIGEST, memoryview(CONTENT))
            with pytest.raises(DestinationError, match="Input/output error"):
                writer.publish()
        assert os.listdir(tmp_path) == [target_module.SCRATCH]
