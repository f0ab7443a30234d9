"""What the helper processes of a bench do, each against a remote on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.bench.helpers import Answer, Ready, Task, run_together
from ntt_backup.bench.sending import PLAIN, WAYS, Load, Way, send
from ntt_backup.bench.streams import download, round_trips, upload
from ntt_backup.config.models import RunSettings
from ntt_backup.errors import BackupError
from ntt_backup.model import Blob, relative_path
from tests.local_transport import Local
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
        path = root / relative_path(blake3(content).hexdigest())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "remote"
    (root / "by-hash").mkdir(parents=True)
    return root


def contents(top: Path) -> dict[str, bytes]:
    files = (path for path in top.rglob("*") if path.is_file())
    return {str(path.relative_to(top)): path.read_bytes() for path in files}


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
    stored = contents(store)
    assert contents(directory) == {f"by-hash/{name}": data for name, data in stored.items()}
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


@pytest.mark.parametrize("measure", [upload, download])
def test_stream_lasts_for_the_time_that_is_asked_for(measure: type) -> None:
    answer = run(partial(measure, Local(), PATIENCE, 0.2, 1000))
    assert answer.ended - answer.began >= 0.2
    assert answer.size > 0


def test_round_trips_are_timed_one_by_one() -> None:
    answer = run(partial(round_trips, Local(), PATIENCE, 50, PATIENCE))
    assert len(answer.trips) == 50
    assert all(trip > 0 for trip in answer.trips)


def test_tasks_begin_when_the_last_one_is_ready() -> None:
    def quick(ready: Ready) -> Answer:
        ready()
        return Answer(began=time.monotonic(), ended=time.monotonic())

    def slow(ready: Ready) -> Answer:
        prepared = round_trips(Local(), PATIENCE, 20, PATIENCE, lambda: None)
        ready()
        return prepared

    first, last = run_together([quick, slow])
    assert first.began >= last.ended


def test_helper_that_dies_is_an_error_with_its_last_words() -> None:
    def dies(_ready: Ready) -> Answer:
        raise RuntimeError("not foreseen")

    with pytest.raises(BackupError, match="a helper process died: RuntimeError: not foreseen"):
        run(dies)
