"""The blocks of docs/operations.md, run as they stand there on a Debian with systemd."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.image import DockerImage

from ntt_backup.blobdir.layout import relative_path
from tests.environment import wait_until
from tests.parallel import in_turn

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "operations.md"
DOCKER = CHECKOUT / "tests" / "docker"
# What a build of the package needs of a checkout; the rest of ours (.venv, tests) is no part of it.
SHIPPED = (
    "ntt_backup",
    "systemd",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "pyproject.toml",
)
BLOBS = 300
SECONDS = 600

# Where the page says `editor`, a person types: the key into authorized_keys. The settings of the
# sample are those of the page, and stay.
EDITOR = """\
#!/bin/sh
case $1 in */authorized_keys) cat /var/lib/ntt-backup/.ssh/id_ed25519.pub >>"$1" ;; esac
"""
# What a disk holds, less what is another program's: its caches, logs and database, and the copies
# that useradd makes of the files it changes.
OTHERS = (
    "/root/checkout",
    "/srv/store",
    "/var/cache",
    "/var/lib/apt",
    "/var/lib/postgresql",
    "/var/log/journal",
    "*/__pycache__",
)
LEFT = re.compile(r"/etc/(passwd|group|g?shadow|sub[ug]id)-|/home/vault(/.*)?|/srv/backup(/.*)?")


def blocks(chapter: str) -> list[str]:
    """The shell commands of one chapter of the page, block by block."""
    text = PAGE.read_text().partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, chapter
    return found


class Machine:
    """A Debian in a container, whose systemd is up."""

    def __init__(self, container: DockerContainer) -> None:
        packages = ("-e", "PIP_NO_INDEX=1", "-e", "PIP_FIND_LINKS=/wheels")
        self._argv = ["docker", "exec", "-i", *packages, container.get_wrapped_container().id]

    def try_to(self, script: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        argv = [*self._argv, "bash", "-euo", "pipefail", "-c", script]
        return subprocess.run(argv, input=stdin, capture_output=True, timeout=SECONDS, check=False)

    def run(self, script: str, stdin: bytes = b"") -> str:
        done = self.try_to(script, stdin)
        said = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == 0, f"{script}\nstatus {done.returncode}:\n{said}"
        return done.stdout.decode()

    def files(self) -> set[str]:
        pruned = " -o ".join(f"-path '{path}'" for path in OTHERS)
        return set(self.run(f"find / -xdev \\( {pruned} \\) -prune -o -print").splitlines())

    def query(self, sql: str) -> str:
        """What PostgreSQL answers in the database of the catalog."""
        psql = "cd / && runuser -u postgres -- psql -XqAt -v ON_ERROR_STOP=1 -d copyjob"
        return self.run(psql, sql.encode()).strip()

    def put(self, path: str, content: Path | bytes) -> None:
        """Lay a file, or a directory with all below it, there."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            if isinstance(content, bytes):
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(content), 0o755
                archive.addfile(member, io.BytesIO(content))
            else:
                archive.add(content, path)
        self.run("tar -C / --no-same-owner -xf -", buffer.getvalue())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would fetch to build and install us: the container has no network."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the wheels for Debian's Python 3.11 are fetched by a Python 3.11")
    directory = tmp_path_factory.mktemp("wheels")
    argv = [sys.executable, "-m", "pip", "wheel", "-q", "-w", str(directory), str(CHECKOUT)]
    subprocess.run([*argv, "hatchling"], check=True, timeout=600)
    for ours in directory.glob("ntt_backup-*"):
        ours.unlink()
    return directory


@pytest.fixture
def machine(wheels: Path) -> Iterator[Machine]:
    # No helper container: it would need another image, and this fixture removes its own.
    testcontainers_config.ryuk_disabled = True
    with in_turn(DOCKER / "make-base"):
        subprocess.run([DOCKER / "make-base"], check=True, timeout=600, stdout=sys.stderr)
        image = DockerImage(
            DOCKER / "systemd", tag="ntt-backup-test-systemd", clean_up=False
        ).build()
    container = (
        DockerContainer(str(image))
        .with_volume_mapping("/sys/fs/cgroup", "/sys/fs/cgroup", "rw")
        .with_volume_mapping(wheels, "/wheels", "ro")
        .with_tmpfs_mount("/run")
        .with_tmpfs_mount("/tmp")
        # Less than privileged, which not every machine may give: systemd mounts, and sandboxes.
        .with_kwargs(
            cap_add=["SYS_ADMIN"],
            security_opt=["seccomp=unconfined", "apparmor=unconfined"],
            cgroupns="host",
            network_mode="none",
        )
    )
    with container:
        machine = Machine(container)
        up = "systemctl is-system-running"
        wait_until(
            lambda: machine.try_to(up).stdout.strip() in (b"running", b"degraded"), up, SECONDS
        )
        yield machine


def fill(store: Path, count: int) -> set[str]:
    """Make blobs below store; their paths in it."""
    paths = set()
    for index in range(count):
        content = os.urandom(index * 20)
        path = store / relative_path(blake3(content).hexdigest())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        paths.add(str(path.relative_to(store)))
    return paths


@pytest.mark.docker
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_leads_from_nothing_to_a_backup_and_back(machine: Machine, tmp_path: Path) -> None:
    paths = fill(tmp_path / "store", BLOBS)
    machine.put("/srv/store", tmp_path / "store")
    for name in SHIPPED:
        machine.put(f"/root/checkout/{name}", CHECKOUT / name)
    machine.put("/usr/bin/editor", EDITOR.encode())
    machine.run(
        "echo 127.0.0.1 backup.example.org >>/etc/hosts; ssh-keygen -A; systemctl start ssh"
    )
    before = machine.files()

    def status() -> dict[str, object]:
        as_service = "runuser -u ntt-backup -- ntt-backup-remote status --json"
        found: dict[str, object] = json.loads(machine.run(as_service))
        return found

    def is_backed_up() -> bool:
        return status()["copied"] == len(paths)

    for block in blocks("Install"):
        machine.run(block)
    wait_until(is_backed_up, "the first backup", SECONDS)
    assert status()["pending"] == status()["failed"] == 0
    listing = "cd /srv/backup/by-hash && find . -type f -printf '%P\\n'"
    assert set(machine.run(listing).splitlines()) == paths
    machine.run("diff -r /srv/store /srv/backup/by-hash && test -s /srv/backup/pgdump/*.dump")
    assert machine.run("systemctl is-active ntt-backup-remote.service") == "active\n"
    assert machine.run("cat /run/ntt-backup/remote.lock").strip().isdigit()

    later = fill(tmp_path / "later", 3)
    machine.put("/srv/store", tmp_path / "later")
    for block in blocks("Upgrade"):
        machine.run(block)
    machine.run("runuser -u ntt-backup -- ntt-backup-remote scan")
    paths |= later
    wait_until(is_backed_up, "a backup after the upgrade", SECONDS)

    for block in blocks("Uninstall"):
        machine.run(block)
    left = machine.files() - before
    assert sorted(path for path in left if not LEFT.fullmatch(path)) == []
    assert set(machine.run(listing).splitlines()) == paths
    assert machine.try_to("getent passwd ntt-backup || getent group ntt-backup").returncode == 2
    assert "ntt-backup" not in machine.run("systemctl list-units --all --plain --no-legend")
    assert machine.query("select count(*) from blobs") == str(len(paths))
    assert machine.query("select rolname from pg_roles where rolname ~ 'ntt'") == ""
    ours = "table_schema = 'public' and column_name ~ 'remote' or table_schema ~ 'ntt'"
    assert machine.query(f"select * from information_schema.columns where {ours}") == ""
