"""OpenSSH's sshd runs on loopback for whoever wants to log in to it; it needs no privileges."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ntt_backup.demo.processes import Interrupts, Server
from ntt_backup.errors import ConfigError, RemoteUnreachable

LOOPBACK: Final = "127.0.0.1"

_START_SECONDS: Final = 120.0
_PRIVILEGE_SEPARATION: Final = Path("/run/sshd")
_CONFIG: Final = """\
PidFile none
StrictModes no
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitUserRC no
PrintMotd no
MaxStartups 200
MaxSessions 100
"""
# Newer servers refuse a client for a while whose connections broke.
_LENIENT: Final = "PerSourcePenalties no\n"


class Sshd(Server):
    """An sshd that lets its own user in, with one key. Its configuration and log are in directory.

    extra: more lines of configuration. inside: the beginning of a command line, such as that of a
    program which enters a network namespace.
    """

    def __init__(
        self,
        directory: Path,
        host_key: Path,
        authorized_keys: Path,
        interrupts: Interrupts,
        *,
        address: str = LOOPBACK,
        extra: str = "",
        inside: Sequence[str] = (),
    ) -> None:
        super().__init__(directory / "sshd.log", interrupts)
        self._address = address
        self._inside = inside
        self._config = directory / "sshd_config"
        # Of these only AuthorizedKeysFile knows percent tokens.
        keys = str(authorized_keys).replace("%", "%%")
        files = f'HostKey "{host_key}"\nAuthorizedKeysFile "{keys}"\n'
        self._text = files + _CONFIG + extra

    def start(self, port: int) -> None:
        """Returns once it answers on the port. Raises ConfigError, RemoteUnreachable."""
        binary = _binary()
        if os.geteuid() == 0:
            # sshd wants it from root, and only its system service makes it; it is empty and stays.
            with suppress(OSError):  # sshd itself says best what it lacks
                _PRIVILEGE_SEPARATION.mkdir(mode=0o755, parents=True, exist_ok=True)
        text = f"ListenAddress {self._address}:{port}\n{self._text}"
        self._config.write_text(text + _LENIENT)
        check = (binary, "-t", "-f", self._config)
        if subprocess.run(check, capture_output=True, check=False).returncode != 0:
            self._config.write_text(text)
        argv = [*self._inside, binary, "-D", "-e", "-f", str(self._config)]
        if not self.start_process(argv, lambda: self._answers(port), _START_SECONDS):
            self.stop()
            raise RemoteUnreachable("sshd does not start", detail=self.last_lines)

    def _answers(self, port: int) -> bool:
        # Another server that took the port is found out by the pinned host key.
        with suppress(OSError), socket.create_connection((self._address, port), 5) as client:
            return client.recv(4) == b"SSH-"
        return False

    def stop(self) -> None:
        """Ends the process that listens, if there is one; sessions end with their clients."""
        self.end_process()


def _binary() -> str:
    """Returns the absolute path of sshd, which it needs to start sessions."""
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    found = shutil.which("sshd", path=search)
    if found is None:
        raise ConfigError("sshd is not installed", hint="--ssh-server embedded")
    return os.path.abspath(found)


def make_key(path: Path) -> None:
    """Writes an Ed25519 key pair, path and path.pub, without a passphrase."""
    argv = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ntt-backup", "-f", path)
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True)
