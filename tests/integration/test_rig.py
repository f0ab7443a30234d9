"""The rig itself: if these fail, what the other tests say about remotes and links means nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.link import Link
from tests.patience import PATIENCE
from tests.sshd import FULL_SIZE, Sshd

LOOP = "while read line; do echo got $line; done"


@contextmanager
def session(sshd: Sshd, command: str = LOOP) -> Iterator[subprocess.Popen[str]]:
    """An ssh session that is up: it has answered once."""
    client = subprocess.Popen(
        sshd.argv(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        tell(client, "first")
        assert answer(client) == "got first\n"
        yield client
    finally:
        client.kill()
        client.communicate()


def tell(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line + "\n")
    client.stdin.flush()


def answer(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline()


def test_a_command_runs_and_its_status_comes_back(remote: Sshd) -> None:
    assert remote.run("true").returncode == 0
    assert remote.run("exit 7").returncode == 7


def test_the_host_key_is_pinned(remote: Sshd) -> None:
    other = remote.through(remote.port)
    entry = other.known_hosts.read_text()
    host, kind, _ = entry.split()
    other.known_hosts.write_text(f"{host} {kind} {'A' * 43}\n")
    try:
        assert other.run("true").returncode == 255
    finally:
        other.known_hosts.write_text(entry)


def test_what_arrives_can_be_read_here(remote: Sshd) -> None:
    directory = remote.directory()
    assert remote.run(f"tar xf - -C {directory.path}", stdin=_tar()).returncode == 0
    assert (directory.local / "a").read_bytes() == b"content"
    assert remote.directory().path != directory.path


def _tar() -> bytes:
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a")
        member.size = 7
        archive.addfile(member, io.BytesIO(b"content"))
    return buffer.getvalue()


def test_a_login_shell_that_is_no_posix_shell(remote: Sshd) -> None:
    csh = remote.as_user("csh")
    assert csh.run("for x in a; do :; done").returncode != 0
    assert csh.run("setenv A b; echo $A").stdout == b"b\n"
    assert remote.as_user("fishy").run("set A b; echo $A").stdout == b"b\n"


def test_a_noisy_login_prints_on_both_streams(remote: Sshd) -> None:
    noisy = remote.as_user("noisy").run("true")
    assert noisy.returncode == 0
    assert set(noisy.stdout.splitlines()) == {b"Welcome from .ssh/rc", b"Welcome from .bashrc"}
    assert b"Mind the gap" in noisy.stderr
    assert b"Authorised use only" in noisy.stderr


def test_the_busy_account_has_busybox_first(remote: Sshd) -> None:
    tools = ("tar", "head", "cp", "sync")
    busy = remote.as_user("busy").run(f"for tool in {' '.join(tools)}; do command -v $tool; done")
    assert busy.stdout.decode().split() == [f"/opt/busybox/bin/{tool}" for tool in tools]
    assert b"BusyBox" in remote.as_user("busy").run("tar --help").stderr


@pytest.mark.docker
def test_the_bare_account_has_no_python(remote: Sshd) -> None:
    assert remote.run("command -v python3").returncode == 0
    assert remote.as_user("bare").run("command -v python3").returncode != 0


def test_a_full_remote_says_so_and_is_empty_again_next_time(remote: Sshd) -> None:
    full = remote.full_directory()
    assert remote.run(f"ls {full.path}").stdout == b""
    overflow = remote.run(f"cat > {full.path}/big", stdin=bytes(FULL_SIZE + 1))
    assert b"No space left on device" in overflow.stderr
    assert int(remote.run(f"wc -c < {full.path}/big").stdout) <= FULL_SIZE
    assert remote.run(f"ls {remote.full_directory().path}").stdout == b""


def test_a_read_only_remote_says_so(remote: Sshd) -> None:
    directory = remote.read_only_directory()
    assert b"Read-only file system" in remote.run(f"touch {directory.path}/a").stderr


def test_killed_sessions_end_and_new_ones_are_welcome(remote: Sshd) -> None:
    with session(remote) as client:
        remote.kill_sessions()
        assert client.wait(timeout=PATIENCE) == 255
    assert remote.run("true").returncode == 0


def test_a_stopped_remote_refuses_and_comes_back_on_its_port(remote: Sshd) -> None:
    directory = remote.directory()
    with session(remote) as client:
        remote.stop()
        assert client.wait(timeout=PATIENCE) == 255
    assert b"Connection refused" in remote.run("true").stderr
    remote.start()
    assert remote.run(f"test -d {directory.path}").returncode == 0


def test_a_paused_remote_holds_its_answer_until_it_goes_on(remote: Sshd) -> None:
    with session(remote) as client:
        remote.pause()
        tell(client, "second")
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(timeout=0.5)
        remote.unpause()
        assert answer(client) == "got second\n"


def test_a_test_may_leave_the_remote_switched_off(remote: Sshd) -> None:
    remote.stop()


def test_the_next_test_finds_it_running(remote: Sshd) -> None:
    assert remote.run("true").returncode == 0


def test_a_cut_link_ends_the_client_and_refuses_until_restored(remote: Sshd, link: Link) -> None:
    through = remote.through(link.port)
    with session(through) as client:
        link.cut()
        assert client.wait(timeout=PATIENCE) == 255
    assert b"Connection refused" in through.run("true").stderr
    link.restore()
    assert through.run("true").returncode == 0


def test_a_stalled_link_passes_on_what_it_held(remote: Sshd, link: Link) -> None:
    with session(remote.through(link.port)) as client:
        link.stall()
        before = link.sent
        tell(client, "second")
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(timeout=0.5)
        assert link.sent == before
        link.resume()
        assert answer(client) == "got second\n"


def test_a_link_cut_after_some_bytes_lets_no_more_through(remote: Sshd, link: Link) -> None:
    directory = remote.directory()
    through = remote.through(link.port)
    link.cut_after(300_000)
    outcome = through.run(f"cat > {directory.path}/a", stdin=bytes(1_000_000))
    assert outcome.returncode == 255
    assert link.sent == 300_000
    assert remote.run("true").returncode == 0
    assert 0 < (directory.local / "a").stat().st_size < 300_000
