"""What is wrong with a catalog's table is refused, one problem at a time; what is odd is told."""

from __future__ import annotations

from typing import Any

import pytest

from ntt_backup.catalog import privileges, schema_check
from ntt_backup.catalog.pending import Index
from ntt_backup.catalog.privileges import Lack
from ntt_backup.catalog.schema_check import (
    LATER_TABLES,
    OWN_TABLES,
    SCHEMA_VERSION,
    existing_table,
    find_table,
    verify_schema,
)
from ntt_backup.errors import CatalogRefused

TYPES = {
    "blobid": "text",
    "size": "bigint",
    "remote_copied": "boolean",
    "remote_last_checked": "timestamp with time zone",
    "remote_copy_failed": "boolean",
}
LARGEST = 2**63 - 1


class World:
    """A catalog in order, as the server tells of it, until a test changes that. columns: types;
    rows: what other statements give, by name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.info = type("Info", (), {"user": "op"})
        self.tables = [(99, "r", "public", "op", "boss", True)]
        self.columns = dict(TYPES)
        self.not_null = self.same_bytes = True
        self.own = OWN_TABLES
        self.indexes = [Index("i", True, "uncopied_is_false")]
        self.lacks: list[Lack] = []
        self.checked: list[str] = []
        self.rows: dict[str, Any] = {
            "schema_version": [(SCHEMA_VERSION, "public")],
            "blobid_unique": [(True,)],
            "row_security": [(False,)],
            "largest_size": [(LARGEST,)],
            "bounds_ascend": [(True,)],
            "tables_elsewhere": [],
        }
        for module, name, told in (
            (schema_check, "statement", lambda name, **_: name),
            (schema_check, "read_indexes", lambda *_: self.indexes),
            (schema_check, "check_one_table", lambda _: self.checked.append("one table")),
            (schema_check, "search_path", lambda _, schema: f"find {schema}"),
            (privileges, "lacking", lambda *_: self.lacks),
            (privileges, "require_writing", lambda _: self.checked.append("writes")),
        ):
            monkeypatch.setattr(module, name, told)

    def execute(self, name: str, values: Any = None) -> Any:
        found = dict(self.rows)
        found["find_tables"] = self.tables
        found["own_tables"] = [(one,) for one in self.own]
        if name == "table_columns":
            assert values == {"table": 99}
            found[name] = [
                (column, kind, self.not_null, None, None, self.same_bytes)
                for column, kind in self.columns.items()
            ]
        return Rows(found[name])

    def verify(self, command: str = "run") -> list[str]:
        conn: Any = self
        return verify_schema(conn, "remote", command)


class Rows(list[Any]):
    def fetchall(self) -> list[Any]:
        return self


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_catalog_in_order_is_told_of_nothing(world: World) -> None:
    conn: Any = world
    assert world.verify() == []
    assert world.checked == ["writes", "one table"]
    world.checked.clear()
    assert world.verify("failed") == []
    assert world.checked == ["one table"]
    table = find_table(conn)
    assert table is not None
    assert table[:6] == (99, "r", "public", "op", "boss", True)
    assert table.columns.keys() == TYPES.keys()
    world.tables = []
    assert find_table(conn) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tables": []}, "the catalog has no table blobs"),
        ({"tables": [(99, "r", "b", "op", "boss", False)]}, "the catalog has no table blobs"),
        ({"tables": [(n, "r", "b", "op", "boss", False) for n in (99, 98)]}, "there are several"),
        ({"tables": [(99, "v", "public", "op", "boss", True)]}, "blobs is a view, not a table"),
        ({"tables": [(99, "?", "public", "op", "boss", True)]}, "blobs is something else, not a"),
        ({"columns": {**TYPES, "blobid": "bytea"}}, "blobid is of type bytea"),
        ({"columns": {"size": "bigint"}}, "has no column blobid"),
        ({"columns": {**TYPES, "size": "text"}}, "blobs.size is of type text"),
        ({"columns": {**TYPES, "remote_copied": "text"}}, "blobs.remote_copied is of type text"),
        ({"columns": {"blobid": "text", "size": "bigint"}}, "the table blobs lacks remote_copied"),
        ({"same_bytes": False}, "collation of blobs.blobid does not suit"),
        ({"own": OWN_TABLES - {"runs", "marks"}}, "the schema ntt_backup lacks marks, runs"),
        ({"indexes": []}, "has no usable index"),
        ({"indexes": [Index("i", True, None)]}, "has no usable index"),
        ({"indexes": [Index("i", False, "uncopied_is_false")]}, "has no usable index"),
        ({"lacks": [Lack("update", "blobs", ("size",))]}, "op may not do what `run` does"),
    ],
    ids=lambda one: one if isinstance(one, str) else "catalog",
)
def test_what_is_wrong_is_refused(world: World, changes: dict[str, Any], said: str) -> None:
    for name, value in changes.items():
        setattr(world, name, value)
    with pytest.raises(CatalogRefused, match=said):
        world.verify()


def test_what_stands_in_the_way_is_told_with_what_mends_it(world: World) -> None:
    world.rows["bounds_ascend"] = [(False,)]
    with pytest.raises(CatalogRefused, match="does not suit hex digits"):
        world.verify()
    world.rows["bounds_ascend"] = [(True,)]
    for version, said in (
        (SCHEMA_VERSION - 1, "of the old version"),
        (SCHEMA_VERSION + 1, "knows"),
    ):
        world.rows["schema_version"] = [(version, "public")]
        with pytest.raises(CatalogRefused, match=said):
            world.verify()
    world.rows["schema_version"] = []
    with pytest.raises(CatalogRefused, match="of the old version 0"):
        world.verify()
    world.tables = [(99, "v", "public", "op", "boss", True)]
    for elsewhere, hint in (([("app",)], "find app"), ([], "must name the database")):
        world.rows["tables_elsewhere"] = elsewhere
        with pytest.raises(CatalogRefused) as caught:
            world.verify()
        assert hint in caught.value.hint


def test_an_index_that_is_unfinished_is_told_as_such(world: World) -> None:
    good, bad = Index("a", True, None), Index("b", False, "uncopied_is_false")
    for indexes, detail in (([good], ""), ([good, bad], "one is unfinished"), ([], "")):
        world.indexes = indexes
        with pytest.raises(CatalogRefused, match="no usable index") as caught:
            world.verify()
        assert caught.value.detail == detail
    world.indexes = [bad, good, Index("c", True, "uncopied_is_false")]
    assert world.verify() == []


def test_a_command_needs_the_tables_that_it_uses(world: World) -> None:
    world.own = OWN_TABLES - LATER_TABLES
    assert world.verify() == []
    with pytest.raises(CatalogRefused, match="lacks packs"):
        world.verify(privileges.of("run", bucket=True))


@pytest.mark.parametrize("kind", ["bigint", "integer", "smallint", "numeric"])
def test_sizes_may_be_of_any_number(world: World, kind: str) -> None:
    world.columns |= {"size": kind, "remote_last_checked": "timestamp without time zone"}
    world.columns["blobid"] = "character varying"
    assert world.verify() == []


def test_what_is_odd_is_told(world: World) -> None:
    conn: Any = world
    world.rows |= {"blobid_unique": [(False,)], "row_security": [(True,)]}
    world.rows["largest_size"] = [(LARGEST - 1,)]
    world.not_null = False
    said = world.verify()
    begins = ("blobs.blobid has no unique index", "blobs.blobid may be NULL", "row-level security")
    assert [one.startswith(begin) for one, begin in zip(said, begins, strict=False)] == [True] * 3
    assert said[3].startswith(f"blobs.size is of type bigint and holds no more than {LARGEST - 1};")
    assert len(said) == 4
    assert existing_table(conn, "remote").found
