"""init-db: makes the catalog, or adds what we need to a table that another program owns and uses.

First comes a plan: every step that is missing of the catalog, and who may do it.

    dba       a superuser, or who owns the database: our schema, and what others own
    owner     who owns `blobs`: its columns, its index, its privileges
    operator  who backs up: what it may do itself; as a rule nothing

Who backs up need not own the table, and who owns the table need not be allowed to make a schema. So
all is read at first, from the system catalogs alone, which everybody may read. A step is SQL that
`init-db` executes where it is the operator's, and that it prints as a script for psql. The scripts
are run in this order, and each may be run again. Nothing is asked for that exists, or that a role
may do already.

Then `init-db` carries out those steps that are the operator's. On a live table of 42 million rows a
plain ALTER TABLE is an outage: while it waits for its exclusive lock behind one long transaction,
everybody else queues behind it. So locks are asked for briefly and again. What exists is not
touched, so init-db can be repeated, and two at once take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Final, NamedTuple

from psycopg import errors, sql

from ntt_backup.catalog import privileges
from ntt_backup.catalog.connection import (
    Connection,
    check_one_table,
    code_of_others,
    code_parts,
    configure,
    privileged,
    search_path,
    shortened,
    translated,
)
from ntt_backup.catalog.history import last_checks
from ntt_backup.catalog.pending import columns, index_names, read_indexes, rows_about
from ntt_backup.catalog.proofs import RECONCILE, first_contact
from ntt_backup.catalog.range_locks import lock_class
from ntt_backup.catalog.schema_check import (
    LATER_TABLES,
    OWN_TABLES,
    PRINT_SQL,
    SCHEMA_VERSION,
    Table,
    check_table,
    existing_table,
    find_table,
    our_columns,
    own_tables,
    own_version,
    warnings,
)
from ntt_backup.catalog.statements import fragment, pasted, shown
from ntt_backup.errors import CatalogRefused, CatalogUnavailable
from ntt_backup.formatting import duration, many, printable

# Ends a query whose rows are the statements to execute.
GENERATES: Final = " \\gexec"
# Rows a second of building an index: 42 million took 210 s beside others who wrote.
_ROWS_PER_SECOND: Final = 200_000
_LONG_SECONDS: Final = 5
BRIEF_LOCK_MS = 1000
LOCK_ATTEMPTS = 10
_PAUSE_S = 0.5
_SHOWN = 5
_LOCK = {"class": lock_class("init-db/"), "key": 0}  # No target's name has a slash.

Report = Callable[[str], object]


class Who(StrEnum):
    """Who must run a script."""

    DBA = "dba"
    OWNER = "owner"
    OPERATOR = "operator"


class Step(NamedTuple):
    """A step that the catalog lacks.

    needed: by `run`. unhurried: it may wait for its locks. by_hand: `init-db` leaves it out.
    """

    who: Who
    text: str
    statements: tuple[str, ...]
    needed: bool = True
    unhurried: bool = False
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps, and what the three are called."""

    steps: Sequence[Step]
    names: Mapping[Who, str]
    database: str

    @property
    def needed(self) -> bool:
        return any(step.needed for step in self.steps)

    def __str__(self) -> str:
        """Says in one line who has to do what."""
        ordered = sorted(self.steps, key=lambda step: list(Who).index(step.who))
        return "; ".join(
            f"{who} ({self.names[who]}): {', '.join(step.text for step in group)}"
            for who, group in groupby(ordered, lambda step: step.who)
        )

    def script(self, only: Who | None = None) -> str:
        """Returns the script of one, or those of all, for psql."""
        return "\n".join(self._script(who) for who in Who if only in (None, who))

    def _script(self, who: Who) -> str:
        steps = [step for step in self.steps if step.who is who]
        # A name may hold a line end, and the rest of it would be a command.
        head = printable(f"-- {who}: {self.names[who]}")
        if not steps:
            return f"{head}: nothing to do\n"
        lines = [f"{head}. For psql; may be run again.", "\\set ON_ERROR_STOP on"]
        lines.append(f"\\connect {sql.Identifier(self.database).as_string(None)}")
        lines.append(shown("set_search_path"))
        for step in steps:
            lines += ["", printable(f"-- {step.text}")]
            lines.append(shown("unhurried" if step.unhurried else "brief_lock"))
            lines += step.statements
        return "\n".join([*lines, ""])


