"""What a hostile client, or whoever tampered with the remote's directories, cannot do."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ntt_backup.wire import framing, messages
from tests.helpers.receivers import (
    PING,
    PLACE,
    RemoteReceiver,
    ScriptedSession,
    commit,
    digest_of,
    forced_command,
    names_under,
    place_of,
    verdicts,
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the root that must stay as it is."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    return outside


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    root.mkdir()
    yield root
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_bytes() == b"precious"
    assert sorted(path.name for path in root.parent.iterdir()) == ["outside", "root"]


@pytest.fixture
def receiver(root: Path) -> Iterator[RemoteReceiver]:
    """Behind a forced command that may not replace."""
    command = forced_command("--root", str(root), "--allow", "put")
    with RemoteReceiver(root, command) as receiver:
        yield receiver


def test_a_protocol_error_ends_the_child_with_status_1_and_without_a_traceback(
    receiver: RemoteReceiver, root: Path
) -> None:
    receiver.hello()
    receiver.write(framing.head(messages.PACK, 2**32 - 1))
    assert receiver.error()[0] == "protocol"
    assert receiver.child.wait() == 1
    assert receiver.stderr() == ""
    assert not (root / ".ntt-incoming").exists()


def test_a_session_does_not_change_over_to_another_by_hash(
    receiver: RemoteReceiver, root: Path
) -> None:
    """What has a name in the one before would be answered for as if it had it in this one."""
    receiver.hello()
    (root / "by-hash").rename(root / "taken-away")
    receiver.write(PLACE + receiver.batch(1, [b"blob"]))
    assert receiver.answer()[0] == messages.READY
    assert receiver.error()[0] == "gone"
    assert not (root / "by-hash").exists()


# --- what is planted in its way


def test_a_symlink_planted_as_a_directory_is_not_followed(root: Path, outside: Path) -> None:
    first, second = digest_of(b"a").hex(), digest_of(b"b").hex()
    (root / "by-hash" / second[:2]).mkdir(parents=True)
    (root / "by-hash" / first[:2]).symlink_to(outside)
    (root / "by-hash" / second[:2] / second[2:4]).symlink_to(outside)
    client = ScriptedSession(root)

    client.say(client.batch(1, [b"a", b"b", b"c"]))

    (receipt,) = client.receipts()
    assert verdicts(receipt) == {0: messages.REFUSED, 1: messages.REFUSED}
    assert all(e.text.startswith(("ELOOP", "ENOTDIR")) for e in receipt.exceptions)
    assert receipt.stored == 1


@pytest.mark.parametrize("name", ["by-hash", ".ntt-incoming"])
def test_a_symlink_or_file_planted_in_the_root_is_refused(
    root: Path, outside: Path, name: str
) -> None:
    (root / name).symlink_to(outside)
    assert ScriptedSession(root).say().error == "place"
    (root / name).unlink()
    (root / name).write_bytes(b"")
    assert ScriptedSession(root).say().error == "place"


def plant_symlink(path: Path) -> None:
    path.symlink_to(path.parents[4] / "outside" / "precious")


def plant_dangling(path: Path) -> None:
    path.symlink_to(path.parents[4] / "outside" / "not-there")


def plant_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("plant", [plant_symlink, plant_dangling, os.mkfifo, plant_socket])
@pytest.mark.parametrize(
    ("checking", "allow"), [("none", ["put"]), ("none", ["put", "replace"]), ("blake3", ["put"])]
)
def test_what_is_no_file_under_a_blobs_name_is_replaced_or_refused(
    root: Path, plant: Callable[[Path], None], checking: str, allow: list[str]
) -> None:
    path = place_of(root, digest_of(b"a"))
    path.parent.mkdir(parents=True)
    plant(path)
    kind = stat.S_IFMT(path.lstat().st_mode)
    client = ScriptedSession(root, allow, checking)
    client.say(client.batch(1, [b"a"]))
    (receipt,) = client.receipts()
    if checking == "blake3" or "replace" in allow:
        assert verdicts(receipt) == {0: messages.REPLACED}
        assert stat.S_ISREG(path.lstat().st_mode)
        assert path.read_bytes() == b"a"
    else:
        assert verdicts(receipt) == {0: messages.REFUSED}
        assert stat.S_IFMT(path.lstat().st_mode) == kind


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_links_planted_where_partial_files_are_kept_are_not_written_through(
    root: Path, outside: Path, plant: Callable[[Path, Path], None]
) -> None:
    content = bytes(messages.RESUMABLE + 1)
    partial = root / ".ntt-incoming" / "partial" / digest_of(content).hex()
    partial.parent.mkdir(parents=True)
    plant(outside / "precious", partial)
    if plant is os.symlink:
        plant(outside / "precious", partial.with_name(f"{partial.name}.mark"))
    client = ScriptedSession(root)
    client.say(PLACE, client.batch(1, [content], large=True))
    assert client.receipts()[0].stored == 1
    assert place_of(root, digest_of(content)).stat().st_size == len(content)


def test_a_link_planted_as_a_stage_of_ours_is_not_followed(root: Path, outside: Path) -> None:
    (outside / "precious").rename(outside / "lock")
    client = ScriptedSession(root)
    fields = client.hello_fields()
    (root / ".ntt-incoming").mkdir()
    name = f"{fields['owner']}.{fields['run']}.{fields['slot']}.1"
    (root / ".ntt-incoming" / name).symlink_to(outside)
    assert client.say().status == 0
    (outside / "lock").rename(outside / "precious")


# --- a client that does not read, or sends without end


def test_answers_that_nobody_reads_do_not_pile_up(receiver: RemoteReceiver) -> None:
    receiver.hello()
    os.set_blocking(receiver.stdin.fileno(), False)
    sent = 0
    # Until it takes no more, because its pipes and its bounded outbox are full. A receiver without
    # a bound would take all of it.
    while sent < 200 << 20 and select.select([], [receiver.stdin], [], 2.0)[1]:
        sent += os.write(receiver.stdin.fileno(), PING * 1000)
    assert sent < 200 << 20
    assert receiver.peak_kilobytes() < 60_000


def test_verdicts_do_not_pile_up(root: Path) -> None:
    # As many blobs as a batch may hold, none of them right: each costs a verdict, not a file.
    with RemoteReceiver(root) as receiver:
        receiver.hello(hash="blake3")
        wrong = [bytes(31) + b"x"] * framing.MAX_BLOBS
        pack = receiver.pack([b""] * framing.MAX_BLOBS, wrong)
        for number in range(3):
            receiver.write(messages.BATCH.frame(number, framing.MAX_BLOBS, 0), pack, commit(number))
            assert len(receiver.receipt().exceptions) == framing.MAX_BLOBS
        assert receiver.peak_kilobytes() < 100_000
    assert names_under(root) == set()
