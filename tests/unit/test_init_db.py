"""init-db waits for its turn and for locks, does what is the operator's, and tells of the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg import errors

from ntt_backup.catalog import privileges, schema
from ntt_backup.catalog.schema_plan import GENERATES
from ntt_backup.catalog.schema_steps import Plan, Step, Who
from ntt_backup.errors import CatalogRefused, CatalogUnavailable

NAMES = {who: f"name of the {who}" for who in Who}


class Rows(list[Any]):
    def fetchall(self) -> list[Any]:
        return self


class Session:
    """Notes what is executed, by name or text. answers: the next rows, or an error, by name."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.did: list[str] = []
        self.closed = False
        self.info = type("Info", (), {"user": "operator"})

    def execute(self, query: str, values: object = None) -> Rows:
        self.did.append(query)
        answer = (self.answers.get(query) or [[]]).pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Rows(answer)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.did.append("begin")
        yield
        self.did.append("commit")


@pytest.fixture
def conn(monkeypatch: pytest.MonkeyPatch) -> Any:
    def configure(conn: Session, setting: str, value: object, *, local: bool = False) -> None:
        conn.did.append(f"set {'local ' * local}{setting} = {value}")

    made = Session()
    monkeypatch.setattr(schema, "configure", configure)
    monkeypatch.setattr(schema, "statement", lambda name: name)
    monkeypatch.setattr(schema, "pasted", lambda _, text: text)
    monkeypatch.setattr(time, "sleep", lambda seconds: made.did.append(f"sleep {seconds}"))
    return made


@pytest.mark.parametrize("others", [0, 1, 3])
def test_another_init_db_is_waited_for_and_told_once(conn: Any, others: int) -> None:
    conn.answers["try_lock"] = [*[[(False,)]] * others, [(True,)]]
    said: list[str] = []
    with schema._one_at_a_time(conn, said.append):
        assert conn.did == ["try_lock", *["sleep 0.5", "try_lock"] * others]
    assert conn.did[-1] == "unlock"
    assert said == ["waiting for another init-db"] * (others > 0)


def test_the_next_init_db_has_its_turn_after_an_error_too(conn: Any) -> None:
    for closed in (False, True):
        conn.did, conn.closed, conn.answers["try_lock"] = [], closed, [[(True,)]]
        with pytest.raises(KeyError), schema._one_at_a_time(conn, print):
            raise KeyError
        assert conn.did == ["try_lock", *["unlock"] * (not closed)]


def step(*statements: str, who: Who = Who.OPERATOR, **more: bool) -> Step:
    return Step(who, f"do {statements[0]}", statements, **more)


def test_a_statement_may_generate_others(conn: Any) -> None:
    conn.answers["b"] = [[("c",), ("d",)]]
    schema._execute(conn, step("a", f"b{GENERATES}", "e"))
    assert conn.did == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("others", [0, 1, 9])
@pytest.mark.parametrize("error", [errors.LockNotAvailable(), errors.DeadlockDetected()])
def test_a_lock_is_asked_for_briefly_and_again(conn: Any, others: int, error: Exception) -> None:
    conn.answers["a"] = [*[error] * others, []]
    conn.answers["lock_holders"] = [[(7, "psql"), (8, "job")], *[[]] * 8]
    said: list[str] = []
    schema._with_brief_lock(conn, step("a"), said.append)
    tried = ["begin", "set local lock_timeout = 1000", "a"]
    assert conn.did == [*[*tried, "lock_holders", "sleep 0.5"] * others, *tried, "commit"]
    held = ["pid 7 (psql), pid 8 (job)", *["nobody any more"] * 8]
    assert said == [f"waiting for a lock on blobs; held by {who}" for who in held[:others]]


@pytest.mark.parametrize(("holders", "held"), [([(7, "psql")], "pid 7 (psql)"), ([], "changing")])
def test_a_lock_that_is_not_to_be_had_is_an_outage(
    conn: Any, holders: list[tuple[int, str]], held: str
) -> None:
    conn.answers = {"a": [errors.LockNotAvailable()] * 99, "lock_holders": [holders] * 99}
    with pytest.raises(CatalogUnavailable, match="is locked by others") as caught:
        schema._with_brief_lock(conn, step("a"), print)
    assert held in caught.value.detail
    assert conn.did.count("a") == schema.LOCK_ATTEMPTS


