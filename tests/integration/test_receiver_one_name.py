"""Sessions of one owner, run and slot on one directory, in processes of one number.

So it is with containers that share a volume, and with hosts that are clones of one image and share
a network file system. Whatever they do to each other, what is published is right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import threading
from pathlib import Path

import pytest

from ntt_backup.receiver.workspace import Refusal
from ntt_backup.receiver.write_workspace import WriteWorkspace
from ntt_backup.wire import messages
from tests.helpers.receivers import (
    PING,
    RemoteReceiver,
    ScriptedSession,
    assert_complete,
    commit,
    digest_of,
    forced_command,
    litter,
    names_under,
    place_of,
)

OWNER, RUN = "0123456789ab", "11111111-2222-4333-8444-555555555555"
_DAY = 86400
MIB = 1 << 20
BIG = messages.RESUMABLE + MIB
NAME = digest_of(b"a large blob")


def of_one_pid(root: Path) -> RemoteReceiver:
    """A receiver that is the first process of its container."""
    *python, program = forced_command()
    one_pid = f"import os; os.getpid = lambda: 1; {program}"
    return RemoteReceiver(root, [*python, one_pid, "--root", str(root)])


def blobs(name: str, count: int) -> list[bytes]:
    return [f"{name} {number}".encode() * (1 + number) for number in range(count)]


def have_directories(root: Path, *contents: list[bytes]) -> None:
    """Makes the directories of these blobs: so each is staged as a file, under a short name."""
    for content in itertools.chain(*contents):
        place_of(root, digest_of(content)).parent.mkdir(parents=True, exist_ok=True)


def stages(root: Path) -> list[Path]:
    return sorted((root / ".ntt-incoming").glob(f"{OWNER}.*"))


def workspace(root: Path, run: str = RUN) -> WriteWorkspace:
    return WriteWorkspace(str(root), OWNER, run, "0")


def lost_stage(root: Path, name: str = f"{OWNER}.earlier.0.{'0' * 16}", lock: bool = True) -> Path:
    """The stage of a session that was killed."""
    (root / "by-hash").mkdir(exist_ok=True)
    stage = root / ".ntt-incoming" / name
    (stage / "d0").mkdir(parents=True)
    if lock:
        (stage / "lock").touch()
    return stage


def no_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_three_sessions_of_one_name_publish_only_right_content(root: Path) -> None:
    first, second, third = (blobs(name, 1) for name in ("first", "second", "third"))
    have_directories(root, first, second, third)
    with of_one_pid(root) as a, of_one_pid(root) as b, of_one_pid(root) as c:
        for receiver, contents in ((a, first), (b, second), (c, third)):
            receiver.hello()
            receiver.write(messages.BATCH.frame(1, 1, 1000), receiver.pack(contents))
            taken_in(receiver)
        for receiver in (a, b):
            with contextlib.suppress(BrokenPipeError):
                receiver.write(commit(1))
            receiver.hang_up()
        assert_complete(root)
        c.write(commit(1))
        assert c.receipt().stored == 1
        assert_complete(root)
        assert names_under(root) >= {digest_of(content).hex() for content in third}
        assert c.bye() == 0
    assert litter(root) == []


def taken_in(receiver: RemoteReceiver) -> None:
    """Returns when the receiver has taken in all that was said, or has ended."""
    with contextlib.suppress(BrokenPipeError):
        receiver.write(PING)
    while receiver.answer()[0] not in (messages.PONG, 0):
        pass


def test_sessions_of_one_name_at_once_never_mix_their_content(root: Path) -> None:
    """They supersede each other, and their clients begin again."""
    contents = {name: blobs(name, 60) for name in "abc"}
    have_directories(root, *contents.values())
    stored: list[bytes] = []

    def send(name: str) -> None:
        for number in range(6):
            part = contents[name][number * 10 : number * 10 + 10]
            with of_one_pid(root) as receiver, contextlib.suppress(BrokenPipeError):
                receiver.hello()
                receiver.write(messages.BATCH.frame(1, 10, 1 << 20))
                for content in part:
                    receiver.write(receiver.pack([content]))
                receiver.write(commit(1))
                kind, payload = receiver.answer()
                if kind == messages.RECEIPT and not failure_of(payload):
                    stored.extend(part)

    threads = [threading.Thread(target=send, args=(name,)) for name in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_complete(root)
    assert {digest_of(content).hex() for content in stored} <= names_under(root)
    assert stored


def failure_of(payload: bytes) -> bool:
    receipt = messages.RECEIPT.read(payload)
    return receipt.outcome != messages.SETTLED or bool(receipt.exceptions)


def test_a_stage_is_made_new_under_a_name_that_nobody_has(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is taken is never taken over: another one is tried."""
    (root / "by-hash").mkdir()
    tokens = [bytes(8), bytes(8), bytes(7) + b"\1"]
    monkeypatch.setattr(os, "urandom", lambda count: tokens.pop(0))
    first = workspace(root)
    (taken,) = stages(root)
    (taken / "staged").write_bytes(b"another's")
    second = workspace(root)
    assert tokens == []
    assert len(stages(root)) == 2
    second.leave()
    assert (taken / "staged").read_bytes() == b"another's"
    first.leave()
    assert litter(root) == []


