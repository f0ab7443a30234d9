"""A batch of the `stream` strategy that is broken off at an awkward moment: what came of it is
told, and the session (or the next one) goes on.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from ntt_backup.errors import BatchRejected, RemoteUnreachable, SourceError, Unsupported
from ntt_backup.upload.strategies import in_flight
from ntt_backup.upload.strategies.session import Rejection, Session
from ntt_backup.upload.strategies.stream import StreamSession
from ntt_backup.wire import framing, messages
from tests.contract.harness import Harness, Machine, receipt_of, settle, takes
from tests.contract.lying_commits import lying_receiver, receipt
from tests.helpers.blobs import noise
from tests.helpers.waiting import PATIENCE

pytestmark = pytest.mark.parametrize("strategy", ["stream"])

MIB = 1 << 20


def reading_fails(monkeypatch: pytest.MonkeyPatch, after: int, then: Callable[[], Any]) -> None:
    """The read after so many pieces of a large blob ends with ESTALE; before it, then happens."""
    readv, seen = os.readv, 0

    def failing(fd: int, buffers: Any) -> int:
        nonlocal seen
        seen += len(buffers[0]) == framing.MAX_CHUNK
        if seen > after:
            then()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return readv(fd, buffers)

    monkeypatch.setattr(os, "readv", failing)


def test_a_store_that_goes_away_within_a_large_blob_leaves_the_session_usable(
    local: Harness,
) -> None:
    batch = local.batch("b", b"small", noise(8 * MIB))
    session = local.open()
    away = local.store.with_name("elsewhere")
    with pytest.MonkeyPatch.context() as patched:
        reading_fails(patched, 3, lambda: local.store.exists() and local.store.rename(away))
        with pytest.raises(SourceError):
            session.put(batch)
    assert session.in_flight == ()
    away.rename(local.store)
    session.put(batch)
    assert [receipt_of(outcome).stored for outcome in settle(session)] == [batch.blobs]
    assert local.on_remote() == local.expected(batch)


FAILS = "say(RECEIPT.frame(batch, 1, 0, 0, [Exceptional(0, REFUSED, 'EBADMSG: Bad message')]))"


@pytest.mark.parametrize("size", [300_000, 3 * MIB], ids=["small", "large"])
def test_a_batch_that_fails_on_the_remote_while_it_is_sent_is_ended(
    local: Harness, machine: Machine, size: int
) -> None:
    """The receiver answers at once and drops the rest; it must learn where that rest ends."""
    # Says FAILED for the first batch when it begins, and takes note of all frames that come.
    book = machine.tools / "book"
    transport = lying_receiver(
        machine,
        f"if number == 2: {receipt(1)}",
        other=f"""
        if kind == BATCH: batch = BATCH.read(payload).number
        if kind == BATCH and batch == 1: {FAILS}
        with open({str(book)!r}, "a") as file: file.write(f"{{kind}} ")
