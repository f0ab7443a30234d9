"""`catalog.url = "embedded"`: a private server that runs as long as a command uses it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ntt_backup.process.embedded import NAME
from tests.helpers import program
from tests.helpers.blobs import put, tree
from tests.helpers.parallel import memory
from tests.helpers.processes import kill
from tests.helpers.waiting import PATIENCE, wait_until

IMPORT = "import sys; from pathlib import Path; from ntt_backup.process import embedded\n"
HOLD = IMPORT + "embedded.hold(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
LET_GO = f"""{IMPORT}
server = Path(sys.argv[1])
embedded.hold(server)
with embedded.unused(server):
    assert not (server / "data" / "postmaster.pid").exists()
"""


@dataclass
class Host:
    """A host with a store, a disk, and an embedded catalog."""

    root: Path

    @property
    def server(self) -> Path:
        return self.root / "state" / NAME

    def begin(self) -> None:
        for name in ("state", "store", "disk"):
            (self.root / name).mkdir()
        if os.geteuid() == 0:
            shutil.chown(self.root / "state", "nobody")
        values = {
            "catalog.url": f"embedded:{self.root}/state",
            "source.root": f"{self.root}/store",
            "remote.url": f"file://{self.root}/disk",
            "log.jsonl": f"{self.root}/log.jsonl",
            "lock.file": f"{self.root}/lock",
            "host.key_file": f"{self.root}/host.key",
        }
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
        (self.root / "backup.toml").write_text("".join(lines))

    def start(self, *args: str) -> program.Started:
        words = ["--config", str(self.root / "backup.toml"), *args]
        with open(os.devnull, "w") as nothing:
            return program.Started(words, os.environ, nothing, nothing)

    def call(self, *args: str, expect: int = 0) -> str:
        done = program.run(
            ["--config", str(self.root / "backup.toml"), *args], os.environ, PATIENCE
        )
        assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def processes(self) -> list[int]:
        """The keepers and servers of this host."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if str(self.server).encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
        return found

    def await_end(self) -> None:
        wait_until(lambda: not self.processes(), "the server to stop")


@pytest.fixture
def host() -> Iterator[Host]:
    root = Path(tempfile.mkdtemp(prefix="ntt-embedded-", dir=memory()))
    root.chmod(0o711)  # The user of the server passes.
    host = Host(root)
    host.begin()
    try:
        yield host
        host.await_end()
    finally:
        for pid in host.processes():
            kill(pid, signal.SIGKILL)
        shutil.rmtree(root, ignore_errors=True)


def test_the_server_runs_as_long_as_it_is_used(host: Host) -> None:
    host.call("init-db")
    host.await_end()
    assert host.server.stat().st_mode & 0o777 == 0o700
    # Several commands start at once, and find one server.
    started = [host.start("status") for _ in range(3)]
    assert [one.wait(PATIENCE) for one in started] == [0] * 3
    subprocess.run([sys.executable, "-c", LET_GO, str(host.server)], check=True)


@pytest.mark.long
def test_a_server_a_keeper_and_a_user_that_are_killed_leave_nothing(host: Host) -> None:
    host.call("init-db")
    argv = [sys.executable, "-c", HOLD, str(host.server)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        for pid in host.processes():
            if pid != holder.pid:  # Without it, the keeper would stop the server.
                kill(pid, signal.SIGKILL)
        wait_until(lambda: host.processes() == [holder.pid], "the server to end")
        assert "0 of 0 blobs" in host.call("status")
        holder.kill()
    host.await_end()
    assert "automatic recovery in progress" in (host.server / "log").read_text()
    assert "0 of 0 blobs" in host.call("status")


@pytest.mark.long
def test_a_backup_without_another_database_is_proved_and_comes_back(host: Host) -> None:
    for number in range(20):
        put(host.root / "store", b"a blob" * number)
    host.call("init-db")
    host.call("scan")
    host.call("run", "--once")
    said = host.call("drill", "--scratch", f"{host.root}/scratch", "--database", "embedded")
    assert "PROVED" in said
    host.await_end()
    for name in ("state", "store"):
        (host.root / name).rename(host.root / f"lost-{name}")
    (host.root / "state").mkdir()
    if os.geteuid() == 0:
        shutil.chown(host.root / "state", "nobody")
    host.call("restore", "--catalog")
    host.call("restore", "--to", f"{host.root}/store")
    assert tree(host.root / "store") == tree(host.root / "lost-store")
    assert "20 of 20 blobs" in host.call("run", "--once")


@pytest.mark.long
def test_the_catalog_moves_to_another_server(host: Host, scratch_url: str) -> None:
    for number in range(3):
        put(host.root / "store", b"a blob" * number)
    host.call("init-db")
    host.call("scan")
    said = host.call("move-catalog", scratch_url)
    assert "moved 3 blobs" in said
    assert scratch_url in (host.root / "backup.toml").read_text()
    host.await_end()
    assert "pending   3 blobs" in host.call("status")
    assert not host.processes()
    # All rows are there still: only the setting goes back.
    assert "moved 3 blobs" in host.call("move-catalog", f"embedded:{host.root}/state")
    put(host.root / "store", b"another blob")
    host.call("scan")
    assert "has other rows in" in host.call("move-catalog", scratch_url, expect=2)


def test_a_full_disk_is_said_in_one_line(host: Host) -> None:
    argv = ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", f"{host.root}/state"]
    if subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        shutil.chown(host.root / "state", "nobody")
        said = host.call("init-db", expect=4)
        assert "No space left on device" in said
        assert "hint: free space" in said
        assert len(said.splitlines()) == 2
    finally:
        subprocess.run(["umount", "-l", host.root / "state"], check=True)
