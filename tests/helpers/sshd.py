"""The remote of the tests: a real OpenSSH server, in a container where an engine answers.

A backup is only as good as what it does against a real sshd, a real tar and a real full disk. The
container (tests/docker/sshd) gives accounts with odd login shells, a small file system and a
read-only one. Where there is no container engine, an sshd started as the current user in a
temporary directory serves the rest, and tests of what it cannot give are skipped with the reason.

NTT_TEST_SSHD chooses: `docker` (fail where no engine answers), `local`, or `auto`, the default.

Fixtures: `remote`, an `Sshd` for the whole session. `give_blake3`, `give_b3sum` and `receiver_on`
decide how the remote computes BLAKE3.
"""

from __future__ import annotations

import functools
import getpass
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import blake3
import pytest

from ntt_backup.cli.commands.install import RECEIVER, write_receiver
from ntt_backup.demo import sshd as demo
from ntt_backup.demo.processes import Interrupts
from tests.helpers.parallel import in_turn, ports
from tests.helpers.processes import descendants, kill, name
from tests.helpers.waiting import PATIENCE, wait_until

HOST = "127.0.0.1"
ALIAS = "ntt-test"
SFTP_KEY = "id_sftp"
FULL_SIZE = 16 * 1024**2
ACCOUNTS = ("backup", "csh", "fishy", "busy", "noisy")
_DOCKER = Path(__file__).parents[1] / "docker"
_KEYS_IN_CONTAINER = "/etc/ntt-test"

Kind = Literal["docker", "local"]


@dataclass(frozen=True)
class RemoteDir:
    """A directory on the remote. local: where this machine reads its files."""

    path: str
    local: Path


class Server(Protocol):
    """The machine behind an `Sshd`: what can be done to it, as opposed to through it."""

    kind: Kind
    accounts: tuple[str, ...]

    def kill_sessions(self) -> None: ...
    def log(self) -> str: ...
    def directory(self, name: str) -> RemoteDir: ...
    def full_directory(self) -> RemoteDir: ...
    def read_only_directory(self) -> RemoteDir: ...


