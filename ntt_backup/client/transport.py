"""A transport carries bytes to the remote and back: by the OpenSSH client, or on this machine.

A transport turns a remote command into the argv of a local process whose stdin and stdout are those
of the remote command, and explains failures of that process. So a strategy runs unchanged over ssh
and in a directory of this machine.

All that is interactive in ssh is switched off. Operators' ssh configurations are written for
people. A `Host *` with `ForwardX11 yes` and an xauth that does not exist makes a scripted ssh hang;
`RemoteCommand exec zsh` replaces our command; `RequestTTY yes` garbles binary data; a shared
ControlMaster leads all workers through one TCP connection. So the command line, which has priority
over all files, sets every option that matters. Options that older clients do not know are announced
by IgnoreUnknown first. Failures are recognized by OpenSSH's messages: its exit status is 255 for
everything from a wrong host key to a cut cable.

A disk of this machine is served by the same receiver as another machine, with the same checks,
syncs and receipts, as a child process that can die alone. The receiver runs with our own Python,
which has BLAKE3, and with our priority.
"""

from __future__ import annotations

import os
import re
import sys
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from ntt_backup.client.remote_errors import ErrorCase
from ntt_backup.config import RemoteSettings
from ntt_backup.errors import BackupError, ConfigError, RemoteDenied, RemoteUnreachable

# The beginning of remote commands that run Python. On this machine it becomes our own Python.
PYTHON: Final = "exec python3"
# What an account by sftp is asked for in place of a command.
SFTP: Final = "sftp"

# AES-GCM moves twice what OpenSSH's default cipher moves, where the CPU has AES instructions.
_FAST_CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"

_FIXED_OPTIONS = (
    "IgnoreUnknown=SessionType,StdinNull,ForkAfterAuthentication",
    "BatchMode=yes",
    "RequestTTY=no",
    "RemoteCommand=none",
    "SessionType=default",
    "StdinNull=no",
    "ForkAfterAuthentication=no",
    "ForwardX11=no",
    "ForwardX11Trusted=no",
    "ForwardAgent=no",
    "ClearAllForwardings=yes",
    "Tunnel=no",
    "PermitLocalCommand=no",
    "ControlMaster=no",
    "ControlPath=none",
    "EscapeChar=none",
    "Compression=no",
    "LogLevel=ERROR",
    "StrictHostKeyChecking=yes",
    "TCPKeepAlive=yes",
)


class Transport(Protocol):
    """The contract of a way to the remote."""

    @property
    def connect_timeout(self) -> float:
        """The seconds within which the remote command must have started."""
        ...

    @property
    def hint(self) -> str:
        """The advice for a remote that is silent or was lost. Empty: the advice for a login."""
        ...

    def argv(self, remote_command: str) -> list[str]:
        """Returns the argv of the local process that runs remote_command."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Returns the environment of the local process."""
        ...

    def explain(self, status: int | None, stderr: str) -> BackupError:
        """Returns the error for a local process that has ended. status: None if it was killed."""
        ...


def transport_to(remote: RemoteSettings) -> Transport:
    """Returns the transport to a remote. Raises ConfigError for a bucket."""
    if remote.kind == "s3":
        raise ConfigError(
            "this command cannot use a bucket",
            detail=remote.url,
            hint="use a target whose url is ssh:// or file:// (--target)",
        )
    if remote.kind == "sftp":
        return Sftp(remote)
    return Ssh(remote) if remote.kind == "ssh" else Local(2.0 * remote.connect_timeout)


@dataclass(frozen=True, slots=True)
class Local:
    """The transport to /bin/sh on this machine."""

    connect_timeout: float = 30.0
    hint: str = "see whether the disk at remote.path is still there (dmesg, df), and free memory"

    def argv(self, remote_command: str) -> list[str]:
        command = remote_command.replace(PYTHON, 'exec "$NTT_PYTHON"', 1)
        # `Child.kill` kills the first shell and its session, as it would kill ssh. The receiver
        # reads the end of its input, and removes its workspace.
        return ["/bin/sh", "-c", 'setsid /bin/sh -c "$1"; exit $?', "sh", command]

    def environment(self) -> Mapping[str, str]:
        """Returns our variables. Messages are English: errors are recognized by them."""
        return {**os.environ, "LC_ALL": "C", "NTT_PYTHON": sys.executable}

    def explain(self, status: int | None, stderr: str) -> BackupError:
        last = stderr.splitlines()[-1] if stderr else f"status {status}"
        return RemoteUnreachable("the local receiver ended", detail=last, hint=self.hint)


