"""What the sender of `tar` says to the remote's loop, and makes of its answers, in memory."""

from __future__ import annotations

import io
import os
import re
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from ntt_backup.blobdir.layout import marker_text, relative_path
from ntt_backup.client.channel import NOISE_LIMIT
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Local
from ntt_backup.errors import (
    BackupError,
    BatchRejected,
    RemoteCannotStore,
    RemoteUnreachable,
    SourceError,
)
from ntt_backup.model import Batch, Blob, Reason, Receipt
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies import tar, tar_probe
from ntt_backup.upload.strategies.probe import Facts, trial
from ntt_backup.upload.strategies.session import Rejection
from ntt_backup.upload.strategies.tar import TarSession
from ntt_backup.upload.strategies.tar_probe import TarProbe
from tests.helpers.blobs import put
from tests.unit.far_side import spec

LAST_WORD = b"\nNTT-TAR 2 end\n"


class Loop:
    """Stands for `Channel`: it greets, keeps what is sent, and says what it was given."""

    lingers = quiet = False

    def __init__(self, greeting: bytes = b"NTT-TAR 2 ready turns") -> None:
        self.greeting = greeting
        self.sent = bytearray()
        self.says: list[bytes] = []
        self.heard = time.monotonic()
        self.on_bytes: Callable[[int], object] = lambda _: None
        self.on_sent: Callable[[], object] = lambda: None
        self.closed: list[bytes] = []
        self.ended = False

    def greet(self, script: bytes, pattern: re.Pattern[bytes], *_: Any, **__: Any) -> Any:
        return pattern.match(self.greeting)

    def send(self, data: memoryview, hear: Any, **_: Any) -> None:
        assert not self.ended
        self.sent += data
        self.on_bytes(len(data))
        self.on_sent()

    def hear(self, hear: Callable[[bytes], None], timeout: float, **_: Any) -> None:
        said, self.says = self.says, []
        for one in said:
            hear(one)

    def is_silent(self, *_: Any) -> bool:
        return not self.says

    def close(self, last_word: bytes = b"") -> None:
        self.closed.append(last_word)

    def abort(self) -> None:
        self.ended = True


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    monkeypatch.setattr(SessionSpec, "channel", lambda *_: made)
    return made


def opened(root: Path, **changes: Any) -> TarSession:
    return TarSession(spec(**changes), Store(root))


def batch(root: Path, *contents: bytes) -> Batch:
    return Batch("b", tuple(put(root, content) for content in contents))


@pytest.mark.parametrize(
    ("said", "words"),
    [(b"fatal EACCES: no", "remote"), (b"gone it is away", "remote.path is gone")],
)
def test_a_loop_that_cannot_begin_says_why(
    loop: Loop, tmp_path: Path, said: bytes, words: str
) -> None:
    loop.greeting = b"NTT-TAR 2 " + said
    with pytest.raises(BackupError, match=words):
        opened(tmp_path)
    assert loop.ended


def test_a_batch_goes_with_its_length_first_and_the_word_to_commit_last(
    loop: Loop, tmp_path: Path
) -> None:
    told: list[int] = []
    session = opened(tmp_path, on_content=told.append)
    one = batch(tmp_path, b"one", b"three", b"one")
    session.put(one)
    head, _, rest = bytes(loop.sent).partition(b"\n")
    number, length, files = map(int, head.split())
    assert (number, files) == (1, 2)
    assert rest[length:] == b"commit\n"
    assert b"three" in rest[:length]
    assert session.in_flight == (one,)
    assert sum(told) == one.size
    loop.says = [b"o", b"k 1", b"\n"]
    (receipt,) = session.collect(1.0)
    assert isinstance(receipt, Receipt)
    assert (receipt.stored, receipt.wire_bytes) == (one.blobs, length)
    assert not session.in_flight
    session.put(batch(tmp_path, b"two"))
    assert b"commit\n2 " in bytes(loop.sent)
    session.close()
    session.close()
    assert loop.closed == [LAST_WORD]
    assert not session.usable


