"""The receiver run by another Python: that of Debian 11 (3.9), or NTT_TEST_REMOTE_PYTHON."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from ntt_backup.client.read_session import ReadSession
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config.sections import RunSettings
from tests.contract.harness import PATIENT, Harness, Machine, Taken
from tests.helpers.waiting import PATIENCE

pytestmark = pytest.mark.parametrize("strategy", ["stream"])

SUITE = "bullseye"


@pytest.fixture(scope="module")
def old_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shell command of an older Debian's Python, taken from its packages."""
    if named := os.environ.get("NTT_TEST_REMOTE_PYTHON"):
        return named
    if not os.environ.get("CI"):
        pytest.skip("fetches packages, which takes half a minute: only with CI=true")
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    home = tmp_path_factory.mktemp("debian")
    root, archive = home / "root", home / "root.tar"
    root.mkdir()
    make = ["mmdebstrap", "--quiet", "--variant=extract", "--include=python3", SUITE]
    made = subprocess.run(
        [*make, archive], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"the packages of {SUITE} cannot be had: {made.stderr.strip()[-300:]}")
    subprocess.run(["tar", "-C", root, "--exclude=./dev", "-xf", archive], check=True)
    archive.unlink()
    # Its own C library, too: nothing is installed, and no right to chroot is needed.
    (loader,) = root.glob("lib/*/ld-linux*.so*")
    libraries = f"{loader.parent}:{root}/usr/lib/{loader.parent.name}"
    return f"{loader} --library-path {libraries} {root}/usr/bin/python3"


def test_a_receiver_under_an_older_python_stores_and_sends_blobs(
    local: Harness, machine: Machine, old_python: str
) -> None:
    machine.tool("python3", f'exec {old_python} "$@"')
    batch = local.batch("b", b"", b"text " * 10_000, os.urandom(3 << 20))
    local.assert_arrives(batch, transport=machine)

    spec = SessionSpec(machine, local.path, "0" * 12, "run", "0", RunSettings(**PATIENT))
    reading, taken = ReadSession(spec), Taken()
    digests = [bytes.fromhex(blob.blobid) for blob in batch.blobs]
    reading.ask_contents(digests)
    reading.contents(taken)
    said = subprocess.run([*old_python.split(), "--version"], capture_output=True, text=True)
    assert reading.banner.python == said.stdout.split()[1]
    assert sorted(taken.digests) == sorted(digests)
    reading.close()
