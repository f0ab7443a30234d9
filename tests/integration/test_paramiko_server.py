"""The ssh server of the demo in Python, used by the real ssh client."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from ntt_backup.demo.paramiko_server import ParamikoServer
from ntt_backup.demo.sshd import make_key
from tests.helpers.processes import has_ended
from tests.helpers.waiting import PATIENCE, wait_until


@dataclass(frozen=True)
class Client:
    """The real ssh client, set up for one server. config is its ssh_config."""

    server: ParamikoServer
    config: Path

    def argv(self, command: str, *options: str) -> list[str]:
        return ["ssh", "-F", str(self.config), *options, "embedded", command]

    def run(
        self, command: str, *options: str, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.argv(command, *options), input=stdin, capture_output=True, timeout=PATIENCE
        )


def public_part(key: Path) -> str:
    return key.with_suffix(".pub").read_text()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    user_key, host_key = tmp_path / "user", tmp_path / "host"
    for key in (user_key, host_key):
        make_key(key)
    with closing(ParamikoServer(host_key, public_part(user_key))) as server:
        known_hosts = tmp_path / "known_hosts"
        known_hosts.write_text(f"[127.0.0.1]:{server.port} {public_part(host_key)}")
        config = tmp_path / "ssh_config"
        config.write_text(
            f"Host embedded\nHostName 127.0.0.1\nPort {server.port}\n"
            f"User anyone\nIdentityFile {user_key}\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {known_hosts}\nStrictHostKeyChecking yes\n"
            "BatchMode yes\nRequestTTY no\nForwardX11 no\nLogLevel ERROR\n"
        )
        yield Client(server, config)


def read_pid(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"), f"{file} is written")
    return int(file.read_text())


def test_command_gets_its_streams_and_client_gets_its_status(client: Client) -> None:
    done = client.run("cat; echo to-stderr >&2; exit 7", stdin=b"in\x00\xffput")
    assert (done.stdout, done.stderr, done.returncode) == (b"in\x00\xffput", b"to-stderr\n", 7)


@pytest.mark.parametrize("command", ["sleep 1000", "yes", "exec >&- 2>&-; sleep 1000"])
def test_killed_client_takes_its_command_along(
    client: Client, tmp_path: Path, command: str
) -> None:
    pid_file = tmp_path / "pid"
    with subprocess.Popen(
        client.argv(f"echo $$ >{shlex.quote(str(pid_file))}; {command}; true"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as ssh:
        pid = read_pid(pid_file)
        ssh.kill()
    wait_until(lambda: has_ended(pid), "the command has ended")


def test_close_ends_commands_and_refuses_new_clients(client: Client, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with subprocess.Popen(
        client.argv(f"echo $$ >{shlex.quote(str(pid_file))}; sleep 1000"),
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as ssh:
        pid = read_pid(pid_file)
        client.server.close()
        assert has_ended(pid)
        assert ssh.wait(timeout=PATIENCE) == 255
    assert client.run("true").returncode == 255
    client.server.close()


def test_other_keys_are_turned_away(client: Client, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    make_key(stranger)
    config = tmp_path / "stranger_config"
    config.write_text(client.config.read_text().replace(str(tmp_path / "user"), str(stranger)))
    done = Client(client.server, config).run("echo inside")
    assert (done.stdout, done.returncode) == (b"", 255)
    assert b"Permission denied" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-s"], id="subsystem"),
        pytest.param(["-o", "RequestTTY=force"], id="terminal"),
        pytest.param(["-o", "ExitOnForwardFailure=yes", "-R", "0:127.0.0.1:1"], id="forwarding"),
        pytest.param(["-W", "127.0.0.1:1"], id="tunnel"),
    ],
)
def test_what_is_not_a_plain_command_is_refused(client: Client, options: list[str]) -> None:
    argv = ["ssh", "-F", str(client.config), *options, "embedded"]
    if "-W" not in options:
        argv.append("echo inside")
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE)
    assert (done.stdout, done.returncode) == (b"", 255)
