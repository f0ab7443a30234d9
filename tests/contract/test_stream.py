"""What the sender of the `stream` strategy does with blobs that go wrong and far sides that lie.

The receiver is the real one unless a test needs one that lies: then a few lines of Python speak the
protocol just well enough (`lying_receiver`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ntt_backup.client.compression_level import Effort
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config.sections import RunSettings
from ntt_backup.errors import (
    BatchRejected,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
    SourceError,
    Unsupported,
)
from ntt_backup.model import Batch, Blob, Failure
from ntt_backup.process.spawn import wait_for
from ntt_backup.source.reader import Reader, TooLarge
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies import open_probe, open_session
from ntt_backup.upload.strategies.session import Rejection
from ntt_backup.upload.strategies.stream import StreamSession, connect
from ntt_backup.wire import framing, messages
from tests.contract.harness import Harness, Machine, reasons, receipt_of, settle
from tests.contract.lying_commits import lying_receiver, receipt
from tests.helpers.blobs import noise
from tests.helpers.waiting import PATIENCE

pytestmark = pytest.mark.parametrize("strategy", ["stream"])

MIB = 1 << 20


# --- large blobs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1])
def test_blobs_around_the_size_of_a_pack_arrive(local: Harness, size: int) -> None:
    batch = local.batch("b", b"before", noise(size), b"after")
    local.assert_arrives(batch)


def test_a_large_blob_that_does_not_match_its_name_never_gets_it(local: Harness) -> None:
    good, corrupt, also = (
        local.put(b"good"),
        local.put(noise(3 * MIB)),
        local.put(b"also good"),
    )
    content = bytearray(local.source_path(corrupt).read_bytes())
    content[MIB] ^= 1
    local.source_path(corrupt).write_bytes(content)
    receipt = local.deliver(Batch("b", (good, corrupt, also)))
    assert receipt.stored == (good, also)
    assert reasons(receipt.failed) == {corrupt.blobid: "corrupt-source"}
    assert local.on_remote() == local.expected(Batch("", (good, also)))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(path.read_bytes()[:MIB]),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
    ids=["cut short", "rewritten"],
)
def test_a_large_blob_that_changes_on_its_way_is_withdrawn(
    local: Harness, change: Callable[[Path], object]
) -> None:
    large, small = local.put(noise(8 * MIB)), local.put(b"small")
    changed: list[bool] = []

    def on_bytes(count: int) -> None:
        local.sent += count
        if local.sent > 2 * MIB and not changed:
            changed.append(True)
            change(local.source_path(large))

    session = open_session("stream", replace(spec_of(local), on_bytes=on_bytes), Store(local.store))
    local.sessions.append(session)
    session.put(Batch("b", (large, small)))
    (outcome,) = settle(session)
    assert changed
    assert receipt_of(outcome).stored == (small,)
    assert reasons(receipt_of(outcome).failed) == {large.blobid: "corrupt-source"}
    assert local.on_remote() == local.expected(Batch("", (small,)))


def spec_of(harness: Harness) -> SessionSpec:
    return SessionSpec(
        transport=harness.transport,
        root=harness.path,
        owner="0123456789ab",
        run_id="run",
        slot="0",
        run=RunSettings(stall_timeout=PATIENCE, receipt_timeout=PATIENCE),
        on_bytes=harness._count,
    )


def interrupted(local: Harness, machine: Machine, size: int) -> Batch:
    """A batch of one blob whose receiver was killed before it had all of it."""
    batch = local.batch("b", noise(size))
    first = local.open(transport=machine, codec="none")
    first.put(batch)
    first.abort()
    return batch


def test_a_large_blob_goes_on_where_its_last_durable_byte_was(
    local: Harness, machine: Machine
) -> None:
    size = 96 * MIB
    batch = interrupted(local, machine, size)
    already = local.sent
    local.assert_arrives(batch, codec="none")
    assert local.sent - already < size // 2


def test_the_remote_hears_of_a_client_that_reads_a_large_part_again(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A receiver gives up who says nothing for an hour, in which a disk reads some 360 GB."""
    batch = interrupted(local, machine, 96 * MIB)
    monkeypatch.setattr("ntt_backup.client.channel._SIGN_SECONDS", 0.0)
    recorded = replace(machine, recording=tmp_path / "sent")
    local.assert_arrives(batch, transport=recorded, codec="none")
    assert (tmp_path / "sent").read_bytes().count(messages.PING.frame(bytes(8))) >= 64


