"""What the helpers of a bench do, each against a far side on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.bench.crew import Crew
from ntt_backup.bench.tasks import Answer, Download, Fetch, Item, Reach, Send, Task, Upload
from ntt_backup.bench.ways import VARIATIONS, Way, registered
from ntt_backup.config.models import RunSettings
from ntt_backup.errors import BackupError
from ntt_backup.model import relative_path
from tests.patience import PATIENCE

HERE = Reach(remote=None, patience=20.0)
RUN = RunSettings(stall_timeout=PATIENCE, receipt_timeout=PATIENCE)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """The far side's python3 is this one, which can decompress zstd."""
    with pytest.MonkeyPatch.context() as patch, Crew() as made:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    for content in (b"", b"x", b"some text " * 500, os.urandom(70_000)):
        path = root / relative_path(blake3(content).hexdigest())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


@pytest.fixture
def remote_dir(tmp_path: Path) -> Path:
    root = tmp_path / "remote"
    (root / "by-hash").mkdir(parents=True)
    return root


def contents(top: Path) -> dict[str, bytes]:
    files = (path for path in top.rglob("*") if path.is_file())
    return {str(path.relative_to(top)): path.read_bytes() for path in files}


def items(store: Path) -> list[Item]:
    files = (path for path in store.rglob("*") if path.is_file())
    return [Item(blobid=path.name, size=path.stat().st_size) for path in files]


def send(way: Way, store: Path, remote_dir: Path, slot: str = "0") -> Send:
    wanted = items(store)
    return Send(
        reach=HERE,
        store=store,
        root=str(remote_dir),
        slot=slot,
        run=RUN,
        strategy=way.strategy,
        codec=way.codec,
        reconnect=way.reconnect,
        stored=way.stored,
        batches=[wanted[:1], wanted[1:3], wanted[3:]],
    )


def one(crew: Crew, task: Task) -> Answer:
    (answer,) = crew.run([task])
    return answer


@pytest.mark.parametrize("way", [*registered(), *VARIATIONS], ids=lambda way: way.name)
def test_every_way_puts_the_blobs_there(
    way: Way, crew: Crew, store: Path, remote_dir: Path
) -> None:
    if lacking := [tool for tool in way.tools if shutil.which(tool) is None]:
        pytest.skip(f"no {', '.join(lacking)}")
    answer = one(crew, send(way, store, remote_dir))
    assert contents(remote_dir) == {
        f"by-hash/{name}": data for name, data in contents(store).items()
    }
    assert answer.size == sum(item.size for item in items(store))
    assert answer.ended > answer.began
    assert answer.cpu_s > 0


@pytest.mark.parametrize("way", [*registered(), *VARIATIONS[:1]], ids=lambda way: way.name)
def test_a_blob_that_is_gone_ends_the_measurement(
    way: Way, crew: Crew, store: Path, remote_dir: Path
) -> None:
    task = send(way, store, remote_dir)
    gone = task.batches[1][0].blobid
    (store / relative_path(gone)).unlink()
    with pytest.raises(BackupError) as caught:
        crew.run([task])
    assert gone in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_way_back_brings_the_same_files(
    crew: Crew, store: Path, remote_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(store, remote_dir / "by-hash", dirs_exist_ok=True)
    (tmp_path / "back").mkdir()
    prefixes = sorted(path.name for path in store.iterdir())
    halves = [prefixes[::2], prefixes[1::2]]
    tasks = [
        Fetch(reach=HERE, root=str(remote_dir), prefixes=half, into=tmp_path / "back")
        for half in halves
    ]
    crew.run(tasks)
    assert contents(tmp_path / "back") == contents(store)


def test_streams_of_a_fixed_size_end_with_it(crew: Crew) -> None:
    warm = 100_000
    up = one(crew, Upload(reach=HERE, size=1_000_000, warm=warm))
    assert up.size == 1_000_000 - warm
    down = one(crew, Download(reach=HERE, size=1_000_000, warm=warm))
    assert 0 < down.size <= 1_000_000 - warm


def test_helpers_that_failed_are_replaced(crew: Crew, store: Path, remote_dir: Path) -> None:
    broken = send(VARIATIONS[0], store, remote_dir / "missing")
    sound = Upload(reach=HERE, size=1000)
    with pytest.raises(BackupError):
        crew.run([sound, broken])
    assert len(crew.run([sound, sound])) == 2
