"""The errors that the words of OpenSSH mean: the class decides whether a run waits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ntt_backup.client.transport import Ssh, explain_ssh
from ntt_backup.config import RemoteSettings
from ntt_backup.errors import BackupError, ConfigError, RemoteDenied, RemoteUnreachable

CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Add correct host key in /root/.ssh/known_hosts to get rid of this message.
Host key for vault has changed and you have requested strict checking.
Host key verification failed."""
UNKNOWN = """\
No ED25519 host key is known for [127.0.0.1]:2222 and you have requested strict checking.
Host key verification failed."""

# What OpenSSH 7.4 to 10 say when they end with 255, by the class and a word of the message.
SAID = {
    (RemoteDenied, "host key is not the one we know"): [CHANGED],
    (RemoteDenied, "host key is not known on this machine"): [UNKNOWN],
    (RemoteDenied, "key"): [
        "backup@vault: Permission denied (publickey).",
        'Load key "/k/id": invalid format\nbackup@vault: Permission denied (publickey).',
        "Received disconnect from 127.0.0.1 port 22:2: Too many authentication failures\n"
        "Disconnected from 127.0.0.1 port 22",
    ],
    (RemoteDenied, "agree"): [
        "Unable to negotiate with 127.0.0.1 port 22: no matching host key type found."
        " Their offer: ssh-rsa",
    ],
    (ConfigError, "configuration"): [
        "/etc/ssh/c: line 3: Bad configuration option: remotcommand\n"
        "/etc/ssh/c: terminating, 1 bad configuration options",
        "Can't open user config file /nowhere: No such file",
        "Bad owner or permissions on /root/.ssh/config",
        "command-line line 0: Bad SSH2 cipher spec '^aes128-gcm@openssh.com'.",
        "/etc/ssh/c line 2: missing argument.",
    ],
    (RemoteUnreachable, "resolve"): [
        "ssh: Could not resolve hostname vault: Name or service not known",
    ],
    (RemoteUnreachable, "refuses"): ["ssh: connect to host vault port 22: Connection refused"],
    (RemoteUnreachable, "answer"): [
        "ssh: connect to host vault port 22: Connection timed out",
        "Connection timed out during banner exchange",
        "Timeout, server vault not responding.",
        "ssh: connect to host vault port 22: No route to host",
        "ssh: connect to host vault port 22: Network is unreachable",
    ],
    (RemoteUnreachable, "lost"): [
        "kex_exchange_identification: Connection closed by remote host\n"
        "Connection closed by 127.0.0.1 port 22",
        "client_loop: send disconnect: Broken pipe",
        "",
    ],
}
# The words of a shell or of our programs, and ends without a word.
OTHERS = [
    (1, "This account is currently not available.", RemoteDenied, "commands"),
    (1, "This service allows sftp connections only.", RemoteDenied, "commands"),
    (None, "", RemoteUnreachable, "lost"),
    (-9, "", RemoteUnreachable, "lost"),
    (127, "bash: line 1: sh: command not found", RemoteDenied, "command"),
    (126, "sh: /bin/sh: Permission denied", RemoteDenied, "command"),
    (0, "sh: 1: head: not found", RemoteDenied, "command"),
    (2, "ntt-backup-receive: error: unrecognized arguments", RemoteDenied, "forced command"),
    (1, "head: illegal option -- c\nusage: head [-n] [file ...]", RemoteDenied, "command"),
    (1, "head: unrecognized option: c\nBusyBox v1.36 multi-call binary.", RemoteDenied, "command"),
]
CASES = [(255, text, *means) for means, texts in SAID.items() for text in texts] + OTHERS


@pytest.mark.parametrize(("status", "stderr", "kind", "word"), CASES)
def test_words_of_ssh_have_a_class_a_message_a_hint_and_one_line_of_detail(
    status: int | None, stderr: str, kind: type[BackupError], word: str
) -> None:
    error = explain_ssh(status, stderr)
    assert type(error) is kind
    assert word in error.message
    assert error.hint
    assert error.retryable is (kind is RemoteUnreachable)
    assert error.exit_code == (2 if kind is ConfigError else 5)
    assert "\n" not in error.detail
    assert not stderr or error.detail in stderr


def test_words_about_the_key_file_come_first_where_no_key_was_good() -> None:
    loading = 'Load key "/k/id": bad permissions'
    denied = "backup@vault: Permission denied (publickey)."
    assert explain_ssh(255, f"{loading}\n{denied}").detail == loading
    lost = explain_ssh(255, f"{loading}\nConnection to vault closed by remote host.")
    assert isinstance(lost, RemoteUnreachable)  # Another key was good.


def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    denied = "backup@vault: Permission denied (publickey)."
    for name, said in (("id", denied), ("gone", f"this user cannot read {tmp_path / 'gone'}")):
        (tmp_path / "id").touch()
        remote = RemoteSettings(host="vault", path="/srv", identity_file=tmp_path / name)
        assert Ssh(remote).explain(255, denied).detail == said


@pytest.mark.parametrize("form", [("-t", "ed25519"), ("-t", "rsa", "-b", "2048", "-m", "PEM")])
@pytest.mark.parametrize("passphrase", ["", "secret"])
def test_a_key_that_has_a_passphrase_is_told_from_one_that_the_remote_refuses(
    tmp_path: Path, form: tuple[str, ...], passphrase: str
) -> None:
    denied = "backup@vault: Permission denied (publickey)."
    key = tmp_path / "id"
    argv = ["ssh-keygen", "-q", *form, "-N", passphrase, "-f", str(key)]
    subprocess.run(argv, check=True, capture_output=True)
    remote = RemoteSettings(host="vault", path="/srv", identity_file=key)
    error = Ssh(remote).explain(255, denied)
    assert ("passphrase, and was not used" in error.message) == bool(passphrase)
    assert str(key) in str(error.detail) or not passphrase


def test_noise_of_a_login_does_not_hide_the_reason() -> None:
    error = explain_ssh(255, f"Welcome to vault\n{CHANGED}\nGood bye")
    assert isinstance(error, RemoteDenied)


def test_the_status_is_told_where_ssh_said_nothing() -> None:
    assert "255" in explain_ssh(255, "").detail
