"""Packs are mounted by the kernel of this machine: every blob right, and nothing stays behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ntt_backup.errors import MountImpossible, RemoteUnreachable
from ntt_backup.filestore.local_cache import Cache
from ntt_backup.mount.image import Built, Options
from ntt_backup.mount.packs_or_snapshot import mount_packs, mount_target
from ntt_backup.pack.names import blob_key
from tests.helpers.bucket_packs import packs_in
from tests.helpers.fake_bucket import FakeBucket
from tests.helpers.mounts import contents, ended, mount_point, packs, servers, write, wrong
from tests.helpers.waiting import wait_until

DISK = Path("/var/tmp")
BLOBS = contents(600)
PACKS = packs(BLOBS, 100)


@pytest.fixture
def place() -> Iterator[Path]:
    with mount_point() as place:
        yield place


def of_bucket(bucket: FakeBucket, place: Path) -> Built:
    return mount_target(lambda: packs_in(bucket), place, Options(DISK, "", pytest.fail))


def of_packs(directory: Path, place: Path, scratch: Path = DISK) -> Built:
    return mount_packs(directory, place, Options(scratch, "", pytest.fail))


def mounts() -> list[list[str]]:
    return [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]


def loop_devices() -> set[str]:
    """What the loop devices in use that are ours lie over."""
    found = set()
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            found.add(f"{file} {file.read_text()}")
    return {one for one in found if " /0" in one or f" {DISK}/#" in one}


def test_every_blob_of_packs_in_a_directory_is_right(tmp_path: Path, place: Path) -> None:
    large = contents(3, 9, (1 << 20,))
    objects = PACKS | {blob_key(digest.hex()): content for digest, content in large.items()}
    built = of_packs(write(tmp_path, objects), place)
    assert built.blobs == len(BLOBS) + 3
    assert wrong(place, BLOBS | large) == []
    one = next(place.glob("??/??/*"))
    assert (one.stat().st_mode, one.parent.stat().st_mode) == (0o100444, 0o040555)
    with pytest.raises(OSError, match="Read-only"):
        (place / "new").touch()
    (line,) = (line for line in mounts() if line[1] == str(place))
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(line[3].split(","))
    subprocess.run(["umount", place], check=True)
    assert list(place.iterdir()) == []


def test_nothing_stays_when_a_mount_of_a_bucket_ends(place: Path) -> None:
    bucket = FakeBucket()
    bucket.objects |= PACKS
    large = contents(2, 9, (3 << 20,))
    bucket.objects |= {blob_key(digest.hex()): content for digest, content in large.items()}
    before, others = loop_devices(), servers()
    assert of_bucket(bucket, place).blobs == len(BLOBS) + 2
    (server,) = servers() - others
    assert wrong(place, BLOBS | large) == []
    assert [line[2] for line in mounts() if line[1] == str(place)] == ["erofs"]
    subprocess.run(["umount", place], check=True)
    wait_until(ended(server), "the end of the process that showed the packs")
    wait_until(lambda: loop_devices() <= before, "the loop devices to go")


def test_a_read_that_the_bucket_refuses_is_an_error_and_no_wrong_byte(
    tmp_path: Path, place: Path
) -> None:
    bucket = FakeBucket()
    bucket.objects |= PACKS
    away = tmp_path / "away"

    def before(verb: str, key: str) -> None:
        if away.exists():
            raise RemoteUnreachable("away")

    bucket.before = before
    of_bucket(bucket, place)
    away.touch()
    large = next(path for path in place.glob("??/??/*") if path.stat().st_size > 65_536)
    with pytest.raises(OSError) as failed:  # noqa: PT011
        large.read_bytes()
    assert failed.value.errno == errno.EIO
    away.unlink()
    assert wrong(place, BLOBS) == []


def test_after_a_kill_reads_fail_and_a_new_mount_says_what_to_do(place: Path) -> None:
    bucket = FakeBucket()
    bucket.objects |= PACKS
    others = servers()
    of_bucket(bucket, place)
    (server,) = servers() - others
    os.kill(server, signal.SIGKILL)
    wait_until(ended(server), "the end of the process")
    large = [path for path in place.glob("??/??/*") if path.stat().st_size >= 16_384]
    for path in large:
        with pytest.raises(OSError) as failed:  # noqa: PT011
            path.read_bytes()
        assert failed.value.errno == errno.EIO
    with pytest.raises(MountImpossible, match="mounted") as refused:
        of_bucket(bucket, place)
    assert f"umount -l {place}" in refused.value.hint
    subprocess.run(["umount", place], check=True)
    of_bucket(bucket, place)
    assert wrong(place, BLOBS) == []
    (server,) = servers() - others
    subprocess.run(["umount", place], check=True)
    wait_until(ended(server), "the end of the process")


def test_what_cannot_be_mounted_is_said_in_one_line(tmp_path: Path, place: Path) -> None:
    directory = write(tmp_path / "packs", PACKS)
    for wanted, packs_, on, scratch in (
        ("cannot mount on", directory, place / "none", DISK),
        ("no packs in", place, place, DISK),
        ("cannot write the image", directory, place, place / "none"),
    ):
        with pytest.raises(MountImpossible, match=wanted) as refused:
            of_packs(packs_, on, scratch)
        assert refused.value.hint
    with pytest.raises(MountImpossible, match="no blob"):
        of_bucket(FakeBucket(), place)
    assert not place.is_mount()


def test_an_image_in_memory_cannot_be_mounted_and_the_hint_says_where(
    tmp_path: Path, place: Path
) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no /dev/shm")
    with pytest.raises(MountImpossible, match="from which Linux cannot mount files") as refused:
        of_packs(write(tmp_path, PACKS), place, memory)
    assert "--scratch" in refused.value.hint


def test_tables_that_this_machine_keeps_are_not_fetched_again(tmp_path: Path, place: Path) -> None:
    bucket, cache = FakeBucket(), Cache("a bucket", tmp_path)
    bucket.objects |= packs(contents(100, sizes=(20_000,)), 20)
    fetched, parts = [], list[float]()
    for _ in range(2):
        bucket.requests.clear()
        built = mount_target(
            lambda: packs_in(bucket),
            place,
            Options(DISK, "", pytest.fail, lambda built: parts.append(built.part)),
            cache=cache,
        )
        subprocess.run(["umount", place], check=True)
        fetched.append(bucket.requests["get_range"])
        assert (built.packs, built.blobs) == (5, 100)
    # What compresses lies back to back and is read into the image each time.
    assert fetched[0] - fetched[1] == 5
    assert parts == sorted(parts[: len(parts) // 2]) * 2
    assert parts[-1] == 1


def test_archived_packs_are_said_to_need_thawing(place: Path) -> None:
    bucket = FakeBucket()
    bucket.objects |= PACKS
    bucket.archived.add(next(iter(PACKS)))
    with pytest.raises(MountImpossible, match="archive") as refused:
        of_bucket(bucket, place)
    assert "thaw" in refused.value.hint