@dataclass(frozen=True)
class Sshd:
    """One way into the test server, with the files an ssh client needs. All paths are absolute.

    known_hosts pins the server's key. ssh_config holds `Host ntt-test` (`alias`) with all the rest.
    """

    server: Server
    work: Path
    port: int
    user: str
    identity_file: Path
    public_host_key: str
    host: str = HOST
    alias: str = ALIAS

    @property
    def kind(self) -> Kind:
        return self.server.kind

    @property
    def known_hosts(self) -> Path:
        return self._client_directory / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        return self._client_directory / "config"

    @property
    def _client_directory(self) -> Path:
        return self.work / f"client-{self.user}-{self.port}-{self.identity_file.name}"

    def __post_init__(self) -> None:
        self._client_directory.mkdir(exist_ok=True)
        self.known_hosts.write_text(f"[{self.host}]:{self.port} {self.public_host_key}\n")
        self.ssh_config.write_text(
            f"Host {self.alias}\n"
            f"    HostName {self.host}\n"
            f"    Port {self.port}\n"
            f"    User {self.user}\n"
            f'    IdentityFile "{self.identity_file}"\n'
            "    IdentitiesOnly yes\n"
            f'    UserKnownHostsFile "{self.known_hosts}"\n'
            "    GlobalKnownHostsFile /dev/null\n"
            "    StrictHostKeyChecking yes\n"
            # A client's default takes ten times the processor's time, at each of a thousand logins.
            "    KexAlgorithms curve25519-sha256\n"
        )

    def as_user(self, user: str) -> Sshd:
        """The same server through another account: csh, fishy, busy or noisy (container only)."""
        if user not in self.server.accounts:
            pytest.skip(f"account {user} needs the sshd in a container, this one is {self.kind}")
        return self._with(user=user)

    def by_sftp(self) -> Sshd:
        """The same server through a key that runs no command and has sftp alone."""
        return self._with(identity_file=self.work / SFTP_KEY)

    def through(self, port: int) -> Sshd:
        """The same server behind another port of 127.0.0.1, such as a `Link`'s."""
        return self._with(port=port)

    def _with(
        self,
        *,
        user: str | None = None,
        port: int | None = None,
        identity_file: Path | None = None,
    ) -> Sshd:
        return Sshd(
            server=self.server,
            work=self.work,
            port=port or self.port,
            user=user or self.user,
            identity_file=identity_file or self.identity_file,
            public_host_key=self.public_host_key,
        )

    def argv(self, command: str) -> list[str]:
        """A plain ssh client's argv for a command: the tests' own way in, not the product's."""
        return ["ssh", "-F", str(self.ssh_config), "-T", "-oBatchMode=yes", self.alias, command]

    def run(self, command: str, *, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a shell command on the remote and return its outcome, whatever it is."""
        return subprocess.run(
            self.argv(command), input=stdin, capture_output=True, timeout=PATIENCE, check=False
        )

    def directory(self, name: str = "backup") -> RemoteDir:
        """A new, empty, writable directory on the remote, another one at every call."""
        return self.server.directory(name)

    def full_directory(self) -> RemoteDir:
        """An empty directory that is a file system of FULL_SIZE bytes. `local` is for root only."""
        return self.server.full_directory()

    def read_only_directory(self) -> RemoteDir:
        """An empty directory on a file system that is mounted read-only."""
        return self.server.read_only_directory()

    def kill_sessions(self) -> None:
        """End every connection at once, as a cut link does; new ones are welcome."""
        self.server.kill_sessions()


class DockerServer:
    """sshd in a container, on a port of 127.0.0.1."""

    kind: Kind = "docker"
    accounts: tuple[str, ...] = ACCOUNTS

    def __init__(self, work: Path, keys: Path, port: int) -> None:
        from testcontainers.core.config import testcontainers_config
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.image import DockerImage

        # No helper container: it would need another image, and this fixture removes its own.
        testcontainers_config.ryuk_disabled = True
        self._uid = os.getuid() or 1000
        self._data = _shared_directory(work / "data", self._uid)
        read_only = _shared_directory(work / "read-only", self._uid)
        with in_turn(_DOCKER / "make-base"):  # whoever comes later finds the image made
            subprocess.run([_DOCKER / "make-base"], check=True, timeout=PATIENCE, stdout=sys.stderr)
            image = DockerImage(
                _DOCKER / "sshd",
                tag=f"ntt-backup-test-sshd:{self._uid}",
                clean_up=False,
                buildargs={"UID": str(self._uid)},
            ).build()
        self._container = (
            DockerContainer(str(image))
            .with_volume_mapping(keys, _KEYS_IN_CONTAINER, "ro")
            .with_volume_mapping(self._data, "/srv/data", "rw")
            .with_volume_mapping(read_only, "/srv/read-only", "ro")
            .with_tmpfs_mount("/srv/full", f"size={FULL_SIZE},mode=1777")
        )
        self._container.ports = {"22/tcp": (HOST, port)}  # type: ignore[dict-item]
        self._names = itertools.count(1)
        self._read_only = RemoteDir("/srv/read-only", read_only)

    def __enter__(self) -> Self:
        self._container.__enter__()  # unlike start(), removes what could not be started
        return self

    def __exit__(self, *_: object) -> None:
        self._container.stop()

    @property
    def _engine(self) -> Any:
        container = self._container.get_wrapped_container()
        container.reload()
        return container

    def kill_sessions(self) -> None:
        # Every sshd but the listener, which is process 1.
        self._as_root(
            "cd /proc; for pid in [0-9]*; do"
            ' [ "$pid" = 1 ] || ! grep -qsx sshd "$pid/comm" || kill -KILL "$pid"; done; true'
        )

    def _as_root(self, script: str) -> None:
        status, output = self._engine.exec_run(["sh", "-c", script])
        assert status == 0, output

    def changes(self) -> set[str]:
        """Returns the paths that differ from the image, but for the directories of the tests."""
        return {str(one["Path"]) for one in self._engine.diff() or ()}

    def log(self) -> str:
        output: bytes = self._engine.logs()
        return output.decode(errors="replace")

    def directory(self, name: str) -> RemoteDir:
        local = _shared_directory(self._data / f"{name}-{next(self._names)}", self._uid)
        return RemoteDir(f"/srv/data/{local.name}", local)

    def full_directory(self) -> RemoteDir:
        path = "/srv/full"
        self._as_root(f"find {path} -mindepth 1 -delete")
        # Only the container's own mount namespace has this file system.
        return RemoteDir(path, Path(f"/proc/{self._engine.attrs['State']['Pid']}/root{path}"))

    def read_only_directory(self) -> RemoteDir:
        return self._read_only


class LocalServer:
    """sshd as the current user, for machines without a container engine."""

    kind: Kind = "local"

    def __init__(self, work: Path, keys: Path, port: int) -> None:
        self.accounts: tuple[str, ...] = (getpass.getuser(),)
        self._data = _shared_directory(work / "data", os.getuid())
        self._names = itertools.count(1)
        self._mounts = ExitStack()
        self._port = port
        files = keys / "host_key", keys / "authorized_keys"
        extra = "Subsystem sftp internal-sftp\n"
        self._sshd = demo.Sshd(work, *files, Interrupts(), extra=extra)

    def __enter__(self) -> Self:
        self._sshd.start(self._port)
        return self

    def __exit__(self, *_: object) -> None:
        kill(self._listener, signal.SIGSTOP)  # no session is born while they are counted
        for pid in (*descendants(self._listener), self._listener):
            kill(pid, signal.SIGKILL)
        self._sshd.stop()
        self._mounts.close()

    def kill_sessions(self) -> None:
        for pid in descendants(self._listener):
            if name(pid).startswith("sshd"):
                kill(pid, signal.SIGKILL)

    @property
    def _listener(self) -> int:
        assert self._sshd.pid is not None, "the server is stopped"
        return self._sshd.pid

    def log(self) -> str:
        return self._sshd.log.read_text(errors="replace")

    def directory(self, name: str) -> RemoteDir:
        local = self._data / f"{name}-{next(self._names)}"
        local.mkdir()
        return RemoteDir(str(local), local)

    def full_directory(self) -> RemoteDir:
        return self._mount("full", f"size={FULL_SIZE}")

    def read_only_directory(self) -> RemoteDir:
        return self._mount("read-only", "ro")

    def _mount(self, name: str, options: str) -> RemoteDir:
        directory = self.directory(name)
        argv = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory.path]
        mounted = subprocess.run(argv, capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            why = mounted.stderr.partition("\n")[0]
            pytest.skip(f"a {name} file system needs a container, or mounts: {why}")
        unmount = functools.partial(subprocess.run, ["umount", "--lazy", directory.path])
        self._mounts.callback(unmount, check=True)
        return directory


def _shared_directory(path: Path, uid: int) -> Path:
    path.mkdir(exist_ok=True)
    if os.getuid() == 0:
        os.chown(path, uid, uid)
    return path


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now.

    It lies below the range the kernel gives to outgoing connections, so that a server may leave it
    for a while and take it again.
    """
    while True:
        port = random.choice(ports())
        with suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port


def wait_for_sshd(server: Server, port: int) -> None:
    """Return once sshd greets on the port; fail with its log where it does not."""

    def greets() -> bool:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=5) as client:
            return client.recv(8).startswith(b"SSH-2.0")
        return False

    wait_until(greets, f"sshd to answer on port {port}", log=server.log)