def test_a_batch_without_any_blob_is_not_sent(loop: Loop, tmp_path: Path) -> None:
    session = opened(tmp_path)
    put(tmp_path, b"there")
    session.put(Batch("b", (Blob("0" * 64, 5),)))
    assert loop.sent == b""
    (receipt,) = session.collect(1.0)
    assert isinstance(receipt, Receipt)
    assert receipt.stored == ()
    assert [one.reason for one in receipt.failed] == [Reason.MISSING]


@pytest.mark.parametrize("text", ["ENOSPC: No space left on device", "tar: bad"])
def test_what_the_remote_could_not_store_is_rejected(loop: Loop, tmp_path: Path, text: str) -> None:
    session = opened(tmp_path)
    one = batch(tmp_path, b"one")
    session.put(one)
    loop.says = [f"err 1 {text}\n".encode()]
    (told,) = session.collect(1.0)
    assert isinstance(told, Rejection)
    assert told.batch == one
    assert not session.in_flight
    assert session.usable
    assert text in told.error.detail


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"ok 2\n", "violates the protocol"),
        (b"ok 0\n", "violates the protocol"),
        (b"ok\n", "violates the protocol"),
        (b"well 1\n", "violates the protocol"),
        (b"\n", "violates the protocol"),
        (b"ok 1\nok 1\n", "violates the protocol"),
        (b"gone 1 by-hash: away\n", "remote.path is gone"),
        (b"x" * (NOISE_LIMIT + 1), "violates the protocol"),
    ],
)
def test_an_answer_that_cannot_be_ends_the_session(
    loop: Loop, tmp_path: Path, said: bytes, words: str
) -> None:
    session = opened(tmp_path)
    session.put(batch(tmp_path, b"one"))
    loop.says = [said]
    with pytest.raises(RemoteUnreachable, match=words):
        session.collect(1.0)
    assert loop.ended
    assert not session.usable


def test_a_line_may_be_long(loop: Loop, tmp_path: Path) -> None:
    session = opened(tmp_path)
    session.put(batch(tmp_path, b"one"))
    words = b"err 1 " + b"x" * (NOISE_LIMIT - 6)
    loop.says = [words, b"\n"]
    (told,) = session.collect(1.0)
    assert isinstance(told, Rejection)


@pytest.mark.parametrize("change", ["other", "length"])
def test_a_blob_that_changes_meanwhile_is_not_committed(
    loop: Loop, tmp_path: Path, change: str
) -> None:
    told: list[int] = []
    session = opened(tmp_path, on_content=told.append)
    one = batch(tmp_path, b"one")
    path = tmp_path / relative_path(one.blobs[0].blobid)

    def alter() -> None:
        if change == "other" and not loop.sent.endswith(b"abort\n"):
            path.write_bytes(b"two")
            os.utime(path, (5, 5))
        elif change == "length" and loop.sent.count(b"\n") == 1:
            path.write_bytes(bytes(20_000))

    loop.on_sent = alter
    with pytest.raises(BatchRejected):
        session.put(one)
    assert session.in_flight == ()
    assert not loop.sent.endswith(b"commit\n")
    if change == "other":
        assert loop.sent.endswith(b"abort\n")
        assert session.usable
        assert sum(told) == 0
        loop.says = [b"ok 1\n"]
        assert session.collect(0.0) == []
        assert [*session._flights] == []
    else:
        assert not session.usable


@pytest.mark.parametrize(("count", "more"), [(1, ""), (2, ", and 1 more"), (3, ", and 2 more")])
def test_blobs_that_changed_meanwhile_are_counted(
    loop: Loop, tmp_path: Path, count: int, more: str
) -> None:
    session = opened(tmp_path)
    one = batch(tmp_path, b"1", b"2", b"3")
    paths = [tmp_path / relative_path(blob.blobid) for blob in one.blobs]

    def alter() -> None:
        for path in paths[:count]:
            os.utime(path, (5, 5))

    loop.on_sent = alter
    with pytest.raises(BatchRejected) as caught:
        session.put(one)
    assert caught.value.detail.endswith(f"{paths[0].name}{more}")