def ssh_argv(
    remote: RemoteSettings, command: str, *, aes: bool, subsystem: bool = False
) -> list[str]:
    """Returns the argv that runs a command on the remote, or a `subsystem` of that name.

    aes: whether the CPU has AES instructions.
    """
    # Of two types of a session ssh takes the one that it reads first.
    argv = ["ssh", "-s"] if subsystem else ["ssh"]
    if remote.ssh_config is not None:
        argv += ["-F", str(remote.ssh_config)]
    argv.append("-T")
    options = [
        *_FIXED_OPTIONS,
        f"ConnectTimeout={remote.connect_timeout}",
        f"ServerAliveInterval={remote.alive_interval}",
        f"ServerAliveCountMax={remote.alive_count}",
    ]
    if aes:
        options.append(f"Ciphers={_FAST_CIPHERS}")
    if remote.known_hosts is not None:
        options.append(f"UserKnownHostsFile={_quoted(remote.known_hosts)}")
    if remote.identity_file is not None:
        options += [f"IdentityFile={_quoted(remote.identity_file)}", "IdentitiesOnly=yes"]
    if remote.port is not None:
        options.append(f"Port={remote.port}")
    for option in options:
        argv += ["-o", option]
    return [*argv, "--", remote.host, command]


def _quoted(path: Path) -> str:
    """Returns a path in the syntax of ssh_config: in double quotes, with % escaped."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"'


@cache
def cpu_has_aes() -> bool:
    """Returns whether /proc/cpuinfo lists AES instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return re.search(r"^(flags|Features)\s*:.*\baes\b", text, re.MULTILINE) is not None


_CANNOT_RUN = "the remote cannot run our command"
_NEEDS_A_SHELL = "the remote account needs a login shell that finds sh and head -c in its PATH"
_KEY_REFUSED = "the remote does not accept our key"
_AGENT = "SSH_AUTH_SOCK"
_OPENSSH_KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----"
_KEY_HEAD = 200  # Bytes.
_SSH_CASES = (
    ErrorCase(
        r"no (\w+ )?host key is known",
        RemoteDenied,
        "the remote's host key is not known on this machine",
        "log in once by hand as this user and compare the key's fingerprint, or set"
        " remote.known_hosts (NTT_KNOWN_HOSTS)",
    ),
    ErrorCase(
        r"host key verification failed|remote host identification has changed",
        RemoteDenied,
        "the remote's host key is not the one we know",
        "if nobody changed it on purpose, do not continue; else compare the new key's fingerprint"
        " and put it into known_hosts (ssh-keygen -R removes the old one)",
    ),
    ErrorCase(
        r"permission denied \(|too many authentication failures|no such identity",
        RemoteDenied,
        _KEY_REFUSED,
        "set remote.identity_file (NTT_SSH_KEY) to a key without a passphrase, or to one that an"
        " agent holds, and put its public half into ~/.ssh/authorized_keys on the remote; the"
        " detail names the machine, which may be a jump host",
        r'load key ".*": ',
    ),
    ErrorCase(
        r"bad configuration option:|bad owner or permissions|can't open user config file"
        r"|bad key types|bad ssh2 cipher|missing argument|unsupported option",
        ConfigError,
        "ssh refuses its own configuration",
        "correct the file that ssh names, or point remote.ssh_config (NTT_SSH_CONFIG) to another",
    ),
    ErrorCase(
        r"account is (currently )?not available|shell access|this service allows sftp",
        RemoteDenied,
        "the remote account may not run commands",
        "give the account a login shell (usermod -s /bin/sh); an account that has sftp alone is a"
        " target for packs, by sftp://",
    ),
    ErrorCase(
        r"subsystem request failed",
        RemoteDenied,
        "the remote account has no sftp",
        "allow it in the server's sshd_config (Subsystem sftp internal-sftp)",
    ),
    ErrorCase(
        r"unable to negotiate|no matching (host key type|cipher|mac|key exchange method) found",
        RemoteDenied,
        "the local ssh and the remote's sshd do not agree on an algorithm",
        "update the older side, or allow what it offers in the ssh configuration of this user",
    ),
    ErrorCase(
        r"\b(head|sh): (command )?not found|\bhead: \w+ option\b",
        RemoteDenied,
        _CANNOT_RUN,
        _NEEDS_A_SHELL,
    ),
    ErrorCase(
        r"^ntt-backup-receive: error: ",
        RemoteDenied,
        "the receiver on the remote does not understand its forced command",
        "compare the line of our key in authorized_keys on the remote with that of"
        " `ntt-backup-remote install-receiver --print`; where it is the same, the receiver is old:"
        " copy it again, see `ntt-backup-remote install-receiver --write FILE`",
    ),
    ErrorCase(
        r"could not resolve hostname",
        RemoteUnreachable,
        "the remote's name does not resolve",
        "check remote.host (NTT_REMOTE_HOST) for a typing error, or name resolution on this host",
    ),
    ErrorCase(
        r"connection refused",
        RemoteUnreachable,
        "the remote refuses connections",
        "check that sshd runs on the remote, and remote.port (NTT_REMOTE_PORT)",
    ),
    ErrorCase(
        r"timed out|not responding|no route to host|network is unreachable",
        RemoteUnreachable,
        "the remote does not answer",
        "check the network between this machine and the remote, and any firewall",
    ),
)


