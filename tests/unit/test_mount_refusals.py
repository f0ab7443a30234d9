"""Where this machine cannot mount, one line says so, and what to do instead."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ntt_backup.errors import MountImpossible
from ntt_backup.mount import kernel
from ntt_backup.mount.image import find_packs


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MountImpossible, match="only root") as refused:
        kernel.require_erofs(kernel.FILES_SINCE)
    assert "unpack" in refused.value.hint
    assert "restore" in refused.value.hint
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("release", ["6.11.0-29-generic", "5.15.0", "unknown"])
def test_a_kernel_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    with pytest.raises(MountImpossible, match=r"needs Linux 6\.12, and this is") as refused:
        kernel.require_erofs(kernel.FILES_SINCE)
    assert "unpack" in refused.value.hint


def test_a_pack_that_is_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    pack = tmp_path / "x.tar"
    pack.symlink_to("/nowhere")
    with pytest.raises(MountImpossible, match=f"cannot read {pack}"):
        find_packs(tmp_path, "")