""",
    )
    # So slowly that the answer overtakes what is sent.
    session = local.open(transport=transport, codec="none", bytes_per_second=300_000)
    first = local.batch("first", noise(size), *(b"%d" % n for n in range(3)))
    session.put(first)
    outcomes = settle(session)
    assert [outcome.batch for outcome in outcomes] == [first]
    assert isinstance(outcomes[0], Rejection)
    assert isinstance(outcomes[0].error, BatchRejected)
    second = local.batch("second", b"content")
    session.put(second)
    assert [receipt_of(outcome).stored for outcome in settle(session)] == [second.blobs]
    between = book.read_text().split()
    begun = [at for at, kind in enumerate(between) if int(kind) == messages.BATCH]
    assert int(between[begun[1] - 1]) in (messages.COMMIT, messages.ABORT)


def test_a_frame_is_sent_whole_although_its_batch_fails_meanwhile(
    local: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = local.open(codec="none")
    assert isinstance(session, StreamSession)
    inbox = framing.Inbox(messages.to_receiver(messages.WRITING))

    def send(data: bytes | memoryview) -> None:
        inbox.space()[: len(data)] = data
        inbox.filled(len(data))
        session._flights[0].answered |= bytes(data[4:5]) == bytes([messages.PACK])

    monkeypatch.setattr(session, "_send", send)
    session.put(local.batch("b", noise(3000)))
    kinds = [kind for kind, _ in iter(inbox.next, None)]
    assert kinds == [messages.BATCH, messages.PACK, messages.ABORT]


def test_nothing_refers_to_what_was_altered_on_its_way(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.tool("python3", f'exec {sys.executable} "$@"')
    session = local.open(transport=machine, codec="zstd-6")
    assert isinstance(session, StreamSession)
    content, send = noise(300_000), session._send

    def altering(data: bytes | memoryview) -> None:
        altered = bytearray(data)
        if len(data) > len(content):
            altered[len(content) // 2] ^= 1
            monkeypatch.undo()
        send(altered)

    monkeypatch.setattr(session, "_send", altering)
    first = local.batch("first", content)
    session.put(first)
    (outcome,) = settle(session)
    assert isinstance(outcome, Rejection)
    assert isinstance(outcome.error, BatchRejected)
    session.put(first)
    (outcome,) = settle(session)
    assert receipt_of(outcome).stored == first.blobs


# --- time -----------------------------------------------------------------------------------------


def test_an_answer_that_is_there_is_heard_before_the_remote_is_called_silent(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may have been held up elsewhere, longer than any remote may be silent."""
    session = local.open(transport=lying_receiver(machine, receipt(1)))
    batch = local.batch("b", b"content")
    session.put(batch)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 10_000)
    assert [receipt_of(outcome).stored for outcome in session.collect(PATIENCE)] == [batch.blobs]


