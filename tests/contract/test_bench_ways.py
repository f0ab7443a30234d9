"""What the helper processes of a bench do, each against a remote on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.bench.bucket_back import MOUNT, WAYS_BACK, Back, Fetch, bring_back
from ntt_backup.bench.bucket_out import WAYS_OUT, Out, send_out
from ntt_backup.bench.helpers import Answer, Task, run_together
from ntt_backup.bench.sending import PLAIN, WAYS, Load, Way, send
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.client.transport import Local
from ntt_backup.config import RemoteConfig
from ntt_backup.config.sections import RemoteSettings, RunSettings
from ntt_backup.errors import BackupError, MountImpossible
from ntt_backup.model import Blob
from ntt_backup.mount import kernel
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.packstore import marker
from ntt_backup.wire.framing import FORMAT
from tests.helpers.blobs import put, tree
from tests.helpers.bucket_packs import packs_in
from tests.helpers.s3_servers import S3Server
from tests.helpers.waiting import PATIENCE

RUN = RunSettings(stall_timeout=PATIENCE, receipt_timeout=PATIENCE)
# Each form with one codec; the other pairs are for --long.
OFTEN = {
    *("direct-none", "pipe-zst", "chunked-gz", "put-each", "packs-zst"),
    *("restore-sequential-gz", "restore-pipe-zst", "restore-ranges", "restore-mount"),
}


def each(ways: Sequence[Out] | Sequence[Back]) -> list[Any]:
    return [
        pytest.param(way, id=way.name, marks=() if way.name in OFTEN else pytest.mark.long)
        for way in ways
    ]


@pytest.fixture(autouse=True)
def _same_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remote's python3 is this one, which can decompress zstd."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    for content in (b"", b"x", b"some text " * 500, os.urandom(70_000)):
        put(root, content)
    return root


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "remote"
    (root / "by-hash").mkdir(parents=True)
    return root


def load(way: Way, store: Path, directory: Path) -> Load:
    files = [path for path in store.rglob("*") if path.is_file()]
    blobs = [Blob(path.name, path.stat().st_size) for path in files]
    batches = [tuple(blobs[:1]), tuple(blobs[1:3]), tuple(blobs[3:])]
    return Load(way, Local(), store, str(directory), "0", RUN, batches)


def run(task: Task) -> Answer:
    (answer,) = run_together([task])
    return answer


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_stores_the_blobs_on_the_remote(way: Way, store: Path, directory: Path) -> None:
    answer = run(partial(send, load(way, store, directory)))
    stored = tree(store)
    assert tree(directory) == {f"by-hash/{name}": data for name, data in stored.items()}
    assert answer.size == sum(map(len, stored.values()))
    assert answer.ended > answer.began
    assert answer.cpu_s > 0


def in_bucket(way: Way, store: Path, remote: RemoteSettings) -> Load:
    """The same load for a bucket, where a store is made."""
    with closing(packs_in(open_bucket(remote))) as store_of_packs:
        marker.make(store_of_packs)
    return replace(load(way, store, store), bucket=remote)


@pytest.mark.parametrize("way", each(WAYS_OUT))
def test_every_way_out_makes_the_objects_that_are_counted(
    way: Out, store: Path, tmp_path: Path, s3: S3Server
) -> None:
    remote = s3.bucket()
    answer = run(partial(send_out, in_bucket(way, store, remote), tmp_path))
    bucket = open_bucket(remote)
    objects = [one for one in bucket.list("") if one.key != FORMAT]
    blobs = [path for path in store.rglob("*") if path.is_file()]
    expected = {"each": len(blobs), "": 3}.get(way.form, 1)
    assert len(objects) == expected
    assert sum(way.writes(one.size, remote.part_size) for one in objects) == expected + (
        2 if way.form == "chunked" else 0
    )
    assert list(bucket.uploads("")) == []
    assert answer.size == sum(path.stat().st_size for path in blobs)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


@pytest.mark.parametrize("way", each(WAYS_BACK))
def test_every_way_back_brings_the_blobs_and_sees_a_wrong_one(
    way: Back, store: Path, tmp_path: Path, s3: S3Server
) -> None:
    if way.form == MOUNT:
        try:
            kernel.require_erofs(kernel.BLOCKS_SINCE)
        except MountImpossible as error:
            pytest.skip(str(error))
    remote = s3.bucket()
    (source,) = (one for one in WAYS_OUT if one.name == way.source)
    sent = in_bucket(source, store, remote)
    run(partial(send_out, sent, tmp_path))
    settings = RemoteConfig(remote=remote)
    directory = Path(tempfile.mkdtemp(dir="/var/tmp" if way.form == MOUNT else tmp_path))

    def fetch(blobs: list[Blob]) -> Answer:
        directory.mkdir(exist_ok=True)
        wanted = Fetch(way, settings, blobs, directory, tmp_path, "0", 2)
        return run(partial(bring_back, wanted))

    answer = fetch(sent.blobs)
    assert answer.ended > answer.began
    if way.form != MOUNT:
        assert tree(directory) == tree(store)
    assert not directory.is_mount()
    shutil.rmtree(directory)
    with pytest.raises(BackupError, match=f"not what was sent: {way.name}: {'0' * 64}"):
        fetch([*sent.blobs, Blob("0" * 64, 1)])
    shutil.rmtree(directory)


def test_error_of_the_remote_is_raised(store: Path, directory: Path) -> None:
    shutil.rmtree(directory)
    with pytest.raises(BackupError, match=r"by-hash"):
        run(partial(send, load(PLAIN, store, directory)))


@pytest.mark.parametrize("way", [WAYS[0], PLAIN], ids=lambda way: way.name)
def test_missing_blob_ends_the_measurement(way: Way, store: Path, directory: Path) -> None:
    task = load(way, store, directory)
    missing = task.batches[1][0].blobid
    (store / relative_path(missing)).unlink()
    with pytest.raises(BackupError) as caught:
        run(partial(send, task))
    assert missing in str(caught.value)
    assert caught.value.exit_code == 2