def test_a_partial_blob_that_went_bad_on_the_remote_is_sent_anew(
    local: Harness, machine: Machine
) -> None:
    size = 96 * MIB
    batch = interrupted(local, machine, size)
    partial = local.remote_dir / ".ntt-incoming" / "partial" / batch.blobs[0].blobid
    with partial.open("r+b") as file:
        file.seek(5)
        file.write(b"\0\0\0\0")
    local.assert_arrives(batch, codec="none")


# --- compression ----------------------------------------------------------------------------------

TEXT = b"".join(
    b"line %d of a log that says much the same all the time\n" % n for n in range(40_000)
)


@pytest.fixture
def well_equipped(machine: Machine) -> Machine:
    """A remote whose Python has the same modules as ours."""
    machine.tool("python3", f'exec {sys.executable} "$@"')
    return machine


@pytest.mark.parametrize("codec", ["zlib", "zstd-1", "zstd-3"])
def test_every_codec_carries_everything(local: Harness, well_equipped: Machine, codec: str) -> None:
    batch = local.batch("b", TEXT, TEXT[:5000], noise(2 * MIB), b"", b"x")
    local.assert_arrives(batch, transport=well_equipped, codec=codec)


@pytest.mark.parametrize("remembers", [True, False], ids=["now", "older receiver"])
def test_packs_refer_to_earlier_ones_where_the_receiver_remembers_them(
    local: Harness, machine: Machine, remembers: bool
) -> None:
    older = "known = codec.available(); del known[3]; codec.available = lambda: known; "
    program = (
        "from ntt_backup.receiver import codec, __main__ as receiver; "
        f"{'' if remembers else older}raise SystemExit(receiver.main())"
    )
    project = Path(__file__).resolve().parents[2]
    command = f'{sys.executable} -c "{program}" --root {local.path}'
    machine.tool("python3", f"PYTHONPATH={project} exec {command}")
    session = local.open(transport=machine, codec="zstd-6")
    batches = [local.batch(f"{seed}", noise(100_000)[seed:] + TEXT) for seed in range(2)]
    sent = []
    for batch in batches:
        before = local.sent
        session.put(batch)
        (outcome,) = settle(session)
        assert receipt_of(outcome).stored == batch.blobs
        sent.append(local.sent - before)
    assert (sent[1] < sent[0] / 4) is remembers
    assert local.on_remote() == local.expected(*batches)


@pytest.mark.parametrize("codec", ["auto", "none"])
def test_text_goes_compressed_unless_that_is_switched_off(
    local: Harness, well_equipped: Machine, codec: str
) -> None:
    batch = local.batch("b", *(TEXT[n : n + 20_000] for n in range(0, 2_000_000, 20_000)))
    receipt = local.deliver(batch, transport=well_equipped, codec=codec, bwlimit="1GB")
    shrunk = receipt.wire_bytes < batch.size / 3
    assert shrunk is (codec != "none")


@pytest.mark.parametrize(("bwlimit", "shrunk"), [(None, False), ("1GB", True)])
def test_nothing_is_compressed_for_a_remote_that_answers_at_once_unless_there_is_a_limit(
    local: Harness,
    well_equipped: Machine,
    monkeypatch: pytest.MonkeyPatch,
    bwlimit: str | None,
    shrunk: bool,
) -> None:
    monkeypatch.setattr("ntt_backup.upload.strategies.stream._NEAR_SECONDS", PATIENCE)
    session = local.open(transport=well_equipped, bwlimit=bwlimit)
    session.put(local.batch("a", TEXT[:MIB]))
    (outcome,) = settle(session)
    assert (receipt_of(outcome).wire_bytes < MIB / 3) is shrunk


