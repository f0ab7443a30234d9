"""What the benchmark's figures rest on: the stores it makes, its arithmetic, and its comparison."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.bench.results import Spread
from tests.bench.contender import Failed, compare
from tests.bench.cpu import NoCgroup, Share, counted
from tests.bench.plan import Case
from tests.bench.results import Outcome, Sample
from tests.bench.slots import slot
from tests.bench.stores import PRODUCTION, Recipe, Store, cached, sizes
from tests.helpers.processes import has_ended


def contents(store: Store) -> dict[str, bytes]:
    files = (path for path in store.root.rglob("*") if path.is_file())
    return {str(path.relative_to(store.root)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("small", blobs=100),
        Recipe("mix", bytes=9_000_000),
        Recipe("large", bytes=9_000_000),
        Recipe("text", bytes=300_000),
    ],
    ids=lambda recipe: recipe.kind,
)
def test_store_is_what_its_recipe_and_its_manifest_say(tmp_path: Path, recipe: Recipe) -> None:
    store = cached(recipe, tmp_path)
    found = contents(store)
    for name, content in found.items():
        blobid = blake3(content).hexdigest()
        assert name == f"{blobid[:2]}/{blobid[2:4]}/{blobid}"
    assert store.blobs == len(found)
    assert store.bytes == sum(map(len, found.values()))
    assert store.directories == sum(path.is_dir() for path in store.root.rglob("*"))
    assert recipe.blobs in (None, store.blobs)
    assert recipe.bytes in (None, store.bytes)


def test_sizes_have_the_production_distribution() -> None:
    drawn = list(sizes(Recipe("mix", blobs=50_000)))
    for share, low, high in PRODUCTION:
        found = sum(low <= size < high for size in drawn) / len(drawn)
        assert found == pytest.approx(share, rel=0.1, abs=0.0005)


def copy_of(store: Store, directory: Path) -> Path:
    subprocess.run(["cp", "-r", store.root, directory], check=True)
    return directory


def some_file(copy: Path) -> Path:
    return max((path for path in copy.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "1 files are missing, 0 are too many"),
        (lambda path: path.with_name("more").touch(), "0 files are missing, 1 are too many"),
        (lambda path: path.write_bytes(path.read_bytes()[::-1]), "1 files differ"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "1 files differ"),
        (lambda path: path.write_bytes(path.read_bytes() + b"-"), "1 files differ"),
    ],
    ids=["missing", "extra", "changed", "cut", "longer"],
)
def test_comparison_fails_on_every_difference(
    tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    store = cached(Recipe("large", blobs=1, bytes=2_500_000), tmp_path)
    copy = copy_of(store, tmp_path / "copy")
    compare(store, copy)
    change(some_file(copy))
    with pytest.raises(Failed, match=words):
        compare(store, copy)


def outcome(*runs: tuple[str, int, float | None]) -> Outcome:
    recipe = Recipe("small", blobs=10)
    store = Store(recipe, Path("/nowhere"), blobs=1000, bytes=4_000_000, directories=0)
    samples = [
        Sample(name, number, seconds, None if seconds else "broken", 0.0)
        for name, number, seconds in runs
    ]
    return Outcome(Case(recipe, "loopback"), store, None, samples)


def test_ratio_is_taken_within_each_round() -> None:
    # The machine was ten times slower in the second round. Both medians alone would say 4.0.
    one = outcome(
        ("us", 1, 1), ("it", 1, 2), ("us", 2, 20), ("it", 2, 40), ("us", 3, 8), ("it", 3, 2)
    )
    assert one.ratio("us", "it") == Spread(0.5, 0.5, 4.0)
    assert one.seconds("us") == Spread(8, 1, 20)
    assert one.spent("it") == 44


def test_contender_that_failed_once_has_no_figure() -> None:
    one = outcome(("us", 1, 1), ("it", 1, 2), ("it", 2, None))
    assert one.error("it") == "broken"
    assert one.seconds("it") is None
    assert one.ratio("us", "it") is None
    assert one.seconds("us") is not None


def test_cpu_of_whatever_was_started_is_counted_and_told_apart() -> None:
    with ExitStack() as stack:
        try:
            cpu = stack.enter_context(counted())
        except NoCgroup as why:
            pytest.skip(f"no cgroup for uid {os.geteuid()}: {why}")
        before = cpu.seconds()
        shares = stack.enter_context(cpu.shares())
        # In a process that has lost its parent: only the cgroup still knows whose it is.
        busy = "import os, time\nif os.fork() == 0:\n while time.process_time() < 0.5: pass\n"
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, "-c", busy], stdin=quiet, stdout=subprocess.PIPE, text=True
        )
        assert process.communicate()[0] == ""
        assert process.returncode == 0
        assert cpu.seconds() - before > 0.4
        stack.close()
        assert sum(map(sum, shares.values())) > 0.2
    one = outcome(("us", 1, 1))
    one.samples[0] = replace(one.samples[0], cpu=0.25, shares={"ssh": Share(0.1, 0.05)})
    assert one.cpu_us("us") == Spread(250, 250, 250)
    assert one.shares("us")["ssh"] == pytest.approx((100, 50))


def test_next_slot_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    script = f"""
import subprocess, sys
from pathlib import Path
from tests.bench.slots import slot

with slot(Path({str(tmp_path)!r})) as taken:
    log = taken.home / "log"
    quiet = subprocess.DEVNULL
    # A running sshd's command line is one word.
    argv = [f"sshd: -f {{log}} [listener]", "-f", "/dev/null"]
    server = subprocess.Popen(argv, executable="tail", stdout=quiet, start_new_session=True)
    print(taken.home, server.pid, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        home, pid = holder.stdout.readline().split()
        with slot(tmp_path) as other:
            assert other.home != Path(home)
            assert Path(home).exists(), "somebody else's slot was swept"
        holder.kill()
        holder.wait()
    assert Path(home).exists()
    assert not has_ended(int(pid))
    with slot(tmp_path) as taken:
        assert not Path(home).exists()
        assert taken.home.exists()
        assert has_ended(int(pid))
    assert not taken.home.exists()
