"""What init-db plans: each step that is missing, whose it is, and whether a run needs it."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql

from ntt_backup.catalog import privileges, schema_plan
from ntt_backup.catalog.pending import Index
from ntt_backup.catalog.privileges import Lack
from ntt_backup.catalog.schema_check import (
    LATER_TABLES,
    OWN_TABLES,
    SCHEMA_VERSION,
    Column,
    Table,
)
from ntt_backup.catalog.schema_plan import make_plan
from ntt_backup.catalog.schema_steps import Step, Who
from ntt_backup.errors import CatalogRefused

DBA, OWNER, OPERATOR = Who
TYPES = {
    "blobid": "text",
    "size": "bigint",
    "remote_copied": "boolean",
    "remote_last_checked": "timestamp with time zone",
    "remote_copy_failed": "boolean",
    "created_at": "timestamp with time zone",
}
FIRST, SECOND = "idx_blobs_remote_pending", "idx_blobs_remote_pending_ntt"


class World:
    """A catalog that lacks nothing, as system catalogs tell of it, until a test changes that.

    acts: who may act as whom. lacks: privileges by role and command.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.schema = "public"
        self.search_path = "$user, public"
        self.around: dict[str, Any] = {
            "database": "copyjob",
            "database_owner": "boss",
            "own_owner": "boss",
            "version_readable": True,
            "new_schema": "public",
            "may_create_table": True,
            "user": "op",
        }
        self.table: Table | None = self.a_table()
        self.version = (SCHEMA_VERSION, "public")
        self.own = OWN_TABLES
        self.indexes = [Index(FIRST, True, "uncopied_is_false")]
        self.rows = 0
        self.trigger = (True, True, True)
        self.may_make = {"op": (True, True, True)}
        self.finds = {"op"}
        self.acts = {("op", "op"), ("app", "app"), ("boss", "boss")}
        self.lacks: dict[tuple[str, str], list[Lack]] = {}
        self.unread: list[tuple[str, str]] = []
        self.absent: list[str] = []
        self.foreign: list[tuple[str, bool]] = []
        self.code: list[str] = []
        self.checked: list[str] = []
        for name, told in (
            ("statement", lambda name, role=None, **_: (name, role)),
            ("find_table", lambda _: self.table),
            ("check_table", lambda *_: self.checked.append("table")),
            ("check_one_table", lambda _: self.checked.append("one table")),
            ("own_tables", lambda _: self.own),
            ("own_version", lambda _: self.version),
            ("read_indexes", self._read_indexes),
            ("rows_about", lambda *_: self.rows),
            ("code_of_others", self._code_of_others),
            ("search_path", lambda _, schema, role: f"{role} finds {schema}"),
        ):
            monkeypatch.setattr(schema_plan, name, told)
        monkeypatch.setattr(privileges, "role_sql", lambda role: role)
        monkeypatch.setattr(privileges, "unreadable", lambda *_: self.unread)
        monkeypatch.setattr(privileges, "lacking", self._lacking)

    def a_table(self, **changes: Any) -> Table:
        collation = sql.Identifier("")
        columns = {name: Column(kind, True, collation, True) for name, kind in TYPES.items()}
        return Table(99, "r", "public", "op", "boss", True, columns)._replace(**changes)

    def without(self, *names: str) -> None:
        assert self.table is not None
        columns = {name: one for name, one in self.table.columns.items() if name not in names}
        self.table = self.table._replace(columns=columns)

    def _read_indexes(self, _: object, target: str, table: int) -> list[Index]:
        assert (target, table) == ("remote", self.table.oid if self.table else 0)
        return self.indexes

    def _code_of_others(self, _: object, *, blobs: bool) -> list[str]:
        assert not blobs
        return self.code

    def _lacking(
        self, _: object, target: str, commands: Any, *, role: str, table: int
    ) -> list[Lack]:
        assert table == (self.table.oid if self.table else 0)
        return [one for command in commands for one in self.lacks.get((role, command), [])]

    def execute(self, query: tuple[str, str], values: Any = None) -> World:
        name, role = query
        if name == "surroundings":
            assert values == {"schema": self.schema}
        self._rows: list[Any] = {
            "absent_roles": [(one,) for one in self.absent],
            "surroundings": [tuple(self.around.values())],
            "code_of_others": self.foreign,
            "may_make": [self.may_make.get(role, (False, True, True))],
            "names_schema": [(role in self.finds,)],
            "acts_as": [((role, (values or {}).get("other")) in self.acts,)],
            "trigger_state": [self.trigger],
        }[name]
        return self

    def fetchall(self) -> list[Any]:
        return self._rows

    def __iter__(self) -> Any:
        return iter(self._rows)

    def plan(self, **how: Any) -> list[Step]:
        conn: Any = self
        return list(make_plan(conn, "remote", **how).steps)

    def brief(self, **how: Any) -> list[tuple[Who, str, bool]]:
        return [(one.who, one.text, one.needed) for one in self.plan(**how)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_where_nothing_is_missing_there_is_nothing_to_do(world: World) -> None:
    assert world.plan(notify=True) == []
    assert world.checked == ["table", "one table"]


def test_a_catalog_is_made_by_whoever_may(world: World) -> None:
    world.table, world.own, world.indexes = None, frozenset(), []
    world.around["own_owner"], world.version = None, (0, "")
    world.lacks["op", "run"] = [Lack("select", "blobs"), Lack("insert", "ntt_backup.runs")]
    own, table, index = world.plan()
    for step in (own, table, index):
        assert (step.who, step.needed, step.by_hand) == (OPERATOR, True, False)
    assert own.text == "make the schema ntt_backup and its tables"
    guard = own.statements[0]
    assert guard.startswith("do ")
    assert own.statements[1].startswith("create schema if not exists ntt_backup")
    assert own.statements[2] == guard
    assert "create table if not exists ntt_backup.failures" in own.statements[3]
    assert len(own.statements) == 5
    assert table.text.startswith("make a new, empty table public.blobs in copyjob (where")
    assert index.text == f"build the index {FIRST}"
    assert [one.unhurried for one in (own, table, index)] == [False, False, True]
    assert world.checked == []
    # By a role that may make nothing.
    world.may_make["op"], world.around["may_create_table"] = (False, True, True), False
    own, table, index, grants, of_tables = world.plan()
    assert [own.who, table.who, index.who] == [DBA, OWNER, OWNER]
    assert {grants.who, of_tables.who} == {OWNER, DBA}
    # For another role than that of the session, which makes no table.
    world.around["may_create_table"] = True
    world.finds.add("other")
    own, table, index = world.plan(role="other")
    assert [own.who, table.who, index.who] == [DBA, OWNER, OWNER]


def test_whose_a_step_is_goes_by_who_owns_what_it_is_about(world: World) -> None:
    world.without("size")
    for owner, acts, who in (
        ("op", None, OPERATOR),
        ("app", None, OWNER),
        ("app", ("op", "app"), OPERATOR),
    ):
        assert world.table is not None
        world.table = world.table._replace(owner=owner)
        world.acts |= {acts} if acts else set()
        ((said, text, needed),) = world.brief()
        assert (said, text, needed) == (who, "add to blobs: size", True)
    world.own = OWN_TABLES - {"runs"}
    for acts, who in ((None, DBA), (("app", "boss"), OWNER), (("op", "boss"), OPERATOR)):
        world.acts |= {acts} if acts else set()
        assert world.brief()[0] == (who, "make the schema ntt_backup and its tables", True)


def test_what_came_later_is_no_need_of_a_run(world: World) -> None:
    world.own = OWN_TABLES - {"packs", "hours"}
    assert world.brief() == [(DBA, "add to ntt_backup hours, packs", False)]
    (step,) = world.plan()
    assert not any(one.startswith("create schema") for one in step.statements)
    world.own = OWN_TABLES - LATER_TABLES
    assert [one.needed for one in world.plan()] == [False]
    world.version = (SCHEMA_VERSION - 1, "public")
    assert world.brief() == [(DBA, "make the schema ntt_backup and its tables", True)]
    world.own = OWN_TABLES
    assert world.brief() == [(DBA, "make the schema ntt_backup and its tables", True)]
    world.version = (SCHEMA_VERSION, "elsewhere")
    noted = "note that the table blobs is in the schema public now"
    assert world.brief() == [(DBA, noted, False)]
    assert len(world.plan()[0].statements) == 2
    # Whoever may not read the version is told of nothing but the privilege.
    world.around["version_readable"] = False
    assert world.plan() == []


def test_columns_are_added_at_once_and_only_a_new_date_has_a_default(world: World) -> None:
    world.without("size", "remote_copied")
    ((_, _, statements, *_),) = world.plan()
    added = (
        'add column if not exists "size" bigint, add column if not exists "remote_copied" boolean'
    )
    assert statements == (f'alter table "public"."blobs" {added};',)
    assert "default" not in statements[0]
    world.without("created_at")
    ((_, text, statements, *_),) = world.plan()
    assert text == "add to blobs: size, remote_copied, created_at"
    assert "alter column created_at set default now()" in statements[0]


FIT, UNFIT = "uncopied_is_false", None


@pytest.mark.parametrize(
    ("indexes", "built", "dropped", "replaces"),
    [
        ([], FIRST, [], False),
        ([Index("theirs", True, UNFIT)], FIRST, [], False),
        ([Index("theirs", False, FIT)], FIRST, [], False),
        ([Index(FIRST, False, FIT)], FIRST, [], True),
        ([Index(FIRST, False, FIT), Index(SECOND, False, FIT)], FIRST, [SECOND], True),
        ([Index(FIRST, True, UNFIT)], SECOND, [], False),
        ([Index(FIRST, True, UNFIT), Index(SECOND, False, FIT)], SECOND, [], True),
    ],
)
def test_one_index_is_built_beside_those_of_others(
    world: World, indexes: list[Index], built: str, dropped: list[str], replaces: bool
) -> None:
    world.indexes = indexes
    (step,) = world.plan()
    more = ", in place of an unfinished one" * replaces
    assert (step.text, step.unhurried, step.by_hand) == (
        f"build the index {built}{more}",
        True,
        False,
    )
    *drops, unfinished, create = step.statements
    assert [one for one in (FIRST, SECOND) if any(f'"{one}"' in drop for drop in drops)] == dropped
    assert len(drops) == len(dropped)
    assert unfinished.endswith(schema_plan.GENERATES)
    assert f'"{built}"' in create


def test_an_index_that_serves_is_used_and_names_that_are_taken_are_told(world: World) -> None:
    world.indexes = [Index("theirs", True, FIT), Index(FIRST, True, UNFIT)]
    assert world.plan() == []
    world.indexes = [Index(FIRST, True, UNFIT), Index(SECOND, True, UNFIT)]
    with pytest.raises(CatalogRefused, match="names of our index are taken") as caught:
        world.plan()
    assert SECOND in caught.value.hint


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (999_999, ""),
        (1_000_000, " over about 1,000,000 rows, which takes about 5.0 s"),
        (42_000_000, " over about 42,000,000 rows, which takes about "),
    ],
)
def test_what_takes_long_is_told(world: World, rows: int, said: str) -> None:
    world.indexes, world.rows = [], rows
    (step,) = world.plan()
    assert step.text.startswith(f"build the index {FIRST}{said}")
    assert bool(said) == ("takes" in step.text)


