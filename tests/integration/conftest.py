"""The place that a receiver is given, and time for claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from ntt_backup.catalog import range_locks
from tests.helpers.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _no_search_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is; tests of what is cut short set it themselves."""
    monkeypatch.setattr(range_locks, "_SEARCH_SECONDS", PATIENCE)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty root."""
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def placed(root: Path) -> None:
    """The root has an empty by-hash."""
    (root / "by-hash").mkdir()
