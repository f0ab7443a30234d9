"""A dump is sent, compared, named and noted, or is not; and what is said before one is made."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ntt_backup import events, rollback_detection
from ntt_backup.catalog import connection, history, privileges, selection
from ntt_backup.catalog.history import DatabaseState
from ntt_backup.config import RemoteConfig
from ntt_backup.config.signing_key import SigningKey, SigningKeys
from ntt_backup.dump import job, pg_programs, record
from ntt_backup.dump.events import DumpComplete, DumpSkipped, DumpStart
from ntt_backup.dump.pg_programs import Programs
from ntt_backup.dump.record import DumpRecord, Stored
from ntt_backup.dump.series import Form
from ntt_backup.errors import (
    BackupError,
    CatalogUnavailable,
    DumpFailed,
    DumpImpossible,
    RemoteCannotStore,
    RemoteUnreachable,
)
from ntt_backup.wire.stored_names import dump_begun
from tests.unit.sample_records import a_dump

KEYS = SigningKeys([SigningKey.of(bytes(32))], Path("host.key"))
FOUND = Programs(Path("pg_dump"), Path("pg_restore"), "16.4")
TEXT = [b"head", None, b"rows", b"more"]
WHOLE = b"headrowsmore"
LISTED = b"; comment\n205; 0 16385 TABLE DATA public blobs ntt\n"


class World:
    """A catalog, a pg_dump and a target, each of which does what a test says."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = RemoteConfig.model_validate(
            {
                "catalog": {"url": "dbname=c"},
                "remote": {"host": "vault", "path": "/srv"},
                "log": {"jsonl": tmp_path / "log.jsonl"},
                "dump": {"keep_last": 2, "keep_daily": 0, "keep_weekly": 0},
            }
        )
        self.state = DatabaseState(
            database="copyjob", server="16.4", server_version=160_004, fingerprint="5 1 2+3"
        )
        self.pieces: list[bytes | None] = list(TEXT)
        self.status: int | None = 0
        self.listed = LISTED
        self.dumps: list[Stored] = []
        self.placed = self.copied = self.ever = True
        self.errors: dict[str, BackupError] = {}
        self.sent = b""
        self.named: dict[str, DumpRecord] = {}
        self.given_up = self.killed = False
        self.polls = self.waits = self.drained = 0
        self.dropped: list[str] = []
        self.noted: list[tuple[str, int, str, str]] = []
        self.last_error = ""
        self.events: list[Any] = []
        self.stderr = self
        self.text = "it has failed"
        self.fds: list[int] = []
        self.tried = False
        monkeypatch.setattr(job, "open_dumps", self._open)
        monkeypatch.setattr(job, "list_dumps", World.stored)
        monkeypatch.setattr(job, "remove_dumps", World.drop)
        monkeypatch.setattr(job, "publish_dump", self._publish)
        monkeypatch.setattr(connection, "connect", self._connect)
        monkeypatch.setattr(history, "database_state", lambda _: self.state)
        monkeypatch.setattr(history, "noted_dumps", lambda *_: frozenset())
        monkeypatch.setattr(history, "record_dump", self._record)
        monkeypatch.setattr(history, "ever_made", lambda *_: self.ever)
        monkeypatch.setattr(history, "last_dumps", lambda *_: [self])
        monkeypatch.setattr(selection, "any_copied", lambda *_: self.copied)
        monkeypatch.setattr(privileges, "require_dumpable", lambda _: self._fail("privileges"))
        monkeypatch.setattr(pg_programs, "find", self._find)
        monkeypatch.setattr(pg_programs, "start_pg_dump", lambda *_: self)
        monkeypatch.setattr(pg_programs, "best_compression", lambda _: ())
        monkeypatch.setattr(pg_programs, "read_head", self._read_head)
        monkeypatch.setattr(job, "identified", lambda _, settings: settings)
        monkeypatch.setattr(pg_programs, "wait_for", self._wait)
        monkeypatch.setattr(SigningKeys, "of", lambda _: KEYS)

    # --- the catalog --------------------------------------------------------------------------

    @contextmanager
    def _connect(self, *_: object, **__: object) -> Iterator[Any]:
        self._fail("connect")
        yield self

    @property
    def info(self) -> Any:
        return type("Info", (), {"server_version": 160_004, "dbname": "copyjob"})

    @property
    def error(self) -> str:
        return self.last_error

    def _record(self, *_: object, name: str, bytes: int, sha256: str, error: str) -> None:
        self.noted.append((name, bytes, sha256, error))

    # --- pg_dump ------------------------------------------------------------------------------

    def _find(self, *_: object) -> Programs:
        self._fail("find")
        return FOUND

    def _read_head(self, *_: object) -> bytes:
        self._fail("head")
        return self.listed

    def read(self) -> bytes | None:
        return self.pieces.pop(0) if self.pieces else b""

    def output(self, _: float) -> bytes:
        return b"head"

    def wait(self, _: float) -> int | None:
        return self.status

    def drain_stderr(self) -> None:
        self.drained += 1

    def _wait(self, *, reading: list[int], timeout: float) -> None:
        self.waits += 1

    def kill(self) -> None:
        self.killed = True

    # --- the target ---------------------------------------------------------------------------

    def _open(self, _: object) -> World:
        self._fail("open")
        return self

    def _fail(self, what: str) -> None:
        if what in self.errors:
            raise self.errors[what]

    def stored(self) -> list[Stored]:
        return record.by_age(self.dumps)

    def close(self) -> None: ...

    def try_out(self) -> None:
        self.tried = True

    def write(self, _: str) -> World:
        self.sent = b""
        return self

    def add(self, data: bytes) -> None:
        self._fail("send")
        self.sent += data

    def poll(self) -> None:
        self.polls += 1

    def finish(self) -> tuple[int, bytes]:
        self._fail("finish")
        return len(self.sent), hashlib.sha256(self.sent).digest()

    def discard(self) -> None:
        self.given_up = True

    def _publish(
        self, _store: World, _file: World, name: str, made: DumpRecord, places: object
    ) -> None:
        assert places is None
        self.named[name] = made

    def drop(self, names: list[str]) -> int:
        self._fail("drop")
        self.dropped += names
        return len(names)

    def run(self, **how: Any) -> bool:
        return job.dump(self.settings, self.events.append, **how).tells

    def said(self, kind: type[events.Event]) -> list[Any]:
        return [one for one in self.events if isinstance(one, kind)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def ours(hours: float, number: int = 1, **changes: Any) -> Stored:
    """A dump of this host that was begun so many hours ago."""
    one = a_dump(datetime.now(UTC) - timedelta(hours=hours), number=number, **changes)
    assert one.record is not None
    return replace(one, record=one.record.signed(one.name, KEYS))


def test_a_dump_is_sent_compared_named_signed_and_noted(world: World) -> None:
    assert world.run()
    assert world.sent == WHOLE
    ((name, made),) = world.named.items()
    assert dump_begun(name)
    assert made.origin(name, KEYS).text == "of this host"
    assert (made.number, made.bytes, made.text, made.copied) == (1, 12, (12, made.sha256), True)
    assert made.sha256 == hashlib.sha256(WHOLE).hexdigest()
    assert (made.head_bytes, made.head_sha256) == (12, made.sha256)
    assert (made.target, made.database, made.fingerprint) == ("remote", "copyjob", "5 1 2+3")
    assert world.noted == [(name, 12, made.sha256, "")]
    assert (world.killed, world.given_up, world.polls, world.waits) == (True, False, 1, 1)
    assert world.drained == len(TEXT)
    assert [one.reason for one in world.said(DumpStart)] == ["first"]
    (done,) = world.said(DumpComplete)
    assert (done.name, done.bytes, done.kept, done.pruned) == (name, 12, 1, 0)
    assert world.said(events.Warning) == []
    assert 0 <= made.duration_s <= done.duration_s


def test_what_a_form_keeps_to_its_end_is_sent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Form, "end", lambda form: form.add(b"end"))
    world.run()
    assert world.sent == WHOLE + b"end"
    assert [made.bytes for made in world.named.values()] == [len(WHOLE) + 3]


