"""`mount`: what an operator sees of packs in a directory, and of packs in a real bucket."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.config.sections import RemoteSettings
from ntt_backup.mount import kernel
from ntt_backup.objects.s3 import open_bucket
from tests.helpers.mounts import contents, mount_point, packs, write, wrong
from tests.helpers.program import run
from tests.helpers.s3_servers import S3Server
from tests.helpers.waiting import PATIENCE

# Production's shape in small: most blobs lie in dense members.
SHAPE = (100, 300, 600, 1000, 2000, 3000, 5000, 17_000)


@pytest.fixture
def place() -> Iterator[Path]:
    with mount_point() as place:
        yield place


def mount(place: Path, *options: str, **environ: str) -> dict[str, Any]:
    done = mount_text(place, "--json", *options, **environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def mount_text(place: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return program("mount", str(place), *options, **environ)


def program(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run(words, {**os.environ, "NTT_CONFIG": os.devnull, **environ}, PATIENCE)


def fill(remote: RemoteSettings, objects: dict[str, bytes]) -> dict[str, str]:
    """Puts objects into the bucket; returns what names it to the program."""
    bucket = open_bucket(remote)
    for key, data in objects.items():
        bucket.put(key, data, sha256(data).digest())
    return {"NTT_REMOTE_URL": remote.url, "NTT_S3_ENDPOINT": str(remote.endpoint)}


def test_packs_in_a_directory_are_mounted_and_unmounted(tmp_path: Path, place: Path) -> None:
    blobs = contents(500)
    directory = write(tmp_path / "packs", packs(blobs, 90))
    done = mount_text(place, "--packs", str(directory))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(blobs):,} blobs, ")
    assert f"umount {place} ends it" in done.stdout
    assert wrong(place, blobs) == []
    subprocess.run(["umount", place], check=True)
    found = mount(place, "--packs", str(directory), "--prefix", "7")
    chosen = {one: content for one, content in blobs.items() if one.hex().startswith("7")}
    assert wrong(place, chosen) == []
    assert found["blobs"] == len(chosen)
    assert found["left_out"] == 0


def test_a_damaged_pack_is_named_and_the_others_are_mounted(tmp_path: Path, place: Path) -> None:
    blobs = contents(300)
    objects = packs(blobs, 100)
    directory = write(tmp_path / "packs", objects)
    lost = directory / next(iter(objects))
    lost.write_bytes(lost.read_bytes()[:-700])
    done = mount_text(place, "--packs", str(directory))
    assert done.returncode == 7, done.stderr
    assert f"left out {lost}: " in done.stderr
    assert "LEFT OUT: 1" in done.stdout
    kept = dict(sorted(blobs.items())[100:])
    assert wrong(place, kept) == []


def test_an_image_alone_is_what_the_kernel_mounts(tmp_path: Path, place: Path) -> None:
    blobs = contents(200)
    write(place / "packs", packs(blobs, 90))
    image = place / "image"
    done = program("pack", str(place / "packs"), "--image", str(image), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["blobs"] == len(blobs)
    devices = [str(path) for path in sorted(place.glob("packs/packs/*/*.tar"))]
    assert sorted(place.iterdir()) == [image, place / "packs"]
    (on := place / "packs" / "on").mkdir()
    kernel.attach(str(image), [*devices, str(image)], on)
    try:
        assert wrong(on, blobs) == []
    finally:
        subprocess.run(["umount", on], check=True)


def test_every_blob_of_a_real_bucket_is_right(place: Path, s3: S3Server) -> None:
    blobs = contents(800, 3, SHAPE)
    environ = fill(s3.bucket(), packs(blobs, 200))
    found = mount(place, **environ)
    assert found["blobs"] == len(blobs)
    assert wrong(place, blobs) == []
    subprocess.run(["umount", place], check=True)


def test_a_target_without_packs_is_refused(place: Path) -> None:
    done = mount_text(place, NTT_REMOTE_URL="ssh://nobody@127.0.0.1/backup")
    assert done.returncode == 2, done.stderr
    assert "has no packs" in done.stderr
    assert "by-hash/" in done.stderr


def test_a_snapshot_that_was_taken_is_mounted_byte_for_byte(tmp_path: Path) -> None:
    files, target = tmp_path / "files", tmp_path / "target"
    (files / "below").mkdir(parents=True)
    target.mkdir()
    (files / "small").write_bytes(b"small")
    (files / "below" / "link").symlink_to("../small")
    with (files / "below" / "sparse").open("wb") as file:
        file.write(os.urandom(2_500_000))
        file.seek(9_000_000)
        file.write(b"end")
    environ = {
        "NTT_REMOTE_URL": f"file://{target}",
        "NTT_LOCK_FILE": str(tmp_path / "lock"),
        "NTT_BACKUP_LOG": str(tmp_path / "log"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for number in range(2):  # The second version has blocks of the first.
        with (files / "below" / "sparse").open("r+b") as file:
            file.seek(100_000)
            file.write(bytes([number]) * 10_000)
        done = program("snapshot", "take", "files", str(files), **environ)
        assert done.returncode == 0, done.stderr
    with mount_point(kernel.require_fuse) as at:
        made = mount(at, "--snapshot", "files", **environ)
        assert (made["set"], made["bytes"]) == ("files", 5 + 9_000_003)
        compare = ["diff", "-r", "--no-dereference", str(files), str(at / str(files)[1:])]
        done = subprocess.run(compare, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")
    assert mount_text(tmp_path, "--snapshot", "none", **environ).returncode == 2
    assert mount_text(tmp_path, "--snapshot", "files", "--packs", ".", **environ).returncode == 2
