"""Commands that read snapshots wait out an outage, and lose nothing of what they ask for by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ntt_backup.config import RunSettings
from ntt_backup.errors import BackupError, ProtocolViolation, RemoteDenied, RemoteUnreachable
from ntt_backup.filestore.contract import Range
from ntt_backup.filestore.reconnecting import ReconnectingStore
from ntt_backup.snapshot.restore.files import RestoreOptions
from ntt_backup.snapshot.restore.version import restore
from ntt_backup.snapshot.verify import verify
from tests.helpers.memory_store import MemoryStore
from tests.helpers.snapshots import directory, file, put_version

NAME = "s/20260102T030405Z-0123abcd/pack-00001"
LOST = RemoteUnreachable("the connection to the remote was lost")


class Remote:
    """A repository in memory that fails as a test wants. opened: how often."""

    def __init__(self) -> None:
        self.files = {NAME: bytes(range(256))}
        self.before: Callable[[str, str], object] = lambda verb, name: None
        self.opened = 0
        self.waits = 0

    def open(self) -> MemoryStore:
        self.opened += 1
        opened = MemoryStore()
        opened.files = self.files
        opened.before = lambda verb, name: self.before(verb, name)
        return opened

    def patient(self, **run: float) -> ReconnectingStore[MemoryStore]:
        settings = RunSettings.model_validate({"backoff_base": 0.01, "backoff_cap": 0.01, **run})
        return ReconnectingStore(self.open, settings, self._note)

    def fail(self, *errors: BackupError, chance: float = 1.0) -> None:
        """The next requests fail, each with this chance."""
        left, dice = list(errors), random.Random(1)

        def before(verb: str, name: str) -> None:
            if left and dice.random() < chance:
                raise left.pop(0)

        self.before = before

    def _note(self, error: BackupError, seconds: float) -> None:
        self.waits += 1


def bytes_one_by_one() -> Iterator[Range]:
    return (Range(NAME, at, 1) for at in range(256))


@pytest.fixture
def remote() -> Remote:
    return Remote()


def test_ranges_come_each_once_and_in_order_over_many_outages(remote: Remote) -> None:
    patient = remote.patient()
    assert [one.name for one in patient.list()] == [NAME]
    remote.fail(*[LOST] * 20, chance=0.2)
    assert b"".join(patient.read(bytes_one_by_one())) == bytes(range(256))
    assert (remote.waits, remote.opened) == (20, 21)


def test_what_asks_for_ranges_may_read_itself_when_the_remote_is_lost(remote: Remote) -> None:
    patient = remote.patient()
    inner = patient.read(bytes_one_by_one())
    outer = patient.read(Range(NAME, one[0], 1) for one in inner)
    assert next(outer) == b"\0"
    remote.fail(*[LOST] * 20, chance=0.2)
    assert b"".join(outer) == bytes(range(1, 256))
    assert remote.waits == 20


@pytest.mark.parametrize(
    ("errors", "run", "waits"),
    [
        ([RemoteDenied("no right")], {}, 0),
        ([LOST] * 9, {"outage_timeout": 0}, 0),
        ([ProtocolViolation()] * 9, {"attempts": 3}, 2),
    ],
)
def test_what_waiting_does_not_mend_ends_it(
    remote: Remote, errors: list[BackupError], run: dict[str, float], waits: int
) -> None:
    patient = remote.patient(**run)
    list(patient.list())
    remote.fail(*errors)
    with pytest.raises(type(errors[0])):
        list(patient.read(bytes_one_by_one()))
    assert remote.waits == waits


def test_what_is_removed_is_removed_over_an_outage(remote: Remote) -> None:
    patient = remote.patient()
    list(patient.list())
    remote.fail(LOST)
    assert patient.do(lambda store: store.remove([NAME])) == 1
    assert (remote.files, remote.waits) == ({}, 1)


def test_what_is_open_is_closed(remote: Remote) -> None:
    patient = remote.patient()
    opened = patient._store
    assert opened is not None
    patient.close()
    assert opened.closed


def test_the_first_contact_has_no_patience(remote: Remote) -> None:
    patient = remote.patient()
    remote.fail(LOST)
    with pytest.raises(RemoteUnreachable):
        list(patient.list())
    assert remote.waits == 0


def test_an_error_of_what_asks_for_ranges_does_not_cut_the_answer_short(remote: Remote) -> None:
    patient = remote.patient()
    list(patient.list())

    def ranges() -> Iterator[Range]:
        yield Range(NAME, 0, 1)
        raise RemoteUnreachable("a version was removed meanwhile")

    with pytest.raises(RemoteUnreachable, match="removed meanwhile"):
        list(patient.read(ranges()))


@pytest.mark.parametrize("command", ["verify", "restore"])
def test_a_command_goes_on_where_it_was(command: str, tmp_path: Path) -> None:
    remote = Remote()
    made = [file(f"d/{number:03}", random.Random(number).randbytes(9000)) for number in range(200)]
    remote.files.clear()
    put_version(remote.open(), [directory("d"), *made])
    patient = remote.patient()
    assert len(list(patient.list())) == 2
    remote.fail(*[LOST] * 3, chance=0.5)
    if command == "verify":
        found = verify(patient, "etc", 1.0)
        assert found.entries == 201
        assert [one.file[-4:] for one in found.wrong] == ["/map"]  # Only a real take makes one.
    else:
        done = restore(lambda: patient, "etc", tmp_path / "to", RestoreOptions(), trust=True)
        assert (done.files, done.wrong) == (200, 0)
    assert remote.waits == 3
