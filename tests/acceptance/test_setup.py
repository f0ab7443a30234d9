"""bin/setup: it says what it does, shows that it is at work, and where it cannot, why.

Run on a checkout of its own, whose Python is a stand-in: nothing is downloaded.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
# Makes a venv whose pip takes its time, or fails, instead of downloading.
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
    [ -z "$PIP_FAILS" ] || { echo "no such package: $PIP_FAILS" >&2; exit 1; }
    while [ ! -e "$PIP_GOES_ON" ]; do sleep 0.1; done
    echo "pip has much to say"
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


def start(checkout: Path, *prefix: str, **environment: str) -> subprocess.Popen[str]:
    path = f"{checkout.parent / 'programs'}:{os.environ['PATH']}"
    return subprocess.Popen(
        [*prefix, str(checkout / "bin" / "setup"), "demo"],
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


AT_WORK = r"packages into .venv \.\."


def read_until(setup: subprocess.Popen[str], pattern: str) -> str:
    """What it has said when that matches."""
    assert setup.stderr is not None
    said = ""
    while not re.search(pattern, said):
        more = setup.stderr.read(1)
        assert more, said
        said += more
    return said


def as_a_user() -> Sequence[str]:
    """What puts a command into the hands of somebody who does not own the checkout."""
    if os.geteuid() == 0:
        return ("setpriv", "--reuid=nobody", "--clear-groups")
    return ()


def test_setup_says_what_it_does_and_shows_that_it_is_at_work(checkout: Path) -> None:
    goes_on = checkout.parent / "goes on"
    with start(checkout, PIP_GOES_ON=str(goes_on)) as setup:
        said = read_until(setup, AT_WORK)
        goes_on.touch()
        assert setup.stderr is not None
        said += setup.stderr.read()
    assert setup.returncode == 0, said
    first, venv, packages = said.splitlines()
    assert first == "setup: this takes a minute or two, the first time only"
    assert re.fullmatch(r"setup: making .venv with Python 3.13.0 \.* \d+ s", venv)
    assert re.fullmatch(r"setup: installing Python packages into .venv \.+ \d+ s", packages)


def test_setup_shows_the_output_of_what_failed(checkout: Path) -> None:
    with start(checkout, PIP_FAILS="blake3") as setup:
        assert setup.stderr is not None
        said = setup.stderr.read()
    assert setup.returncode == 1
    assert said.splitlines()[-2:] == ["no such package: blake3", "setup: that failed, see above"]


def test_setup_names_the_owner_of_a_checkout_of_another_user(checkout: Path) -> None:
    if os.geteuid() != 0:
        checkout.chmod(0o555)
    with start(checkout, *as_a_user()) as setup:
        assert setup.stderr is not None
        (said,) = setup.stderr.read().splitlines()
    checkout.chmod(0o755)
    owner, user = pwd.getpwuid(checkout.stat().st_uid).pw_name, "nobody"
    if os.geteuid() != 0:
        user = owner
    assert setup.returncode == 1
    assert said == (
        f"setup: {user} may not write to {checkout}, where .venv belongs: run this as {owner},"
        f" or in a copy of your own (cp -r {checkout} ~/)"
    )