def make_plan(
    conn: Connection,
    target: str,
    *,
    role: str | None = None,
    monitors: Iterable[str] = (),
    notify: bool = False,
) -> Plan:
    """Returns the steps that a role lacks to back up, and that monitors lack to look at figures.

    role: None for that of this session. notify: also plan that inserts wake the daemon at once.

    Raises:
        CatalogRefused: The catalog has a problem that no step can solve.
    """
    names = [*filter(None, [role]), *monitors]
    with translated("show what it lacks"):
        for (absent,) in conn.rows("absent_roles", {"names": names}):
            raise CatalogRefused(
                f"the server has no role {absent}",
                hint=f"as a superuser: {shown('create_role', role=sql.Identifier(absent))}",
            )
        return _Planner(conn, target, role).plan(names[1:] if role else names, notify=notify)


class _Planner:
    def __init__(self, conn: Connection, target: str, role: str | None) -> None:
        self._conn = conn
        self._target = target
        (
            self._database_name,
            self._database_owner,
            self._own_owner,  # Of our schema; None without that schema.
            self._version_readable,
            new_schema,
            may_create_table,
            self._user,
        ) = conn.rows("surroundings", {"schema": conn.schema})[0]
        self._role = role or self._user
        creator = self._role if may_create_table and self._role == self._user else ""
        # A table that is still to be made has the oid 0, and the owner "" for anybody.
        new = Table(0, "r", new_schema, creator, self._database_owner, True, {})
        self._table = find_table(conn) or new
        self._schema = self._table.schema
        self._name = sql.Identifier(self._schema, "blobs")
        self._database = sql.SQL("database {}").format(sql.Identifier(self._database_name))
        self._require_trusted()
        if self._table.oid and self._table.found:
            check_table(conn, self._table, target)
            if self._version_readable:
                check_one_table(conn)
        may_create, *_ = self._ask("may_make", self._role, schema="pg_catalog")
        self._own_maker = Who.OPERATOR if may_create else Who.DBA
        if self._own_owner is not None:
            self._own_maker = self._who(self._own_owner)
        self._own_steps = self._own_schema()
        self._unreadable = privileges.unreadable(conn, self._role)

    def _require_trusted(self) -> None:
        """Raises CatalogRefused where roles other than the owners have objects in our schema.

        A role that can do more than these roles does not read their objects.
        """
        trusted = sql.SQL("array[session_user, {}]").format(self._trusted())
        found = self._conn.rows("code_of_others", **code_parts(None, trusted))
        if lines := [line for line, owned in found if owned]:
            raise CatalogRefused(
                "the schema ntt_backup, or an event trigger, has what roles with other rights can"
                " put code into",
                detail=shortened(lines),
                hint="let the owner run init-db; if nobody knows the schema, drop it as a"
                " superuser: drop schema ntt_backup cascade; (this deletes the backup's tables and"
                " history);"
                " an event trigger needs a superuser's function",
            )
        if code_of_others(self._conn, blobs=False):
            self._version_readable = False

    def _trusted(self) -> sql.Composed:
        """Returns who may have put something into our schema, as a part of a query."""
        names = [sql.Literal(name) for name in {self._role, self._table.owner} if name]
        return sql.SQL(", ").join([fragment("owner_of_database"), *names])

    def _guard(self) -> str:
        """Returns the statement that ends a script as `_require_trusted` ends a plan."""
        trusted = fragment("trusted_by_script", privileged=privileged(), names=self._trusted())
        query = fragment("code_of_others", **code_parts(None, trusted))
        body = fragment("guard", privileged=privileged(), code_of_others=query)
        return shown("do", body=sql.Literal(body.as_string(None)))

    def plan(self, monitors: Iterable[str], *, notify: bool) -> Plan:
        role = self._role
        steps = [*self._own_steps, *self._columns(), *self._index(), *self._access(role)]
        steps += self._grants(role, privileges.EVERY_DAY, "back up", dump=True)
        for name in monitors:
            steps += self._access(name)
            steps += self._grants(name, privileges.MONITORING, "look at figures")
        steps += self._trigger() if notify else []
        steps += self._rest_of_dump()
        if not self._table.found:  # Perhaps another table is meant.
            steps = [step._replace(by_hand=True) for step in steps]
        names = {
            Who.DBA: f"a superuser, or {self._own_owner or self._database_owner}",
            Who.OWNER: self._table.owner or f"who may make tables in {self._schema}",
            Who.OPERATOR: role,
        }
        return Plan(steps, names, self._database_name)

    # --- what is made -----------------------------------------------------------------------------

    def _own_schema(self) -> list[Step]:
        version, serves = SCHEMA_VERSION, self._schema
        if self._version_readable:  # Whoever may not read it is told of the privilege.
            version, serves = own_version(self._conn)
        noted = {"version": sql.Literal(SCHEMA_VERSION), "schema": sql.Literal(self._schema)}
        note = shown("set_version", **noted)
        absent = OWN_TABLES - own_tables(self._conn)
        if not absent and version == SCHEMA_VERSION:
            text = f"note that the table blobs is in the schema {self._schema} now"
            moved = Step(self._own_maker, text, (self._guard(), note), needed=False)
            return [] if serves == self._schema else [moved]
        create = [] if self._own_owner else [self._guard(), shown("create_schema")]
        text = "make the schema ntt_backup and its tables"
        needed = version != SCHEMA_VERSION or not absent <= LATER_TABLES
        if not needed:
            text = f"add to ntt_backup {', '.join(sorted(absent))}"
        # A schema that is ours nobody else can put anything into any more; another one is refused.
        # To make it fires event triggers.
        statements = (*create, self._guard(), shown("create_own_tables"), note)
        return [Step(self._own_maker, text, statements, needed=needed)]

    def _columns(self) -> list[Step]:
        who = self._who(self._table.owner)
        if not self._table.oid:
            create = shown("create_table", table=self._name, **columns(self._target))
            text = (
                f"make a new, empty table {self._schema}.blobs in {self._database_name} (where"
                " another program keeps its blobs elsewhere, correct catalog.url, NTT_DB_URL)"
            )
            return [Step(who, text, (create,))]
        wanted = {**our_columns(self._target), "created_at": "timestamptz"}
        absent = [name for name in wanted if name not in self._table.columns]
        if not absent:
            return []
        changes = [
            fragment("add_column", column=sql.Identifier(name), type=sql.SQL(wanted[name]))
            for name in absent
        ]
        if "created_at" in absent:
            changes.append(fragment("default_created_at"))
        alter = shown("alter_table", table=self._name, changes=sql.SQL(", ").join(changes))
        return [Step(who, f"add to blobs: {', '.join(absent)}", (alter,))]

    def _index(self) -> list[Step]:
        """Plans one valid index of what is pending; those of others are used as they are."""
        indexes = read_indexes(self._conn, self._target, self._table.oid)
        if any(index.valid and index.form for index in indexes):
            return []
        names = index_names(self._target)
        taken = {index.name for index in indexes if index.valid}
        free = [name for name in names if name not in taken]
        if not free:
            raise CatalogRefused(
                "the names of our index are taken by indexes that do not serve us",
                detail=", ".join(names),
                hint=f"rename one, or drop it: {self._drop(names[1])}",
            )
        name, *spare = free
        parts = {
            "index": sql.Identifier(name),
            "table": self._name,
            "uncopied": fragment("uncopied_is_false", **columns(self._target)),
        }
        text = f"build the index {name}{self._rows_and_time()}"
        if any(index.name == name for index in indexes):
            text += ", in place of an unfinished one"
        who = self._who(self._table.owner)
        if self._table.kind == "p":
            text += "; blobs is partitioned, so who writes waits until it is built"
            create = shown("mend_partitioned_index", old=self._in_schema(name), **parts)
            return [Step(who, text, (create,), unhurried=True, by_hand=True)]
        literal = sql.Literal(self._in_schema(name).as_string(None))
        drop = fragment("drop_unfinished", index=literal).as_string(None) + GENERATES
        drops = [self._drop(index.name) for index in indexes if index.name in spare]
        statements = (*drops, drop, shown("create_index", **parts))
        return [Step(who, text, statements, unhurried=True)]

    def _rows_and_time(self) -> str:
        """Says how large the table is, and how long an index takes; "" where that is soon over."""
        rows = rows_about(self._conn, self._table.oid)
        seconds = rows / _ROWS_PER_SECOND
        if seconds < _LONG_SECONDS:
            return ""
        return f" over about {many(rows, 'row')}, which takes about {duration(seconds)}"

    def _trigger(self) -> list[Step]:
        state = self._conn.rows("trigger_state", {"table": self._table.oid})
        exists, function_exists, may_add = state[0]
        if exists:
            return []
        steps = []
        made = [] if function_exists else [shown("create_notify")]
        owner = self._table.owner
        if owner and any(lack.privilege == "usage" for lack in self._lacking(owner, ("check",))):
            made.append(self._grant(["usage"], sql.SQL("schema ntt_backup"), owner))
        if made:
            made.insert(0, self._guard())
            text = "make the function that wakes a watching daemon"
            steps.append(Step(self._own_maker, text, tuple(made)))
        once = fragment(
            "create_trigger_once",
            create=sql.Literal(shown("create_trigger", table=self._name).removesuffix(";")),
            table=sql.Literal(self._name.as_string(None)),
        )
        text = "have inserts into blobs wake a watching daemon"
        ours = may_add and self._role == self._user
        who = Who.OPERATOR if ours else self._who(owner)
        too_early = bool(made) and self._own_maker is not Who.OPERATOR
        statements = (once.as_string(None) + GENERATES,)
        return [*steps, Step(who, text, statements, by_hand=too_early)]

    # --- who may do what with it ------------------------------------------------------------------

    def _access(self, role: str) -> list[Step]:
        """Lets the role get to the table at all."""
        steps = []
        _, connects, uses = self._ask("may_make", role, schema=self._schema)
        if not connects:
            grant = self._grant(["connect"], self._database, role)
            steps.append(Step(self._who(self._database_owner), f"let {role} connect", (grant,)))
        if not uses:
            schema = sql.SQL("schema {}").format(sql.Identifier(self._schema))
            grant = self._grant(["usage"], schema, role)
            who = self._who(self._table.schema_owner)
            steps.append(Step(who, f"let {role} use the schema {self._schema}", (grant,)))
        found = self._table.found and role == self._user
        values = {"schema": self._schema, "search_path": self._conn.search_path}
        if not (found or self._ask("names_schema", role, **values)[0]):
            mend = search_path(self._conn, self._schema, role)
            steps.append(Step(Who.DBA, f"have {role} find blobs in {self._schema}", (mend,)))
        return steps

    def _grants(
        self, role: str, commands: Sequence[str], purpose: str, *, dump: bool = False
    ) -> list[Step]:
        """Grants what the commands lack, a step for each who must; needed is what `run` lacks."""
        lacks = self._lacking(role, commands)
        if dump and (self._schema, "blobs") in self._unreadable:
            # Even if we may read it by columns, pg_dump may not lock it.
            lacks.append(privileges.Lack("select", "blobs"))
        urgent = self._lacking(role, ("run",))
        steps: dict[Who, Step] = {}
        for on, group in groupby(sorted(lacks, key=lambda one: one.on), lambda one: one.on):
            these = list(group)
            named, who, will_own = self._object(on)
            if will_own and role == self._role:
                continue
            grant = self._grant(list(dict.fromkeys(map(_verb, these))), named, role)
            step = steps.get(who, Step(who, f"let {role} {purpose}", (), needed=False))
            needed = step.needed or any(one in urgent for one in these)
            steps[who] = step._replace(statements=(*step.statements, grant), needed=needed)
        return list(steps.values())

    def _rest_of_dump(self) -> list[Step]:
        """Lets pg_dump read what other programs have in the database, and will add to it."""
        schemas = {
            schema
            for schema, name in self._unreadable
            if schema != "ntt_backup" and (schema, name) != (self._schema, "blobs")
        }
        grants = privileges.grants_to_read(self._conn, schemas, self._role)
        text = f"let {self._role} dump all tables of today, and those that their owners add"
        return [Step(Who.DBA, text, tuple(grants), needed=False)] if grants else []

    def _lacking(self, role: str, commands: Sequence[str]) -> list[privileges.Lack]:
        table = self._table.oid
        return privileges.lacking(self._conn, self._target, commands, role=role, table=table)

    def _object(self, on: str) -> tuple[sql.Composable, Who, bool]:
        """Returns the object of a `Lack`, who may grant it, whether the role makes it itself."""
        if on == "blobs":
            makes_it = not self._table.oid and self._table.owner == self._role
            return self._name, self._who(self._table.owner), makes_it
        if on == "the database":
            return self._database, self._who(self._database_owner), False
        makes_it = bool(self._own_steps) and self._own_maker is Who.OPERATOR
        return sql.SQL(on), self._own_maker, makes_it

    def _in_schema(self, index: str) -> sql.Identifier:
        return sql.Identifier(self._schema, index)

    def _drop(self, index: str) -> str:
        return shown("drop_index", index=self._in_schema(index))

    def _grant(self, verbs: Sequence[str], on: sql.Composable, role: str) -> str:
        parts = {"privileges": sql.SQL(", ".join(verbs)), "object": on}
        return shown("grant", role=sql.Identifier(role), **parts)

    def _who(self, owner: str) -> Who:
        """Returns who may act as the owner of something."""
        if not owner:
            return Who.OWNER
        if self._ask("acts_as", self._role, other=owner)[0]:
            return Who.OPERATOR
        if self._table.owner and self._ask("acts_as", self._table.owner, other=owner)[0]:
            return Who.OWNER
        return Who.DBA

    def _ask(self, query: str, role: str, **values: object) -> tuple[bool, ...]:
        return self._conn.rows(query, values, role=privileges.role_sql(role))[0]