@functools.cache
def chosen_kind() -> tuple[Kind, str]:
    """Which server the session uses, and why in a few words."""
    wanted = os.environ.get("NTT_TEST_SSHD", "auto")
    if wanted not in ("docker", "local", "auto"):
        pytest.exit(f"NTT_TEST_SSHD is {wanted!r}, not docker, local or auto", returncode=2)
    if wanted == "local":
        return "local", "NTT_TEST_SSHD=local"
    answer = _engine_version()
    if answer is not None:
        return "docker", f"engine {answer}"
    if wanted == "docker":
        pytest.exit("NTT_TEST_SSHD=docker, but no container engine answers", returncode=2)
    return "local", "no container engine answers"


def _engine_version() -> str | None:
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=10)
    except DockerException:
        return None
    with client.api:
        try:
            return str(client.version()["Version"])
        except (DockerException, OSError):
            return None


@contextmanager
def _serving(work: Path) -> Iterator[Sshd]:
    keys = work / "keys"
    keys.mkdir(mode=0o755)
    identity = work / "id_ed25519"
    by_sftp = work / SFTP_KEY
    for path in (identity, by_sftp, keys / "host_key"):
        demo.make_key(path)
    only_sftp = f'restrict,command="internal-sftp" {by_sftp.with_suffix(".pub").read_text()}'
    authorized = keys / "authorized_keys"
    authorized.write_text(identity.with_suffix(".pub").read_text() + only_sftp)
    port = free_port()
    kind, _ = chosen_kind()
    with (DockerServer if kind == "docker" else LocalServer)(work, keys, port) as server:
        wait_for_sshd(server, port)
        yield Sshd(
            server=server,
            work=work,
            port=port,
            user=server.accounts[0],
            identity_file=identity,
            public_host_key=" ".join((keys / "host_key.pub").read_text().split()[:2]),
        )


@pytest.fixture(scope="session")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """The session's remote, entered as its ordinary account."""
    with _serving(tmp_path_factory.mktemp("sshd")) as sshd:
        yield sshd


def pytest_report_header() -> str:
    kind, reason = chosen_kind()
    return f"sshd: {kind} ({reason})"


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


def by_python_alone(remote: Sshd, startup: Path) -> None:
    """Let the remote's ordinary account find python3 and what starts it, and nothing besides."""
    tools = remote.directory("appliance")
    link = f'ln -s "$(command -v $name)" {tools.path}/$name'
    done = remote.run(f"for name in python3 sh head; do {link} || exit; done")
    assert done.returncode == 0, done.stderr
    startup.write_text(f"export PATH={tools.path} PYTHONNOUSERSITE=1\n")


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
