"""What the benchmark's figures rest on: the stores it makes, its arithmetic, and its comparison."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from blake3 import blake3

from tests.bench import slots
from tests.bench.contender import Failed, compare
from tests.bench.plan import FULL, QUICK, Case, Choice, Plan, choose
from tests.bench.results import Outcome, Sample, Spread
from tests.bench.slots import slot
from tests.bench.stores import PRODUCTION, Kind, Recipe, Store, cached, sizes


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return cached(Recipe("small", blobs=50), tmp_path)


def contents(store: Store) -> dict[str, bytes]:
    files = (path for path in store.root.rglob("*") if path.is_file())
    return {str(path.relative_to(store.root)): path.read_bytes() for path in files}


# --- stores


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
def test_a_store_is_what_its_recipe_and_its_manifest_say(tmp_path: Path, recipe: Recipe) -> None:
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


@pytest.mark.parametrize("kind", ["mix", "text"])
def test_the_same_recipe_makes_the_same_store_and_another_seed_another(
    tmp_path: Path, kind: Kind
) -> None:
    recipes = [Recipe(kind, bytes=200_000), Recipe(kind, bytes=200_000, seed=2)]
    one, other = (cached(recipe, tmp_path / "one") for recipe in recipes)
    again = cached(recipes[0], tmp_path / "again")
    assert contents(one) == contents(again)
    starts = [{content[:16] for content in contents(store).values()} for store in (one, other)]
    assert not starts[0] & starts[1]


def test_a_store_is_made_once_and_an_unfinished_one_is_made_anew(tmp_path: Path) -> None:
    recipe = Recipe("small", blobs=20)
    first = cached(recipe, tmp_path)
    mark = first.root / "mark"
    mark.touch()
    assert cached(recipe, tmp_path) == first
    assert mark.exists()
    (tmp_path / recipe.name / "manifest.json").unlink()
    assert cached(recipe, tmp_path) == first
    assert not mark.exists()


def test_a_recipe_without_an_amount_is_refused() -> None:
    with pytest.raises(ValueError, match="blobs or of bytes"):
        Recipe("mix")


def test_sizes_have_the_production_distribution() -> None:
    drawn = list(sizes(Recipe("mix", blobs=50_000)))
    for share, low, high in PRODUCTION:
        found = sum(low <= size < high for size in drawn) / len(drawn)
        assert found == pytest.approx(share, rel=0.1, abs=0.0005)


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("small", 16, 10_000), ("mix", 16, 40e6 / 16), ("large", 1e6, 40e6 / 4)],
)
def test_sizes_fill_the_bytes_and_keep_to_their_kind(kind: Kind, low: float, high: float) -> None:
    drawn = list(sizes(Recipe(kind, bytes=40_000_000)))
    assert sum(drawn) == 40_000_000
    assert min(drawn[:-1]) >= low  # the last one takes what is left
    assert max(drawn) <= high


def test_only_text_compresses(tmp_path: Path) -> None:
    ratios = {}
    for kind in ("mix", "text"):
        store = cached(Recipe(kind, bytes=1_000_000), tmp_path)
        ratios[kind] = store.bytes / len(zlib.compress(b"".join(contents(store).values())))
    assert ratios["mix"] == pytest.approx(1, abs=0.01)
    assert 2.2 < ratios["text"] < 4


# --- comparison


def copy_of(store: Store, directory: Path) -> Path:
    subprocess.run(["cp", "-r", store.root, directory], check=True)
    return directory


def test_an_identical_copy_passes(store: Store, tmp_path: Path) -> None:
    compare(store, copy_of(store, tmp_path / "copy"))


def some_file(copy: Path) -> Path:
    return max((path for path in copy.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)


def test_a_missing_file_fails(store: Store, tmp_path: Path) -> None:
    copy = copy_of(store, tmp_path / "copy")
    some_file(copy).unlink()
    with pytest.raises(Failed, match="1 files are missing, 0 are too many"):
        compare(store, copy)


def test_a_file_too_many_fails(store: Store, tmp_path: Path) -> None:
    copy = copy_of(store, tmp_path / "copy")
    (copy / "more").touch()
    with pytest.raises(Failed, match="0 files are missing, 1 are too many"):
        compare(store, copy)


@pytest.mark.parametrize("change", ["flip", "cut", "append"])
def test_a_changed_file_fails(store: Store, tmp_path: Path, change: str) -> None:
    copy = copy_of(store, tmp_path / "copy")
    path = some_file(copy)
    content = path.read_bytes()
    changed = {
        "flip": content[:-1] + bytes([content[-1] ^ 1]),
        "cut": content[:-1],
        "append": content + b"-",
    }
    path.write_bytes(changed[change])
    with pytest.raises(Failed, match=f"1 files differ, .*{path.name}"):
        compare(store, copy)


def test_the_end_of_a_large_file_is_compared_too(tmp_path: Path) -> None:
    store = cached(Recipe("large", blobs=1, bytes=2_500_000), tmp_path)
    copy = copy_of(store, tmp_path / "copy")
    compare(store, copy)
    with some_file(copy).open("r+b") as file:
        file.truncate(store.bytes - 1)
        file.seek(0, 2)
        file.write(b"-" if contents(store).popitem()[1][-1:] != b"-" else b"+")
    with pytest.raises(Failed, match="1 files differ"):
        compare(store, copy)


# --- arithmetic


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
    assert one.seconds("us") == Spread(8, 1, 20)
    assert one.spent("it") == 44


def test_a_ratio_needs_rounds_of_both() -> None:
    one = outcome(("us", 1, 3), ("us", 2, 8), ("it", 2, 4))
    assert one.ratio("us", "it") == Spread(2, 2, 2)
    assert one.ratio("us", "nobody") is None


def test_who_failed_once_has_no_figure() -> None:
    one = outcome(("us", 1, 1), ("it", 1, 2), ("it", 2, None))
    assert one.error("it") == "broken"
    assert one.seconds("it") is None
    assert one.ratio("us", "it") is None
    assert one.seconds("us") is not None


def test_the_report_has_rates_and_the_share_of_the_ceiling() -> None:
    one = outcome(("us", 1, 2), ("raw", 1, 0.5), ("it", 1, None))
    us, raw, it = one.report("us", "raw")["figures"]
    assert (us["mb_per_s"], us["files_per_s"], us["share_of_ceiling"]) == (2.0, 500.0, 0.25)
    assert (raw["ours_by_peer"]["median"], raw["share_of_ceiling"]) == (4.0, 1.0)
    assert (it["error"], it["seconds"], it["ours_by_peer"]) == ("broken", None, None)


# --- what is run


@pytest.mark.parametrize("plan", [FULL, QUICK], ids=["full", "quick"])
def test_without_words_all_is_chosen(plan: Plan) -> None:
    assert choose(plan, ["us", "it"], []) == Choice(plan.cases, ("us", "it"))


def test_words_choose_among_their_sort() -> None:
    choice = choose(FULL, ["us", "rsync -a", "rsync -az"], ["mix", "slow", "rsync"])
    assert [(case.recipe.kind, case.link) for case in choice.cases] == [("mix", "slow")]
    assert choice.contenders == ("rsync -a", "rsync -az")


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match="warp: none of"):
        choose(FULL, ["us"], ["warp", "mix"])


# --- what a killed one leaves


def test_the_next_slot_removes_what_a_killed_one_left(
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
    assert _runs(int(pid))
    with slot(tmp_path) as taken:
        assert not Path(home).exists()
        assert taken.home.exists()
        assert not _runs(int(pid))
    assert not taken.home.exists()


@pytest.mark.parametrize("made", [True, False])
def test_only_whoever_made_a_network_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(slots, "_NAMESPACES", tmp_path)
    removed: list[list[str]] = []
    monkeypatch.setattr(slots.subprocess, "run", lambda argv, **_: removed.append(argv))
    with slot(tmp_path) as taken:
        (tmp_path / taken.namespace).touch()  # ours, or of somebody with another TMPDIR
        if made:
            taken.network.touch()
    assert (["ip", "netns", "delete", taken.namespace] in removed) is made


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