def test_an_index_is_built_without_limits_unless_another_session_builds_one(conn: Any) -> None:
    schema._build_index(conn, step("a"))
    assert conn.did == ["building", "set lock_timeout = 0", "set statement_timeout = 0", "a"]
    conn.did, conn.answers["building"] = [], [[(7,), (8,)]]
    with pytest.raises(CatalogUnavailable, match="is building an index") as caught:
        schema._build_index(conn, step("a"))
    assert (caught.value.detail, conn.did) == ("pid 7, 8", ["building"])


class World:
    """What init-db finds: a plan before and after its work, and what the role may not do."""

    def __init__(self, conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.conn = conn
        self.plans: list[Sequence[Step]] = []
        self.lacks: dict[str, list[privileges.Lack]] = {}
        self.unread: list[tuple[str, str]] = []
        self.code: list[str] = []
        self.warned: list[str] = []
        self.asked: list[bool] = []
        self.said: list[str] = []
        monkeypatch.setattr(schema, "make_plan", self._plan)
        monkeypatch.setattr(schema, "existing_table", lambda *_: None)
        monkeypatch.setattr(schema, "warnings", lambda *_: self.warned)
        monkeypatch.setattr(schema, "code_of_others", lambda _: self.code)
        monkeypatch.setattr(privileges, "unreadable", lambda _: self.unread)
        monkeypatch.setattr(privileges, "lacking", lambda _, __, of: self.lacks.get(of[0], []))
        monkeypatch.setattr(privileges, "require_writing", lambda conn: conn.did.append("writes"))

    def _plan(self, *_: object, notify: bool) -> Plan:
        self.asked.append(notify)
        return Plan(self.plans.pop(0), NAMES, "copyjob")

    def init_db(self, **how: bool) -> list[str]:
        self.conn.answers["try_lock"] = [[(True,)]]
        return schema.init_db(self.conn, "remote", report=self.said.append, **how)


@pytest.fixture
def world(conn: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(conn, monkeypatch)


def test_what_is_the_operators_is_done_and_told(world: World) -> None:
    optional = step("f", who=Who.DBA, needed=False)
    world.plans = [
        [
            step("a"),
            step("b", who=Who.OWNER),
            step("c", by_hand=True),
            step("d", unhurried=True),
            optional,
        ],
        [optional],
    ]
    world.warned = ["size is narrow"]
    assert world.init_db(notify=True) == []
    assert world.conn.did == [
        *("try_lock", "writes", "begin", "set local lock_timeout = 1000", "a", "commit"),
        *("building", "set lock_timeout = 0", "set statement_timeout = 0", "d", "unlock"),
    ]
    assert world.said == ["do a", "do d", "warning: size is narrow"]
    assert world.asked == [True, True]


def test_what_is_left_for_others_is_a_refusal(world: World) -> None:
    world.plans = [[], [step("b", who=Who.OWNER)]]
    with pytest.raises(CatalogRefused, match="not ready for operator") as caught:
        world.init_db()
    assert caught.value.detail == "missing is: owner (name of the owner): do b"
    assert world.conn.did[-1] == "unlock"
    assert world.asked == [False, False]


def test_what_the_role_may_not_do_yet_is_told_by_command(world: World) -> None:
    world.plans = [[], []]
    world.lacks["run"] = [privileges.Lack("update", "blobs", ("size",))]
    world.unread = [("public", f"t{n}") for n in range(7)]
    world.code = ["a trigger"]
    run, dump = world.init_db()
    assert run.startswith("`run` (it lacks update")
    assert dump.startswith("`dump` (it lacks select")
    assert [f"public.t{n}" in dump for n in range(7)] == [True] * 5 + [False] * 2
    (said,) = world.said
    assert said.startswith("warning: commands that use the tables will refuse operator, which has")
    assert "database: a trigger. Let" in said