def _verb(lack: privileges.Lack) -> str:
    """Returns the privilege to grant. Reading is granted on the whole table: pg_dump locks it."""
    if not lack.columns or lack.privilege == "select":
        return lack.privilege
    names = sql.SQL(", ").join(map(sql.Identifier, lack.columns))
    return f"{lack.privilege} ({names.as_string(None)})"


# --- carrying it out ------------------------------------------------------------------------------


def init_db(
    conn: Connection, target: str, *, notify: bool = False, report: Report = lambda line: None
) -> list[str]:
    """Creates or completes the catalog for a target, as far as this session may.

    report gets a line for each step, wait and warning. notify: also have inserts wake the daemon
    at once. Returns what this session may not do yet although it may run, a command each. Raises
    CatalogRefused where the table cannot be used, or with all that is left for others to do;
    CatalogUnavailable where a lock was not to be had. The session's time limits may be changed.
    """
    with translated("prepare its schema"), _one_at_a_time(conn, report):
        privileges.require_writing(conn)
        before = find_table(conn)
        others_mark = before is not None and f"{target}_copied" in before.columns
        for step in make_plan(conn, target, notify=notify).steps:
            if step.who is Who.OPERATOR and not step.by_hand:
                report(step.text)
                if step.unhurried:
                    _build_index(conn, step)
                else:
                    _with_brief_lock(conn, step, report)
        left = make_plan(conn, target, notify=notify)
        if left.needed:
            raise CatalogRefused(
                f"the catalog is not ready for {conn.info.user}",
                detail=f"missing is: {left}",
                hint=PRINT_SQL,
            )
        for warning in warnings(conn, existing_table(conn, target)):
            report(f"warning: {warning}")
        if later := privileges.makers(conn, None, ()):
            where = ", ".join(f"{owner} in {schema}" for schema, owner in later[:_SHOWN])
            report(
                f"warning: {conn.info.user} may not read partitions that will be added by {where}:"
                " dumps will fail then. `ntt-backup-remote init-db --print-sql dba` has the grants"
            )
        if found := code_of_others(conn):
            report(
                f"warning: commands that use the tables will refuse {conn.info.user}, which has"
                f" rights beyond this database: {shortened(found)}. Let catalog.url name an"
                " ordinary role: `ntt-backup-remote init-db --role NAME` prints its grants"
            )
        else:
            contact = first_contact(conn, target, exact=others_mark)
            if said := contact.warning(last_checks(conn, target)):
                report(f"warning: {said}: {RECONCILE}")
        return _not_yet(conn, target)


