"""The wheel is installed as users do it, from the package index, and works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.machine import CHECKOUT

PINNED = CHECKOUT / "bin" / "packaging" / "requirements.txt"


def run(*argv: str | Path, **environ: str | Path) -> str:
    """What a command prints; it must end with 0."""
    words = [str(word) for word in argv]
    # A configuration of this machine, and what the tests run in, are no part of it.
    others = {"PATH": os.environ["PATH"], "NTT_CONFIG": "/dev/null"}
    env = {**os.environ, **others, **{name: str(value) for name, value in environ.items()}}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=900)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pipx and uv."""
    venv = tmp_path_factory.mktemp("tools")
    run(sys.executable, "-m", "venv", venv)
    run(venv / "bin" / "pip", "install", "-q", "pipx", "uv", "hatchling")
    return venv / "bin"


@pytest.fixture(scope="module")
def wheel(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    build = [str(tools / "python"), "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=CHECKOUT, check=True, capture_output=True)
    (found,) = directory.glob("*.whl")
    return found


def by_pip(_tools: Path, wheel: Path, place: Path) -> Path:
    run(sys.executable, "-m", "venv", place)
    run(place / "bin" / "pip", "install", "-q", "--require-hashes", "-r", PINNED)
    run(place / "bin" / "pip", "install", "-q", "--no-deps", wheel)
    return place / "bin"


def by_pipx(tools: Path, wheel: Path, place: Path) -> Path:
    environ = {"PIPX_HOME": place, "PIPX_BIN_DIR": place / "bin", "PIPX_MAN_DIR": place / "man"}
    run(tools / "pipx", "install", "--python", sys.executable, f"{wheel}[s3]", **environ)
    return place / "bin"


def by_uv(tools: Path, wheel: Path, place: Path) -> Path:
    environ = {"UV_TOOL_DIR": place, "UV_TOOL_BIN_DIR": place / "bin"}
    run(tools / "uv", "tool", "install", "--python", sys.executable, f"{wheel}[s3]", **environ)
    return place / "bin"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", [by_pip, by_pipx, by_uv])
def test_what_is_installed_from_the_wheel_backs_up_and_restores(
    way: object, tools: Path, wheel: Path, tmp_path: Path
) -> None:
    assert callable(way)
    programs = way(tools, wheel, tmp_path / "place")
    remote, data, back = (tmp_path / name for name in ("remote", "data", "back"))
    for directory in (remote, data, back):
        directory.mkdir()
    (data / "file").write_bytes(os.urandom(100_000))
    program, url = programs / "ntt-backup-remote", f"file://{remote}"
    assert "version" in run(program, "--version")
    assert "--root" in run(programs / "ntt-backup-receive", "--help")
    run(program, "snapshot", "take", "data", data, NTT_REMOTE_URL=url)
    run(program, "snapshot", "restore", "data", "--to", back, NTT_REMOTE_URL=url)
    (restored,) = back.rglob("file")
    assert restored.read_bytes() == (data / "file").read_bytes()
    run(program, "install-service", "--root", tmp_path / "root")
    assert (tmp_path / "root/etc/systemd/system/ntt-backup-remote.service").is_file()
