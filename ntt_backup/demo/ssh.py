"""The demo's own ssh server, on loopback, for one key.

OpenSSH's sshd is what most remotes run, so it is taken where it is installed; it needs no
privileges to let in the user who started it. It may still refuse (a locked account, a login shell
that is none), so it is asked to log us in before it is used, and else the server in
`transport.embedded` takes its place.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ntt_backup.client.ssh import ssh_argv
from ntt_backup.config import RemoteSettings
from ntt_backup.demo.interrupts import Interrupts
from ntt_backup.demo.paramiko_server import LOOPBACK, EmbeddedSshServer
from ntt_backup.errors import ConfigError, RemoteDenied, RemoteError, RemoteUnreachable
from ntt_backup.process.pipeline import die_with_parent

Choice = Literal["auto", "openssh", "embedded"]

_START_SECONDS: Final = 30.0
_LOGIN_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 10.0
_PORTS_TRIED: Final = 5
_PRIVILEGE_SEPARATION: Final = Path("/run/sshd")

_CLIENT: Final = """\
# In place of your own ssh settings: they have no part in the demo.
Host *
    GlobalKnownHostsFile /dev/null
    IdentityAgent none
"""

_SERVER: Final = """\
ListenAddress {address}
Port {port}
HostKey {host_key}
AuthorizedKeysFile {authorized_keys}
PidFile none
StrictModes no
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitUserRC no
PrintMotd no
MaxStartups 100
"""


@dataclass(frozen=True, slots=True)
class SshFiles:
    """Keys and configuration files of client and server, in a directory of their own."""

    directory: Path

    @property
    def identity(self) -> Path:
        return self.directory / "id_ed25519"

    @property
    def authorized_keys(self) -> Path:
        return self.directory / "id_ed25519.pub"

    @property
    def host_key(self) -> Path:
        return self.directory / "host_key"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    @property
    def client(self) -> Path:
        return self.directory / "config"

    def write(self) -> None:
        """Make the keys and the client's configuration, where they are not there yet."""
        for key in (self.identity, self.host_key):
            if not key.exists():
                _make_key(key)
        self.client.write_text(_CLIENT)

    def pin(self, port: int) -> None:
        """Make the client know the server on this port, and no other."""
        public = self.host_key.with_suffix(".pub").read_text()
        self.known_hosts.write_text(f"[{LOOPBACK}]:{port} {public}")


@dataclass(frozen=True, slots=True)
class SshServer:
    """A server that has let us in. name says what it is, and why where that is not plain."""

    name: str
    host: str
    port: int


def start(choice: Choice, files: SshFiles, stack: ExitStack, interrupts: Interrupts) -> SshServer:
    """Start a server that lets us in; stack will stop it. Raises ConfigError, RemoteError."""
    host = f"{_user()}@{LOOPBACK}"
    _require_loopback()
    files.write()
    name = "embedded"
    if choice != "embedded":
        sshd = _OpenSsh(files, interrupts)
        stack.callback(sshd.stop)
        try:
            return _proven(SshServer("OpenSSH's sshd", host, sshd.start()), files)
        except (ConfigError, RemoteError) as error:
            if choice == "openssh":
                raise
            sshd.stop()
            name = f"embedded ({error.message})"
    with interrupts.held():
        server = EmbeddedSshServer(files.host_key, files.authorized_keys.read_text())
        stack.callback(server.close)
    return _proven(SshServer(name, host, server.port), files)


def _proven(server: SshServer, files: SshFiles) -> SshServer:
    """Log in as the backup will. Raises RemoteDenied, RemoteUnreachable."""
    files.pin(server.port)
    remote = RemoteSettings(
        host=server.host,
        port=server.port,
        path=str(files.directory),  # a login needs none, but settings must have one
        identity_file=files.identity,
        known_hosts=files.known_hosts,
        ssh_config=files.client,
    )
    try:
        login = subprocess.run(
            ssh_argv(remote, "true", aes=False),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOGIN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RemoteUnreachable(f"{server.name} on port {server.port} does not answer") from error
    if login.returncode != 0:
        raise RemoteDenied(
            f"{server.name} does not let us in",
            detail=login.stderr.strip(),
            hint="try the other one, --ssh-server embedded or openssh",
        )
    return server


class _OpenSsh:
    """sshd, as the user who runs the demo."""

    def __init__(self, files: SshFiles, interrupts: Interrupts) -> None:
        self._files = files
        self._interrupts = interrupts
        self._config = files.directory / "sshd_config"
        self._log = files.directory / "sshd.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        """The port it listens on. A free port may be taken before sshd has it; then another one."""
        search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
        binary = shutil.which("sshd", path=search)
        if binary is None:
            raise ConfigError("sshd is not installed", hint="--ssh-server embedded")
        if os.geteuid() == 0:
            # sshd wants it from root, and only its system service makes it; it is empty and stays.
            with suppress(OSError):  # sshd itself says best what it lacks
                _PRIVILEGE_SEPARATION.mkdir(mode=0o755, parents=True, exist_ok=True)
        for _ in range(_PORTS_TRIED):
            port = _free_port()
            self._configure(port)
            with self._interrupts.held(), self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [os.path.abspath(binary), "-D", "-e", "-f", self._config],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
            if self._greets(self._process, port):
                return port
            self.stop()
        said = self._log.read_text(errors="replace").strip().splitlines()
        raise RemoteUnreachable("sshd does not start", detail="\n".join(said[-3:]))

    def stop(self) -> None:
        """Stop listening; sessions end with their clients. Does nothing where it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _configure(self, port: int) -> None:
        self._config.write_text(
            _SERVER.format(
                address=LOOPBACK,
                port=port,
                host_key=f'"{self._files.host_key}"',
                # The only one of these that knows percent tokens.
                authorized_keys=f'"{self._files.authorized_keys}"'.replace("%", "%%"),
            )
        )

    @staticmethod
    def _greets(process: subprocess.Popen[bytes], port: int) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=5) as client:
                # Whoever else might have taken the port is found out by the pinned host key.
                return client.recv(4) == b"SSH-"
            time.sleep(0.05)
        return False


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _require_loopback() -> None:
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname()).close()
    except OSError as error:
        raise RemoteUnreachable(
            f"nobody can connect to {LOOPBACK} here",
            detail=error.strerror or str(error),
            hint="the demo talks to itself over the loopback interface: ip link set lo up",
        ) from error


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise ConfigError(
            f"user id {os.geteuid()} has no name on this machine",
            hint="ssh and PostgreSQL want one: run the demo as a user of this system",
        ) from None


def _make_key(path: Path) -> None:
    """Write an Ed25519 key pair as ssh-keygen does: path and path.pub, without a passphrase."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_suffix(".pub").write_bytes(public + b" ntt-backup-demo\n")
    path.touch(mode=0o600)
    path.write_bytes(private)
