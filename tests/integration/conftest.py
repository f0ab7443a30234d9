"""The place that a receiver is given."""

from __future__ import annotations

from pathlib import Path

import pytest


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
