"""What is shipped: a wheel and an sdist that hold what they must, versions that are pinned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ntt_backup

PROJECT = Path(__file__).parents[2]
PINNED = PROJECT / "bin" / "packaging" / "requirements.txt"
# What the service is installed with: every kind of target.
EXTRAS = ("s3", "sftp", "mount", "seal")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist."""
    pytest.importorskip("hatchling")
    directory = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    subprocess.run(argv, cwd=PROJECT, check=True, capture_output=True)
    return directory


def test_the_wheel_installs_both_programs_and_all_files_of_the_service(
    dist: Path, tmp_path: Path
) -> None:
    """Without an index: what the tests run with is what the program needs."""
    (wheel,) = dist.glob("*.whl")
    venv = tmp_path / "venv"
    run = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(run, check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    options = ["-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    # Without what an editable install has put there: .pth files of a .pth's directory do not count.
    (site / "needed.pth").write_text(f"{ours}\n")
    said = subprocess.run(
        [venv / "bin" / "ntt-backup-remote", "--version"], check=True, capture_output=True
    )
    assert ntt_backup.__version__ in said.stdout.decode()
    subprocess.run([venv / "bin" / "ntt-backup-receive", "--help"], check=True, capture_output=True)
    root = tmp_path / "root"
    argv = [str(venv / "bin" / "ntt-backup-remote"), "install-service", "--root", str(root)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=tmp_path)
    sample = {path.name for path in (PROJECT / "systemd").rglob("*") if path.is_file()}
    assert {Path(line.partition(":")[0]).name for line in done.stdout.splitlines()} == sample
    unit = root / "etc/systemd/system/ntt-backup-remote.service"
    assert f"ExecStart={venv}/bin/ntt-backup-remote run" in unit.read_text()


def test_wheel_and_sdist_hold_what_they_must_and_no_tests(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = {path for path in (PROJECT / "ntt_backup").rglob("*") if path.is_file()}
    wanted = {
        str(path.relative_to(PROJECT)) for path in package if path.parent.name != "__pycache__"
    }
    assert wanted - inside == set()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    build = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "docs/first-aid.md"}
    assert (wanted | build | {"bin/build-deb", "systemd/backup-remote.toml"}) - names == set()
    assert [name for name in inside | names if name.startswith(("tests", "."))] == [".gitignore"]


def test_a_purge_follows_no_link_and_leaves_keys(tmp_path: Path) -> None:
    """The script is run with a root of its own, and without the user's removal."""
    script = (PROJECT / "bin/packaging/debian/postrm").read_text()
    script = re.sub(r"(?<=[ =\"'])/(?=(?:var|etc|run)/)", f"{tmp_path}/", script)
    script = script.replace("getent passwd", "false")
    assert not re.search(r"(?<!\w)/(var|etc|run)/", script.replace(f"{tmp_path}/", "@"))
    ours = '{"timestamp": "2026-01-01", "level": "info", "event": "run_start", "run_id": "1"}\n'
    kept = {
        "var/lib/ntt-backup/host.key": "a key",
        "var/lib/ntt-backup/.ssh/id_ed25519": "a key",
        "etc/ntt/backup-remote.toml": "settings",
        "var/log/ntt/other.jsonl": ours,
        "var/log/ntt/backup-remote-old.jsonl": '{"text": "of another program"}\n',
        "elsewhere/log.jsonl": ours,
        "elsewhere/newest/a": "a file",
    }
    gone = {"var/log/ntt/backup-remote.jsonl": ours, "var/lib/ntt-backup/newest-x.json": "{}"}
    for name, text in {**kept, **gone}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "var/log/ntt/backup-remote-l.jsonl").symlink_to(tmp_path / "elsewhere/log.jsonl")
    (tmp_path / "var/lib/ntt-backup/.cache").symlink_to(tmp_path / "elsewhere/newest")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/ntt-backup").symlink_to(tmp_path / "elsewhere")
    subprocess.run(["sh", "-s", "purge"], input=script, text=True, check=True, capture_output=True)

    files = {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file()}
    assert files == {*kept, "var/log/ntt/backup-remote-l.jsonl"}
    for name, text in kept.items():
        assert (tmp_path / name).read_text() == text


def test_every_dependency_is_pinned_with_hashes() -> None:
    """Else: bin/lock."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(text for name in EXTRAS for text in extras[name])]
    pinned = {}
    for block in re.split(r"\n(?=\S)", PINNED.read_text()):
        if match := re.match(r"([\w.-]+)==(\S+)", block):
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), match[0]
            pinned[canonicalize_name(match[1])] = match[2]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"run bin/lock: {requirement} is missing"
        assert requirement.specifier.contains(pinned[name]), f"run bin/lock: {requirement}"
    assert "http" not in PINNED.read_text()


def test_a_tag_and_the_program_name_the_same_version() -> None:
    # The clone may belong to somebody else.
    git = ["git", "-c", "safe.directory=*", "-C", str(PROJECT)]
    argv = [*git, "tag", "--points-at", "HEAD", "--list", "v*"]
    try:
        tags = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no clone")
    assert tags in ([], [f"v{ntt_backup.__version__}"])


def test_workflows_call_only_scripts_of_the_repository() -> None:
    """What CI does elsewhere can be done here."""
    workflows = sorted((PROJECT / ".github" / "workflows").glob("*.yml"))
    assert len(workflows) == 3
    scripts = r"(?<![\w/])(?:\.ci|bin|tests)/[\w./-]*\w"
    called = {
        one for path in workflows for one in re.findall(rf"run: .*?({scripts})", path.read_text())
    }
    assert called >= {".ci/run", "bin/test", "bin/demo", "bin/build-deb", "bin/release"}
    for one in called:
        assert os.access(PROJECT / one, os.X_OK), one
    versions = re.search(r"python: \[(.*)\]", (workflows[0]).read_text())
    assert versions
    metadata = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    assert metadata["project"]["requires-python"] == ">=" + versions[1].split('"')[1]