def explain_ssh(status: int | None, stderr: str) -> BackupError:
    """Returns the error for an ssh process that has ended; see `Transport.explain`."""
    lines = [line.strip() for line in stderr.splitlines()]
    last = lines[-1] if lines else ""
    for case in _SSH_CASES:
        if telling := [line for line in lines if re.search(case.pattern, line.lower())]:
            if case.better:
                telling += [line for line in lines if re.search(case.better, line.lower())]
            return case.error(case.message, detail=telling[-1], hint=case.hint)
    if status in (126, 127):
        return RemoteDenied(_CANNOT_RUN, detail=last, hint=_NEEDS_A_SHELL)
    if status == 0:
        return RemoteDenied(
            "the remote ended the login without running our command",
            detail=last,
            hint="see what startup files of the remote account do: do they read from stdin, or"
            " start another program?",
        )
    return RemoteUnreachable(
        "the connection to the remote was lost",
        detail=last or (f"ssh ended with status {status}" if status is not None else ""),
        hint="if it does not come back: check the link, and sshd's log on the remote",
    )


def _has_passphrase(key: Path) -> bool:
    """Returns whether the file of a private key is encrypted, as far as its beginning tells."""
    try:
        with key.open("rb") as file:
            head = file.read(_KEY_HEAD)
        if not head.startswith(_OPENSSH_KEY):
            return b"ENCRYPTED" in head
        # A word, its length, and the name of the cipher.
        return b"\0\0\0\4none" not in b64decode(head.split()[4][:64])
    except (OSError, ValueError, IndexError):
        return False


@dataclass(frozen=True, slots=True)
class Ssh:
    """The transport over the OpenSSH client."""

    remote: RemoteSettings
    hint: str = ""

    @property
    def connect_timeout(self) -> float:
        """Twice the limit of ssh for the TCP connection: login and startup files get the same."""
        return 2.0 * self.remote.connect_timeout

    def argv(self, remote_command: str) -> list[str]:
        return ssh_argv(self.remote, remote_command, aes=cpu_has_aes())

    def environment(self) -> Mapping[str, str]:
        """Returns our variables without those that make ssh prompt, or print another language."""
        hidden = {"DISPLAY", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE", "LC_ALL", "LANG", "LANGUAGE"}
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        return {**kept, "LC_ALL": "C"}

    def explain(self, status: int | None, stderr: str) -> BackupError:
        error, key = explain_ssh(status, stderr), self.remote.identity_file
        if error.message != _KEY_REFUSED or key is None:
            return error
        # ssh ignores a key that it cannot use without a message.
        if not os.access(key, os.R_OK):
            return RemoteDenied(
                _KEY_REFUSED, detail=f"this user cannot read {key}", hint=error.hint
            )
        if _has_passphrase(key):
            why = f"there is no agent, {_AGENT} is not set"
            if os.environ.get(_AGENT):
                why = "the agent does not hold it, or the remote does not know it"
            return RemoteDenied(
                "our key has a passphrase, and was not used",
                detail=f"{key}: {why}",
                hint=f"`ssh-add {key}`, and start this command in the same session; a service needs"
                " a key without a passphrase, or the socket of an agent in its environment",
            )
        return error


@dataclass(frozen=True, slots=True)
class Sftp(Ssh):
    """The transport to the subsystem `sftp` of an account that runs no command."""

    def argv(self, remote_command: str) -> list[str]:
        if remote_command != SFTP:
            raise ConfigError(
                "this command cannot use a target by sftp",
                detail=f"{self.remote.url}: the account runs no command",
                hint="use a target whose url is ssh:// or file:// (--target)",
            )
        return ssh_argv(self.remote, SFTP, aes=cpu_has_aes(), subsystem=True)
