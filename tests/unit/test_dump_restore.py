"""A dump is given to pg_restore, and its rows are copied, only where it is what was dumped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ntt_backup.catalog import connection, history
from ntt_backup.catalog.restore_role import Restorer
from ntt_backup.config import RemoteConfig
from ntt_backup.config.sealing import Keyring
from ntt_backup.config.signing_key import Origin, SigningKey, SigningKeys
from ntt_backup.dump import pg_programs, record, restore
from ntt_backup.dump.record import SERIES, Stored
from ntt_backup.dump.restore import restore_rows
from ntt_backup.dump.store import DUMPS, DumpText
from ntt_backup.dump.toc import DumpDamaged
from ntt_backup.errors import (
    CatalogRefused,
    ConfigError,
    DumpFailed,
    RemoteDenied,
    Unsupported,
)
from ntt_backup.filestore.contract import FileMissing, FileUnreadable, Range, WholeFileDamaged
from tests.helpers.memory_store import MemoryStore
from tests.unit.sample_records import NOON, RECORD, a_dump
from tests.unit.test_dump_toc import ROWS, archive, block, entry

CONTENT = bytes(range(256)) * 1000
HEAD = 1000
KEYS = SigningKeys([SigningKey.of(bytes(32))], Path("host.key"))
HEAD_OF_GRANT = archive(entry(1, "ACL", "a", definition="GRANT a TO b;"))
OF_BLOBS = "COPY public.blobs (blobid, size, remote_copied, usb_copied, evil) FROM stdin;\n"


SETTINGS = RemoteConfig.model_validate(
    {"catalog": {"url": "dbname=c"}, "remote": {"host": "vault", "path": "/srv"}}
)


class Text:
    """What comes of a dump, in pieces. left: those that nobody has read; closed: it was ended; bad:
    after the last piece it turns out to be damaged.
    """

    def __init__(self, content: bytes = CONTENT, *, bad: bool = False) -> None:
        self.left = [content[at : at + 300] for at in range(0, len(content), 300)]
        self.closed = False
        self.bad = bad
        self.damaged = self.why = ""

    def __iter__(self) -> Iterator[bytes]:
        try:
            while self.left:
                yield self.left.pop(0)
            if self.bad:
                self.damaged, self.why = "NAME", "it is another"
        finally:
            self.closed = True


class Back:
    """Restores of a dump of CONTENT by a pg_restore that takes anything. entered: a role was made;
    poured: what pg_restore got.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = 0
        self.poured: list[bytes] = []
        self.told: list[str] = []
        self.good = True
        self.refused = False
        monkeypatch.setattr(restore, "restorer", self._restorer)
        monkeypatch.setattr(restore, "_pour", self._pour)
        monkeypatch.setattr(pg_programs, "find_restore", lambda *_: Path("pg_restore"))

    @contextmanager
    def _restorer(self, *_: object, **__: object) -> Iterator[Restorer]:
        self.entered += 1
        if self.refused:
            raise CatalogRefused("no role can be made")
        yield Restorer("owner", "dbname=c")

    def _pour(self, pieces: Iterator[bytes], *_: object) -> None:
        self.poured = list(pieces)
        if not self.good:
            raise DumpDamaged("it is another")

    def whole(self, text: Any, one: Stored) -> Any:
        assert one.record is not None
        how: dict[str, Any] = {"allow_superuser": False, "refresh": True}
        return restore._whole(
            SETTINGS, text, one.record, (160_004, "user"), self.told.append, **how
        )

    def rows(self, text: Any, _: Stored) -> Any:
        return restore._rows(SETTINGS, text)


@pytest.fixture
def back(monkeypatch: pytest.MonkeyPatch) -> Back:
    return Back(monkeypatch)


def dumped(content: bytes = CONTENT, **changes: Any) -> Stored:
    """A dump of that content."""
    head = content[:HEAD]
    values: dict[str, Any] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "head_bytes": len(head),
        "head_sha256": hashlib.sha256(head).hexdigest(),
    }
    return a_dump(**{**values, **changes})


def test_pg_restore_gets_a_dump_as_it_is_stored(back: Back) -> None:
    text = Text()
    assert back.whole(text, dumped()) == ("owner", (), ())
    assert (b"".join(back.poured), text.left, text.closed) == (CONTENT, [], True)
    back.good = False
    with pytest.raises(DumpDamaged):
        back.whole(Text(), dumped())


