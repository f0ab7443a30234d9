"""The receiver as a child process: what arrives, what is answered, what stays behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import zstandard

import ntt_backup
from ntt_backup.client.bootstrap import GREETING, LOADER
from ntt_backup.upload.strategies.codec import choose_codec
from ntt_backup.wire import framing, messages
from ntt_backup.wire.messages import Receipt
from tests.helpers.receivers import (
    BYE,
    RemoteReceiver,
    assert_complete,
    commit,
    digest_of,
    failure,
    forced_command,
    names_under,
    place_of,
)
from tests.helpers.waiting import PATIENCE

HASHES = ("sha256", "blake3")


@pytest.fixture
def receiver(root: Path) -> Iterator[RemoteReceiver]:
    with RemoteReceiver(root) as receiver:
        yield receiver


# --- the start


def test_the_banner_says_the_version_and_what_the_receiver_can_do(receiver: RemoteReceiver) -> None:
    assert receiver.protocol == str(framing.PROTOCOL)
    assert receiver.banner["version"] == ntt_backup.__version__
    assert receiver.banner["python"] == ".".join(map(str, sys.version_info[:3]))
    assert receiver.banner["hash"].split(",") == ["blake3", "sha256"]
    assert receiver.banner["codec"].split(",")[-1] == "zlib"


def test_it_needs_the_standard_library_only_and_imports_nothing_that_lies_around(
    root: Path,
) -> None:
    for name in ("zlib.py", "blake3.py", "json.py", "ntt_backup.py"):
        (root / name).write_text("raise SystemExit('planted')")
    python = f"{sys.executable} -S"
    with RemoteReceiver(root, python=python, cwd=root, env={"PYTHONPATH": str(root)}) as receiver:
        assert receiver.banner["hash"] == "sha256"
        receiver.hello()
        receiver.write(receiver.batch(1, [b"one"]))
        assert receiver.receipt().stored == 1
        assert receiver.bye() == 0
        assert receiver.stderr() == ""
    assert names_under(root) == {digest_of(b"one").hex()}


@pytest.mark.parametrize("shell", ["sh", "bash", "csh", "tcsh", "fish", "zsh", "busybox sh"])
def test_every_login_shell_starts_it(root: Path, shell: str) -> None:
    if which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed")
    with RemoteReceiver(root, shell=shell) as receiver:
        assert receiver.hello()["sync"] in ("syncfs", "fsync")


def test_a_python_that_is_too_old_says_so_and_reads_nothing() -> None:
    old = "import sys; sys.version_info = (3, 6, 8); sys.version = '3.6.8 (default)'; "
    done = subprocess.run(
        [sys.executable, "-c", old + LOADER, "1000", *GREETING], input=b"", capture_output=True
    )
    assert done.stdout == b"\nNTT-LOADER 1 python=3.6.8\n"
    assert done.stderr == b""


def test_ready_says_free_space_clock_and_sync(receiver: RemoteReceiver) -> None:
    ready = receiver.hello()
    space = {"free_bytes", "total_bytes", "free_inodes"}
    assert set(ready) == space | {
        *("clock_us", "system", "sync", "placed", "packs", "empty", "target", "names")
    }
    assert (ready["empty"], ready["target"]) == (1, "")
    assert ready["placed"] == 1
    assert 0 < ready["free_bytes"] <= ready["total_bytes"]


# --- batches


@pytest.mark.parametrize("hashed", HASHES)
@pytest.mark.parametrize("sync", ["syncfs", "fsync"])
def test_a_batch_is_stored_and_answered(
    receiver: RemoteReceiver, root: Path, hashed: str, sync: str
) -> None:
    contents = [b"", b"a", bytes(3000), b"\xff" * framing.PACK_BYTES]
    assert receiver.hello(hash=hashed, sync=sync)["sync"] == sync

    receiver.write(receiver.batch(7, contents))

    receipt = receiver.receipt()
    assert receipt == Receipt(7, messages.SETTLED, messages.HASHES[hashed], 4, [])
    for content in contents:
        path = place_of(root, digest_of(content))
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o7777 == 0o644
    assert receiver.bye() == 0
    assert names_under(root) == {digest_of(content).hex() for content in contents}
    assert not (root / ".ntt-incoming").exists()


def test_a_stream_goes_on_behind_what_is_dropped_or_compressed_by_itself(
    receiver: RemoteReceiver, root: Path
) -> None:
    codec = choose_codec("zstd-6", ("zstd", "zstd-stream"))

    def part(raw: bytes) -> bytes:
        return b"".join(codec.encode([memoryview(raw)])[1])

    one, two, three = (random.Random(seed).randbytes(5000) for seed in range(3))
    stream: dict[str, Any] = {"codec": messages.ZSTD_STREAM, "compress": part}
    prefix = messages.part_prefix(messages.ZSTD_STREAM, len(three))
    receiver.hello()
    receiver.write(
        messages.BATCH.frame(1, 3, 20_000),
        receiver.pack([one], checksum=bytes(32), **stream),
        receiver.pack([two], **stream),
        messages.LARGE.frame(digest_of(three), len(three), 0),
        framing.frame(messages.DATA, prefix, part(three)),
        receiver.end(three),
        commit(1),
    )
    assert failure(receiver.receipt()).startswith("EBADMSG: ")
    receiver.write(receiver.batch(2, [one, two, three], **stream))
    own: dict[str, Any] = {"codec": messages.ZSTD, "compress": zstandard.compress}
    receiver.write(receiver.batch(3, [one + two], **own), receiver.batch(4, [one + three]))
    receiver.write(receiver.batch(5, [two + three], **stream))
    assert [receiver.receipt().stored for _ in range(4)] == [3, 1, 1, 1]
    assert_complete(root)


def test_a_batch_may_hold_less_than_announced(receiver: RemoteReceiver) -> None:
    receiver.hello()
    receiver.write(messages.BATCH.frame(1, 1000, 10**9) + receiver.pack([b"a"]))
    receiver.write(commit(1))
    assert receiver.receipt().stored == 1
    receiver.write(messages.BATCH.frame(2, 1000, 10**9) + commit(2))
    assert receiver.receipt() == Receipt(2, messages.SETTLED, messages.SHA256, 0, [])


def test_ping_is_answered_between_and_within_batches(receiver: RemoteReceiver) -> None:
    receiver.hello()
    for frame in (messages.BATCH.frame(1, 1, 1), receiver.pack([b"a"])):
        receiver.write(frame)
        receiver.ping()


# --- the end


def test_the_end_of_the_input_stores_what_is_committed_and_drops_the_rest(
    receiver: RemoteReceiver, root: Path
) -> None:
    receiver.hello()
    receiver.write(
        receiver.batch(1, [b"a"]) + messages.BATCH.frame(2, 2, 2) + receiver.pack([b"b"])
    )
    receiver.stdin.close()

    assert receiver.receipt().number == 1
    assert receiver.answer() == (0, b"")
    assert receiver.child.wait() == 0
    assert receiver.stderr() == ""
    assert names_under(root) == {digest_of(b"a").hex()}
    assert not (root / ".ntt-incoming").exists()


def test_what_is_committed_is_stored_though_the_client_reads_no_answers(
    receiver: RemoteReceiver, root: Path
) -> None:
    receiver.hello()
    receiver.stdout.close()
    receiver.write(receiver.batch(1, [b"a"]) + receiver.batch(2, [b"b"]))
    receiver.stdin.close()

    assert receiver.child.wait() == 0
    assert receiver.stderr() == ""
    assert names_under(root) == {digest_of(b"a").hex(), digest_of(b"b").hex()}
    assert not (root / ".ntt-incoming").exists()


def test_bye_answers_what_is_committed_and_then_says_that_nothing_is_left(
    receiver: RemoteReceiver, root: Path
) -> None:
    receiver.hello()
    receiver.write(receiver.batch(1, [b"a"]) + receiver.batch(2, [b"b"]) + BYE)
    assert [receiver.receipt().number, receiver.receipt().number] == [1, 2]
    assert receiver.answer() == (messages.LEFT, b"")
    assert not (root / ".ntt-incoming").exists()
    assert receiver.answer() == (0, b"")
    assert receiver.child.wait() == 0


# --- what others left


def test_a_missing_by_hash_is_not_made_unless_asked_for(root: Path) -> None:
    with RemoteReceiver(root) as receiver:
        assert receiver.hello(place=False)["placed"] == 0
        receiver.write(receiver.batch(1, [b"content"]))
        code, text = receiver.error()
        assert code == "gone"
        assert "mounted" in text
        assert receiver.child.wait() == 1
    assert list(root.iterdir()) == []


def test_the_root_is_never_made(root: Path) -> None:
    with RemoteReceiver(root) as receiver:
        receiver.write(receiver.hello_frame(root=str(root / "sub")))
        assert receiver.error()[0] == "root"
    assert list(root.iterdir()) == []


def test_the_descriptors_are_left_as_they_were(root: Path) -> None:
    """They may be a terminal's, or another program's too."""
    reading, to_receiver = os.pipe()
    from_receiver, writing = os.pipe()
    os.close(to_receiver)
    command = forced_command("--root", str(root))
    subprocess.run(command, stdin=reading, stdout=writing, timeout=PATIENCE, check=True)
    assert (os.get_blocking(reading), os.get_blocking(writing)) == (True, True)
    for fd in reading, from_receiver, writing:
        os.close(fd)


def test_the_session_of_a_silent_client_ends(root: Path) -> None:
    with RemoteReceiver(
        root, forced_command("--root", str(root), "--idle-timeout", "2")
    ) as receiver:
        receiver.hello()
        assert receiver.error()[0] == "idle"
        assert receiver.child.wait() == 1
    assert not (root / ".ntt-incoming").exists()
