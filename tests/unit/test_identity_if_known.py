"""Whoever has no catalog is not kept waiting for what speaks to one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ntt_backup.catalog import identity_if_known
from ntt_backup.catalog.identity_if_known import identified_if_known
from ntt_backup.config import RemoteConfig

REMOTE = {"url": "file:///backup"}


def test_the_commands_of_snapshots_load_no_driver_of_postgresql_by_themselves() -> None:
    modules = "ntt_backup.cli.commands.snapshot, ntt_backup.snapshot.job"
    argv = [sys.executable, "-c", f"import sys, {modules}; print('psycopg' in sys.modules)"]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_catalog_is_asked_where_one_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(identity_if_known, "_SOCKETS", (tmp_path,))
    # Who asks fails.
    monkeypatch.setitem(sys.modules, "ntt_backup.catalog.connection", None)
    plain = RemoteConfig.model_validate({"remote": REMOTE})
    assert identified_if_known(plain, "test") is plain
    named = RemoteConfig.model_validate({"remote": REMOTE, "catalog": {"url": "postgresql:///x"}})
    with pytest.raises(ImportError):
        identified_if_known(named, "test")
    with monkeypatch.context() as patch:
        patch.setenv("PGHOST", "db")
        with pytest.raises(ImportError):
            identified_if_known(plain, "test")
    (tmp_path / ".s.PGSQL.5432").touch()
    with pytest.raises(ImportError):
        identified_if_known(plain, "test")
