"""A remote whose Python has the module blake3: this machine's own, where versions are the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import blake3
import pytest

from tests.sshd import Sshd


def give_blake3(remote: Sshd, startup: Path) -> None:
    """Let the remote's ordinary account find the module; skip the test where it cannot be used."""
    home = remote.directory("home")
    version = remote.run("python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'")
    place = home.local / f".local/lib/python{version.stdout.decode().strip()}/site-packages/blake3"
    source = Path(blake3.__file__).parent
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
    startup.write_text(f"export HOME={home.path}\n")
    if remote.run("python3 -E -c 'import blake3'").returncode != 0:
        pytest.skip("this machine's blake3 does not run on the remote's Python")
