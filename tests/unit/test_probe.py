"""The trial blobs of a preflight: made on this machine, which may be full."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from ntt_backup.errors import SourceError
from ntt_backup.upload.strategies.probe import trial


def test_a_machine_without_room_for_trial_blobs_is_told_of_and_may_be_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(SourceError, match="no room") as caught, trial():
        pytest.fail("trial blobs were made")

    assert "TMPDIR" in caught.value.hint