# --- the store goes away --------------------------------------------------------------------------


def test_a_store_that_is_away_is_no_batchs_trouble_and_the_session_goes_on(local: Harness) -> None:
    session = local.open()
    batch = local.batch("b", b"content", noise(3 * MIB))
    away = local.store.with_name("elsewhere")
    local.store.rename(away)
    with pytest.raises(SourceError):
        session.put(batch)
    assert session.in_flight == ()
    assert session.usable
    away.rename(local.store)
    session.put(batch)
    assert [receipt_of(outcome).stored for outcome in settle(session)] == [batch.blobs]


# --- greetings ------------------------------------------------------------------------------------


def says(machine: Machine, line: str) -> Machine:
    """A remote whose python3 prints this line and waits."""
    machine.tool("python3", f"echo; echo '{line}'; exec sleep 600")
    return machine


def test_a_python_that_is_too_old_is_named(local: Harness, machine: Machine) -> None:
    with pytest.raises(Unsupported) as caught:
        local.open(transport=says(machine, "NTT-LOADER 1 python=3.6.8"))
    assert "3.6.8" in caught.value.detail
    assert "3.8" in caught.value.hint


def test_a_receiver_of_another_protocol_is_named_with_both_versions(
    local: Harness, machine: Machine
) -> None:
    banner = "NTT-RECEIVE 9 version=7.0.0 python=3.14.0 hash=sha256 codec=zlib allow=put"
    with pytest.raises(RemoteDenied) as caught:
        local.open(transport=says(machine, banner))
    assert "7.0.0 with protocol 9" in caught.value.detail
    assert f"protocol {framing.PROTOCOL}" in caught.value.detail


def test_a_codec_that_the_remote_does_not_have_is_refused_by_name_only(
    local: Harness, machine: Machine
) -> None:
    banner = "NTT-RECEIVE 1 version=1 python=3.11.0 hash=sha256 codec=zlib allow=put"
    with pytest.raises(Unsupported) as caught:
        local.open(transport=says(machine, banner), codec="zstd-3")
    assert "zstd" in caught.value.message


class Bare(Machine):
    """A remote that explains its end by what it said."""

    def explain(self, status: int | None, stderr: str) -> RemoteDenied:
        return RemoteDenied("cannot run", detail=stderr)


def without_python(machine: Machine) -> Machine:
    needed = "sh tar head cp mv cmp df find sync cut tr rm mkdir sed wc awk date uname id rmdir cat"
    return Bare(machine.tools, startup=f"PATH={machine.only(*needed.split())['PATH']}")


def test_a_remote_without_python_is_told_so(local: Harness, machine: Machine) -> None:
    with pytest.raises(Unsupported) as caught:
        local.open(transport=without_python(machine))
    assert "no python3" in caught.value.message
    assert "run.strategy" in caught.value.hint


# --- far sides that lie ---------------------------------------------------------------------------


def failed(text: str) -> str:
    return f"say(RECEIPT.frame(number, 1, 0, 0, [Exceptional(0, REFUSED, {text!r})]))"


