"""A short run of each kind of mutated input; the long ones are played by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import KINDS
from tests.helpers.waiting import PATIENCE

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("what", KINDS)
def test_mutated_input_does_no_harm_and_takes_no_memory(what: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.fuzz", what, "--rounds", "60", "--seed", "7"]
    done = subprocess.run(
        argv,
        cwd=PROJECT,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"{what}: 60 rounds, seed 7: 0 found" in done.stdout
