"""The way to the remote: by a jump host, with an agent, to an appliance that stays as it is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import DockerServer, Sshd, by_python_alone
from tests.helpers.waiting import wait_until

PASSPHRASE = "correct horse"
HOST = """\
Host {name}
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile "{key}"
    IdentitiesOnly yes
    UserKnownHostsFile "{known_hosts}"
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    HostKeyAlias {alias}
    KexAlgorithms curve25519-sha256
"""


@pytest.fixture
def locked(env: Environment, remote: Sshd) -> Path:
    """The key that the remote accepts, with a passphrase."""
    key = env.root / "locked"
    key.write_bytes(remote.identity_file.read_bytes())
    key.chmod(0o600)
    argv = ["ssh-keygen", "-q", "-p", "-P", "", "-N", PASSPHRASE, "-f", str(key)]
    subprocess.run(argv, check=True, capture_output=True)
    return key


@pytest.fixture
def agent(env: Environment, locked: Path) -> Iterator[Path]:
    """An agent that holds the key; its socket."""
    socket = env.root / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        wait_until(socket.exists, "the agent")
        ask = env.root / "ask"
        ask.write_text(f"#!/bin/sh\necho {PASSPHRASE}\n")
        ask.chmod(0o700)
        asked = {"SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
        environment = {**os.environ, **asked, "SSH_AUTH_SOCK": str(socket)}
        subprocess.run(["ssh-add", "-q", str(locked)], env=environment, check=True)
        yield socket
    finally:
        process.kill()
        process.wait()


def host(remote: Sshd, name: str, port: int, key: Path) -> str:
    """Returns a Host of ssh_config that leads to the test server."""
    alias = f"[{remote.host}]:{remote.port}"
    parts = {"user": remote.user, "known_hosts": remote.known_hosts, "alias": alias}
    return HOST.format(name=name, port=port, key=key, **parts)


def configure(env: Environment, text: str) -> None:
    config = env.root / "ssh_config"
    config.write_text(text)
    env.write_config(remote={"ssh_config": str(config)})


@pytest.mark.long
def test_a_jump_host_is_a_line_in_the_configuration_of_ssh(
    env: Environment, remote: Sshd, link: Link
) -> None:
    port = 22 if remote.kind == "docker" else remote.port  # As the jump host sees it.
    behind = host(remote, remote.alias, port, remote.identity_file) + "    ProxyJump jump\n"
    configure(env, behind + host(remote, "jump", link.port, remote.identity_file))
    env.fill(20)

    for command in ("check", "run", "verify", "reconcile"):
        done = env.run(command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    env.assert_complete()
    assert link.sent > sum(map(len, env.in_store().values()))


def test_a_jump_host_that_refuses_our_key_is_named_at_once(
    env: Environment, remote: Sshd, link: Link, locked: Path
) -> None:
    behind = host(remote, remote.alias, 22, remote.identity_file) + "    ProxyJump jump\n"
    configure(env, behind + host(remote, "jump", link.port, locked))
    env.fill(2)

    done = env.run("verify")

    assert done.returncode == 5
    assert "error: the remote does not accept our key" in done.stderr
    assert "Permission denied" in done.stderr
    assert "jump host" in done.stderr


def test_a_key_with_a_passphrase_is_used_from_an_agent(
    env: Environment, remote: Sshd, locked: Path, agent: Path
) -> None:
    configure(env, host(remote, remote.alias, remote.port, locked))
    env.write_config(remote={"identity_file": str(locked)})
    env.environ["SSH_AUTH_SOCK"] = str(agent)
    env.fill(5)

    done = env.run("run")

    assert done.returncode == 0, done.stdout
    env.assert_complete()


@pytest.mark.parametrize("command", ["run", "verify", "check"])
def test_without_an_agent_one_line_says_that_the_key_has_a_passphrase(
    env: Environment, remote: Sshd, locked: Path, command: str
) -> None:
    configure(env, host(remote, remote.alias, remote.port, locked))
    env.write_config(remote={"identity_file": str(locked)})
    env.environ["SSH_AUTH_SOCK"] = ""
    env.fill(2)

    done = env.run(command)

    assert done.returncode == 5
    said = done.stdout + done.stderr
    assert said.count("our key has a passphrase, and was not used") == 1
    assert str(locked) in said
    assert "ssh-add" in said


@pytest.mark.long
def test_on_an_appliance_python_alone_is_needed_and_nothing_is_installed(
    env: Environment, remote: Sshd, startup: Path, postgres: Postgres, database_url: str
) -> None:
    """No BLAKE3, no tar, no sha256sum; and the system of the remote stays as it is."""
    assert isinstance(remote.server, DockerServer)
    by_python_alone(remote, startup)
    env.write_config(run={"skip_pgdump": False}, dump={"bin": str(postgres.programs)})
    env.fill(30)
    missing = env.put(b"never sent by anybody")
    env.send_all()
    env.remote_path(missing).unlink()
    # Another program has put them there, and has marked half of them.
    wrong, *_ = sorted(env.copied() - {missing})
    env.query("update blobs set remote_copied = false where blobid > '8'")
    content = env.remote_path(wrong).read_bytes()
    env.remote_path(wrong).write_bytes(bytes(len(content)))
    before = remote.server.changes()

    done = {line: env.run(*line.split()) for line in ("check", "verify", "reconcile --adopt")}
    said = {line: one.stdout + one.stderr for line, one in done.items()}
    assert done["check"].returncode == 0, said
    assert "checks by SHA-256 (no BLAKE3 on the remote)" in said["check"]
    assert "strategy stream" in said["check"]
    assert done["verify"].returncode == 7
    assert wrong in said["verify"]
    assert done["reconcile --adopt"].returncode == 0
    assert env.run("run").returncode == 0
    assert env.run("verify").returncode == 0
    scratch = str(env.root / "scratch")
    drill = env.run("drill", "--scratch", scratch, "--database", database_url)
    assert drill.returncode == 0, drill.stderr
    assert "PROVED" in drill.stdout

    assert env.on_remote() == env.in_store()
    assert env.copied() == {Path(name).name for name in env.in_store()}
    assert env.litter() == ["pgdump"]
    assert remote.server.changes() == before
