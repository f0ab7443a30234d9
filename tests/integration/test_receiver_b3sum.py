"""A receiver whose Python has no BLAKE3, on a machine with the program b3sum, or one called so."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ntt_backup.receiver import session, sync_thread
from ntt_backup.receiver.b3sum import KNOWN_OUTPUT, B3sum, by_descriptor
from ntt_backup.wire import framing, read_messages, write_messages
from tests.integration.test_receiver_promises import Client
from tests.receiver_driver import (
    FarSide,
    assert_complete,
    digest_of,
    forced_command,
    litter,
    names_under,
    place_of,
    put,
)

pytestmark = pytest.mark.skipif(shutil.which("b3sum") is None, reason="b3sum is not installed")

# Right for the known input, by itself; else `then`.
FAKE = """#!/bin/sh
case $2 in /proc/self/fd/*)
    if [ $# = 2 ] && [ "$(wc -c <$2)" = 1025 ]; then echo "{known}  $2"; exit 0; fi
esac
{then}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "by-hash").mkdir(parents=True)
    return root


@pytest.fixture
def far(root: Path) -> Iterator[FarSide]:
    command = forced_command("--root", str(root), "--require", "blake3", checking="b3sum")
    with FarSide(root, command) as far:
        assert far.banner["hash"] == "sha256"
        assert far.banner["check"] == "b3sum"
        yield far


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a program called b3sum before the real one: it is right when tried, and then this."""

    def make(then: str) -> None:
        program = tmp_path / "tools" / "b3sum"
        program.parent.mkdir()
        program.write_text(FAKE.format(known=KNOWN_OUTPUT.hex(), then=then))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return make


def test_a_login_account_with_the_program_has_it(root: Path) -> None:
    with FarSide(root, python=f"{sys.executable} -S") as far:
        if "blake3" in far.banner["hash"]:
            pytest.skip("libblake3 goes first")
        assert far.banner["check"] == "b3sum"


def test_all_that_is_right_is_stored(root: Path, far: FarSide) -> None:
    chance = random.Random(1)
    contents = [chance.randbytes(chance.randrange(3000)) for _ in range(2500)]
    large = chance.randbytes(write_messages.RESUMABLE + 5)
    far.hello()
    far.write(far.batch(1, contents))
    assert far.receipt().stored == len(set(contents))
    far.write(
        write_messages.batch(2, 1, len(large))
        + write_messages.large(digest_of(large), len(large), 0)
    )
    for piece in far.pieces(large):
        far.write(piece)
    far.write(far.end(large) + write_messages.numbered(framing.COMMIT, 2))
    assert far.receipt().stored == 1
    assert names_under(root) == {digest_of(one).hex() for one in (*contents, large)}
    assert_complete(root)
    assert far.bye() == 0
    assert litter(root) == []


@pytest.mark.parametrize(
    "size", [3, 2 << 20, write_messages.RESUMABLE + 1], ids=["small", "large", "huge"]
)
@pytest.mark.parametrize("where", ["new directory", "directory that is there"])
def test_what_does_not_hash_to_its_name_gets_none(
    root: Path, far: FarSide, size: int, where: str
) -> None:
    evil, good = bytes(size), b"good"
    name = digest_of(b"content that never comes")
    if where != "new directory":
        place_of(root, name).parent.mkdir(parents=True)
    far.hello()
    far.write(write_messages.batch(1, 2, size + len(good)))
    if size <= framing.PACK_BYTES:
        far.write(far.pack([evil, good], digests=[name, digest_of(good)]))
    else:
        far.write(write_messages.large(name, size, 0))
        for piece in far.pieces(evil):
            far.write(piece)
        far.write(far.end(evil, name) + far.pack([good]))
    far.write(write_messages.numbered(framing.COMMIT, 1))
    receipt = far.receipt()
    assert [each[:2] for each in receipt.exceptions] == [(0, write_messages.MISMATCH)]
    assert receipt.stored == 1
    assert names_under(root) == {digest_of(good).hex()}
    assert place_of(root, name).parent.exists() == (where != "new directory")
    assert far.bye() == 0
    assert litter(root) == []


def test_a_batch_of_nothing_but_wrong_ones(root: Path, far: FarSide) -> None:
    wrong = [bytes([number, *bytes(31)]) for number in range(200)]
    far.hello()
    far.write(far.batch(1, [b"x"] * 200, digests=wrong))
    assert {each.verdict for each in far.receipt().exceptions} == {write_messages.MISMATCH}
    assert list((root / "by-hash").rglob("*")) == []


@pytest.mark.parametrize(
    "then", ["kill -9 $$", "exit 1", "echo nonsense", 'shift; exec sha256sum "$@"', "rm $0; exit 3"]
)
def test_a_program_that_fails_midway_fails_the_batch_and_blames_no_blob(
    root: Path, failing: Callable[[str], None], then: str
) -> None:
    if "sha256sum" in then:  # Another program from then on, which the known input tells.
        then = f"sed -i s/{KNOWN_OUTPUT.hex()}/0/ $0; {then}"
    failing(then)
    command = forced_command("--root", str(root), checking="b3sum")
    with FarSide(root, command) as far:
        assert far.banner["check"] == "b3sum"
        far.hello()
        far.write(far.batch(1, [b"one", b"two"]))
        receipt = far.receipt()
        assert receipt.outcome == write_messages.FAILED
        assert receipt.exceptions[0].text.startswith("EAGAIN: ")
        assert "b3sum" in receipt.exceptions[0].text
        assert far.bye() == 0
    assert names_under(root) == set()
    assert litter(root) == []


@pytest.mark.parametrize("then", ["kill -9 $$", "exit 1", "echo nonsense", "rm $0; exit 3"])
def test_a_program_that_fails_midway_gives_no_verdict(
    root: Path, failing: Callable[[str], None], then: str
) -> None:
    failing(then)
    put(root, digest_of(b"one"), b"one")
    with FarSide(root, forced_command("--root", str(root), checking="b3sum")) as far:
        far.hello(reading=True)
        far.write(read_messages.verifying([digest_of(b"one"), digest_of(b"missing")]))
        code, text = far.error()
        assert code == "internal"
        assert "b3sum" in text
        assert far.stderr() == ""


def test_a_sync_that_fails_while_names_are_checked_fails_that_batch_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that were lost may be those of the batch that is being checked."""
    checked: list[int] = []
    digests = B3sum.digests

    def fail(fd: int) -> None:
        while len(checked) < 2:
            time.sleep(0.01)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def wait(
        self: B3sum,
        files: dict[str, bytes],
        size: int,
        alive: Callable[[], None],
        directory: int = -1,
        fds: tuple[int, ...] = (),
    ) -> dict[str, bytes]:
        checked.append(1)
        found = digests(self, files, size, alive, directory, fds)
        while len(checked) == 2 and len(os.listdir(by_descriptor(directory))) > 1:
            alive()
        return found

    monkeypatch.setattr(session, "can_syncfs", lambda device: True)
    monkeypatch.setattr(sync_thread, "syncfs", fail)
    monkeypatch.setattr(B3sum, "digests", wait)
    client = Client(root, checking="b3sum")
    client.say(
        client.batch(1, {digest_of(b"one"): b"one"}, large=False),
        client.batch(2, {digest_of(b"two"): b"two"}, large=False),
        sync="syncfs",
    )
    receipts = client.receipts()
    assert [each.outcome for each in receipts] == [write_messages.FAILED, write_messages.FAILED]
    assert all(each.exceptions[0].text.startswith("EIO") for each in receipts)
    assert names_under(root) == set()
