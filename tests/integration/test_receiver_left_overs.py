"""What sessions that ended badly leave below .ntt-incoming, and who removes it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.receiver.workspace import Ground
from ntt_backup.wire import framing, write_messages
from tests.receiver_driver import FarSide, digest_of, litter, put

MIB = 1 << 20
BIG = write_messages.RESUMABLE + MIB
NAME = digest_of(b"a large blob")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


def leave(root: Path, name: str, content: bytes = b"") -> Path:
    """A file of a dead session where partial files are kept."""
    path = root / ".ntt-incoming" / "partial" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def mark(length: int) -> bytes:
    return b"%020d\n" % length


def session(root: Path, slot: str = "0") -> None:
    """One that does nothing."""
    with FarSide(root) as far:
        far.hello(slot=slot)
        assert far.bye() == 0


def test_a_mark_without_its_file_is_removed(root: Path) -> None:
    """Killed between the placing of a large blob and the removal of its mark."""
    leave(root, f"{NAME.hex()}.mark", mark(BIG))
    session(root)
    assert litter(root) == []


def test_a_partial_file_of_which_nothing_is_known_to_be_durable_is_removed(root: Path) -> None:
    leave(root, NAME.hex(), bytes(1000))
    session(root)
    assert litter(root) == []


def test_a_partial_file_of_a_blob_that_is_there_is_removed(root: Path) -> None:
    """Its own session was still alive when another one sent the blob."""
    put(root, NAME, b"a large blob")
    leave(root, NAME.hex(), bytes(1000))
    leave(root, f"{NAME.hex()}.mark", mark(1000))
    session(root)
    assert litter(root) == []


def test_a_head_start_is_kept(root: Path) -> None:
    leave(root, NAME.hex(), bytes(1000))
    leave(root, f"{NAME.hex()}.mark", mark(1000))
    session(root)
    assert litter(root) == ["partial", f"partial/{NAME.hex()}", f"partial/{NAME.hex()}.mark"]


def test_what_another_session_writes_is_kept(root: Path) -> None:
    with FarSide(root) as far:
        far.hello()
        far.write(write_messages.batch(1, 1, BIG) + write_messages.large(NAME, BIG, 0))
        for piece in far.pieces(bytes(MIB)):
            far.write(piece)
        far.ask(framing.frame(framing.PING, bytes(8)))
        session(root, slot="1")
        assert f"partial/{NAME.hex()}" in litter(root)


def test_a_file_that_is_no_partial_file_is_kept(root: Path) -> None:
    leave(root, "notes", b"somebody's")
    session(root)
    assert "partial/notes" in litter(root)


@pytest.fixture
def full_of_inodes(tmp_path: Path) -> Iterator[Path]:
    """A small disk with by-hash, and room for .ntt-incoming and a stage, but for no file in it."""
    place = tmp_path / "disk"
    place.mkdir()
    options = "size=1m,nr_inodes=4"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
    (place / "by-hash").mkdir()
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_stage_that_cannot_be_made_whole_is_removed(full_of_inodes: Path) -> None:
    with FarSide(full_of_inodes) as far:
        far.write(write_messages.fields(framing.HELLO, far.hello_fields()))
        code, text = far.error()
    assert code == "storage"
    assert text.startswith("ENOSPC")
    assert [path.name for path in full_of_inodes.iterdir()] == ["by-hash"]


def test_there_are_signs_of_life_while_a_large_stage_is_removed(root: Path) -> None:
    dead = root / ".ntt-incoming" / "0123456789ab.run.0.1"
    dead.mkdir(parents=True)
    (root / "by-hash").mkdir()
    for number in range(1000):
        (dead / str(number)).touch()
    signs: list[int] = []
    ground = Ground(
        str(root), "0123456789ab", "run2", "0", lambda: signs.append(len(os.listdir(dead)))
    )
    ground.leave()
    assert len(signs) >= 3
    assert signs == sorted(signs, reverse=True)
    assert not (root / ".ntt-incoming").exists()


def test_what_leaves_a_stage_while_it_is_removed_stays_whole(root: Path) -> None:
    """A session that is taken for dead may still give names: its last sync has taken long."""
    new = root / ".ntt-incoming" / "0123456789ab.run.0.1" / "d0"
    new.mkdir(parents=True)
    for number in range(3):
        (new / str(number)).touch()
    place = root / "by-hash" / "3f" / "07"
    place.parent.mkdir(parents=True)

    def move() -> None:
        with contextlib.suppress(FileNotFoundError):
            new.rename(place)

    Ground(str(root), "0123456789ab", "run2", "0", move).leave()

    assert not place.exists() or len(list(place.iterdir())) == 3
    assert not (root / ".ntt-incoming").exists()


# --- a session whose client has left without a word -----------------------------------------------


def send_most_of(far: FarSide, content: bytes) -> None:
    """A large blob up to its last MiB; returns when all of that has been taken in."""
    far.write(
        write_messages.batch(1, 1, len(content)) + write_messages.large(NAME, len(content), 0)
    )
    for piece in far.pieces(content[:-MIB]):
        far.write(piece)
    far.ask(framing.frame(framing.PING, bytes(8)))


def test_who_comes_back_after_a_silent_cut_goes_on_where_it_was(root: Path) -> None:
    """sshd may hold the dead connection for hours, and its receiver the lock of the blob."""
    content = bytes(BIG + MIB)
    with FarSide(root) as old, FarSide(root) as new:
        old.hello()
        send_most_of(old, content)
        new.hello()
        kind, payload = new.ask(write_messages.ask_offset(NAME, len(content)))
        assert kind == framing.OFFSET
        assert write_messages.read_offset(payload)[0] == BIG
        assert old.error()[0] == "superseded"
        assert new.bye() == 0


def test_another_worker_takes_nothing_away(root: Path) -> None:
    content = bytes(BIG + MIB)
    with FarSide(root) as old, FarSide(root) as new:
        old.hello()
        send_most_of(old, content)
        new.hello(slot="1")
        _, payload = new.ask(write_messages.ask_offset(NAME, len(content)))
        assert write_messages.read_offset(payload)[0] == 0
        assert old.ask(framing.frame(framing.PING, bytes(8)))[0] == framing.PONG


def test_what_a_superseded_session_has_committed_is_settled(root: Path) -> None:
    with FarSide(root) as old:
        old.hello()
        old.write(old.batch(1, [b"a", b"b"]))
        with FarSide(root) as new:
            new.hello()
            assert old.receipt().stored == 2
            assert old.error()[0] == "superseded"
            assert new.bye() == 0
    assert not (root / ".ntt-incoming").exists()
