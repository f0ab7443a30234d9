"""The figure of a comparison: the same every time, and an error that helps where it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ntt_backup.bench import plot
from ntt_backup.bench.runs import Cell, Findings, Run
from ntt_backup.bench.sample import CLASSES, Sample
from ntt_backup.bench.ways import PLAIN, Way
from ntt_backup.errors import ConfigError
from ntt_backup.model import Blob

TAR = Way("tar", strategy="tar")


def runs(rate: float) -> list[Run]:
    return [Run(100 / rate / step, 50, 10**8, None, 1.0, None) for step in (0.9, 1.0, 1.1)]


@pytest.fixture
def found() -> Findings:
    made = Findings(Sample((Blob("a" * 64, 10**8),), ()), 0, 4)
    made.ceilings = {1: [12e6, 12e6, 12e6]}
    made.runs = {Cell(TAR, 4): runs(11), Cell(PLAIN, 4): runs(9)}
    made.runs |= {Cell(TAR, workers): runs(workers) for workers in (1, 2, 8)}
    made.runs |= {Cell(TAR, 4, name): runs(3) for name, _ in CLASSES}
    return made


def test_one_figure_with_everything_in_it(found: Findings, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(found, tmp_path / "plot.png", "backup.example.org")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ending", plot.FORMATS)
def test_the_same_findings_make_the_same_file(found: Findings, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}{ending}" for name in ("one", "two")]
    for file in files:
        plot.draw(found, file, "backup.example.org")
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_comparison_of_one_way_alone_can_be_drawn(found: Findings, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found.runs = {Cell(PLAIN, 4): runs(9)}
    plot.draw(found, tmp_path / "plot.svg", "h")
    assert (tmp_path / "plot.svg").read_text().count("</svg>") == 1


def test_a_file_that_cannot_be_written_is_an_error_of_ours(found: Findings, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "plot.svg").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        plot.draw(found, tmp_path / "plot.svg", "h")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError) as caught:
        plot.require()
    assert ".[bench]" in caught.value.hint
