"""What `check` says of the work beside the workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ntt_backup.config.models import Settings
from ntt_backup.daemon.check import snapshots
from ntt_backup.objects import s3
from ntt_backup.objects.bucket import Protection
from ntt_backup.snapshot.repository import open as opening
from tests.memory_repository import MemoryRepository


@pytest.mark.parametrize(
    ("days", "of_which"),
    # A full version of `etc` may be needed for 30 + 28 days, one of `db` for 1 + 3.
    [(0, None), (3, "db (4), etc (58)"), (57, "etc (58)"), (58, None)],
)
def test_a_lock_that_ends_before_a_chain_does_is_warned_of(
    days: int, of_which: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"full_every": 86400, "keep_last": 3, "keep_daily": 0, "keep_weekly": 0}
    settings = Settings.model_validate(
        {
            "source": {"root": str(tmp_path)},
            "remote": {"url": "s3://bucket"},
            "snapshots": {
                "db": {"paths": [str(tmp_path)], **short},
                "etc": {"paths": [str(tmp_path)]},
            },
        }
    )
    told = SimpleNamespace(protection=lambda: Protection(lock_days=days))
    monkeypatch.setattr(s3, "open_bucket", lambda _: told)
    monkeypatch.setattr(opening, "open_repository", lambda _: MemoryRepository())

    step = snapshots(settings, reached=True)

    assert bool(step.warning) == (of_which is not None)
    assert (of_which or "2 sets, 0 versions") in step.text + step.warning