def test_an_index_of_a_partitioned_table_is_made_by_hand(world: World) -> None:
    world.table, world.indexes = world.a_table(kind="p"), []
    (step,) = world.plan()
    assert (step.who, step.unhurried, step.by_hand) == (OPERATOR, True, True)
    assert "who writes waits until it is built" in step.text


def test_a_table_that_the_search_path_does_not_find_is_left_to_a_person(world: World) -> None:
    world.table = world.a_table(found=False)
    world.without("size")
    world.finds = set()
    column, finds = world.plan()
    assert [column.by_hand, finds.by_hand] == [True, True]
    assert (finds.who, finds.text) == (DBA, "have op find blobs in public")
    assert finds.statements == ("op finds public",)
    assert world.checked == []
    world.finds = {"op"}
    assert [one.text for one in world.plan()] == ["add to blobs: size"]


def test_a_role_gets_to_the_table(world: World) -> None:
    world.may_make["other"] = (False, False, False)
    connect, use, finds = world.plan(role="other")
    assert [(one.who, one.text) for one in (connect, use, finds)] == [
        (DBA, "let other connect"),
        (DBA, "let other use the schema public"),
        (DBA, "have other find blobs in public"),
    ]
    assert connect.statements == ('grant connect on database "copyjob" to "other";',)
    assert use.statements == ('grant usage on schema "public" to "other";',)
    world.acts.add(("other", "boss"))
    assert [one.who for one in world.plan(role="other")] == [OPERATOR, OPERATOR, DBA]


