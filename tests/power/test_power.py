"""A few power cuts in the suite; many by `tests/power/run`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.postgres import Postgres
from tests.power.disks import FILE_SYSTEMS, lacking
from tests.power.play import BREAKS, CONTROLS, HEADER, KINDS, How, Played, campaign

pytestmark = pytest.mark.skipif(bool(lacking()), reason=f"the lab cannot run: {lacking()}")

OURS = [name for name in KINDS if name not in CONTROLS]


Play = Callable[[list[tuple[str, str, str]], How], None]


@pytest.fixture
def play(postgres: Postgres, tmp_path: Path) -> Play:
    """Plays kinds, and asserts that what was found is what had to be found."""
    return partial(_play, postgres, tmp_path)


def _play(postgres: Postgres, work: Path, played: list[tuple[str, str, str]], how: How) -> None:
    done = list(campaign(postgres.server, work, played, 1, how))
    assert [one for one in done if not one.right] == [], "\n".join(
        [HEADER, *(one.line() for one in done)]
    )


def test_no_power_cut_takes_what_was_promised(play: Play) -> None:
    play([("small", "ext4", "")], How(images=4, again=1, checks=1))


@pytest.mark.long
@pytest.mark.parametrize("fs", FILE_SYSTEMS)
@pytest.mark.parametrize("name", OURS)
def test_a_power_cut_in_any_work_takes_nothing(play: Play, name: str, fs: str) -> None:
    play([(name, fs, "")], How(images=12, again=2, checks=1))


@pytest.mark.long
@pytest.mark.parametrize("name", [*CONTROLS, *BREAKS])
def test_what_keeps_no_promise_is_found(play: Play, name: str) -> None:
    kind = BREAKS[name][0] if name in BREAKS else name
    broken = name if name in BREAKS else ""
    play([(kind, "ext4", broken)], How(images=40, again=1, checks=1))


def test_what_must_be_found_and_is_not_is_told() -> None:
    assert not Played("control-cp", "ext4", 1, images=9).right
    assert not Played("small", "ext4", 1, "early-name", images=9).right
    assert Played("small", "xfs", 1, "early-name", images=9).right
    assert not Played("small", "xfs", 1, "early-receipt", images=9).right
    assert Played("small", "ext4", 1, images=9).right