def test_a_remote_that_clears_up_for_long_before_it_is_ready_is_waited_for(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sign of life takes half as long as the remote may be silent."""
    transport = lying_receiver(machine, receipt(1))
    program = machine.tools / "lying.py"
    slowly = (
        "import time\ndef clear_up():\n    for _ in range(5): say(BUSY.frame()); time.sleep(0.1)\n"
    )
    text = program.read_text().replace("while True:", slowly + "while True:", 1)
    program.write_text(text.replace("== HELLO: say", "== HELLO: clear_up(); say"))
    takes(monkeypatch, transport.connect_timeout / 2)
    session = local.open(transport=transport)
    assert session.usable


def test_a_remote_has_as_long_for_a_receipt_as_a_slow_disk_takes_to_hash_a_large_blob(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that checks names by the program b3sum, once it has all of the blob."""
    answer = f"""
            import time
            for _ in range(50): say(BUSY.frame()); time.sleep(0.01)
            {receipt(1)}
"""
    session = local.open(transport=lying_receiver(machine, answer), receipt_timeout=PATIENCE)
    batch = local.batch("b", b"content")
    session.put(batch)
    monkeypatch.setattr(in_flight, "SLOW", len(b"content") / 1_000_000)
    takes(monkeypatch, PATIENCE / 2)
    while not (outcomes := session.collect(1.0)):
        continue
    assert receipt_of(outcomes[0]).stored == batch.blobs


def test_a_remote_that_is_busy_for_ever_is_given_up(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = """
            import time
            while True: say(BUSY.frame()); time.sleep(0.01)
"""
    session = local.open(transport=lying_receiver(machine, answer), receipt_timeout=20)
    batch = local.batch("b", b"content")
    session.put(batch)
    start, clock = time.monotonic(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: start + (clock() - start) * 1000)
    with pytest.raises(RemoteUnreachable) as caught:
        settle_for(session, 1000 * PATIENCE)
    assert "does not answer" in caught.value.message
    assert session.in_flight == (batch,)


def test_a_remote_that_is_busy_for_ever_and_reads_nothing_is_given_up(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = """
        if kind == BATCH:
            import time
            while True: say(BUSY.frame()); time.sleep(0.01)
"""
    transport = lying_receiver(machine, receipt(1), other=busy)
    session = local.open(transport=transport, codec="none", stall_timeout=5, receipt_timeout=20)
    start, clock = time.monotonic(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: start + (clock() - start) * 1000)
    batch = local.batch("b", noise(20 * MIB))
    with pytest.raises(RemoteUnreachable) as caught:
        session.put(batch)
    assert "stalled" in caught.value.message
    assert session.in_flight == (batch,)


# --- a Python that is there, and no use -----------------------------------------------------------


@pytest.mark.parametrize("lacking", ["ctypes", "zlib"])
def test_a_python_that_lacks_a_module_is_no_place_for_the_receiver(
    local: Harness, machine: Machine, lacking: str
) -> None:
    """As python3-minimal does; auto then takes tar."""
    without = machine.tools / "sitecustomize.py"
    without.write_text(f"import sys; sys.modules[{lacking!r}] = None\n")
    python = f"PYTHONPATH={machine.tools} exec {sys.executable}"
    machine.tool("python3", f'shift; {python} "$@"')
    with pytest.raises(Unsupported) as caught:
        local.open(transport=machine)
    assert lacking in caught.value.detail
    assert "tar" in caught.value.hint


# --- a disk that goes away under a session --------------------------------------------------------


@pytest.mark.parametrize("what", ["by-hash", "the root", "the root, for another"])
def test_a_disk_that_goes_away_under_a_session_gives_no_receipt(local: Harness, what: str) -> None:
    """The receiver still has it open, and could write there without anybody ever seeing it."""
    session = local.open()
    first, second = local.batch("first", b"1"), local.batch("second", b"2")
    session.put(first)
    assert [receipt_of(outcome).stored for outcome in settle(session)] == [first.blobs]
    gone = local.remote_dir / "by-hash" if what == "by-hash" else local.remote_dir
    gone.rename(gone.with_name("elsewhere"))
    if what == "the root, for another":
        (local.remote_dir / "by-hash").mkdir(parents=True)
    session.put(second)
    with pytest.raises(RemoteUnreachable) as caught:
        settle(session)
    assert caught.value.message == "remote.path is gone"
    assert session.in_flight == (second,)


# --- a far side that stops talking ----------------------------------------------------------------

# Passes so many bytes of what the receiver says, then nothing, and reads nothing either.
MUTE = """
import os, subprocess, sys, time
limit, argv = int(sys.argv[1]), sys.argv[2:]
child = subprocess.Popen(argv, stdout=subprocess.PIPE)
while limit and (piece := os.read(child.stdout.fileno(), limit)):
    os.write(1, piece)
    limit -= len(piece)
child.kill()
if limit == 0:
    time.sleep(600)
"""


@pytest.mark.parametrize("passed", [40, 150, 396])
def test_a_remote_that_falls_silent_at_any_point_is_given_up(
    local: Harness, machine: Machine, passed: int
) -> None:
    """In its banners, in READY, before and within the offset of a large blob, and in receipts."""
    script = machine.tools / "mute.py"
    script.write_text(MUTE)
    machine.tool("python3", f'exec {sys.executable} {script} {passed} {sys.executable} "$@"')
    transport = Machine(machine.tools, connect_timeout=2.0)
    batches = [
        local.batch("small", b"one", b"two"),
        local.batch("large", noise(66 * MIB)),
        local.batch("last", b"three"),
    ]

    def send() -> None:
        session = local.open(transport=transport, stall_timeout=1, receipt_timeout=2)
        for batch in batches:
            session.put(batch)
            settle(session)

    with pytest.raises(RemoteUnreachable):
        send()
    for session in local.sessions:
        assert not session.usable
    assert set(local.on_remote()) <= set(local.expected(*batches))


def settle_for(session: Session, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        session.collect(1.0)
