"""A session's stage: what lies in it, with which rights, and what is removed around it."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3

from ntt_backup.blobdir import publish
from ntt_backup.receiver.large_blob import PARTIAL
from ntt_backup.receiver.staged_batch import StagedBatch, StageWriter
from ntt_backup.receiver.workspace import Refusal
from ntt_backup.receiver.write_workspace import WriteWorkspace
from tests.helpers.receivers import ScriptedSession, digest_of, failure, place_of

OWNER = "0123456789ab"
MARK = b"%020d\n" % 1000
LONG_AGO = time.time() - 8 * 86400


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "by-hash").mkdir()
    return tmp_path


def leave_partials(root: Path) -> Path:
    """A partial file that is a week old, and one of which nothing is durable."""
    partial = root / ".ntt-incoming" / PARTIAL
    partial.mkdir(parents=True)
    for name in ("0" * 64, f"{'0' * 64}.mark", "1" * 64):
        (partial / name).write_bytes(MARK)
        os.utime(partial / name, (LONG_AGO, LONG_AGO))
    return partial


def test_a_session_begins_without_what_dead_ones_have_left(root: Path) -> None:
    partial = leave_partials(root)
    scratch = root / f".ntt-check-{OWNER}.1"
    young, others = root / f".ntt-check-{OWNER}.2", root / ".ntt-check-ffffffffffff.1"
    for one in scratch, young, others:
        one.mkdir()
        (one / "file").touch()
    for one in scratch, others:
        os.utime(one, (LONG_AGO, LONG_AGO))
    session = WriteWorkspace(str(root), OWNER, "run", "0")
    assert list(partial.iterdir()) == []
    assert (scratch.exists(), young.exists(), others.exists()) == (False, True, True)
    session.leave()


def test_a_session_leaves_nothing_where_open_files_keep_a_hidden_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NFS, and by FUSE."""
    unlink = os.unlink

    def hide(name: str, *, dir_fd: int) -> None:
        path = Path(f"/proc/self/fd/{dir_fd}").readlink() / name
        files = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        if str(path) in files:
            path.rename(path.with_name(".hidden"))
        else:
            unlink(path)

    session = WriteWorkspace(str(root), OWNER, "run", "0")
    monkeypatch.setattr(os, "unlink", hide)
    session.leave()
    assert [one.name for one in root.iterdir()] == ["by-hash"]


def test_others_may_look_and_not_write(root: Path) -> None:
    """Whatever the umask is: a receiver sets its own."""
    umask = os.umask(0)
    try:
        client = ScriptedSession(root)
        client.say(client.batch(1, [b"a", b"b"]))
        session = WriteWorkspace(str(root), OWNER, "run", "0")
        (stage,) = (root / ".ntt-incoming").iterdir()
        modes = [stat.S_IMODE(one.stat().st_mode) for one in (stage.parent, stage, stage / "lock")]
        session.leave()
    finally:
        os.umask(umask)
    assert modes == [0o755, 0o700, 0o600]
    found = {stat.S_IMODE(one.stat().st_mode): one for one in (root / "by-hash").rglob("*")}
    assert {mode: one.is_dir() for mode, one in found.items()} == {0o755: True, 0o644: False}


@pytest.mark.parametrize("large", [False, True])
def test_a_disk_that_takes_a_little_at_a_time_gets_all_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    content = bytes(range(256)) * 4
    write: Callable[[int, bytes], int] = os.write
    session = ScriptedSession(root)
    batch = session.batch(1, [content], large=large)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:100])))
    session.say(batch)
    assert [receipt.stored for receipt in session.receipts()] == [1]
    assert place_of(root, digest_of(content)).read_bytes() == content


def test_a_disk_that_is_full_when_names_are_given_fails_the_batch(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(publish, "rename_new", full)
    session = ScriptedSession(root)
    session.say(session.batch(1, [b"one", b"two"]))
    (receipt,) = session.receipts()
    assert failure(receipt).startswith("ENOSPC: ")
    assert os.listdir(root) == ["by-hash"]


def test_new_directories_below_one_are_staged_in_one(root: Path) -> None:
    """So one rename gives all of them their names."""
    contents = sorted((b"%d" % number for number in range(300)), key=digest_of)
    names = [digest_of(one) for one in contents]
    session = WriteWorkspace(str(root), OWNER, "run", "0")
    batch = StagedBatch(1, len(contents), 1 << 20, 0)
    batch.add(b"".join(names), sum(map(len, contents)))
    raw = memoryview(b"".join(contents))
    sizes = tuple(map(len, contents))
    writer = StageWriter(session.stage, session.by_hash, blake3, by_file=False)
    writer.put(batch, 0, raw, b"".join(names), sizes, 0)
    assert [one.prefix for one in batch.parents] == sorted({name[:1] for name in names})
    staged = {tuple(new.prefix for new in one.directories) for one in batch.parents}
    assert {prefix for some in staged for prefix in some} == {name[:2] for name in names}
    assert batch.exceptions == []
    batch.discard(session.stage, keep_partials=False)
    session.leave()
    assert sorted(os.listdir(root)) == ["by-hash"]


def test_what_has_files_of_its_own_goes_with_its_batch(root: Path) -> None:
    session = WriteWorkspace(str(root), OWNER, "run", "0")
    batch = StagedBatch(1, 2, 10, 7)
    batch.add(bytes(64), 10)
    for position in (0, 1):
        name = batch.lay(position)
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=session.stage))
    batch.discard(session.stage, keep_partials=True)
    assert os.listdir(session.stage) == ["lock"]
    session.leave()


@pytest.mark.parametrize(("flags", "code"), [(os.ST_RDONLY, "EROFS"), (0, "EACCES")])
def test_a_session_that_may_not_write_is_refused_before_it_makes_anything(
    root: Path, monkeypatch: pytest.MonkeyPatch, flags: int, code: str
) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    with pytest.raises(Refusal, match=f"{code}.*by-hash"):
        WriteWorkspace(str(root), OWNER, "run", "0")
    assert os.listdir(root) == ["by-hash"]


@pytest.mark.parametrize(("files", "free", "told"), [(1000, 7, 7), (1000, 0, 0), (0, 0, -1)])
def test_a_file_system_without_a_fixed_number_of_files_tells_none(
    root: Path, monkeypatch: pytest.MonkeyPatch, files: int, free: int, told: int
) -> None:
    session = WriteWorkspace(str(root), OWNER, "run", "0")
    room = SimpleNamespace(f_files=files, f_favail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    assert session.free_inodes() == told
    monkeypatch.undo()
    session.leave()