@pytest.mark.parametrize(
    "changes",
    [{"head_sha256": "00" * 32}, {"head_bytes": HEAD - 1}, {"head_bytes": HEAD + 1}],
    ids=str,
)
def test_of_a_head_that_is_not_proved_nothing_is_executed(
    back: Back, changes: dict[str, Any]
) -> None:
    text = Text()
    with pytest.raises(DumpDamaged):
        back.whole(text, dumped(**changes))
    # The session gives nothing else before the end of what was asked for.
    assert (back.entered, back.poured, text.left) == (0, [], [])


@pytest.mark.parametrize("size", [HEAD, HEAD - 1])
def test_a_dump_that_ends_damaged_within_its_head_is_not_executed(back: Back, size: int) -> None:
    text = Text(CONTENT[:size], bad=True)
    for way in (back.whole, back.rows):
        with pytest.raises(DumpDamaged):
            way(text, dumped(head_bytes=HEAD + 300))
    assert (back.entered, text.left) == (0, [])


@pytest.mark.parametrize("changes", [{"sha256": "00" * 32}, {"bytes": len(CONTENT) - 1}], ids=str)
def test_a_dump_is_proved_by_its_record(changes: dict[str, Any]) -> None:
    one = replace(dumped(**changes), size=len(CONTENT))
    store = MemoryStore(DUMPS)
    store.files[one.name] = CONTENT
    text = DumpText(store, [one])
    assert b"".join(text) in (CONTENT, b"")
    assert (text.damaged, text.why) == (one.name, "its SHA-256 differs from its record")
    text = DumpText(store, [dumped()])
    assert (b"".join(text), text.damaged) == (CONTENT, "")


