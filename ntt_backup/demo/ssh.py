"""The demo has an ssh server, and the files that a client needs for it.

OpenSSH's sshd is what most remotes run, so it is taken where it is installed. It may still refuse
(a locked account, a login shell that is none), so a login is tried first; where that fails, the
server in `paramiko_server` takes its place.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ntt_backup.client.transport import ssh_argv
from ntt_backup.config import RemoteSettings
from ntt_backup.demo.paramiko_server import ParamikoServer
from ntt_backup.demo.processes import Interrupts
from ntt_backup.demo.sshd import LOOPBACK, Sshd, make_key
from ntt_backup.demo.store import Listing, list_tree
from ntt_backup.errors import ConfigError, RemoteDenied, RemoteError, RemoteUnreachable

Choice = Literal["auto", "openssh", "embedded"]

_LOGIN_SECONDS: Final = 60.0
_PORTS_TRIED: Final = 5
_CLIENT: Final = """\
# In place of your own ssh settings: they have no part in the demo.
Host *
    GlobalKnownHostsFile /dev/null
    IdentityAgent none
"""


class SshFiles:
    """Keys and configuration files of client and server, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.identity = directory / "id_ed25519"
        self.authorized_keys = directory / "id_ed25519.pub"
        self.host_key = directory / "host_key"
        self.known_hosts = directory / "known_hosts"
        self.client = directory / "config"

    def write(self) -> None:
        """Makes the keys and the client's configuration, where they do not exist yet."""
        for key in (self.identity, self.host_key):
            if not key.exists():
                make_key(key)
        self.client.write_text(_CLIENT)

    def pin(self, port: int) -> None:
        """Makes the client know the server on this port, and no other."""
        public = self.host_key.with_suffix(".pub").read_text()
        self.known_hosts.write_text(f"[{LOOPBACK}]:{port} {public}")


@dataclass(frozen=True, slots=True)
class SshRemote:
    """A directory behind a server. server: its kind, and the reason where that is not plain."""

    server: str
    host: str
    port: int
    files: SshFiles
    path: Path

    @property
    def name(self) -> str:
        return f"ssh server: {self.server}, {self.host} port {self.port}"

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def settings(self) -> dict[str, object]:
        """Returns the table `remote`."""
        return {
            "host": self.host,
            "port": self.port,
            "path": self.path,
            "identity_file": self.files.identity,
            "known_hosts": self.files.known_hosts,
            "ssh_config": self.files.client,
        }

    def listing(self) -> Listing:
        """Returns the files of the blobs."""
        return list_tree(self.path / "by-hash")


def start(
    choice: Choice, files: SshFiles, path: Path, stack: ExitStack, interrupts: Interrupts
) -> SshRemote:
    """Starts a server that lets us in; stack will stop it. Raises ConfigError, RemoteError."""
    host = f"{_user()}@{LOOPBACK}"
    _require_loopback()
    files.write()
    name = "embedded"
    if choice != "embedded":
        sshd = Sshd(files.directory, files.host_key, files.authorized_keys, interrupts)
        stack.callback(sshd.stop)
        try:
            return _proven(SshRemote("OpenSSH's sshd", host, _start(sshd), files, path))
        except (ConfigError, RemoteError) as error:
            if choice == "openssh":
                raise
            sshd.stop()
            name = f"embedded ({error.message})"
    with interrupts.held():
        server = ParamikoServer(files.host_key, files.authorized_keys.read_text())
        stack.callback(server.close)
    return _proven(SshRemote(name, host, server.port, files, path))


def _start(sshd: Sshd) -> int:
    """Starts the server and returns its port.

    Another process may take a free port before sshd has the port; then another port is tried.
    """
    for attempt in range(_PORTS_TRIED):
        with socket.create_server((LOOPBACK, 0)) as probe:
            port: int = probe.getsockname()[1]
        try:
            sshd.start(port)
            break
        except RemoteUnreachable:
            if attempt == _PORTS_TRIED - 1:
                raise
    return port


def _proven(remote: SshRemote) -> SshRemote:
    """Logs in as the backup will. Raises RemoteDenied, RemoteUnreachable."""
    remote.files.pin(remote.port)
    settings = RemoteSettings.model_validate({**remote.settings, "path": str(remote.path)})
    try:
        login = subprocess.run(
            ssh_argv(settings, "true", aes=False),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOGIN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RemoteUnreachable(f"{remote.server}, port {remote.port}, does not answer") from error
    if login.returncode != 0:
        raise RemoteDenied(
            f"{remote.server} does not let us in",
            detail=login.stderr.strip(),
            hint="try the other one, --ssh-server embedded or openssh",
        )
    return remote


def _require_loopback() -> None:
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname()).close()
    except OSError as error:
        raise RemoteUnreachable(
            f"nobody can connect to {LOOPBACK} on this machine",
            detail=error.strerror or str(error),
            hint="the demo uses the loopback interface: ip link set lo up",
        ) from error


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise ConfigError(
            f"user id {os.geteuid()} has no name on this machine",
            hint="ssh and PostgreSQL need one: run the demo as a user of this system",
        ) from None
