"""What the figures of the snapshots' benchmark rest on: its states, and its comparison."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.bench.archivers import Place
from tests.bench.contender import Failed
from tests.bench.snapshot_peers import Ours
from tests.bench.snapshot_states import (
    PAGE,
    changed_super_blocks,
    different,
    mirror,
    pages,
    tree_files,
)

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("rsync", "diff"))), reason="rsync or diff is not installed"
)


@pytest.mark.parametrize("stretch", [False, True])
def test_one_page_in_a_hundred_differs_between_the_states(tmp_path: Path, stretch: bool) -> None:
    before, after = (state / "table" for state in pages(4, stretch=stretch)(tmp_path))
    one, two = before.read_bytes(), after.read_bytes()
    starts = range(0, len(one), PAGE)
    changed = [at // PAGE for at in starts if one[at : at + PAGE] != two[at : at + PAGE]]
    assert len(changed) == len(starts) // 100
    assert stretch == (changed == list(range(changed[0], changed[0] + len(changed))))


def test_whatever_does_not_come_back_as_it_was_is_noticed(tmp_path: Path) -> None:
    state, found = tree_files(tmp_path / "state", 101), tmp_path / "found"
    mirror(state, found)
    different(state, found)
    (found / "00" / "01" / "100").write_bytes(b"other")
    with pytest.raises(Failed, match="100 differ"):
        different(state, found)


@pytest.mark.long
def test_our_way_brings_back_the_first_state_and_fetches_little_more_than_what_changed(
    tmp_path: Path,
) -> None:
    states = pages(8, stretch=True)(tmp_path / "states")
    work, data, repository, to = (tmp_path / name for name in ("work", "data", "store", "to"))
    for directory in (work, repository, to):
        directory.mkdir()
    ours = Ours(Place(None, work, data, repository))
    ours.prepare()
    mirror(states[0], data)
    first = ours.take().version
    mirror(states[1], data)
    ours.take()
    mirror(states[1], ours.inside(to))
    back = ours.restore(first, to, delta=True)
    different(states[0], ours.inside(to))
    changed = changed_super_blocks(ours.manifest(first), data, states)
    assert 0 < changed <= back.fetched
    assert changed < sum(path.stat().st_size for path in repository.rglob("pack-*")) / 2
