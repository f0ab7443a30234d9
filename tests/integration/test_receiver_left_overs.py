"""What sessions that ended badly leave below .ntt-incoming, and who removes it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.blobdir import partial
from ntt_backup.receiver.write_workspace import WriteWorkspace
from ntt_backup.wire import messages
from tests.helpers.receivers import (
    RemoteReceiver,
    ScriptedSession,
    assert_complete,
    digest_of,
    litter,
    put,
)

MIB = 1 << 20
BIG = messages.RESUMABLE + MIB
NAME = digest_of(b"a large blob")
MARK = b"%020d\n" % 1000


def leave(root: Path, name: str, content: bytes = b"") -> Path:
    """A file of a dead session where partial files are kept."""
    path = root / ".ntt-incoming" / "partial" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def session(root: Path, slot: str = "0") -> None:
    """One that does nothing."""
    with RemoteReceiver(root) as receiver:
        receiver.hello(slot=slot)
        assert receiver.bye() == 0


@pytest.mark.parametrize("left", ["mark", "file", "both, and the blob is there"])
def test_a_partial_file_or_mark_that_is_of_no_use_is_removed(root: Path, left: str) -> None:
    """A mark without its file; a file of which nothing is durable; one of a blob that is there."""
    if left != "mark":
        leave(root, NAME.hex(), bytes(1000))
    if left != "file":
        leave(root, f"{NAME.hex()}.mark", MARK)
    if left.startswith("both"):
        put(root, NAME, b"a large blob")
    session(root)
    assert litter(root) == []


def test_a_partial_file_with_a_mark_is_kept(root: Path) -> None:
    leave(root, NAME.hex(), bytes(1000))
    leave(root, f"{NAME.hex()}.mark", MARK)
    session(root)
    assert litter(root) == ["partial", f"partial/{NAME.hex()}", f"partial/{NAME.hex()}.mark"]


def test_a_partial_file_that_was_not_used_for_a_week_is_removed(root: Path) -> None:
    names = ("0" * 64, "1" * 64)
    for name in names:
        path = leave(root, name, bytes(1000))
        leave(root, f"{name}.mark", MARK)
    long_ago = path.stat().st_mtime - 8 * 86400
    os.utime(path, (long_ago, long_ago))
    session(root)
    assert litter(root) == ["partial", f"partial/{names[0]}", f"partial/{names[0]}.mark"]


def test_a_partial_file_that_another_session_writes_is_kept(root: Path) -> None:
    with RemoteReceiver(root) as receiver:
        receiver.hello()
        receiver.write(messages.BATCH.frame(1, 1, BIG) + messages.LARGE.frame(NAME, BIG, 0))
        receiver.write(*receiver.pieces(bytes(MIB)))
        receiver.ping()
        session(root, slot="1")
        assert f"partial/{NAME.hex()}" in litter(root)


@pytest.mark.parametrize("sent", [1, MIB - 1])
def test_a_little_of_a_large_blob_is_not_kept(root: Path, sent: int) -> None:
    """A client that leaves thousands of such files would make every later start slow."""
    with RemoteReceiver(root) as receiver:
        receiver.hello()
        receiver.write(messages.BATCH.frame(1, 1, BIG) + messages.LARGE.frame(NAME, BIG, 0))
        receiver.write(*receiver.pieces(bytes(sent)))
        receiver.ping()
        receiver.hang_up()
    assert litter(root) == []


def test_partial_files_are_counted_and_one_too_many_goes_without(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "_MOST_NAMES", 10)
    for number in range(5):
        name = digest_of(b"%d" % number).hex()
        leave(root, name, bytes(MIB))
        leave(root, f"{name}.mark", MARK)
    (root / "by-hash").mkdir()
    content = bytes(BIG)
    session = ScriptedSession(root)
    last = digest_of(b"4")
    session.say(
        messages.ASK_OFFSET.frame(last, BIG),
        messages.ASK_OFFSET.frame(digest_of(content), BIG),
        session.batch(1, [content], large=True),
    )
    offsets = [payload for kind, payload in session.answers if kind == messages.OFFSET]
    assert [messages.OFFSET.read(payload)[0] for payload in offsets] == [1000, 0]
    assert [receipt.stored for receipt in session.receipts()] == [1]
    assert_complete(root)
    assert len(litter(root)) == 11


def test_a_session_looks_at_a_bounded_number_of_partial_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there may be: somebody else has put them there."""
    monkeypatch.setattr(partial, "_MOST_NAMES", 10)
    for number in range(50):
        name = digest_of(b"%d" % number).hex()
        leave(root, name, bytes(1))
        leave(root, f"{name}.mark", MARK)
    looked: list[str] = []
    real = os.stat

    def stat(path: Any, **how: Any) -> os.stat_result:
        looked.append(str(path))
        return real(path, **how)

    (root / "by-hash").mkdir()
    monkeypatch.setattr(os, "stat", stat)
    WriteWorkspace(str(root), "0123456789ab", "run", "0").leave()
    monkeypatch.undo()
    of_partials = [path for path in looked if len(path.split("/")[-1]) >= 64]
    assert 0 < len(of_partials) <= 40  # Two looks at each, at the start and at the end.
    assert len(litter(root)) == 101


def test_an_unknown_file_among_partial_files_is_kept(root: Path) -> None:
    leave(root, "notes", b"somebody's")
    session(root)
    assert "partial/notes" in litter(root)


def test_signs_of_life_are_shown_while_a_large_stage_is_removed(root: Path) -> None:
    dead = root / ".ntt-incoming" / "0123456789ab.run.0.1"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (root / "by-hash").mkdir()
    for number in range(1000):
        (dead / str(number)).touch()
    signs: list[int] = []
    ground = WriteWorkspace(
        str(root), "0123456789ab", "run2", "0", lambda: signs.append(len(os.listdir(dead)))
    )
    ground.leave()
    assert len(signs) >= 3
    assert signs == sorted(signs, reverse=True)
    assert not (root / ".ntt-incoming").exists()


def test_a_directory_that_is_moved_while_its_stage_is_removed_stays_whole(root: Path) -> None:
    """A session that is taken for dead may still give names: its last sync has taken long."""
    new = root / ".ntt-incoming" / "0123456789ab.run.0.1" / "d0"
    new.mkdir(parents=True)
    (new.parent / "lock").touch()
    for number in range(3):
        (new / str(number)).touch()
    place = root / "by-hash" / "3f" / "07"
    place.parent.mkdir(parents=True)

    def move() -> None:
        with contextlib.suppress(FileNotFoundError):
            new.rename(place)

    WriteWorkspace(str(root), "0123456789ab", "run2", "0", move).leave()

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
