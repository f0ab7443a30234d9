"""What `check` says of the work beside the workers, and of the way back."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from ntt_backup.catalog import connection, ledger
from ntt_backup.catalog.history import CheckRun
from ntt_backup.client.bootstrap import Banner
from ntt_backup.config.command_settings import Settings
from ntt_backup.filestore.contract import StoredFile
from ntt_backup.model import StoredPack
from ntt_backup.objects.bucket import Protection
from ntt_backup.report import check
from ntt_backup.report.check import look, of_banner, of_drills, snapshots
from tests.helpers.memory_store import MemoryStore


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
    monkeypatch.setattr(check, "open_bucket", lambda _: told)
    monkeypatch.setattr(check, "open_store", lambda *_: MemoryStore())

    step = snapshots(settings, reached=True)

    assert bool(step.warning) == (of_which is not None)
    assert (of_which or "2 sets, 0 versions") in step.text + step.warning


def test_a_log_on_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.model_validate(
        {
            "source": {"root": str(tmp_path)},
            "remote": {"url": f"file://{tmp_path}"},
            "log": {"jsonl": str(tmp_path / "log.jsonl")},
        }
    )
    assert not check._log(settings).warning
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=0))
    assert "events are lost" in check._log(settings).warning


WHEN = datetime(2026, 3, 4, tzinfo=UTC)
KEY = f"packs/wide/{0:016x}-{'f' * 16}-{'ab' * 16}.tar"


@pytest.mark.parametrize(
    ("there", "lost"),
    [
        (None, True),
        (StoredFile(KEY, 9, WHEN, checksum="SUM"), False),
        (StoredFile(KEY, 8, WHEN, checksum="SUM"), True),
        (StoredFile(KEY, 9, WHEN, checksum="ANOTHER"), True),
        # The server keeps no checksum: nothing tells it from another of the same size.
        (StoredFile(KEY, 9, WHEN), False),
    ],
    ids=str,
)
def test_the_newest_pack_is_missed_where_another_object_has_its_key(
    there: StoredFile | None, lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.model_validate(
        {
            "source": {"root": str(tmp_path)},
            "remote": {"url": "s3://bucket"},
            "log": {"jsonl": str(tmp_path / "log")},
        }
    )
    pack = StoredPack("ab" * 16, KEY, "00", "ff", 3, 9, "SUM")
    store = SimpleNamespace(stat=lambda _: there, close=lambda: None)
    monkeypatch.setattr(check, "open_packs", lambda _: store)
    monkeypatch.setattr(connection, "connect", lambda *_: nullcontext())
    monkeypatch.setattr(ledger, "newest_pack", lambda *_: (pack, WHEN))
    assert [one.missed for one in look(settings)] == [KEY] * lost


ALL = frozenset({"list", "get", "verify", "write"})
BANNER = Banner("1", "3.11.2", ("blake3", "sha256"), "blake3", (), ALL)
PROVED = CheckRun("drill", WHEN, WHEN, 0, 5, 5, 0, "")


@pytest.mark.parametrize(
    ("banner", "warns", "words"),
    [
        (BANNER, False, "Python 3.11.2 on the remote, BLAKE3: verify, restore and drill can"),
        (replace(BANNER, checking="b3sum"), False, "BLAKE3 by the program b3sum"),
        (replace(BANNER, checking="none"), False, "(verify: what the store here has)"),
        (replace(BANNER, allowed=ALL - {"get"}), True, "restore, drill and verify --download need"),
        (replace(BANNER, allowed=frozenset({"write"})), True, "lacks list, get, verify"),
    ],
)
def test_what_a_receiver_cannot_read_is_said_in_words(
    banner: Banner, warns: bool, words: str
) -> None:
    step = of_banner(banner)
    assert bool(step.warning) is warns
    assert words in (step.warning or step.text)
    assert step.error is None


@pytest.mark.parametrize(
    ("drills", "copied", "warns", "words"),
    [
        ([], False, False, "nothing is copied yet"),
        ([], True, False, "no drill has proved yet"),
        ([PROVED], True, False, "2026-03-04"),
        ([replace(PROVED, exit_code=7)], True, True, "NOT PROVED; none ever did"),
        ([replace(PROVED, exit_code=5, detail="away"), PROVED], True, True, "ended with 5 (away)"),
        ([replace(PROVED, exit_code=7), PROVED], True, True, "the last one that did: 2026-03-04"),
    ],
)
def test_the_last_drill_is_told_with_its_verdict(
    drills: list[CheckRun], copied: bool, warns: bool, words: str
) -> None:
    step = of_drills(drills, copied=copied)
    assert bool(step.warning) is warns
    assert words in (step.warning or step.text)