def _not_yet(conn: Connection, target: str) -> list[str]:
    lacks = {
        command: privileges.lacking(conn, target, [command]) for command in privileges.EVERY_DAY
    }
    unread = [f"{schema}.{name}" for schema, name in privileges.unreadable(conn)]
    lacks["dump"] += [privileges.Lack("select", name) for name in unread[:_SHOWN]]
    return [
        f"`{command}` (it lacks {', '.join(map(str, these))})"
        for command, these in lacks.items()
        if these
    ]


@contextmanager
def _one_at_a_time(conn: Connection, report: Report) -> Iterator[None]:
    waiting = False
    while not conn.rows("try_lock", _LOCK)[0][0]:
        if not waiting:
            report("waiting for another init-db")
        waiting = True
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        if not conn.closed:
            conn.rows("unlock", _LOCK)


def _execute(conn: Connection, step: Step) -> None:
    for text in step.statements:
        query = text.removesuffix(GENERATES)
        rows = conn.execute(pasted("init-db", query))
        if query != text:
            for (generated,) in rows.fetchall():
                conn.execute(pasted("init-db", generated))


def _build_index(conn: Connection, step: Step) -> None:
    """Executes the step without time limits, unless another session is building an index."""
    if builders := conn.rows("building"):
        raise CatalogUnavailable(
            "another session is building an index on blobs",
            detail=f"pid {', '.join(str(pid) for (pid,) in builders)}",
            hint="run init-db again when it is done: select * from pg_stat_progress_create_index;",
        )
    configure(conn, "lock_timeout", 0)
    configure(conn, "statement_timeout", 0)
    _execute(conn, step)


def _with_brief_lock(conn: Connection, step: Step, report: Report) -> None:
    """Executes a step, never waiting for a lock long enough for a queue behind us."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            with conn.transaction():
                configure(conn, "lock_timeout", BRIEF_LOCK_MS, local=True)
                _execute(conn, step)
            return
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            holders = conn.rows("lock_holders")
            named = ", ".join(f"pid {pid} ({application})" for pid, application in holders)
            report(f"waiting for a lock on blobs; held by {named or 'nobody any more'}")
            time.sleep(_PAUSE_S)
    raise CatalogUnavailable(
        "the table blobs is locked by others",
        detail=f"held by {named or 'changing sessions'}",
        hint="run init-db again when their transactions have ended",
    )
