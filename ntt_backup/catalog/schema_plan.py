"""One look at everything that init-db makes: what is missing, and who may make it.

Who backs up need not own the table, and who owns the table need not be allowed to make a schema. To
try, and to show the first statement that is refused, takes each of them a round. So all is looked
at first, in the system catalogs alone, which everybody may read. Nothing is asked for that is
there, or that a role may do already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from psycopg import sql

from ntt_backup.catalog import dump_history, privileges
from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.found_schema import (
    add_columns,
    choose_index,
    find_table,
    rows_and_time,
    surroundings,
    trigger_state,
)
from ntt_backup.catalog.pending import columns
from ntt_backup.catalog.queries import fragment, shown, statement
from ntt_backup.catalog.schema_check import (
    CREATE_OWN,
    OWN_TABLES,
    SCHEMA_VERSION,
    check_table,
    check_version,
    own_tables,
    read_table,
)
from ntt_backup.catalog.schema_scripts import Missing, Part, Who


def look(
    conn: Connection,
    target: str,
    *,
    role: str | None = None,
    monitors: Iterable[str] = (),
    notify: bool = False,
) -> Missing:
    """All that is missing for the role (None: that of this session) to back up, and for others to
    look at figures. Raises CatalogRefused for what adding cannot mend.
    """
    with translated(conn, "show what it lacks"):
        return _Look(conn, target, role).everything(list(monitors), notify)


class _Look:
    def __init__(self, conn: Connection, target: str, role: str | None) -> None:
        self._conn = conn
        self._target = target
        self._around = surroundings(conn)
        self._role = role or self._around.user
        self._table = find_table(conn)
        self._owner: str | None = None
        if self._table is not None:
            self._owner = self._table.owner
        elif self._around.may_create_table and self._role == self._around.user:
            self._owner = self._role
        self._own_maker = self._who_makes_own()
        self._name = sql.Identifier(self._schema, "blobs")
        self._own_parts = self._own_schema()

    @property
    def _schema(self) -> str:
        return self._table.schema if self._table else self._around.new_schema

    def everything(self, monitors: list[str], notify: bool) -> Missing:
        visible = read_table(self._conn)
        if visible is not None:
            check_table(self._conn, visible, self._target)
        parts = [
            *self._own_parts,
            *self._columns(),
            *self._index(),
            *self._reach(self._role),
            *self._grants(self._role, tuple(privileges.NEEDS), "back up", dump_too=True),
        ]
        for name in monitors:
            parts += [
                *self._reach(name),
                *self._grants(name, privileges.MONITORING, "look at figures"),
            ]
        if notify:
            parts += self._trigger()
        parts += self._rest_of_dump()
        around = self._around
        names = {
            Who.DBA: f"a superuser, or {around.own_owner or around.database_owner}",
            Who.OWNER: self._owner or f"who may make tables in the schema {self._schema}",
            Who.OPERATOR: self._role,
        }
        return Missing(parts, names, around.database)

    # --- what init-db makes -----------------------------------------------------------------------

    def _own_schema(self) -> list[Part]:
        around = self._around
        there = own_tables(self._conn)
        if there >= OWN_TABLES and self._version_fits():
            return []
        noted = {"version": sql.Literal(SCHEMA_VERSION), "schema": sql.Literal(self._schema)}
        statements = [
            *([] if around.own_owner else [shown("create_schema")]),
            *map(shown, CREATE_OWN),
            shown("set_version", **noted),
        ]
        text = "make the schema ntt_backup and its tables"
        return [Part(self._own_maker, text, tuple(statements))]

    def _who_makes_own(self) -> Who:
        if self._around.own_owner is not None:
            return self._who(self._around.own_owner)
        may_create = self._ask("may_make", self._role, schema="pg_catalog")[0]
        return Who.OPERATOR if may_create else Who.DBA

    def _version_fits(self) -> bool:
        """Whoever may not read it is told by the next look, with the privilege."""
        if not self._around.version_readable:
            return True
        return check_version(self._conn, older=True) == SCHEMA_VERSION

    def _columns(self) -> list[Part]:
        if self._table is None:
            create = shown("create_table", table=self._name, **columns(self._target))
            text = f"make the table {self._schema}.blobs, new and empty"
            return [Part(self._who(self._owner), text, (create,))]
        rows = self._conn.execute(statement("column_names"), {"table": self._table.oid})
        change = add_columns(self._target, [name for (name,) in rows])
        if change is None:
            return []
        absent, changes = change
        alter = shown("alter_table", table=self._name, changes=changes)
        statements = (shown("brief_lock"), alter)
        return [Part(self._who(self._owner), f"add to blobs: {', '.join(absent)}", statements)]

    def _index(self) -> list[Part]:
        oid = self._table.oid if self._table else 0
        chosen = choose_index(self._conn, self._target, oid)
        if chosen is None:
            return []
        name, unfinished = chosen
        ours = sql.Identifier(self._schema, name)
        parts = {
            "index": sql.Identifier(name),
            "table": self._name,
            "uncopied": fragment("uncopied_is_false", **columns(self._target)),
        }
        text = f"build the index {name}"
        if self._table and (size := rows_and_time(self._conn, oid)):
            text += f" over {size}"
        if self._table and self._table.partitioned:
            text += "; blobs is partitioned, and who writes waits until it is done"
            statements = [shown("mend_partitioned_index", old=ours, **parts)]
        else:
            literal = sql.Literal(ours.as_string(None))
            statements = [
                shown("unhurried"),
                fragment("drop_unfinished", index=literal).as_string(None),
                shown("create_index", **parts),
            ]
        spare = [
            shown("drop_index", index=sql.Identifier(self._schema, left))
            for left in unfinished
            if left != name
        ]
        return [Part(self._who(self._owner), text, (*spare, *statements))]

    def _trigger(self) -> list[Part]:
        state = trigger_state(self._conn, self._table.oid if self._table else 0)
        if state.there:
            return []
        parts, made = [], []
        if not state.function:
            made.append(shown("create_notify"))
        owner = self._owner
        if owner and any(lack.privilege == "usage" for lack in self._lacking(owner, ("check",))):
            made.append(self._grant(["usage"], sql.SQL("schema ntt_backup"), owner))
        if made:
            text = "make the function that wakes a watching daemon"
            parts.append(Part(self._own_maker, text, tuple(made)))
        create = shown("create_trigger", table=self._name)
        once = fragment(
            "create_trigger_once",
            create=sql.Literal(create.removesuffix(";")),
            table=sql.Literal(self._name.as_string(None)),
        )
        statements = (shown("brief_lock"), once.as_string(None))
        text = "have inserts into blobs wake a watching daemon"
        return [*parts, Part(self._who(owner), text, statements)]

    # --- what others may do with it ---------------------------------------------------------------

    def _reach(self, role: str) -> list[Part]:
        """That the role gets to the table at all."""
        parts = []
        around, table = self._around, self._table
        database = sql.Identifier(around.database)
        _, connects, uses = self._ask("may_make", role, schema=self._schema)
        if not connects:
            grant = self._grant(["connect"], sql.SQL("database {}").format(database), role)
            parts.append(Part(self._who(around.database_owner), f"let {role} connect", (grant,)))
        schema = sql.Identifier(self._schema)
        if not uses:
            grant = self._grant(["usage"], sql.SQL("schema {}").format(schema), role)
            who = self._who(table.schema_owner) if table else Who.DBA
            parts.append(Part(who, f"let {role} use the schema {self._schema}", (grant,)))
        found = table is not None and table.found and role == around.user
        if not (found or self._ask("names_schema", role, schema=self._schema)[0]):
            named = {"user": sql.Identifier(role), "database": database, "schema": schema}
            mend = shown("mend_search_path", **named)
            parts.append(Part(Who.DBA, f"have {role} find blobs in {self._schema}", (mend,)))
        return parts

    def _grants(
        self, role: str, commands: Sequence[str], purpose: str, *, dump_too: bool = False
    ) -> list[Part]:
        """What the commands lack, grouped by what it is on; needed is what `run` lacks."""
        urgent = set(self._lacking(role, ("run",)))
        lacks = self._lacking(role, commands)
        if dump_too and not any(one.on == "blobs" and one.privilege == "select" for one in lacks):
            # By columns it may be read by us, and not be locked by pg_dump.
            unread = dump_history.unreadable(self._conn, role)
            if (self._schema, "blobs") in unread:
                lacks.append(privileges.Lack("select", "blobs"))
        lacks = [one for one in lacks if not (role == self._role and self._will_own(one.on))]
        parts: dict[Who, list[str]] = {}
        needed: dict[Who, bool] = {}
        for on, group in groupby(sorted(lacks, key=lambda one: one.on), lambda one: one.on):
            these = list(group)
            who = self._grantor(on)
            granted = [self._privilege(one) for one in these]
            parts.setdefault(who, []).append(self._grant(granted, self._object(on), role))
            needed[who] = needed.get(who, False) or not urgent.isdisjoint(these)
        return [
            Part(who, f"let {role} {purpose}", tuple(statements), needed[who])
            for who, statements in parts.items()
        ]

    def _rest_of_dump(self) -> list[Part]:
        """What other programs have in the database, for pg_dump."""
        unread = [
            (schema, name)
            for schema, name in dump_history.unreadable(self._conn, self._role)
            if schema != "ntt_backup" and (schema, name) != (self._schema, "blobs")
        ]
        if not unread:
            return []
        role = sql.Identifier(self._role)
        statements = []
        for schema in dict.fromkeys(schema for schema, _ in unread):
            named = sql.Identifier(schema)
            if not self._ask("may_make", self._role, schema=schema)[2]:
                on = sql.SQL("schema {}").format(named)
                statements.append(self._grant(["usage"], on, self._role))
            statements += [
                shown("grant_all_of_schema", kind=sql.SQL(kind), schema=named, role=role)
                for kind in ("tables", "sequences")
            ]
        text = f"let {self._role} dump all tables of today (pg_read_all_data: later ones, too)"
        return [Part(Who.DBA, text, tuple(statements), needed=False)]

    def _lacking(self, role: str, commands: Sequence[str]) -> list[privileges.Lack]:
        oid = self._table.oid if self._table else None
        return privileges.lacking(self._conn, self._target, commands, role=role, table=oid)

    def _privilege(self, lack: privileges.Lack) -> sql.Composable:
        """By columns only what changes them: pg_dump must be able to lock the whole table."""
        verb = sql.SQL(lack.privilege)
        if not lack.columns or lack.privilege == "select":
            return verb
        names = sql.SQL(", ").join(map(sql.Identifier, lack.columns))
        return sql.SQL("{} ({})").format(verb, names)

    def _grantor(self, on: str) -> Who:
        if on == "blobs":
            return self._who(self._owner)
        if on == "the database":
            return self._who(self._around.database_owner)
        return self._own_maker

    def _will_own(self, on: str) -> bool:
        """Whether the role makes it itself: then it may do all with it."""
        if on == "blobs":
            return self._table is None and self._owner == self._role
        return on != "the database" and bool(self._own_parts) and self._own_maker is Who.OPERATOR

    def _object(self, on: str) -> sql.Composable:
        if on == "blobs":
            return self._name
        if on == "the database":
            return sql.SQL("database {}").format(sql.Identifier(self._around.database))
        return sql.SQL(on)

    def _grant(self, privileges: Sequence[object], on: sql.Composable, role: str) -> str:
        words = [sql.SQL(one) if isinstance(one, str) else one for one in privileges]
        parts = {"privileges": sql.SQL(", ").join(words), "object": on}
        return shown("grant", role=sql.Identifier(role), **parts)

    def _who(self, owner: str | None) -> Who:
        """Who may act as the owner of something."""
        if owner is None:
            return Who.OWNER
        if self._acts_as(self._role, owner):
            return Who.OPERATOR
        if self._owner and self._acts_as(self._owner, owner):
            return Who.OWNER
        return Who.DBA

    def _acts_as(self, role: str, other: str) -> bool:
        query = statement("acts_as", role=privileges.named(role))
        return bool(self._conn.execute(query, {"other": other}).fetchall()[0][0])

    def _ask(self, query: str, role: str, **values: object) -> tuple[bool, ...]:
        return self._conn.execute(statement(query, role=privileges.named(role)), values).fetchall()[
            0
        ]
