"""bin/setup: where it cannot do what it should, it says why.

Run on a checkout of its own, whose Python is a stand-in: nothing is downloaded.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
# Makes a venv whose pip fails instead of downloading.
PYTHON = """\
#!/bin/sh
case "$*" in
--version) echo Python 3.13.0 ;;
esac
case "$1 $2" in
"-m venv")
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    echo "$3" >"$3/bin/activate"
    ;;
"-m pip")
    echo "no such package: blake3" >&2
    exit 1
    ;;
esac
"""


@pytest.fixture
def checkout() -> Iterator[Path]:
    """One that another user may enter, which pytest's own directories are not for."""
    with tempfile.TemporaryDirectory() as place:
        yield _checkout(Path(place))


def _checkout(place: Path) -> Path:
    root = place / "checkout"
    (root / "bin").mkdir(parents=True)
    shutil.copy(CHECKOUT / "bin" / "setup", root / "bin")
    shutil.copy(CHECKOUT / "pyproject.toml", root)
    programs = place / "programs"
    programs.mkdir()
    (programs / "python3").write_text(PYTHON)
    (programs / "python3").chmod(0o755)
    for name in ("ssh", "tar"):
        (programs / name).symlink_to("/bin/true")
    for path in (place, root, root / "bin", programs):
        path.chmod(0o755)
    return root


def complaint(checkout: Path, *prefix: str) -> list[str]:
    """What it says where it fails."""
    path = f"{checkout.parent / 'programs'}:{os.environ['PATH']}"
    done = subprocess.run(
        [*prefix, str(checkout / "bin" / "setup"), "demo"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()


def as_a_user() -> Sequence[str]:
    """What puts a command into the hands of somebody who does not own the checkout."""
    if os.geteuid() == 0:
        return ("setpriv", "--reuid=nobody", "--clear-groups")
    return ()


def test_setup_shows_the_output_of_what_failed(checkout: Path) -> None:
    said = complaint(checkout)
    assert said[-2:] == ["no such package: blake3", "setup: that failed, see above"]


def test_setup_names_the_owner_of_a_checkout_of_another_user(checkout: Path) -> None:
    if os.geteuid() != 0:
        checkout.chmod(0o555)
    (said,) = complaint(checkout, *as_a_user())
    checkout.chmod(0o755)
    owner, user = pwd.getpwuid(checkout.stat().st_uid).pw_name, "nobody"
    if os.geteuid() != 0:
        user = owner
    assert said == (
        f"setup: {user} may not write to {checkout}, where .venv belongs: run this as {owner},"
        f" or in a copy of your own (cp -r {checkout} ~/)"
    )