def test_a_loop_that_takes_turns_is_waited_for_before_the_commit(
    loop: Loop, tmp_path: Path
) -> None:
    loop.greeting = b"NTT-TAR 2 ready lockstep"
    session = opened(tmp_path)
    loop.says = [b"got 1\n"]
    session.put(batch(tmp_path, b"one"))
    assert loop.sent.endswith(b"commit\n")
    with pytest.raises(RemoteUnreachable, match="does not answer"):
        session.put(batch(tmp_path, b"two"))
    assert not bytes(loop.sent).endswith(b"commit\n")


def test_a_store_that_hangs_is_an_outage_of_the_source(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar, "tar_argv", lambda *_: ["sleep", "600"])
    session = opened(tmp_path, run={"stall_timeout": 5.0})
    clock = iter(range(0, 100, 3))
    one = batch(tmp_path, b"one")
    monkeypatch.setattr(tar, "time", cast(Any, type("C", (), {"monotonic": lambda: next(clock)})))
    with pytest.raises(SourceError, match="the store does not answer"):
        session.put(one)
    assert loop.ended


# --- the probe ------------------------------------------------------------------------------------


class Scratch:
    """Stands for `ScratchDirectory`."""

    facts = Facts("Linux", "tar", 5, 0.0, placed=True)

    def __init__(self, *given: Any) -> None:
        self.path = given[-1]
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("scratch", ["", "/far/.ntt-check-owner.run"])
def test_facts_end_their_connection_unless_it_keeps_a_directory(
    monkeypatch: pytest.MonkeyPatch, scratch: str
) -> None:
    loop = Loop()
    monkeypatch.setattr(tar_probe, "Channel", lambda *_: loop)
    said = {"tar": "GNU tar", "free_kib": "1"}
    monkeypatch.setattr(tar_probe.ScratchDirectory, "_read_facts", lambda *_, **__: said)
    made = tar_probe.ScratchDirectory(Local(1.0), "/far", ".ntt-check-owner", scratch)
    assert made.facts.free_bytes == 1024
    assert loop.ended == (not scratch)
    loop.ended = False
    said["problem"] = "remote.path is away"
    with pytest.raises(BackupError):
        tar_probe.ScratchDirectory(Local(1.0), "/far", ".ntt-check-owner", scratch)
    assert loop.ended


@pytest.fixture
def scratches(monkeypatch: pytest.MonkeyPatch) -> list[Scratch]:
    made: list[Scratch] = []

    def scratch(*given: Any) -> Scratch:
        made.append(Scratch(*given))
        return made[-1]

    monkeypatch.setattr(tar_probe, "ScratchDirectory", scratch)
    return made


def test_a_probe_makes_a_scratch_directory_only_where_it_tries(scratches: list[Scratch]) -> None:
    probe = TarProbe(spec())
    assert probe.facts().placed
    (scratch,) = scratches
    assert scratch.path == ""
    probe.hand_over()
    probe.close()
    assert scratches == [scratch]


