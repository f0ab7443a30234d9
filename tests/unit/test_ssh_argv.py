"""The ssh command line names every option the job depends on, and no file can undo one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.client.transport import Ssh, ssh_argv
from ntt_backup.config.sections import RemoteSettings
from tests.helpers.waiting import PATIENCE

HOSTILE = """
Host *
    RemoteCommand exec zsh
    RequestTTY yes
    ForwardX11 yes
    ForwardX11Trusted yes
    XAuthLocation /opt/X11/bin/xauth
    ForwardAgent yes
    ControlMaster auto
    ControlPath /tmp/cm-%r@%h:%p
    ControlPersist yes
    PermitLocalCommand yes
    LocalCommand echo local
    LocalForward 9999 localhost:9999
    RemoteForward 9998 localhost:9998
    DynamicForward 9997
    Tunnel yes
    Compression yes
    BatchMode no
    LogLevel DEBUG3
    EscapeChar ~
    StrictHostKeyChecking no
    ConnectTimeout 999
    ServerAliveInterval 0
    TCPKeepAlive no
    SessionType none
    StdinNull yes
    ForkAfterAuthentication yes
    StreamLocalBindUnlink yes
"""


def settings(**changes: Any) -> RemoteSettings:
    return RemoteSettings(**{"host": "vault", "path": "/storage", **changes})


def test_the_whole_command_line() -> None:
    """Options that old clients lack are announced first, and the command comes last."""
    argv = ssh_argv(
        settings(
            ssh_config='/etc/my ssh/100% "config"',
            port=2222,
            identity_file="""/a b/it's "k" 100%h \\""",
            known_hosts="/k/hosts",
            connect_timeout=3,
            alive_interval=7,
            alive_count=2,
        ),
        "exec sh -c 'true'",
        aes=False,
    )
    assert argv[:6] == [
        *("ssh", "-F", '/etc/my ssh/100% "config"', "-T", "-o"),
        "IgnoreUnknown=SessionType,StdinNull,ForkAfterAuthentication",
    ]
    assert [word for word in argv[-17:] if word != "-o"] == [
        "ConnectTimeout=3",
        "ServerAliveInterval=7",
        "ServerAliveCountMax=2",
        'UserKnownHostsFile="/k/hosts"',
        '''IdentityFile="/a b/it's \\"k\\" 100%%h \\\\"''',
        "IdentitiesOnly=yes",
        "Port=2222",
        *("--", "vault", "exec sh -c 'true'"),
    ]


def effective(argv: list[str]) -> dict[str, str]:
    """What ssh itself makes of a command line."""
    done = subprocess.run(
        ["ssh", "-G", *argv[1:]], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_a_fast_cipher_comes_first_where_the_cpu_has_aes_and_others_stay() -> None:
    assert not any("Ciphers" in word for word in ssh_argv(settings(), "true", aes=False))
    ciphers = effective(ssh_argv(settings(ssh_config="/dev/null"), "true", aes=True))["ciphers"]
    assert ciphers.startswith("aes128-gcm@openssh.com,aes256-gcm@openssh.com,")
    assert "chacha20-poly1305@openssh.com" in ciphers


def test_a_hostile_configuration_changes_nothing_that_matters(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(HOSTILE)
    shown = effective(ssh_argv(settings(ssh_config=config), "true", aes=True))
    expected = {
        "batchmode": "yes",
        "requesttty": "false",
        "forwardx11": "no",
        "forwardx11trusted": "no",
        "forwardagent": "no",
        "clearallforwardings": "yes",
        "tunnel": "false",
        "permitlocalcommand": "no",
        "controlmaster": "false",
        "escapechar": "none",
        "compression": "no",
        "loglevel": "ERROR",
        "stricthostkeychecking": "true",
        "connecttimeout": "15",
        "serveraliveinterval": "15",
        "serveralivecountmax": "4",
        "tcpkeepalive": "yes",
        "sessiontype": "default",
        "stdinnull": "no",
        "forkafterauthentication": "no",
    }
    assert {name: shown.get(name) for name in expected} == expected
    # Shown as "none", or not at all, depending on the client's age.
    assert shown.get("remotecommand", "none") == "none"
    assert shown.get("controlpath", "none") == "none"
    for name in ("localforward", "remoteforward", "dynamicforward"):
        assert name not in shown or shown["clearallforwardings"] == "yes"


def test_a_path_with_odd_characters_is_one_path_for_ssh(tmp_path: Path) -> None:
    odd = tmp_path / """a b'c "d" 100%"""
    remote = settings(ssh_config="/dev/null", identity_file=odd, known_hosts=odd)
    shown = effective(ssh_argv(remote, "true", aes=False))
    percent_kept = str(odd).replace("%", "%%")
    assert shown["identityfile"] in (str(odd), percent_kept)
    assert shown["userknownhostsfile"] in (str(odd), percent_kept)


def test_the_environment_cannot_ask_a_person_or_change_the_language(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DISPLAY", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE", "LANG", "LC_ALL", "LANGUAGE"):
        monkeypatch.setenv(name, "de_DE.UTF-8")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/agent")
    environment = Ssh(settings()).environment()
    assert environment["LC_ALL"] == "C"
    assert environment["SSH_AUTH_SOCK"] == "/agent"
    assert environment["PATH"] == os.environ["PATH"]
    assert not {"DISPLAY", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE", "LANG"} & environment.keys()
