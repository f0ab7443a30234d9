"""What each command does with the catalog, and what of that a role may not do.

Asking for everything of everybody would be the obvious way, and would keep a monitoring role from
looking at figures. So each command has a line in one table, `NEEDS`, and is refused only for what
it does itself. What every one of them does is not in it: reading the columns of `blobs` that we
know, and the version of our schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from psycopg import sql

from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.queries import shown, statement
from ntt_backup.errors import CatalogUnavailable


@dataclass(frozen=True, slots=True)
class Needs:
    """What a command does besides reading: the columns of `blobs` that it updates and inserts (a
    target's by their last words), and what it does with our own tables.
    """

    update: tuple[str, ...] = ()
    insert: tuple[str, ...] = ()
    own: Mapping[str, str] = field(default_factory=dict)
    temporary: bool = False

    @property
    def writes(self) -> bool:
        return bool(self.update or self.insert) or any(
            words != "select" for words in self.own.values()
        )


_MARKS: Final = ("copied", "last_checked", "copy_failed")
_COUNTED: Final = {"marks": "select insert update"}
_CHECKED: Final = Needs(update=_MARKS, own={"failures": "select insert update", **_COUNTED})
NEEDS: Final[Mapping[str, Needs]] = {
    "check": Needs(),
    "run --dry-run": Needs(),
    "reconcile": Needs(),
    "verify --local": Needs(),
    "drill": Needs(),
    "bench": Needs(),
    "status": Needs(own={"failures": "select", "runs": "select", "dumps": "select"}),
    "scan": Needs(insert=("blobid", "size"), own={"scans": "select insert update"}, temporary=True),
    "run": Needs(
        update=("size", *_MARKS),
        own={
            "failures": "select insert update delete",
            "runs": "select insert update",
            "dumps": "select insert",
            **_COUNTED,
        },
    ),
    "dump": Needs(own={"dumps": "select insert", "marks": "select"}),
    "requeue": Needs(update=("copy_failed",), own={"failures": "select delete", **_COUNTED}),
    "verify": _CHECKED,
    "reconcile --apply": _CHECKED,
}
MONITORING: Final = ("check", "status", "reconcile")
_OF_A_TARGET: Final = frozenset(_MARKS)


@dataclass(frozen=True, slots=True)
class Lack:
    """A privilege that a role has not: on `blobs` (then on which columns), or on something else."""

    privilege: str
    on: str
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        columns = f" ({', '.join(self.columns)})" if self.columns else ""
        return f"{self.privilege}{columns} on {self.on}"


def lacking(
    conn: Connection,
    target: str,
    commands: Iterable[str],
    *,
    role: str | None = None,
    table: int | None = None,
) -> list[Lack]:
    """What the role (None: that of this session) may not do that the commands do.

    table: the oid of `blobs`, where the search path may not find it.
    """
    needs = [NEEDS[command] for command in commands]
    who = {"role": named(role)}
    known = ("blobid", "size", *_MARKS)
    on_blobs = [("select", name) for name in known]
    on_blobs += [("insert", name) for name in _union(need.insert for need in needs)]
    on_blobs += [("update", name) for name in _union(need.update for need in needs)]
    lacks: dict[str, list[str]] = {}
    wanted = [(verb, _column(name, target)) for verb, name in on_blobs]
    for verb, name in conn.execute(statement("lacking_on_columns", **who), _pairs(wanted, table)):
        lacks.setdefault(verb, []).append(name)
    found = [Lack(verb, "blobs", tuple(names)) for verb, names in lacks.items()]
    usable, temporary = conn.execute(statement("lacking_elsewhere", **who)).fetchall()[0]
    if not usable:
        found.append(Lack("usage", "schema ntt_backup"))
    on_own = {("select", "schema_version"): None}
    for need in needs:
        on_own |= {(verb, name): None for name, verbs in need.own.items() for verb in verbs.split()}
    rows = conn.execute(statement("lacking_on_own", **who), _pairs(list(on_own), table))
    found += [Lack(verb, f"ntt_backup.{name}") for verb, name in rows]
    if any(need.temporary for need in needs) and not temporary:
        found.append(Lack("temporary", "the database"))
    return found


def _union(groups: Iterable[tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group))


def _column(name: str, target: str) -> str:
    return f"{target}_{name}" if name in _OF_A_TARGET else name


def _pairs(wanted: list[tuple[str, str]], table: int | None) -> dict[str, object]:
    return {
        "table": table,
        "privileges": [verb for verb, _ in wanted],
        "names": [name for _, name in wanted],
    }


def named(role: str | None) -> sql.Composable:
    """The role (None: that of this session) as a part of a query."""
    return sql.SQL("{}::name").format(sql.Literal(role)) if role else sql.SQL("current_user")


def require_writing(conn: Connection) -> None:
    """Raise CatalogUnavailable where the transactions of this session may only read."""
    read_only, standby, source, *names = conn.execute(statement("read_only")).fetchall()[0]
    if not read_only:
        return
    database, user = map(sql.Identifier, names)
    scopes = {
        "user": sql.SQL("role {}").format(user),
        "database": sql.SQL("database {}").format(database),
        "database user": sql.SQL("role {} in database {}").format(user, database),
    }
    hint = "default_transaction_read_only is on: see the server's configuration, and catalog.url"
    if standby:
        hint = "it is a standby: point catalog.url (NTT_DB_URL) at the primary"
    elif source in scopes:
        hint = f"as a superuser: {shown('mend_read_only', scope=scopes[source])}"
    raise CatalogUnavailable(
        f"the transactions of {conn.info.user} are read-only on this server", hint=hint
    )