@pytest.mark.parametrize("back", ["all", "nothing", "one less", "odd mode", "other content"])
def test_a_probe_compares_what_comes_back_with_what_was_sent(
    loop: Loop,
    scratches: list[Scratch],
    monkeypatch: pytest.MonkeyPatch,
    back: str,
) -> None:
    archives: list[bytes] = []

    def answers() -> None:
        for word in (b"commit\n", b"abort\n"):
            if loop.sent.endswith(word):
                head, _, rest = bytes(loop.sent).partition(b"\n")
                number, length, _ = map(int, head.split())
                archives.append(rest[:length])
                loop.sent.clear()
                loop.says.append(b"ok %d\n" % number)

    def fetched(*_: Any, **__: Any) -> bytes:
        if back == "nothing":
            return b""
        sink = io.BytesIO()
        mode = 0o600 if back == "odd mode" else 0o644
        found = [one for archive in archives for one in members(archive)]
        with tarfile.open(mode="w", fileobj=sink) as to:
            for name, content in found[back == "one less" :]:
                member = tarfile.TarInfo(name)
                altered = b"?" + content[1:] if back == "other content" else content
                member.size, member.mode = len(altered), mode
                to.addfile(member, io.BytesIO(altered))
        return sink.getvalue()

    loop.on_sent = answers
    monkeypatch.setattr(tar_probe, "ask", fetched)
    probe = TarProbe(spec())
    if back == "all":
        assert probe.try_out() == "5 trial blobs in 2 batches by tar, identical"
    else:
        words = "mode 600 instead of 644" if back == "odd mode" else "not what was sent"
        with pytest.raises(RemoteCannotStore, match=words):
            probe.try_out()
    (scratch,) = scratches
    assert scratch.path.startswith("/far/.ntt-check-owner.run.")
    assert scratch.closed == 1
    assert loop.closed == [LAST_WORD]


def members(archive: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        return [(one.name, found.extractfile(one).read()) for one in found if one.isreg()]  # type: ignore[union-attr]


def test_a_trial_that_the_remote_refuses_raises_its_words(
    loop: Loop, scratches: list[Scratch]
) -> None:
    def refuses() -> None:
        if loop.sent.endswith(b"commit\n"):
            loop.on_sent = lambda: None
            loop.says.append(b"err 1 ENOSPC: No space left on device\n")

    loop.on_sent = refuses
    with pytest.raises(RemoteCannotStore) as told:
        TarProbe(spec()).try_out()
    assert "No space left on device" in f"{told.value} {told.value.detail}"
    assert loop.ended
    assert [one.closed for one in scratches] == [1]


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError(28, "No space left on device", "x"), "No space left on device"), (OSError("y"), "y")],
)
def test_a_machine_without_room_for_a_trial_says_why(
    monkeypatch: pytest.MonkeyPatch, error: OSError, why: str
) -> None:
    def full(**_: object) -> None:
        raise error

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(SourceError, match="no room for a few trial blobs") as told, trial():
        pass
    assert told.value.detail == why


@pytest.mark.parametrize(
    ("said", "works"),
    [
        (b"made=%s\n" % marker_text("1d" * 16), True),
        (b"noise\nmade=%s\n" % marker_text("1d" * 16), True),
        (b"no\n", False),
        (b"", False),
    ],
)
def test_by_hash_is_made_where_the_remote_says_so_last(
    monkeypatch: pytest.MonkeyPatch, said: bytes, works: bool
) -> None:
    monkeypatch.setattr(tar_probe, "ask", lambda *_, **__: said)
    with nullcontext() if works else pytest.raises(RemoteCannotStore):
        assert TarProbe(spec()).make_place() == "1d" * 16


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, (None, 0.0, False, None, False)),
        ({"free_kib": "5", "free_inodes": "7"}, (5120, 0.0, False, 7, False)),
        ({"free_kib": "x", "free_inodes": "-"}, (None, 0.0, False, None, False)),
        ({"by-hash": "present", "python": "present"}, (None, 0.0, True, None, True)),
        ({"by-hash": "missing", "python": "missing"}, (None, 0.0, False, None, False)),
        ({"clock": "95"}, (None, 4.0, False, None, False)),
        ({"clock": "99"}, (None, 0.0, False, None, False)),
        ({"clock": "104"}, (None, 2.0, False, None, False)),
    ],
)
def test_a_probe_takes_facts_as_far_as_they_are_any(said: dict[str, str], found: Any) -> None:
    facts = tar_probe._facts(said, 100.0, 102.0)
    assert found == (
        facts.free_bytes,
        facts.skew_s,
        facts.placed,
        facts.free_inodes,
        facts.readable,
    )
    with pytest.raises(BackupError):
        tar_probe._facts({**said, "problem": "EACCES: no"}, 100.0, 102.0)
