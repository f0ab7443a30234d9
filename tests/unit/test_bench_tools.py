"""The comparison with peers: a contender that leaves something out gets no figure."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.bench.results import Spread
from tests.bench.contender import Failed, compare
from tests.bench.plan import Case
from tests.bench.results import Outcome, Sample
from tests.bench.stores import Recipe, Store, make


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make(Recipe("mix", bytes=300_000), tmp_path)


@pytest.mark.parametrize("kind", ["small", "text"])
def test_a_store_holds_the_blobs_that_it_counts(tmp_path: Path, kind: str) -> None:
    store = make(Recipe(kind, bytes=300_000), tmp_path)  # type: ignore[arg-type]
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert (len(files), sum(path.stat().st_size for path in files)) == (store.blobs, store.bytes)
    for path in files:
        blobid = blake3(path.read_bytes()).hexdigest()
        assert str(path.relative_to(store.root)) == f"{blobid[:2]}/{blobid[2:4]}/{blobid}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Path.unlink, "1 files are missing, 0 are too many"),
        (lambda path: path.with_name("more").touch(), "0 files are missing, 1 are too many"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "1 files differ"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "1 files differ"),
    ],
)
def test_a_copy_that_is_not_the_same_is_no_result(
    store: Store, tmp_path: Path, change: object, said: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store.root, copy)
    compare(store, copy)
    change(max(copy.rglob("*/*/*"), key=lambda path: path.stat().st_size))  # type: ignore[operator]
    with pytest.raises(Failed, match=said):
        compare(store, copy)


def outcome(*runs: tuple[str, int, float | None]) -> Outcome:
    recipe = Recipe("small", blobs=10)
    store = Store(recipe, Path("/nowhere"), blobs=1000, bytes=4_000_000, directories=0)
    samples = [
        Sample(name, number, seconds, None if seconds else "broken", 0.0)
        for name, number, seconds in runs
    ]
    return Outcome(Case(recipe, "loopback"), store, None, samples)


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine was ten times slower in the second round. Both medians alone would say 4.0.
    one = outcome(
        ("us", 1, 1), ("it", 1, 2), ("us", 2, 20), ("it", 2, 40), ("us", 3, 8), ("it", 3, 2)
    )
    assert one.ratio("us", "it") == Spread(0.5, 0.5, 4.0)


def test_a_contender_that_failed_once_has_no_figure() -> None:
    one = outcome(("us", 1, 1), ("it", 1, 2), ("it", 2, None))
    assert one.error("it") == "broken"
    assert one.seconds("it") is None
    assert one.ratio("us", "it") is None
    assert one.seconds("us") is not None
