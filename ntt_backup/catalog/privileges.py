"""What each command does with the catalog, and which of that a role may not do.

Each command has a line in one table, `NEEDS`, and is refused only for what it does itself: a role
that looks at figures needs no right to change them. What all commands do is not in the table:
reading the columns of `blobs` that we know, and the version of our schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from psycopg import sql

from ntt_backup.catalog.connection import Connection, shortened, translated
from ntt_backup.catalog.statements import shown
from ntt_backup.errors import CatalogUnavailable, DumpFailed

_CHECKED: Final = (
    "update .copied .last_checked .copy_failed",
    "select insert update failures marks",
    "select targets",
)
_RUN: Final = (
    "update .size .copied .last_checked .copy_failed",
    "select insert update delete failures",
    "select insert update runs marks targets",
    "select insert dumps",
)
_ADOPTED: Final = (*_CHECKED, "update .size", "delete failures")
_PRUNED: Final = (
    "update .copied .copy_failed",
    "delete of_blobs",
    "select insert update delete failures",
    "select update places",
    "select origins",
    "temporary database",
)
# What each command does besides: verbs, then our own tables, or columns of `blobs` with a dot (a
# target's by their last words; of_blobs is the table as a whole).
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "check": (),
    "run --dry-run": (),
    "reconcile": ("select targets",),
    "verify --local": (),
    "drill": (),
    "bench": (),
    "status": ("select failures runs dumps",),
    "status of packs": ("select failures runs dumps packs",),
    "scan": (
        "insert .blobid .size",
        "update .size",
        "select insert update scans marks",
        "temporary database",
    ),
    "run": _RUN,
    "run of packs": (*_RUN, "select insert update packs"),
    "failed": ("select failures",),
    "failed --known": ("select update failures",),
    "show": ("select failures",),
    "runs": ("select runs",),
    "dumps": ("select dumps",),
    "dump": ("select insert dumps", "select marks targets"),
    "requeue": ("update .copy_failed", "select delete failures", "select insert update marks"),
    "heal --dry-run": ("select failures",),
    "heal": ("update .copy_failed", "select delete failures", "select insert update marks"),
    "verify": _CHECKED,
    "verify of packs": (*_CHECKED, "select update delete packs"),
    "reconcile --apply": _CHECKED,
    "reconcile --adopt": _ADOPTED,
    "reconcile of packs": ("select packs targets",),
    "reconcile --apply of packs": (*_ADOPTED, "select insert update delete packs"),
    "reconcile --adopt of packs": (*_ADOPTED, "select insert update delete packs"),
    "files by path": (
        "insert .blobid .size",
        "update .size",
        "select insert update places origins",
        "select insert delete seen_places",
        "select insert update delete directories",
        "select insert update marks",
        "temporary database",
    ),
    "reading of files by path": ("select places",),
    "prune": _PRUNED,
    "prune of packs": (*_PRUNED, "select insert update delete packs"),
    # Beside the work of commands: granted with the rest, and none is refused for it.
    "the history of checks": ("select checks",),
    "the identity of the target": ("select targets",),
    "a note of a check": ("insert checks",),
    "the history of hours": ("select hours",),
    "a note of an hour": ("select insert update hours",),
    "the first contact": ("select contacts",),
    "the count of proofs": ("select proofs",),
    "a note of the count of proofs": ("select insert delete proofs",),
    "a note of what is unchecked": ("select insert update delete unchecked",),
    "a note of the first contact": ("select insert contacts", "select runs"),
}
_VERBS: Final = frozenset({"select", "insert", "update", "delete", "temporary"})
_OF_A_TARGET: Final = ("copied", "last_checked", "copy_failed")


class Lack(NamedTuple):
    """A privilege that a role has not: on `blobs` (then on which columns), or on something else."""

    privilege: str
    on: str
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        columns = f" ({', '.join(self.columns)})" if self.columns else ""
        return f"{self.privilege}{columns} on {self.on}"


def of(command: str, *, packs: bool) -> str:
    """Returns the name in `NEEDS` of a command. packs: whether the target has packs."""
    special = f"{command} of packs"
    return special if packs and special in NEEDS else command


def tables(command: str) -> frozenset[str]:
    """Returns those of our own tables that the command works with."""
    return frozenset(name for kind, _, name in needs(command) if kind == "table")


def needs(command: str) -> list[tuple[str, str, str]]:
    """Returns kind, privilege and name of all that the command needs besides reading `blobs`."""
    found = []
    for line in NEEDS[command]:
        words = line.split()
        verbs = [word for word in words if word in _VERBS]
        for name in words[len(verbs) :]:
            kind = "column" if name.startswith(".") else "table"
            kind = name if name in ("database", "of_blobs") else kind
            found += [(kind, verb, name.lstrip(".")) for verb in verbs]
    return found


def writes(command: str) -> bool:
    """Returns whether the command changes anything in the catalog."""
    return any(verb != "select" for _, verb, _ in needs(command))


# All but what the owner of `blobs` may do, and whoever the owner lets.
EVERY_DAY: Final = tuple(command for command in NEEDS if not command.startswith("prune"))
# What a role does that looks at figures.
MONITORING: Final = tuple(command for command in NEEDS if not writes(command))


def lacking(
    conn: Connection,
    target: str,
    commands: Iterable[str],
    *,
    role: str | None = None,
    table: int | None = None,
) -> list[Lack]:
    """Returns the privileges that a role (None: that of this session) lacks for commands.

    table: the oid of `blobs`, where the search path may not find the table.
    """
    wanted = [("column", "select", name) for name in ("blobid", "size", *_OF_A_TARGET)]
    wanted += [("schema", "usage", "ntt_backup"), ("table", "select", "schema_version")]
    wanted += [one for command in commands for one in needs(command)]
    asked = dict.fromkeys(wanted)
    values = {
        "table": table,
        "kinds": [kind for kind, *_ in asked],
        "privileges": [verb for _, verb, _ in asked],
        "names": [f"{target}_{name}" if name in _OF_A_TARGET else name for *_, name in asked],
    }
    found: dict[tuple[str, str], list[str]] = {}
    for kind, verb, name in conn.rows("lacking", values, role=role_sql(role)):
        on = {
            "column": "blobs",
            "of_blobs": "blobs",
            "table": f"ntt_backup.{name}",
            "schema": "schema ntt_backup",
        }
        columns = found.setdefault((verb, on.get(kind, "the database")), [])
        columns += [name] if kind == "column" else []
    return [Lack(verb, on, tuple(columns)) for (verb, on), columns in found.items()]


def role_sql(role: str | None) -> sql.Composable:
    """Returns the role (None: that of this session) as a part of a query."""
    return sql.SQL("{}::name").format(sql.Literal(role)) if role else sql.SQL("current_user")


def require_writing(conn: Connection) -> None:
    """Raises CatalogUnavailable where the transactions of this session may only read."""
    read_only, standby, source, *names = conn.rows("read_only")[0]
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
        hint = (
            "it is a standby: point catalog.url (NTT_DB_URL) at the primary, or name all hosts"
            " there, with target_session_attrs=read-write"
        )
    elif source in scopes:
        hint = f"as a superuser: {shown('mend_read_only', scope=scopes[source])}"
    raise CatalogUnavailable(
        f"the transactions of {conn.info.user} are read-only on this server", hint=hint
    )


# --- what pg_dump needs ---------------------------------------------------------------------------


def require_dumpable(conn: Connection) -> None:
    """Raises DumpFailed, with the SQL that mends it, where pg_dump may not read all there is."""
    with translated("tell what of it may be read"):
        found = _undumpable(conn, None)
    if not found:
        return
    user = conn.info.user
    kinds = {kind for kind, *_ in found}
    mends = []
    if "unreadable" in kinds:
        schemas = {schema for kind, _, schema, _ in found if kind == "unreadable"}
        mends += grants_to_read(conn, schemas, user)
    if "policy" in kinds:
        mends.append(shown("mend_row_security", user=sql.Identifier(user)))
    if "large object" in kinds:
        mends.append(shown("mend_large_objects", role=sql.Literal(user)))
    raise DumpFailed(
        f"{user} may not read all that pg_dump dumps",
        detail=shortened([quoted for _, quoted, *_ in found]),
        hint="as a superuser: " + " ".join(" ".join(mends).split()),
    )


def unreadable(conn: Connection, role: str | None = None) -> list[tuple[str, str]]:
    """Returns what pg_dump reads and the role may not: schema and name of tables and sequences."""
    found = _undumpable(conn, role)
    return [(schema, name) for kind, _, schema, name in found if kind == "unreadable"]


def makers(conn: Connection, role: str | None, schemas: Iterable[str]) -> list[tuple[str, str]]:
    """Returns who will make tables that the role may not read: schema and owner of each.

    Args:
        conn: The session.
        role: The role that dumps; None for that of this session.
        schemas: The schemas of which all tables count, not only partitions.
    """
    values = {"schemas": list(schemas)}
    return [(schema, owner) for schema, owner in conn.rows("makers", values, role=role_sql(role))]


def grants_to_read(conn: Connection, schemas: Iterable[str], role: str) -> list[str]:
    """Returns the SQL that lets a role read what is in the schemas today, and is added later.

    Later ones are those of present owners of tables in the schemas, and partitions anywhere. The
    role pg_read_all_data would cover what anybody adds. It reads each database and the passwords of
    all roles, and `drill` and `restore` refuse a role that has it, since a dump is a program. So it
    is for people to grant.
    """
    grants = [
        shown("grant_reading", schema=sql.Identifier(one), role=sql.Identifier(role))
        for one in sorted(schemas)
    ]
    for schema, maker in makers(conn, role, schemas):
        names = {"schema": schema, "owner": maker, "role": role}
        parts = {key: sql.Identifier(name) for key, name in names.items()}
        grants.append(shown("grant_reading_later", **parts))
    return grants


def _undumpable(conn: Connection, role: str | None) -> list[tuple[str, str, str, str]]:
    """Returns kind, quoted name, schema and name of what pg_dump, run by the role, cannot dump."""
    return conn.rows("undumpable", role=role_sql(role))