def test_privileges_are_granted_by_whoever_owns_and_needed_where_a_run_lacks_them(
    world: World,
) -> None:
    world.table = world.a_table(owner="app")
    world.lacks["op", "run"] = [Lack("update", "blobs", ("size", "remote_copied"))]
    world.lacks["op", "scan"] = [Lack("insert", "blobs"), Lack("temporary", "the database")]
    world.lacks["op", "status"] = [Lack("select", "ntt_backup.hours"), Lack("select", "blobs")]
    of_table, of_others = world.plan()
    assert (of_table.who, of_table.text, of_table.needed) == (OWNER, "let op back up", True)
    (grant,) = of_table.statements
    assert grant.endswith(' on "public"."blobs" to "op";')
    for verb in ('update ("size", "remote_copied")', "insert", "select"):
        assert verb in grant
    assert (of_others.who, of_others.needed) == (DBA, False)
    assert of_others.statements == (
        'grant select on ntt_backup.hours to "op";',
        'grant temporary on database "copyjob" to "op";',
    )
    world.lacks["op", "run"] = []
    assert [one.needed for one in world.plan()] == [False, False]


def test_a_table_that_pg_dump_may_not_lock_is_granted_whole(world: World) -> None:
    world.table = world.a_table(owner="app")
    world.unread = [("public", "blobs"), ("public", "other"), ("b", "blobs"), ("a", "t")]
    world.unread += [("ntt_backup", "runs")]
    grant, rest = world.plan()
    assert grant.statements == ('grant select on "public"."blobs" to "op";',)
    assert (rest.who, rest.needed) == (DBA, False)
    assert rest.text == "let op dump all tables of today (pg_read_all_data: later ones, too)"
    schemas = [next(s for s in ("a", "b", "public") if f'"{s}"' in one) for one in rest.statements]
    assert schemas == ["a", "b", "public"]
    # Whoever looks at figures dumps nothing.
    world.unread = [("public", "blobs")]
    world.finds.add("eye")
    assert world.brief(monitors=["eye"]) == [(OWNER, "let op back up", False)]


