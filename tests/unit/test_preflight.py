"""The preflight's judgements: what came back must be what was sent, and the rest is only a look."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.catalog.connection import Connection
from ntt_backup.config import Settings, load
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.daemon import preflight
from ntt_backup.errors import BackupError, RemoteCannotStore, SourceError
from ntt_backup.model import PendingEstimate
from ntt_backup.process.messages import RemoteProbed
from ntt_backup.report import check
from ntt_backup.upload.strategies import tar_probe
from ntt_backup.upload.strategies.probe import Facts, trial
from tests.unit.test_config import RECIPIENT

CONTENTS = (b"", b"x", b"y" * 70_000)
SENT = {blake3(content).hexdigest() for content in CONTENTS}


def archive(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    """A tar archive as the remote's tar makes it of by-hash."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as made:
        top = tarfile.TarInfo("by-hash")
        top.type, top.mode = tarfile.DIRTYPE, 0o755
        made.addfile(top)
        for name, content in files.items():
            member = tarfile.TarInfo(f"by-hash/{name}")
            member.size, member.mode = len(content), mode
            made.addfile(member, io.BytesIO(content))
    return data.getvalue()


RIGHT = {relative_path(blake3(content).hexdigest()): content for content in CONTENTS}


def test_what_comes_back_identical_is_well() -> None:
    tar_probe._compare(archive(RIGHT), SENT)


@pytest.mark.parametrize(
    ("files", "mode", "word"),
    [
        ({}, 0o644, "0 of 3"),
        (dict(list(RIGHT.items())[:2]), 0o644, "2 of 3"),
        ({name: content + b"\r" for name, content in RIGHT.items()}, 0o644, "0 of 3"),
        (RIGHT, 0o600, "mode 600"),
        (RIGHT, 0o755, "mode 755"),
    ],
    ids=["nothing", "too little", "altered", "private", "executable"],
)
def test_what_comes_back_otherwise_stops_the_run(
    files: dict[str, bytes], mode: int, word: str
) -> None:
    with pytest.raises(RemoteCannotStore) as caught:
        tar_probe._compare(archive(files, mode), SENT)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"NTT: not found\n" * 50, archive(RIGHT)[:70_000]],
    ids=["nothing", "text", "half"],
)
def test_what_is_no_archive_is_an_error_of_ours_and_not_of_a_library(data: bytes) -> None:
    with pytest.raises(BackupError):
        tar_probe._compare(data, SENT)


@pytest.mark.parametrize(("skew", "warned"), [(0.0, False), (4.9, False), (5.1, True)])
def test_a_clock_that_is_off_is_worth_a_look(skew: float, warned: bool) -> None:
    facts = Facts(system="Linux", program="tar", free_bytes=1, skew_s=skew, placed=True)
    said = preflight._clock(facts).warning
    assert bool(said) is warned
    # Nobody knows yet whose clock is wrong.
    assert not warned or said.startswith(
        "the clocks of this host and of the remote differ by 5.1 s"
    )


@pytest.mark.parametrize(
    ("inodes", "blobs", "warned", "full"),
    [
        (None, 5000, False, False),
        (5000, 5000, False, False),
        (4999, 5000, True, False),
        (999, 5000, False, True),
        (0, 0, False, True),
        (1, 0, False, False),
        (10, 10, False, False),
        (9, 10, False, True),
    ],
)
def test_free_inodes_are_compared_with_what_is_pending(
    monkeypatch: pytest.MonkeyPatch, inodes: int | None, blobs: int, warned: bool, full: bool
) -> None:
    """Blobs are small files: a disk may have room, and yet take none of them."""
    facts = Facts("Linux", "tar", 1 << 40, 0.0, True, free_inodes=inodes)
    checked = preflight.Preflight.__new__(preflight.Preflight)
    remote = RemoteSettings.model_validate({"url": "file:///mnt"})
    checked._sizes, checked._settings = [], cast(Settings, SimpleNamespace(remote=remote))
    estimate = PendingEstimate(blobs, blobs, 0, exact=True)
    monkeypatch.setattr(preflight.Preflight, "_estimate", lambda self, catalog: estimate)
    catalog = cast(Connection, None)
    if full:
        with pytest.raises(RemoteCannotStore, match="no inodes") as caught:
            checked._look_for_space(catalog, facts)
        assert caught.value.exit_code == 6
    else:
        assert ("inodes" in checked._look_for_space(catalog, facts).warning) == warned


def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    step = preflight.guarded("versions", lambda: check._versions("ssh"))
    assert isinstance(step.error, SourceError)
    assert "tar is not installed" in step.error.message
    assert "apt-get install tar" in step.error.hint


def test_a_machine_without_room_for_trial_blobs_is_told_of_and_may_be_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(SourceError, match="no room") as caught, trial():
        pytest.fail("trial blobs were made")
    assert "TMPDIR" in caught.value.hint


def test_a_start_loads_nothing_of_buckets() -> None:
    load = "from ntt_backup.daemon import coordinator, preflight, run_history"
    argv = [sys.executable, "-c", f"{load}; import sys; print(*sys.modules)"]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.startswith("ntt_backup.objects.")] == []


@pytest.mark.parametrize(
    ("url", "recipients", "warned"),
    [
        ("s3://bucket/store", (RECIPIENT,), True),
        ("s3://bucket/store", (), False),
        ("ssh://remote/store", (), False),
    ],
)
def test_a_run_whose_packs_should_be_signed_tells_of_a_lost_key(
    tmp_path: Path, url: str, recipients: tuple[str, ...], warned: bool
) -> None:
    flags = {
        "remote.url": url,
        "host.key_file": str(tmp_path / "host.key"),
        "pack.recipients": recipients,
        "catalog.url": "postgresql:///catalog",
        "source.root": str(tmp_path),
    }
    settings = load(Settings, flags=flags, environ={})
    facts = Facts("Linux", "python", 1 << 40, 0.0, True)
    found = RemoteProbed(strategy="any", facts=asdict(facts))
    step = preflight.Preflight(settings)._look_at_remote(lambda _: found)
    assert ("nothing that this host sends is signed" in step.warning) is warned
