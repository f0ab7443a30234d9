"""The way in is not made for us: operators' ssh configurations, odd login shells, noisy accounts.

What must not matter does not, and what must be mended is said in one line, before anything is sent.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.environment import Environment
from tests.helpers.sshd import Sshd

HOSTILE = """
Host *
    IgnoreUnknown SessionType,StdinNull,ForkAfterAuthentication
    RemoteCommand exec zsh
    RequestTTY yes
    SessionType none
    StdinNull yes
    ForkAfterAuthentication yes
    ForwardX11 yes
    ForwardX11Trusted yes
    XAuthLocation /opt/X11/bin/xauth
    ForwardAgent yes
    LocalForward 127.0.0.1:{taken} 127.0.0.1:22
    ExitOnForwardFailure yes
    ControlMaster auto
    ControlPath {root}/control-%C
    ControlPersist 60
    PermitLocalCommand yes
    LocalCommand touch {root}/local-command-ran
    SendEnv *
    Compression yes
    EscapeChar ~
    LogLevel VERBOSE
"""


def refused(env: Environment, code: int, *words: str) -> None:
    """The run ends with the code, says once what is wrong and what to do, and changes nothing."""
    env.fill(20)
    done = env.run("run", "--once")
    assert done.returncode == code, done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stdout + done.stderr
    assert [word for word in words if word not in errors[0]] == []
    assert done.stderr == ""
    (error,) = env.events("error")
    assert error["hint"]
    assert f"hint: {error['hint']}" in done.stdout.splitlines()
    assert error["exit_code"] == env.events("run_stop")[-1]["exit_code"] == code
    assert env.events("outage") == []
    assert env.copied() == set()
    assert env.failures() == {}
    if env.remote.local.is_dir():
        assert list(env.remote.local.iterdir()) == []


def test_a_configuration_made_for_people_changes_nothing(env: Environment, remote: Sshd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = env.root / "ssh_config"
        hostile = HOSTILE.format(root=env.root, taken=taken.getsockname()[1])
        config.write_text(remote.ssh_config.read_text() + hostile)
        env.write_config(remote={"ssh_config": str(config)})
        env.environ["DISPLAY"] = ":77"
        env.fill(50)

        done = env.run("run", "--once")

    assert done.returncode == 0, done.stdout + done.stderr
    env.assert_complete()
    assert sum(event["wire_bytes"] for event in env.events("batch_complete")) > 0
    left = {path.name for path in env.root.iterdir()}
    assert left == {"by-hash", "log", "lock", "backup-remote.toml", "ssh_config", "host.key"}


@pytest.mark.parametrize("user", ["fishy", "busy", "noisy"])
def test_every_account_that_has_sh_and_tar_will_do(
    env: Environment, remote: Sshd, user: str
) -> None:
    env.through(remote.as_user(user))
    env.fill(50)

    env.run("run", "--once", expect=0)
    env.assert_complete()


def test_the_remotes_umask_does_not_matter(env: Environment, startup: Path) -> None:
    startup.write_text("umask 077\n")
    env.fill(50)

    env.run("run", "--once", expect=0)

    env.assert_complete()
    top = env.remote.local / "by-hash"
    modes = {(path.is_dir(), path.stat().st_mode & 0o7777) for path in [top, *top.rglob("*")]}
    assert modes == {(True, 0o755), (False, 0o644)}


# --- not let in, or not found


def wrong_host_key(env: Environment) -> None:
    other = env.root / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    kind, key, *_ = other.with_suffix(".pub").read_text().split()
    known = env.root / "known_hosts"
    known.write_text(f"[{env.sshd.host}]:{env.sshd.port} {kind} {key}\n")
    env.write_config(remote={"known_hosts": str(known)})


def wrong_user_key(env: Environment) -> None:
    other = env.root / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    change_ssh_config(env, str(env.sshd.identity_file), str(other))


def bad_option(env: Environment) -> None:
    change_ssh_config(env, "    Port", "    NoSuchOption yes\n    Port")


def change_ssh_config(env: Environment, old: str, new: str) -> None:
    text = env.sshd.ssh_config.read_text()
    assert old in text
    config = env.root / "ssh_config"
    config.write_text(text.replace(old, new))
    env.write_config(remote={"ssh_config": str(config)})


@pytest.mark.parametrize(
    ("broken", "code", "word"),
    [
        (wrong_host_key, 5, "host key"),
        (wrong_user_key, 5, "key"),
        (bad_option, 2, "nosuchoption"),
    ],
)
def test_a_run_says_in_one_line_why_it_was_not_let_in(
    env: Environment, broken: Callable[[Environment], None], code: int, word: str
) -> None:
    broken(env)
    refused(env, code, word)