def test_monitors_get_what_they_look_at(world: World) -> None:
    world.finds |= {"eye", "other"}
    world.lacks["eye", "status"] = [Lack("select", "blobs", ("size",))]
    world.lacks["eye", "run"] = [Lack("update", "blobs", ("size",))]
    for how in ({}, {"role": "op"}, {"role": "other"}):
        (step,) = world.plan(monitors=["eye"], **how)
        assert (step.text, step.needed) == ("let eye look at figures", False)
        assert step.statements == ('grant select on "public"."blobs" to "eye";',)
    world.absent = ["eye"]
    with pytest.raises(CatalogRefused, match="the server has no role eye"):
        world.plan(monitors=["eye"])


def test_the_trigger_is_made_once_there_is_its_function(world: World) -> None:
    world.trigger = (False, True, True)
    assert world.brief() == []
    (once,) = world.plan(notify=True)
    assert (once.who, once.by_hand) == (OPERATOR, False)
    assert once.text == "have inserts into blobs wake a watching daemon"
    assert once.statements[0].endswith(schema_plan.GENERATES)
    # The function is another's to make, so it is too early for the trigger.
    world.trigger = (False, False, True)
    function, once = world.plan(notify=True)
    assert (function.who, function.text) == (
        DBA,
        "make the function that wakes a watching daemon",
    )
    assert function.statements[0].startswith("do ")
    assert len(function.statements) == 2
    assert once.by_hand
    world.acts.add(("op", "boss"))
    function, once = world.plan(notify=True)
    assert (function.who, once.by_hand) == (OPERATOR, False)
    # The owner of the table needs to get to it, and may add what we may not.
    world.table = world.a_table(owner="app")
    world.lacks["app", "check"] = [Lack("usage", "schema ntt_backup")]
    world.trigger = (False, True, False)
    function, once = world.plan(notify=True)
    assert function.statements[1:] == ('grant usage on schema ntt_backup to "app";',)
    assert once.who is OWNER
    world.trigger = (False, True, True)
    assert world.plan(notify=True)[-1].who is OPERATOR
    world.finds.add("other")
    assert world.plan(notify=True, role="other")[-1].who is OWNER


def test_what_others_have_in_our_schema_is_not_read(world: World) -> None:
    world.code = ["a function"]
    world.version = (SCHEMA_VERSION, "elsewhere")
    assert world.plan() == []
    assert world.checked == ["table"]
    world.foreign = [("theirs", False)]
    assert world.plan() == []
    world.foreign = [("ours", True), ("theirs", False)]
    with pytest.raises(CatalogRefused, match="can put code into") as caught:
        world.plan()
    assert caught.value.detail == "ours"


def test_a_plan_names_who_runs_it(world: World) -> None:
    conn: Any = world
    assert make_plan(conn, "remote").names == {DBA: "a superuser, or boss", OWNER: "op"} | {
        OPERATOR: "op"
    }
    world.table, world.around["own_owner"] = None, None
    world.around["may_create_table"] = False
    assert make_plan(conn, "remote").names[OWNER] == "who may make tables in public"