def test_of_a_head_no_more_is_proved_than_pg_restore_needs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg_programs, "HEAD_BYTES", 6)
    world.run()
    (made,) = world.named.values()
    assert (made.head_bytes, made.head_sha256) == (6, hashlib.sha256(b"headro").hexdigest())


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"errors": {"finish": RemoteCannotStore("it is another")}}, RemoteCannotStore, "another"),
        ({"listed": b"205; 0 16385 TABLE DATA public blobs_2 ntt\n"}, DumpFailed, "table blobs"),
        ({"status": 1}, DumpFailed, "pg_dump failed"),
        ({"status": None}, DumpFailed, "pg_dump failed"),
        ({"errors": {"send": RemoteUnreachable("away")}}, RemoteUnreachable, "away"),
        ({"placed": False}, BackupError, "by-hash is missing"),
    ],
    ids=str,
)
def test_a_dump_that_is_not_what_it_must_be_gets_no_name_and_is_noted(
    world: World, change: dict[str, Any], error: type[BackupError], said: str
) -> None:
    for name, value in change.items():
        setattr(world, name, value)
    with pytest.raises(error, match=said) as caught:
        world.run()
    assert world.named == {}
    assert world.given_up == (world.placed is True)
    assert world.noted == [("", 0, "", str(caught.value))]
    assert world.dropped == []


