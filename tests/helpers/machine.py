"""A Debian in a container, whose systemd is up: a machine to install us on."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.image import DockerImage

from ntt_backup.blobdir.layout import relative_path
from tests.helpers.parallel import in_turn
from tests.helpers.waiting import wait_until

CHECKOUT = Path(__file__).parents[2]
DOCKER = CHECKOUT / "tests" / "docker"
SECONDS = 600
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


@contextmanager
def debian(wheels: Path | None = None) -> Iterator[Machine]:
    """A machine; wheels: what pip finds there."""
    # No helper container: it would need another image, and this removes its own.
    testcontainers_config.ryuk_disabled = True
    with in_turn(DOCKER / "make-base"):
        subprocess.run([DOCKER / "make-base"], check=True, timeout=600, stdout=sys.stderr)
        image = DockerImage(
            DOCKER / "systemd", tag="ntt-backup-test-systemd", clean_up=False
        ).build()
    container = (
        DockerContainer(str(image))
        .with_volume_mapping("/sys/fs/cgroup", "/sys/fs/cgroup", "rw")
        .with_tmpfs_mount("/run")
        .with_tmpfs_mount("/tmp")
        # Less than privileged, which not every machine may give: systemd mounts, and sandboxes.
        .with_kwargs(
            cap_add=["SYS_ADMIN", "DAC_READ_SEARCH"],
            security_opt=["seccomp=unconfined", "apparmor=unconfined"],
            cgroupns="host",
            network_mode="none",
        )
    )
    if wheels is not None:
        container = container.with_volume_mapping(wheels, "/wheels", "ro")
    with container:
        machine = Machine(container)
        up = "systemctl is-system-running"
        wait_until(
            lambda: machine.try_to(up).stdout.strip() in (b"running", b"degraded"), up, SECONDS
        )
        # As on any other machine: what systemd mounts for a service is seen by the service.
        machine.run("mount --make-rshared /")
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
