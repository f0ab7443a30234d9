"""Remotes that can compute BLAKE3, in one way or another, and remotes that cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import blake3
import pytest

from ntt_backup.cli.commands.install import RECEIVER, write_receiver
from tests.helpers.sshd import RemoteDir, Sshd

CHECKING = ("blake3", "b3sum", "none")


def give_blake3(remote: Sshd, startup: Path) -> None:
    """Let the remote's ordinary account find the module; skip the test where it cannot be used."""
    home = remote.directory("home")
    version = remote.run("python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'")
    _copy_module(home.local / f".local/lib/python{version.stdout.decode().strip()}/site-packages")
    startup.write_text(f"export HOME={home.path}\n")
    if remote.run("python3 -E -c 'import blake3'").returncode != 0:
        pytest.skip("this machine's blake3 does not run on the remote's Python")


def give_b3sum(remote: Sshd, startup: Path) -> None:
    """Let the remote's ordinary account find the program, and no module."""
    tools = remote.directory("tools")
    _copy_program(remote, tools)
    startup.write_text(f"export PATH={tools.path}:$PATH PYTHONNOUSERSITE=1\n")


def receiver_on(remote: Sshd, checking: str) -> str:
    """A command on the remote that runs the receiver as `install-receiver --write` writes it.

    checking: what it finds to check names with, and nothing else. Skips the test where the remote
    cannot have that.
    """
    place = remote.directory("program")
    receiver = place.local / RECEIVER
    write_receiver(receiver)
    receiver.write_text(receiver.read_text().replace("libblake3", "libnothing"))
    python = f'exec "$python" -S {place.path}/{RECEIVER} "$@"'
    if checking == "blake3":
        _copy_module(place.local)
        python = f"PYTHONPATH={place.path} {python}"
        if remote.run(f"PYTHONPATH={place.path} python3 -S -c 'import blake3'").returncode != 0:
            pytest.skip("this machine's blake3 does not run on the remote's Python")
    elif checking == "b3sum":
        _copy_program(remote, place)
    command = place.local / "receive"
    # Its own path: what is called python3 may be a script, which needs programs.
    found = "python=$(python3 -c 'import sys; print(sys.executable)')"
    command.write_text(f"#!/bin/sh\n{found}\nPATH={place.path}\n{python}\n")
    command.chmod(0o755)
    return f"{place.path}/{command.name}"


def _copy_module(to: Path) -> None:
    source = Path(blake3.__file__).parent
    shutil.copytree(source, to / "blake3", ignore=shutil.ignore_patterns("__pycache__"))


def _copy_program(remote: Sshd, to: RemoteDir) -> None:
    program = shutil.which("b3sum")
    if program is None:
        pytest.skip("b3sum is not installed")
    shutil.copy(program, to.local)
    if remote.run(f"{to.path}/b3sum --version").returncode != 0:
        pytest.skip("this machine's b3sum does not run on the remote")
