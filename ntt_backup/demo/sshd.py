"""OpenSSH's sshd runs on loopback for whoever wants to log in to it; it needs no privileges."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ntt_backup.demo.interrupts import Interrupts
from ntt_backup.errors import ConfigError, RemoteUnreachable
from ntt_backup.process.pipeline import die_with_parent

LOOPBACK: Final = "127.0.0.1"

_START_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 10.0
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


class Sshd:
    """An sshd that lets its own user in, with one key. Its configuration and log are in directory.

    extra: more lines of configuration. inside: the beginning of a command line, such as that of a
    program which enters a network namespace. pid is that of the process that listens.
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
        self._interrupts = interrupts
        self._address = address
        self._inside = inside
        self._config = directory / "sshd_config"
        self._log = directory / "sshd.log"
        self._process: subprocess.Popen[bytes] | None = None
        # Of these only AuthorizedKeysFile knows percent tokens.
        keys = str(authorized_keys).replace("%", "%%")
        files = f'HostKey "{host_key}"\nAuthorizedKeysFile "{keys}"\n'
        self._text = files + _CONFIG + extra

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

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
        with self._interrupts.held(), self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._inside, binary, "-D", "-e", "-f", self._config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        if not self._answers(self._process, port):
            self.stop()
            last = self.log.strip().splitlines()[-3:]
            raise RemoteUnreachable("sshd does not start", detail="\n".join(last))

    def _answers(self, process: subprocess.Popen[bytes], port: int) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            # Another server that took the port is found out by the pinned host key.
            with suppress(OSError), socket.create_connection((self._address, port), 5) as client:
                return client.recv(4) == b"SSH-"
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        """Ends the process that listens; sessions end with their clients. Does nothing where it
        does not run.
        """
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