def test_a_stage_whose_lock_another_one_holds_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, how: int) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))

    (root / "by-hash").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(Refusal) as caught:
        workspace(root)
    assert (caught.value.code, "lock" in caught.value.text) == ("place", True)
    assert stages(root) == []
    session = ScriptedSession(root)
    assert session.say().error == "place"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("swap", ["symlink", "directory"])
def test_a_stage_that_is_swapped_while_it_is_made_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    (root / "by-hash").mkdir()
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "0").write_bytes(b"precious")
    real = os.mkdir
    swapped: list[str] = []

    def mkdir(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(path, mode, dir_fd=dir_fd)
        if path.startswith(OWNER) and not swapped:
            swapped.append(path)
            os.rename(path, f"aside-{path}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            if swap == "symlink":
                os.symlink(outside, path, dir_fd=dir_fd)
            else:
                real(path, 0o777, dir_fd=dir_fd)
                lock = os.open(f"{path}/lock", os.O_CREAT | os.O_WRONLY, 0o666, dir_fd=dir_fd)
                os.close(lock)

    monkeypatch.setattr(os, "mkdir", mkdir)
    made = workspace(root)
    assert len(swapped) == 1
    made.leave()
    assert (outside / "0").read_bytes() == b"precious"
    assert [path.name for path in outside.iterdir()] == ["0"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_there_are_no_locks_no_stage_that_changed_today_is_taken_for_a_dead_ones(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    young = lost_stage(root)
    old = lost_stage(root, f"{OWNER}.earlier.1.{'0' * 16}")
    os.utime(old, (old.stat().st_mtime - _DAY - 60,) * 2)
    no_locks(monkeypatch, number)
    first = workspace(root)
    second = workspace(root, "other")
    assert young.exists()
    assert not old.exists()
    assert len(stages(root)) == 3
    second.leave()
    first.leave()
    assert stages(root) == [young]


def test_another_error_of_a_lock_ends_the_session(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "by-hash").mkdir()
    no_locks(monkeypatch, errno.EIO)
    assert ScriptedSession(root).say().error == "storage"
    assert litter(root) == []


@pytest.mark.parametrize("lock", [True, False])
def test_a_stage_without_a_lock_may_be_one_that_begins_or_that_of_tar(
    root: Path, lock: bool
) -> None:
    left = lost_stage(root, lock=lock)
    workspace(root).leave()
    assert left.exists() == (not lock)
    if left.exists():
        os.utime(left, (left.stat().st_mtime - _DAY - 60,) * 2)
        workspace(root).leave()
    assert litter(root) == []


def test_a_directory_that_is_moved_while_its_stage_is_removed_stays_whole(root: Path) -> None:
    """A session that is taken for dead may still give names: its last sync has taken long."""
    new = root / ".ntt-incoming" / "0123456789ab.run.0.1" / "d0"
    new.mkdir(parents=True)
    (new.parent / "lock").touch()
    for number in range(3):
        (new / str(number)).touch()
    place = root / "by-hash" / "3f" / "07"
    place.parent.mkdir(parents=True)

    calls: list[int] = []

    def move() -> None:
        calls.append(1)
        with contextlib.suppress(FileNotFoundError):
            new.rename(place)

    WriteWorkspace(str(root), "0123456789ab", "run2", "0", move).leave()

    assert calls
    assert not place.exists() or len(list(place.iterdir())) == 3
    assert not (root / ".ntt-incoming").exists()


# --- a session whose client has left without a word -----------------------------------------------


def send_most_of(receiver: RemoteReceiver, content: bytes) -> None:
    """A large blob up to its last MiB; returns when all of that has been taken in."""
    receiver.write(
        messages.BATCH.frame(1, 1, len(content)) + messages.LARGE.frame(NAME, len(content), 0)
    )
    for piece in receiver.pieces(content[:-MIB]):
        receiver.write(piece)
    receiver.ping()


def test_a_new_session_of_a_worker_supersedes_its_old_one_and_resumes(root: Path) -> None:
    """sshd may hold the dead connection for hours, and its receiver the lock of the blob."""
    content = bytes(BIG + MIB)
    with RemoteReceiver(root) as old, RemoteReceiver(root) as new:
        old.hello()
        send_most_of(old, content)
        new.hello()
        kind, payload = new.ask(messages.ASK_OFFSET.frame(NAME, len(content)))
        assert kind == messages.OFFSET
        assert messages.OFFSET.read(payload)[0] == BIG
        assert old.error()[0] == "superseded"
        assert new.bye() == 0


def test_a_session_of_another_worker_supersedes_none(root: Path) -> None:
    content = bytes(BIG + MIB)
    with RemoteReceiver(root) as old, RemoteReceiver(root) as new:
        old.hello()
        send_most_of(old, content)
        new.hello(slot="1")
        _, payload = new.ask(messages.ASK_OFFSET.frame(NAME, len(content)))
        assert messages.OFFSET.read(payload)[0] == 0
        old.ping()


def test_a_superseded_session_answers_what_it_has_committed(root: Path) -> None:
    with RemoteReceiver(root) as old:
        old.hello()
        old.write(old.batch(1, [b"a", b"b"]))
        with RemoteReceiver(root) as new:
            new.hello()
            assert old.receipt().stored == 2
            assert old.error()[0] == "superseded"
            assert new.bye() == 0
    assert not (root / ".ntt-incoming").exists()
