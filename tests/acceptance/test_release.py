"""A release: what is wrong is told before anything is made, and what is made fits together."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.machine import CHECKOUT

VERSION = "7.8.9rc1"


def git(clone: Path, *words: str) -> str:
    argv = ["git", "-C", str(clone), "-c", "user.name=t", "-c", "user.email=t@localhost", *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def release(clone: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    argv, names = [str(clone / "bin" / "release"), *words], ("AUTHOR", "COMMITTER")
    given = {f"GIT_{name}_{part}": "t" for name in names for part in ("NAME", "EMAIL")}
    # Without an image, which would stay in the engine.
    env = {**os.environ, **given, "DOCKER_HOST": "unix:///nonexistent", **environ}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=1500)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of this checkout, changes included, in which something is new."""
    if not (CHECKOUT / ".git").exists():
        pytest.skip("this is no clone")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-tags", str(CHECKOUT), str(clone)], check=True)
    for name in ("bin", "ntt_backup", "docs", "systemd"):
        shutil.copytree(CHECKOUT / name, clone / name, dirs_exist_ok=True)
    shutil.rmtree(clone / "changes.d", ignore_errors=True)
    (clone / "changes.d").mkdir()
    (clone / "changes.d" / "thing.new.md").write_text("- A thing.\n")
    shutil.copy(CHECKOUT / "CHANGELOG.md", clone)
    git(clone, "add", "--all")
    git(clone, "commit", "-q", "-m", "changes")
    return clone


def test_a_release_that_cannot_be_made_is_refused_and_changes_nothing(clone: Path) -> None:
    before = git(clone, "rev-parse", "HEAD")
    for word in ("v7.8.9", "7.8.9-rc1", "7", "", "--help"):
        assert release(clone, word).returncode == 2, word
    assert release(clone, VERSION, "now").returncode == 2
    git(clone, "tag", "v7.8.8")
    refused = {
        "7.8.8": "the tag v7.8.8 exists",
        "7x8y9rc1": "no version",
        "7.8.9": "7.8 is missing",
    }
    for version, why in refused.items():
        assert why in release(clone, version).stderr
    nameless = release(clone, VERSION, GIT_COMMITTER_NAME="")
    assert "git knows no name" in nameless.stderr
    (clone / "new").touch()
    assert "the checkout has changes" in release(clone, VERSION).stderr
    (clone / "new").unlink()
    wrong = clone / "changes.d" / "thing.odd.md"
    wrong.write_text("- A thing.\n")
    git(clone, "add", "--all")
    git(clone, "commit", "-q", "-m", "wrong")
    assert "is called NAME.KIND.md" in release(clone, VERSION).stderr
    git(clone, "reset", "-q", "--hard", before)
    assert (git(clone, "rev-parse", "HEAD"), git(clone, "tag")) == (before, "v7.8.8")
    assert git(clone, "status", "--porcelain") == ""
    assert not (clone / "dist").exists()
    shutil.rmtree(clone / ".git")
    assert "a version is made in a clone" in release(clone, VERSION).stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_release_has_all_files_of_one_version_and_a_tag_and_another_build_is_equal(
    clone: Path, tmp_path: Path
) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("this is no Debian: it has no dpkg-deb")
    done = release(clone, VERSION)
    assert done.returncode == 0, done.stdout + done.stderr
    assert git(clone, "describe") == f"v{VERSION}"
    assert git(clone, "log", "-1", "--format=%s") == f"Release {VERSION}"
    assert git(clone, "status", "--porcelain") == ""
    assert f"\n\n## {VERSION} (20" in (clone / "CHANGELOG.md").read_text()
    assert not (clone / "changes.d" / "thing.new.md").exists()
    dist = clone / "dist"
    lines = (line.partition("  ") for line in (dist / "SHA256SUMS").read_text().splitlines())
    sums = {name: digest for digest, _, name in lines}
    for name, digest in sums.items():
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
    (deb,) = dist.glob("*.deb")
    made = {"ntt-backup.cdx.json", "requirements.txt", deb.name}
    made |= {f"ntt_backup-{VERSION}-py3-none-any.whl", f"ntt_backup-{VERSION}.tar.gz"}
    assert set(sums) == made == {path.name for path in dist.iterdir()} - {"SHA256SUMS"}
    fields = ["dpkg-deb", "--field", str(deb), "Version"]
    version = subprocess.run(fields, check=True, capture_output=True, text=True).stdout.strip()
    assert re.fullmatch(r"7\.8\.9~rc1-1(\+(deb|ubuntu)[\d.]+)?", version)
    bom = json.loads((dist / "ntt-backup.cdx.json").read_text())
    about = bom["metadata"]["component"]
    assert (about["name"], about["version"]) == ("ntt-backup", VERSION)
    pinned = (dist / "requirements.txt").read_text().count("\n    --hash=sha256:")
    assert sum(len(one["externalReferences"][0]["hashes"]) for one in bom["components"]) == pinned
    assert "the tag" in release(clone, VERSION).stderr

    # Once more, later, at another place, and by somebody with other customs.
    other = tmp_path / "in another" / "place"
    subprocess.run(["git", "clone", "-q", str(clone), str(other)], check=True)
    (tmp_path / "scratch").mkdir()
    customs = {"TZ": "Asia/Tokyo", "LANG": "tr_TR.UTF-8", "COLUMNS": "40", "HOME": str(tmp_path)}
    customs["PYTHONDONTWRITEBYTECODE"] = ""  # It is set in many containers.
    again = release(other, TMPDIR=str(tmp_path / "scratch"), **customs)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (other / "dist" / "SHA256SUMS").read_text() == (dist / "SHA256SUMS").read_text()