@pytest.mark.parametrize(
    "answer",
    [
        receipt(1),
        receipt(3),
        receipt(1, (5, messages.PRESENT, "")),
        receipt(2, (0, messages.PRESENT, "")),
        receipt(0, (0, messages.PRESENT, ""), (0, messages.PRESENT, "")),
        receipt(1, (0, messages.WITHDREW, "")),
        receipt(2, hashed=1),
        receipt(2, number="number + 1"),
        receipt(2, number="number - 1"),
        receipt(2) + "; " + receipt(2),
        f"if number == 2: {receipt(2)}",
        "say(ABORTED.frame(number))",
        "say(frame(READY, b'{}'))",
        "say(head(RECEIPT, 1 << 30))",
        "say(frame(COMMIT, b'1234'))",
    ],
)
def test_an_answer_that_cannot_be_ends_the_session(
    local: Harness, machine: Machine, answer: str
) -> None:
    session = local.open(transport=lying_receiver(machine, answer))
    batch, second = local.batch("b", b"one", b"two"), local.batch("second", b"3", b"4")
    session.put(batch)
    session.put(second)
    with pytest.raises(RemoteUnreachable) as caught:
        settle(session)
    assert "violates the protocol" in caught.value.message
    assert not session.usable
    assert second in session.in_flight


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ENOSPC: No space left on device", RemoteCannotStore),
        ("EROFS: Read-only file system: 17", RemoteCannotStore),
        ("ESTALE: Stale file handle", RemoteUnreachable),
        ("EBADMSG: a pack does not have its checksum", BatchRejected),
        ("", BatchRejected),
    ],
)
def test_a_batch_that_failed_on_the_remote_is_rejected_with_its_words(
    local: Harness, machine: Machine, text: str, kind: type[Exception]
) -> None:
    session = local.open(transport=lying_receiver(machine, failed(text)))
    batch = local.batch("b", b"one", b"two")
    session.put(batch)
    (outcome,) = settle(session)
    assert isinstance(outcome, Rejection)
    assert (outcome.batch, type(outcome.error)) == (batch, kind)
    assert text in outcome.error.detail
    assert session.usable


def test_verdicts_are_told_apart(local: Harness, machine: Machine) -> None:
    answer = receipt(
        1,
        (0, messages.PRESENT, ""),
        (1, messages.REPLACED, ""),
        (2, messages.REFUSED, "a directory"),
    )
    session = local.open(transport=lying_receiver(machine, answer))
    batch = local.batch("b", b"1", b"2", b"3", b"4")
    session.put(batch)
    (outcome,) = settle(session)
    assert receipt_of(outcome).stored == (*batch.blobs[:2], batch.blobs[3])
    (failure,) = receipt_of(outcome).failed
    assert (failure.blobid, failure.reason.value) == (batch.blobs[2].blobid, "remote-rejected")
    assert failure.detail == "a directory"


def test_a_blob_altered_on_its_way_has_its_batch_sent_again(
    local: Harness, machine: Machine
) -> None:
    session = local.open(transport=lying_receiver(machine, receipt(1, (1, messages.MISMATCH, ""))))
    batch = local.batch("b", b"one", b"two")
    session.put(batch)
    (outcome,) = settle(session)
    assert isinstance(outcome, Rejection)
    assert isinstance(outcome.error, BatchRejected)
    assert batch.blobs[1].blobid in outcome.error.detail


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("gone", RemoteUnreachable),
        ("root", RemoteCannotStore),
        ("place", RemoteCannotStore),
        ("storage", BatchRejected),
        ("refused", RemoteDenied),
        ("protocol", RemoteUnreachable),
        ("idle", RemoteUnreachable),
        ("internal", RemoteUnreachable),
    ],
)
def test_an_error_ends_the_session_with_its_words(
    local: Harness, machine: Machine, code: str, kind: type[Exception]
) -> None:
    answer = f"say(ERROR.frame({code!r}, 'words of it'))"
    session = local.open(transport=lying_receiver(machine, answer))
    session.put(local.batch("b", b"one"))
    with pytest.raises(kind) as caught:
        settle(session)
    assert "words of it" in str(caught.value)
    assert not session.usable


def test_a_remote_without_by_hash_is_an_outage(local: Harness) -> None:
    (local.remote_dir / "by-hash").rmdir()
    with pytest.raises(RemoteUnreachable) as caught:
        local.open()
    assert caught.value.message == "remote.path is gone"
    assert not (local.remote_dir / "by-hash").exists()


