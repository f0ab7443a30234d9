"""Snapshot sets: of the settings, or of a command line, never of both."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ntt_backup.config import CatalogConfig
from ntt_backup.config.sections import SnapshotSettings
from ntt_backup.errors import ConfigError
from ntt_backup.snapshot.take.walk import SnapshotSet, find_set

SETTINGS = CatalogConfig(
    snapshots={"etc": SnapshotSettings(paths=(Path("/etc"),), exclude=("*.key",), full_every=60)}
)


def test_a_set_comes_from_the_settings_or_from_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_settings = SnapshotSet("etc", ("/etc",), ("*.key",), 0, timedelta(seconds=60))
    assert find_set(SETTINGS, "etc") == of_settings
    monkeypatch.chdir(tmp_path)
    given = find_set(SETTINGS, "home", ["notes", "/srv"], ["*.swp"])
    assert given == SnapshotSet("home", (f"{tmp_path}/notes", "/srv"), ("*.swp",))


@pytest.mark.parametrize(
    ("name", "paths", "said"),
    [
        ("home", [], "no set home is in the configuration, and no paths are given"),
        ("etc", ["/srv"], r"the paths of etc stand under \[snapshots.etc\]"),
        ("../etc", ["/srv"], "is not the name of a snapshot set"),
        ("home", ["/srv/../etc"], "may mean two directories"),
        ("home", ["/srv", ""], "a path is empty"),
    ],
)
def test_a_set_that_is_not_clear_is_refused(name: str, paths: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_set(SETTINGS, name, paths)
