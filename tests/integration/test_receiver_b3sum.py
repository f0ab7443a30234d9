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

from ntt_backup.receiver import dispatcher, group_commit
from ntt_backup.receiver.b3sum import B3sum, by_descriptor
from ntt_backup.receiver.hashing import KNOWN_OUTPUT
from ntt_backup.wire import messages
from tests.helpers.receivers import (
    RemoteReceiver,
    ScriptedSession,
    assert_complete,
    digest_of,
    failure,
    forced_command,
    litter,
    names_under,
)

pytestmark = [
    pytest.mark.skipif(shutil.which("b3sum") is None, reason="b3sum is not installed"),
    pytest.mark.usefixtures("placed"),
]

# Right for the known input, by itself; else `then`.
FAKE = """#!/bin/sh
case $2 in /proc/self/fd/*)
    if [ $# = 2 ] && [ "$(wc -c <$2)" = 1025 ]; then echo "{known}  $2"; exit 0; fi
esac
{then}
"""


@pytest.fixture
def receiver(root: Path) -> Iterator[RemoteReceiver]:
    command = forced_command("--root", str(root), "--require", "blake3", checking="b3sum")
    with RemoteReceiver(root, command) as receiver:
        assert receiver.banner["hash"] == "sha256"
        assert receiver.banner["check"] == "b3sum"
        yield receiver


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


def test_b3sum_is_found_by_a_login_account(root: Path) -> None:
    with RemoteReceiver(root, python=f"{sys.executable} -S") as receiver:
        if "blake3" in receiver.banner["hash"]:
            pytest.skip("libblake3 goes first")
        assert receiver.banner["check"] == "b3sum"


def test_right_blobs_are_stored(root: Path, receiver: RemoteReceiver) -> None:
    chance = random.Random(1)
    contents = [chance.randbytes(chance.randrange(3000)) for _ in range(2500)]
    large = chance.randbytes(messages.RESUMABLE + 5)
    receiver.hello()
    receiver.write(receiver.batch(1, contents))
    assert receiver.receipt().stored == len(set(contents))
    receiver.write(receiver.batch(2, [large], large=True))
    assert receiver.receipt().stored == 1
    assert names_under(root) == {digest_of(one).hex() for one in (*contents, large)}
    assert_complete(root)
    assert receiver.bye() == 0
    assert litter(root) == []


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
    with RemoteReceiver(root, command) as receiver:
        assert receiver.banner["check"] == "b3sum"
        receiver.hello()
        receiver.write(receiver.batch(1, [b"one", b"two"]))
        why = failure(receiver.receipt())
        assert why.startswith("EAGAIN: ")
        assert "b3sum" in why
        assert receiver.bye() == 0
    assert names_under(root) == set()
    assert litter(root) == []


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

    monkeypatch.setattr(dispatcher, "can_syncfs", lambda device: True)
    monkeypatch.setattr(group_commit, "syncfs", fail)
    monkeypatch.setattr(B3sum, "digests", wait)
    client = ScriptedSession(root, checking="b3sum")
    client.say(client.batch(1, [b"one"]), client.batch(2, [b"two"]), sync="syncfs")
    receipts = client.receipts()
    assert len(receipts) == 2
    assert all(failure(each).startswith("EIO") for each in receipts)
    assert names_under(root) == set()