def test_an_error_ends_what_comes_from_the_remote(
    back: Back, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CatalogRefused("no tables can be made")

    back.refused = True
    monkeypatch.setattr(pg_programs, "HEAD_BYTES", HEAD)
    monkeypatch.setattr(restore, "restore_rows", refuse)
    for way in (back.whole, back.rows):
        text = Text()
        with pytest.raises(CatalogRefused) as caught:
            way(text, dumped())
        assert text.closed, caught


def test_rows_come_back_of_what_is_whole_and_the_reason_is_kept_where_they_do_not(
    back: Back, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(head: bytes, pieces: Iterator[bytes], url: str, *_: object) -> list[str]:
        assert CONTENT.startswith(head)
        if b"".join(pieces) != CONTENT:
            raise DumpDamaged("it is no dump")
        return [url]

    monkeypatch.setattr(pg_programs, "HEAD_BYTES", HEAD)
    monkeypatch.setattr(restore, "restore_rows", take)
    assert back.rows(Text(), dumped()) == ("dbname=c",)
    for text, damaged, why in (
        (Text(CONTENT[:-1]), "", "it is no dump"),
        (Text(bad=True), "NAME", "it is another"),
    ):
        with pytest.raises(DumpDamaged):
            back.rows(text, dumped())
        assert (text.damaged, text.why, text.left) == (damaged, why, [])


# --- which one comes back -------------------------------------------------------------------------


class Shelf:
    """A target with dumps, and an empty database. bad: dumps whose content is another; foreign:
    that are sealed for others. whole, rows: the dumps that came back in either way, also those that
    turned out to be damaged.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dumps: list[Stored] = []
        self.bad: set[str] = set()
        self.foreign: set[str] = set()
        self.whole_of: list[str] = []
        self.rows_of: list[str] = []
        self.warned: list[str] = []
        self.told: list[str] = []
        self.keys = KEYS
        self.empty = True
        self.planned: list[object] = []
        self.info = SimpleNamespace(server_version=160_004, user="user", dbname="copyjob")
        monkeypatch.setattr(connection, "connect", self._connect)
        monkeypatch.setattr(history, "require_empty", self._require_empty)
        monkeypatch.setattr(restore, "open_dumps", lambda _: self)
        monkeypatch.setattr(restore, "list_dumps", Shelf.stored)
        monkeypatch.setattr(SigningKeys, "of", lambda _: self.keys)
        monkeypatch.setattr(restore, "_whole", self.whole)
        monkeypatch.setattr(restore, "_rows", self.rows)

    @contextmanager
    def _connect(self, *_: object, no_tables: bool) -> Iterator[Shelf]:
        # As a superuser it uses no table of others before the restore.
        assert no_tables
        yield self

    def _require_empty(self, _: object) -> None:
        if not self.empty:
            raise ConfigError("the database copyjob is not empty", detail="it has t")

    def stored(self) -> list[Stored]:
        return record.by_age(self.dumps)

    def close(self) -> None: ...

    def whole(self, _: object, text: Any, *__: object, **___: object) -> Any:
        self._require_good(text, self.whole_of)
        return "owner", restore._rights(HEAD_OF_GRANT, "user", pytest.fail), ()

    def rows(self, _: object, text: Any) -> Any:
        self._require_good(text, self.rows_of)
        return ("FUNCTION f()",)

    def _require_good(self, text: Any, tried: list[str]) -> None:
        names = [member.name for member in text._needed]
        tried.append(names[-1])
        if self.foreign.intersection(names):
            list(text)
            raise DumpDamaged(text.why)
        text.damaged = next((name for name in names if name in self.bad), "")
        if text.damaged:
            text.why = "its SHA-256 differs from its record"
            raise DumpDamaged(text.why)

    def read(self, ranges: Iterator[Range]) -> Iterator[bytes]:
        """Of all dumps that are read, nothing can be opened; see `filestore.sealed`."""
        yield from ()
        if all(one.name in self.foreign for one in self.dumps if one.sealed):
            raise Keyring().foreign()
        raise WholeFileDamaged(f"{next(ranges).name}: it is sealed for other identities")

    def back(self, tell: bool = False, **how: Any) -> restore.Recalled:
        tells = self.told.append if tell else None
        return restore.restore_catalog(SETTINGS, self.warned.append, tells, **how)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    return Shelf(monkeypatch)


def ours(number: int, keys: SigningKeys = KEYS, **changes: Any) -> Stored:
    one = a_dump(NOON + timedelta(hours=number), number=number, **changes)
    assert one.record is not None
    return replace(one, record=one.record.signed(one.name, keys))


def strange(number: int, **changes: Any) -> Stored:
    return a_dump(NOON + timedelta(hours=number), number=number, **changes)


def test_the_newest_good_dump_of_this_host_comes_back_whole(place: Shelf) -> None:
    torn = replace(ours(4), size=7)
    place.dumps = [ours(1), ours(2), ours(3), torn, strange(5), ours(6, target="usb")]
    place.dumps += [replace(strange(7), record=None)]
    place.bad = {place.dumps[2].name}
    found = place.back()
    assert found == restore.Recalled(
        place.dumps[1], Origin.OURS, "owner", ("GRANT a TO b;",), (), new_owner=True
    )
    assert place.whole_of == [place.dumps[2].name, place.dumps[1].name]
    assert place.rows_of == []
    passed, incomplete, damaged = place.warned
    assert passed.startswith(f"{place.dumps[4].name} is passed over, since it is not of this host")
    assert incomplete == f"{torn.name} is not complete: it has 7 bytes"
    assert damaged == f"{place.dumps[2].name} is damaged: its SHA-256 differs from its record"


def sealed(number: int) -> Stored:
    return replace(ours(number), sealed=True)


def test_of_a_dump_that_no_record_tells_of_nothing_is_given() -> None:
    store = MemoryStore(DUMPS)
    one = replace(strange(1), record=None, size=5)
    store.files[one.name] = b"xmore"
    text = DumpText(store, [one])
    assert list(text) == []
    assert (text.damaged, text.why) == (one.name, "its SHA-256 differs from its record")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (FileMissing("NAME"), "it is missing"),
        (FileUnreadable("a dump cannot be read", detail="EIO"), "a dump cannot be read: EIO"),
        (WholeFileDamaged("NAME: its end is missing"), "its end is missing"),
    ],
)
def test_a_dump_that_cannot_be_read_is_damaged(error: Exception, why: str) -> None:
    one, store = ours(1), MemoryStore(DUMPS)
    error.args = tuple(str(arg).replace("NAME", one.name) for arg in error.args)
    if isinstance(error, WholeFileDamaged):
        error.detail = error.detail.replace("NAME", one.name)

    def fail(_verb: str, _name: str) -> None:
        raise error

    store.before = fail
    text = DumpText(store, [one])
    assert list(text) == []
    assert (text.damaged, text.why) == (one.name, why)


@pytest.mark.parametrize("kind", [RemoteDenied, Unsupported])
def test_a_target_that_lets_nothing_be_read_is_no_damage_of_a_dump(
    kind: type[RemoteDenied],
) -> None:
    """Each dump would be told to be damaged, and why not one comes back would be told by none."""
    store = MemoryStore(DUMPS)

    def fail(_verb: str, _name: str) -> None:
        raise kind("the receiver on the remote may not get")

    store.before = fail
    text = DumpText(store, [ours(1)])
    with pytest.raises(kind, match="may not get"):
        list(text)
    assert text.damaged == ""


def test_a_dump_that_is_sealed_for_others_is_told_and_the_one_before_it_is_taken(
    place: Shelf,
) -> None:
    place.dumps = [sealed(n) for n in (1, 2, 3)]
    place.foreign = {place.dumps[2].name}
    assert place.back().dump == place.dumps[1]
    assert place.warned == [f"{place.dumps[2].name} is damaged: it is sealed for other identities"]


def test_where_no_sealed_dump_opens_the_identity_is_told(place: Shelf) -> None:
    """And one of the time before the bucket was sealed is not taken instead."""
    place.dumps = [ours(1), sealed(2), sealed(3)]
    place.foreign = {one.name for one in place.dumps[1:]}
    for name in (None, place.dumps[2].name):
        with pytest.raises(ConfigError, match="for other identities than those in"):
            place.back(name=name)
    assert place.dumps[0].name not in place.whole_of
    assert place.back(name=place.dumps[0].name).dump == place.dumps[0]
    place.foreign.remove(place.dumps[1].name)
    place.bad = {place.dumps[1].name}
    assert place.back().dump == place.dumps[0]


def test_what_is_passed_over_is_told_to_whoever_asked_for_it(place: Shelf) -> None:
    place.dumps = [strange(number) for number in range(13)] + [ours(14)]
    place.back(tell=True)
    assert place.warned == []
    assert [one.split()[0] for one in place.told[:10]] == [one.name for one in place.dumps[12:2:-1]]
    assert place.told[10] == "3 more are passed over: `ntt-backup-remote dumps` lists them"
    place.told.clear()
    place.dumps = place.dumps[3:]
    place.back(tell=True)
    assert len(place.told) == 10


def test_dumps_of_the_database_that_was_lost_come_first_where_there_are_any(place: Shelf) -> None:
    mine, other = ours(1), ours(2, database="other")
    place.dumps = [mine, other]
    found = place.back()
    assert (found.dump, found.others) == (mine, ("other",))
    found = place.back(database="other")
    assert (found.dump, found.others) == (other, ("copyjob",))
    assert place.back(database="nobody's").dump == other
    assert place.back(name=other.name).dump == other
    place.info.user = "owner"
    assert not place.back().new_owner


def test_an_increment_comes_back_by_its_whole_dump_and_what_is_damaged_is_read_once(
    place: Shelf,
) -> None:
    base, lost = ours(1, format=SERIES, text_sha256="ab"), f"{record.name_of(NOON, '0' * 8)}"
    more = [ours(n, format=SERIES, text_sha256="ab", base=base.name) for n in (2, 3)]
    place.dumps = [base, *more, ours(4, format=SERIES, text_sha256="ab", base=lost)]
    assert place.back().dump == more[-1]
    assert place.warned[0].startswith(f"{place.dumps[-1].name} cannot be read: ")
    place.warned.clear()
    place.bad = {base.name}
    with pytest.raises(DumpFailed, match="there is no good dump of the catalog"):
        place.back()
    assert place.warned[1:] == [
        f"{more[1].name} cannot be read: {base.name} is damaged: its SHA-256 differs from its"
        " record",
        f"{more[0].name} cannot be read: {base.name} is damaged",
        f"{base.name} cannot be read: {base.name} is damaged",
    ]
    assert place.whole_of[1:] == [more[1].name]


def test_of_a_dump_that_nobody_vouches_for_rows_come_back_where_that_is_asked_for(
    place: Shelf,
) -> None:
    early = replace(strange(9), arrived=NOON)
    late = replace(strange(1), arrived=NOON + timedelta(hours=5))
    untold = replace(strange(3), arrived=None)
    forged = strange(5, signature=f"{KEYS.name}:{'0' * 64}")
    place.dumps = [early, late, untold, forged]
    with pytest.raises(DumpFailed, match="no dump on the remote is known to be of this host"):
        place.back()
    assert place.whole_of == place.rows_of == []
    # In the order of arrival, which no record can claim.
    place.bad = {late.name, untold.name}
    found = place.back(trust_target=True)
    assert found == restore.Recalled(early, Origin.UNKNOWN, "user", (), (), ("FUNCTION f()",))
    assert place.rows_of == [late.name, untold.name, early.name]
    assert place.whole_of == []
    # One that is forged only by its name.
    assert place.back(trust_target=True, name=forged.name).origin is Origin.FORGED
    place.dumps = [forged]
    with pytest.raises(DumpFailed, match="all dumps on the remote are FORGED"):
        place.back(trust_target=True)
    # Those of this host come first.
    place.dumps = [ours(2), late, early]
    assert place.back(trust_target=True).origin is Origin.OURS


def test_a_dump_that_was_asked_for_and_does_not_come_back_is_named(place: Shelf) -> None:
    place.dumps = [ours(1), ours(2)]
    place.bad = {ours(2).name}
    with pytest.raises(DumpFailed, match=f"the dump {ours(2).name} is damaged") as caught:
        place.back(name=ours(2).name)
    assert caught.value.detail == f"there are {ours(1).name}, {ours(2).name}"
    with pytest.raises(DumpFailed, match="there is no dump none on the remote"):
        place.back(name="none")
    place.dumps = []
    with pytest.raises(DumpFailed) as caught:
        place.back(name="none")
    assert caught.value.detail == "there are none"


def test_nothing_is_restored_into_a_database_that_has_something(place: Shelf) -> None:
    place.empty, place.dumps = False, [ours(1)]
    with pytest.raises(DumpFailed, match="is not empty") as caught:
        place.back()
    assert "create an empty database" in caught.value.hint
    assert place.whole_of == []


# --- what pg_restore says -------------------------------------------------------------------------


class Program:
    """A pg_restore that takes what it is given until it ends."""

    def __init__(self, status: int = 0, said: str = "", *, takes: int = 1 << 30) -> None:
        self.status, self.text, self.takes = status, said, takes
        self.got = b""
        self.waits = 2
        self.killed = self.drained = self.closed = self.ready = False
        self.stderr = self
        self.fds: list[int] = []
        self.stdin_fd = -1

    def wait(self, _: float) -> int | None:
        self.waits -= 1
        return None if self.waits > 0 else self.status

    def wait_for(self, *, writing: list[int], **_: object) -> None:
        self.ready = True

    def write(self, _: int, data: memoryview) -> int:
        assert self.ready  # Else it would be asked again and again.
        self.ready = False
        if len(self.got) >= self.takes:
            raise BrokenPipeError
        self.got += data[:1000]
        return min(len(data), 1000)

    def drain_stderr(self) -> None:
        self.drained = True

    def close_stdin(self) -> None:
        self.closed = True

    def kill(self) -> None:
        self.killed = True


def pour(
    monkeypatch: pytest.MonkeyPatch, program: Program, *, damaged: bool = False, made: str = "16.4"
) -> None:
    monkeypatch.setattr(restore, "start", lambda *_, **__: program)
    monkeypatch.setattr(restore, "wait_for", program.wait_for)
    monkeypatch.setattr(restore, "write", program.write)
    of_program = replace(RECORD, program=made)
    text = Text(bad=damaged)
    pieces = restore._or_damaged(text, iter(text))  # type: ignore[arg-type]
    try:
        restore._pour(pieces, Path("pg_restore"), of_program, "dbname=c", {})
    finally:
        assert program.killed


def test_the_end_of_a_dump_is_held_back_until_it_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program()
    pour(monkeypatch, program)
    assert (program.got, program.closed, program.drained) == (CONTENT, True, True)
    program = Program()
    with pytest.raises(DumpDamaged):
        pour(monkeypatch, program, damaged=True)
    assert CONTENT.startswith(program.got)
    assert len(program.got) == len(CONTENT) - restore._HELD
    assert not program.closed


@pytest.mark.parametrize(
    ("said", "made", "message", "hint"),
    [
        ("unsupported version (1.16)", "18.1", "too old for this dump", "postgresql-client-18,"),
        ("unsupported version (1.16)", "", "too old for this dump", "postgresql-client-N,"),
        ("permission denied for x", "16.4", "pg_restore failed", "--allow-superuser"),
        ("must be superuser", "16.4", "pg_restore failed", "--allow-superuser"),
        ("disk full", "16.4", "pg_restore failed", "has to be as new as the server"),
        (
            'unrecognized configuration parameter "transaction_timeout"',
            "18.1",
            "too new for this server",
            "programs of the server's version",
        ),
    ],
)
def test_what_pg_restore_stumbles_over_is_told_at_the_end(
    monkeypatch: pytest.MonkeyPatch, said: str, made: str, message: str, hint: str
) -> None:
    for takes in (0, 1 << 30):
        program = Program(1, f"{said}\nmore", takes=takes)
        with pytest.raises(DumpFailed, match=message) as caught:
            pour(monkeypatch, program, made=made)
        assert f"{said}; more" in caught.value.detail
        assert hint in caught.value.hint
    # What it stumbled over may be damage.
    with pytest.raises(DumpDamaged):
        pour(monkeypatch, Program(1, said, takes=0), damaged=True, made=made)


def test_what_says_nothing_is_told_by_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DumpFailed) as caught:
        pour(monkeypatch, Program(3))
    assert caught.value.detail == "status 3"


# --- rows of a dump that nobody vouches for -------------------------------------------------------


class Tables:
    """The tables that init-db makes, and the rows that they got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.columns = {
            ("public", "blobs"): frozenset({"blobid", "size", "remote_copied"}),
            ("ntt_backup", "runs"): frozenset({"run_id", "host"}),
            ("ntt_backup", "blobs"): frozenset({"n"}),
        }
        self.targets: list[str] = []
        self.got: dict[tuple[str, str], list[bytes]] = {}
        self.refuses = False
        monkeypatch.setattr(restore, "new_tables", self._new)

    @contextmanager
    def _new(self, url: str, application: str, targets: Any) -> Iterator[Tables]:
        self.targets = list(targets)
        yield self

    def copy(self, table: tuple[str, str], columns: Any, encoding: str, rows: Any) -> None:
        if self.refuses:
            raise CatalogRefused("a row does not fit")
        assert encoding == "LATIN1"
        self.got[table] = [",".join(columns).encode(), *rows]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    return Tables(monkeypatch)


def rows_of(*entries: bytes, blocks: bytes = b"") -> list[str]:
    data = archive(*entries) + blocks
    return restore_rows(data, [data], "dbname=c", "test", "remote")


def data_of(number: int, name: str, copy: str, schema: str = "public") -> bytes:
    return entry(number, "TABLE DATA", name, copy=copy, schema=schema)


ENCODING = entry(1, "ENCODING", "ENCODING", definition="SET client_encoding = 'LATIN1';\n")
BLOBS = data_of(5, "blobs", OF_BLOBS)
BLOB_ROWS = block(5, b"aa\t1\tt\tf\tx\n\\N\t2\tt\tf\tx\nbb\t\\N\tt\tf\tx\n\\.\n\n\n")


def test_only_rows_of_our_tables_come_back_and_what_is_lost_is_named(tables: Tables) -> None:
    runs = data_of(6, "runs", "COPY ntt_backup.runs (host, run_id) FROM stdin;\n", "ntt_backup")
    own = data_of(7, "blobs", "COPY ntt_backup.blobs (n) FROM stdin;\n", "ntt_backup")
    other = data_of(8, "runs", "COPY public.runs (run_id) FROM stdin;\n")
    gone = data_of(9, "gone", "COPY ntt_backup.gone (n) FROM stdin;\n", "ntt_backup")
    lost = rows_of(
        ENCODING,
        entry(2, "TABLE", "blobs"),
        entry(2, "TABLE", "runs"),
        entry(3, "SCHEMA", "ntt_backup", schema=None),
        entry(3, "SCHEMA", "evil", schema=None),
        entry(4, "TABLE", "runs", schema="ntt_backup"),
        entry(4, "FUNCTION", "f()", schema="ntt_backup"),
        entry(4, "FUNCTION", "blobs"),
        *(entry(4, kind, kind) for kind in ("STDSTRINGS", "SEARCHPATH", "DATABASE")),
        *(other, BLOBS, runs, own, gone),
        blocks=BLOB_ROWS
        + block(6, b"alpha\t7\n\\.\n\n\n")
        + block(7, b"3\n\\.\n\n\n")
        + block(8, b"evil\n\\.\n\n\n"),
    )
    assert tables.got == {
        ("public", "blobs"): [b"blobid,size,remote_copied", b"aa\t1\tt\n", b"bb\t\\N\tt\n"],
        ("ntt_backup", "runs"): [b"host,run_id", b"alpha\t7\n"],
        ("ntt_backup", "blobs"): [b"n", b"3\n"],
    }
    assert tables.targets == ["remote", "usb"]
    assert lost == [
        "TABLE public.runs",
        "SCHEMA evil",
        "FUNCTION ntt_backup.f()",
        "FUNCTION public.blobs",
        "TABLE DATA public.runs",
    ]


def test_of_two_tables_the_one_in_public_is_taken(tables: Tables) -> None:
    elsewhere = data_of(4, "blobs", OF_BLOBS.replace("public", "a"), "a")
    rows_of(ENCODING, elsewhere, BLOBS, blocks=block(4, ROWS) + BLOB_ROWS)
    assert len(tables.got["public", "blobs"]) == 3
    # Where there is but one, its schema may be any.
    rows_of(ENCODING, elsewhere, blocks=BLOB_ROWS.replace(b"\5", b"\4", 1))
    assert len(tables.got["public", "blobs"]) == 3
    elsewhere_too = data_of(5, "blobs", OF_BLOBS.replace("public", "b"), "b")
    with pytest.raises(DumpDamaged, match="has no table blobs, or several"):
        rows_of(ENCODING, elsewhere, elsewhere_too, blocks=BLOB_ROWS)


@pytest.mark.parametrize(
    ("columns", "row", "why"),
    [
        ("evil", b"x", "cannot be determined"),
        ("blobid, blobid", b"aa\taa", "cannot be determined"),
        ("blobid, size", b"aa", "another number of columns"),
        ("blobid, size", b"aa\t1\t2", "another number of columns"),
        ("blobid, (size)", b"aa\t1", "cannot be determined"),
    ],
)
def test_rows_that_are_not_those_of_their_table_are_damage(
    tables: Tables, columns: str, row: bytes, why: str
) -> None:
    one = data_of(5, "blobs", f"COPY public.blobs ({columns}) FROM stdin;\n")
    with pytest.raises(DumpDamaged, match=why):
        rows_of(ENCODING, one, blocks=block(5, row + b"\n\\.\n\n\n"))


def test_what_cannot_be_read_or_does_not_fit_is_damage(tables: Tables) -> None:
    with pytest.raises(DumpDamaged, match="no dump of pg_dump"):
        restore_rows(b"nonsense", [b"nonsense"], "dbname=c", "test", "remote")
    with pytest.raises(DumpDamaged, match="has no table blobs, or several"):
        rows_of(ENCODING)
    with pytest.raises(DumpDamaged, match="has no rows in it"):
        rows_of(ENCODING, BLOBS)
    tables.refuses = True
    with pytest.raises(DumpDamaged, match="a row does not fit"):
        rows_of(ENCODING, BLOBS, blocks=BLOB_ROWS)


def test_a_dump_names_no_more_than_twenty_targets(tables: Tables) -> None:
    names = ", ".join(f"t{n}_copied" for n in range(30))
    one = data_of(5, "blobs", f"COPY public.blobs (blobid, {names}) FROM stdin;\n")
    row = b"\t".join([b"aa", *[b"t"] * 30]) + b"\n\\.\n\n\n"
    rows_of(ENCODING, one, blocks=block(5, row))
    assert tables.targets == ["remote", *(f"t{n}" for n in range(20))]