def test_a_pg_dump_that_says_nothing_is_stalled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(step=200.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    # What it says meanwhile gives it as long again.
    world.pieces = [None, b"a", None, b"b", *[None] * 9]
    with pytest.raises(DumpFailed, match="has stalled") as caught:
        world.run()
    assert world.sent == b"ab"
    assert "wrote nothing for 600 s" in caught.value.detail
    assert world.killed


@pytest.mark.parametrize(
    ("error", "patient", "noted"),
    [
        (RemoteUnreachable("away"), True, False),
        (RemoteUnreachable("away"), False, True),
        (RemoteCannotStore("full"), True, True),
    ],
)
def test_an_outage_that_is_waited_for_is_noted_nowhere(
    world: World, error: BackupError, patient: bool, noted: bool
) -> None:
    world.errors["open"] = error
    with pytest.raises(type(error)):
        world.run(patient=patient)
    assert world.noted == [("", 0, "", str(error))] * noted


def test_no_dump_is_made_where_the_last_one_is_as_good(world: World) -> None:
    last = ours(1, copied=True)
    world.dumps = [last]
    assert world.run()
    assert world.named == {}
    assert [one.name for one in world.said(DumpSkipped)] == [last.name]
    # One that failed since is over.
    assert world.noted == []
    world.last_error = "the link was down"
    assert world.run()
    assert last.record is not None
    assert world.noted == [(last.name, last.record.bytes, last.record.sha256, "")]
    for how in ({"force": True}, {"whole": True}):
        world.pieces = list(TEXT)
        world.run(**how)
    assert [made.number for made in world.named.values()] == [2, 2]
    assert {one.reason for one in world.said(DumpStart)} == {"asked"}


def test_blobs_that_were_copied_are_known_of_by_the_catalog_or_the_last_dump(world: World) -> None:
    world.copied = False
    assert not world.run()
    (made,) = world.named.values()
    assert not made.copied
    world.placed, world.pieces = False, list(TEXT)
    world.dumps = [ours(1, copied=True)]
    # A target without by-hash tells of no blob.
    assert not world.run(force=True)
    world.placed, world.pieces = True, list(TEXT)
    assert world.run(force=True)


def test_the_first_dump_beside_the_first_blobs_knows_of_none_of_them(world: World) -> None:
    assert not world.run(beside=True)
    (made,) = world.named.values()
    assert not made.copied
    world.dumps, world.pieces = [ours(1, copied=False)], list(TEXT)
    assert world.run(beside=True)
    assert [one.reason for one in world.said(DumpStart)] == ["first", "marked"]


def test_a_dump_that_is_missed_is_named(world: World) -> None:
    world.run()
    ((name, made),) = world.named.items()
    there = Stored(name, made.bytes, made, datetime.now(UTC))
    for dumps in ([there], []):
        world.pieces, world.events, world.dumps = list(TEXT), [], dumps
        world.run(force=True)
        lacks = ["the target lacks the dump" in one.reason for one in world.said(events.Warning)]
        assert lacks == [True] * (not dumps)


def test_what_was_dumped_is_kept_for_the_next_one_where_it_has_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    closed: list[Form] = []
    monkeypatch.setattr(Form, "keep", lambda _, name: kept.append(name))
    monkeypatch.setattr(Form, "close", lambda one: closed.append(one))
    world.run()
    assert (kept, len(closed)) == ([*world.named], 1)
    world.status, world.pieces = 1, list(TEXT)
    with pytest.raises(DumpFailed):
        world.run()
    assert (kept, len(closed)) == ([*world.named], 2)


def test_a_key_that_was_lost_is_told_before_a_dump_goes_unsigned(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollback_detection, "lost_key", lambda *_: "the key is lost")
    world.run()
    assert [one.reason for one in world.said(events.Warning)] == ["the key is lost"]


def test_dumps_past_retention_go_the_newest_first(world: World) -> None:
    # One that is young is not on its way any more, once it has its content.
    world.dumps = [ours(hours, n) for n, hours in enumerate((99, 98, 97, 0.7, 0.6), 1)]
    young = replace(ours(0.1, 9), size=None)
    stranger = a_dump(datetime.now(UTC) - timedelta(hours=1), number=10)
    world.dumps += [young, stranger]
    world.run(force=True)
    assert world.dropped == [one.name for one in world.dumps[3::-1]]
    (done,) = world.said(DumpComplete)
    assert (done.kept, done.pruned) == (3, 4)
    (warned,) = world.said(events.Warning)
    assert warned.reason.startswith("1 dump of this catalog on the remote are not known")


def test_a_target_that_removes_nothing_has_the_dump_all_the_same(world: World) -> None:
    world.dumps = [ours(9 - n, n) for n in range(1, 4)]
    world.errors["drop"] = RemoteUnreachable("away")
    world.run(force=True)
    (warned,) = world.said(events.Warning)
    assert "past retention are still on the remote: away" in warned.reason
    (done,) = world.said(DumpComplete)
    assert (done.kept, done.pruned) == (4, 0)
    assert [error for *_, error in world.noted] == [""]


def test_a_dump_whose_clock_was_off_is_named(world: World) -> None:
    odd = replace(ours(100), arrived=datetime.now(UTC))
    world.dumps = [odd]
    world.run(force=True)
    (warned,) = world.said(events.Warning)
    assert warned.reason.startswith(
        "1 doubtful dump on the target: never removed by the retention, nor counted by it. The"
        f" newest is {odd.name}"
    )
    assert world.dropped == []


# --- a rehearsal ----------------------------------------------------------------------------------


def rehearse(world: World, *, remote_too: bool = True) -> tuple[str, str]:
    return job.rehearse(world.settings, remote_too=remote_too)


def test_a_rehearsal_says_what_makes_a_dump_and_what_it_may_send(world: World) -> None:
    assert rehearse(world, remote_too=False) == ("pg_dump, version 16.4", "")
    assert not world.tried
    world.copied = False
    assert rehearse(world) == ("pg_dump, version 16.4", "")
    assert world.tried
    whole = ours(2, bytes=5000)
    world.dumps = [whole]
    said, _ = rehearse(world)
    assert "; the newest is of " in said
    assert "dump.mode full sends 5.0 kB a dump, series not known yet" in said


@pytest.mark.parametrize(
    ("base", "said"),
    [("", "; the next one is whole"), ("a.dump", "; the next one is an increment on a.dump")],
)
def test_a_rehearsal_says_on_what_the_next_dump_is_an_increment(
    world: World, monkeypatch: pytest.MonkeyPatch, base: str, said: str
) -> None:
    opened = io.BytesIO()
    opened.name = base
    monkeypatch.setattr(job, "kept_base", lambda *_: opened if base else None)
    world.dumps = [ours(2)]
    assert "next one" not in rehearse(world)[0]
    dump = world.settings.dump.model_copy(update={"mode": "series"})
    world.settings = world.settings.model_copy(update={"dump": dump})
    assert rehearse(world)[0].endswith(said)
    assert opened.closed == bool(base)


@pytest.mark.parametrize(
    ("known", "copied", "warning"),
    [
        ([], True, "no dump of the catalog can be restored"),
        ([], False, ""),
        ([ours(1)], True, "was begun before the first blob was copied"),
        ([ours(1)], False, ""),
        ([ours(1, copied=True)], True, ""),
        ([ours(2, 1), ours(1, 2, copied=True)], True, ""),
        ([ours(2, 1, copied=True), ours(1, 2)], True, "was begun before the first blob"),
    ],
)
def test_a_rehearsal_warns_where_no_dump_tells_what_must_come_back(
    world: World, known: list[Stored], copied: bool, warning: str
) -> None:
    world.dumps, world.copied = known, copied
    _, said = rehearse(world)
    assert warning in said
    assert bool(said) == bool(warning)


@pytest.mark.parametrize(
    ("status", "error", "relied_on", "raised", "said"),
    [
        (0, DumpImpossible("no pg_dump"), False, DumpImpossible, "no pg_dump"),
        (0, DumpImpossible("no pg_dump"), True, DumpFailed, "cannot be dumped: no pg_dump"),
        (0, RemoteUnreachable("away"), False, DumpFailed, "cannot be dumped: away"),
        (0, CatalogUnavailable("gone"), True, CatalogUnavailable, "gone"),
        (1, None, False, DumpFailed, "cannot be dumped: pg_dump failed"),
    ],
)
def test_what_a_run_would_stumble_over_is_said_before(
    world: World,
    status: int,
    error: BackupError | None,
    relied_on: bool,
    raised: type[BackupError],
    said: str,
) -> None:
    world.ever, world.status = relied_on, status
    if error is not None:
        world.errors["find"] = error
    with pytest.raises(raised, match=said) as caught:
        rehearse(world)
    assert type(caught.value) is raised
    assert not world.tried


@pytest.mark.parametrize("where", ["privileges", "head", "open"])
def test_a_rehearsal_goes_through_all_that_a_dump_does(world: World, where: str) -> None:
    world.errors[where] = DumpFailed(where)
    with pytest.raises(DumpFailed, match=f"cannot be dumped: {where}"):
        rehearse(world)
    assert world.killed == (where != "privileges")
    assert not world.tried


def test_dumps_are_relied_on_where_one_was_made_or_a_place_is_set(world: World) -> None:
    assert job.relied_on(world.settings)
    world.ever = False
    assert not job.relied_on(world.settings)
    world.errors["connect"] = CatalogUnavailable("gone")
    assert job.relied_on(world.settings)
    del world.errors["connect"]
    dump = world.settings.dump.model_copy(update={"bin": Path("/usr/bin")})
    assert job.relied_on(world.settings.model_copy(update={"dump": dump}))
