"""A bare Debian: few commands lead to a proved backup, and a setup that fails leaves no trace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.machine import CHECKOUT

SECONDS = 1500
# By the network of this machine; all processes that were started end with the script.
ENTER = """\
mount --rbind /dev "$0/dev"
mount -t proc proc "$0/proc"
mount -t tmpfs tmpfs "$0/run"
exec chroot "$0" /sbin/runuser --login "$1" --whitelist-environment=PIP_CERT --command "$2"
"""
# The first run sends also files that were just written.
SCRIPT = """\
set -eu
began=$(date +%s)
PATH=$PATH:~/ntt/bin
say() { echo "[$(($(date +%s) - began)) s] $*"; }
setup() {
    ntt-backup-remote setup --yes --files ~/photos --to "file:///media/usb/$USER" \\
        --set source.grace=0 "$@"
}
trace() {
    find / -xdev \\( -path /tmp -o -path ~/ntt \\) \\
        -prune -o -type d -printf '%p %m %u\\n' -o -printf '%p %m %u %s\\n' 2>/dev/null |
        sort
    getent passwd
}
setup_fails() {
    trace >~/ntt/before
    if setup --set dump.bin=/nowhere >~/ntt/said 2>&1; then exit 1; fi
    tail -n 4 ~/ntt/said
    trace >~/ntt/after
    diff ~/ntt/before ~/ntt/after
    say a setup that failed left no trace
}
cd
say "$(. /etc/os-release && echo "$PRETTY_NAME")"
mkdir photos
head -c 100000 /dev/urandom >photos/one
python3 -m venv ~/ntt
~/ntt/bin/pip install -q "$(echo /*.whl)[embedded]"
say installed
setup_fails
setup
ntt-backup-remote run --once
say a backup
ntt-backup-remote drill --scratch drill --database embedded
say a drill
"""


def call(*argv: str | Path) -> str:
    """What a program says, which must end well."""
    words = [str(word) for word in argv]
    done = subprocess.run(
        words, cwd=CHECKOUT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The root of a Debian with Python, the wheel of this checkout, and an ordinary user."""
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.skip("a bare Debian is made by mmdebstrap, and entered by root alone")
    place = tmp_path_factory.mktemp("bare")
    root = place / "root"
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place)
    # What mmdebstrap mounts below the root, such as this machine's /dev/shm, ends with it, also
    # where it is killed: the root is removed with all that lies in it.
    # Signatures are checked, but a mirror that stands still is good enough.
    options = ("--quiet", "--mode=root", "--variant=minbase", "--include=python3-venv")
    late = '--aptopt=Acquire::Check-Valid-Until "false"'
    call(
        "unshare",
        "--mount",
        "mmdebstrap",
        *options,
        late,
        "--dpkgopt=force-unsafe-io",
        request.param,
        root,
    )
    for name in filter(None, ("/etc/resolv.conf", "/etc/hosts", os.environ.get("PIP_CERT"))):
        (root / name.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, root / name.lstrip("/"))
    (wheel,) = place.glob("*.whl")
    shutil.copy(wheel, root)
    call("chroot", root, "/sbin/useradd", "--create-home", "person")
    disk = root / "media" / "usb"
    disk.mkdir()
    disk.chmod(0o1777)
    yield root
    shutil.rmtree(root)


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
def test_a_bare_debian_comes_to_a_proved_backup(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespaces = ("--mount", "--pid", "--ipc", "--fork", "--kill-child")
    enter = ("unshare", *namespaces, "sh", "-euc", ENTER, root, "person", SCRIPT)
    said = call(*enter)
    times = [line for line in said.splitlines() if line.startswith("[")]
    with capsys.disabled():
        print(f"\n{', '.join(times)}")
    assert "removed again" in said
    assert "PROVED" in said
    assert times[-1].endswith("a drill")
