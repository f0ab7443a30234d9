"""What the helper processes of a bench do, each against a remote on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from ntt_backup.bench.helpers import Answer, Task, run_together
from ntt_backup.bench.sending import PLAIN, WAYS, Load, Way, send
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.client.local import Local
from ntt_backup.config.models import RunSettings
from ntt_backup.errors import BackupError
from ntt_backup.model import Blob
from tests.files import put, tree
from tests.patience import PATIENCE

RUN = RunSettings(stall_timeout=PATIENCE, receipt_timeout=PATIENCE)


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