def test_what_came_before_the_question_does_not_make_a_remote_near(
    local: Harness, machine: Machine
) -> None:
    early = bytes((1, *bytes(7)))
    transport = lying_receiver(
        machine, "pass", other="        if kind == PING and payload[0]: say(BUSY.frame())"
    )
    effort = Effort(1).sender(0)
    connection = connect(replace(spec_of(local), transport=transport, effort=effort))
    connection.open()
    session = StreamSession(connection, Store(local.store))
    local.sessions.append(session)
    connection.send(messages.PING.frame(early), lambda _: None)
    assert wait_for(reading=connection.channel._child.fds, timeout=PATIENCE)
    before = connection.channel.heard
    session.detect_near_remote()
    assert connection.channel.heard > before
    effort.note(0.001, 0.0, MIB, MIB // 2)
    assert effort.step == 1


def test_life_is_shown_while_a_disk_reads_what_fills_a_pack(
    local: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker whose disk takes a second a blob counts as stalled, and loses its claims."""
    read, since = Reader.read, [0]

    def reading(reader: Reader, blob: Blob, into: memoryview) -> int | TooLarge | Failure:
        since[-1] += 1
        return read(reader, blob, into)

    monkeypatch.setattr(Reader, "read", reading)
    batch = local.batch("b", *(b"%d" % number for number in range(100)))
    missing = tuple(Blob(f"{number:064x}", 1) for number in range(10))
    spec = replace(spec_of(local), on_bytes=lambda _: since.append(0))
    session = open_session("stream", spec, Store(local.store))
    local.sessions.append(session)
    session.put(Batch("b", (*missing, *batch.blobs)))
    assert sum(since) == 110
    assert max(since) <= 16
    assert since.count(1) >= len(missing) - 1


# --- the look before a run ------------------------------------------------------------------------


def test_a_probe_sends_trial_blobs_and_leaves_nothing(local: Harness) -> None:
    probe = open_probe("auto", spec_of(local))
    facts = probe.facts()
    assert probe.strategy == "stream"
    assert facts.placed
    assert facts.free_bytes
    inodes = os.statvfs(local.remote_dir)
    assert (facts.free_inodes is None) == (inodes.f_files == 0)
    assert (facts.skew_s or 0.0) < 5
    said = probe.try_out()
    probe.close()
    assert "5 trial blobs" in said
    assert local.on_remote() == {}
    assert [path.name for path in local.remote_dir.iterdir()] == ["by-hash"]


def test_a_session_goes_on_over_the_connection_of_the_probe(local: Harness) -> None:
    (local.remote_dir / "by-hash").rmdir()
    store, batch = Store(local.store), local.batch("a", b"one", noise(2 * MIB))
    probe = open_probe("stream", spec_of(local))
    assert not probe.facts().placed
    probe.make_place()
    connection = probe.hand_over()
    session = open_session("stream", spec_of(local), store, connection)
    assert isinstance(session, StreamSession)
    assert connection is not None
    assert session.channel is connection.channel
    session.put(batch)
    assert [receipt_of(one).stored for one in settle(session)] == [batch.blobs]
    session.close()
    assert local.on_remote() == local.expected(batch)


def test_a_probe_looks_without_by_hash_and_makes_it_when_told(local: Harness) -> None:
    (local.remote_dir / "by-hash").rmdir()
    probe = open_probe("stream", spec_of(local))
    facts = probe.facts()
    assert not facts.placed
    probe.try_out()
    assert not (local.remote_dir / "by-hash").exists()
    probe.make_place()
    assert (local.remote_dir / "by-hash").is_dir()
    probe.close()


def test_auto_is_tar_where_the_remote_has_no_python(local: Harness, machine: Machine) -> None:
    spec = replace(spec_of(local), transport=without_python(machine))
    probe = open_probe("auto", spec)
    probe.facts()
    assert probe.strategy == "tar"
    assert "trial blobs" in probe.try_out()
    probe.hand_over()
    assert list(local.remote_dir.glob(".ntt-check-*")) == []
