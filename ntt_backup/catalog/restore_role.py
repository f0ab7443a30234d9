"""A dump is restored by a role that can do nothing beyond the database that it restores.

A dump is a program: defaults, check constraints, expressions of indexes and functions in it run
while it is restored, as the role that restores. For a superuser that is code on the server. SET
ROLE is no wall, since any function may RESET it. So a superuser makes a role for the restore, which
logs in by itself, and may create in the new database for that time. A role that is no superuser,
and cannot become anything dangerous, restores by itself. Who logged in counts, and not as whom a
session begins.

The code stays in the tables, and runs again for whoever owns or uses them. So what was restored
belongs to that role for good; it only cannot log in any more. Ordinary roles become its members.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog.connection import (
    Connection,
    connect,
    describe,
    refuse_code_of_others,
    translated,
)
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.statements import fragment, statement
from ntt_backup.errors import BackupError, CatalogError, DumpFailed

OWN_SCHEMA: Final = "ntt_backup"
BLOBS: Final = "blobs"
_PREFIX: Final = "ntt_restore_"
_VALID: Final = timedelta(days=7)
_SCRAM: Final = "scram-sha-256"
# The tables that init-db writes itself. Marks that nobody vouches for are those of others.
_OF_INIT_DB: Final = frozenset({"schema_version", "contacts"})
_AT_ONCE: Final = 1 << 16  # Bytes of rows that are sent together.
_ORDINARY: Final = (
    "createuser an ordinary role, createdb --owner that role, and name both in the URL of the"
    " database; or call it with --allow-superuser: then code in the dump runs as {user}"
)


@dataclass(slots=True)
class Restorer:
    """Who restores. owner: of all that is restored. url: how pg_restore logs in. done: it has."""

    owner: str
    url: str
    done: bool = False


@contextmanager
def restorer(
    url: str, application: str, *, allow_superuser: bool, empty: bool = True
) -> Iterator[Restorer]:
    """Yields the role that restores a dump into a database.

    A role that was created for the restore cannot log in afterwards, and is dropped unless the
    database was restored. allow_superuser: restore as the user of `url`, whatever that user may do.
    empty: the database is; in one that others use nothing is lent to a role.

    Raises:
        DumpFailed: The user may do more than a restore needs, and no lesser role can log in, or can
            be made; or its sessions begin as another role.
        CatalogError: The server does not answer, or refuses.
    """
    with _session(url, application, "say what its user may do") as conn:
        mighty = fragment("role_is_privileged")
        superuser, dangerous, begins_as = conn.rows("rights_beyond", role_is_privileged=mighty)[0]
        user = conn.info.user
    if allow_superuser or not (superuser or dangerous or begins_as):
        yield Restorer(user, url)
        return
    if begins_as:
        raise DumpFailed(
            f"a dump is restored by whoever logs in, and sessions of {user} begin as {begins_as}",
            detail=f"a dump is a program, and SET ROLE NONE in it makes it {user} again",
            hint="take the setting `role` out of the URL, the database or the role"
            f" (alter database, alter role: reset role); or {_ORDINARY.format(user=user)}",
        )
    if not (superuser and empty):
        may = "a superuser" if superuser else ", ".join(dangerous)
        raise DumpFailed(
            f"the user {user} may do more than a restore needs",
            detail=f"a dump is a program, and {user} is, or may become, {may}",
            hint=_ORDINARY.format(user=user),
        )
    role = f"{_PREFIX}{secrets.token_hex(6)}"
    with _session(url, application, "make a role") as conn:
        # Roles of former restores that own nothing any more, and have no members.
        for (name,) in conn.rows("unused_restorers", {"prefix": f"^{_PREFIX}[0-9a-f]{{12}}$"}):
            with suppress(psycopg.Error):  # Another restore may be dropping it, too.
                conn.rows("drop_role", role=sql.Identifier(name))
        public = _owner_of_public(conn)
        # In one transaction: others drop such roles that nothing refers to. The role does not
        # become the owner of the database, who can set what all later sessions in it begin with.
        with conn.transaction():
            conn.rows("create_restorer", **_names(conn, role))
            if public is not None:
                conn.rows("set_owner_of_public", role=sql.Identifier(role))
    found = Restorer(role, "")

    def end() -> None:
        """Takes back what the role was lent; drops it unless what it made is to be kept."""
        with _session(url, application, "take back what it lent") as conn:
            _disable_login(conn, role)
            if public is not None and _owner_of_public(conn) == role:
                conn.rows("set_owner_of_public", role=sql.Identifier(public))
                conn.rows("grant_public", role=sql.Identifier(role))
            conn.rows("revoke_create", **_names(conn, role))
            for (member,) in conn.rows("members", {"role": role}):
                # Before PostgreSQL 16 a role can make others its members.
                names = {**_names(conn, role), "member": sql.Identifier(member)}
                conn.rows("revoke_membership", **names)
            if not found.done:
                conn.rows("drop_owned", role=sql.Identifier(role))
                conn.rows("drop_role", role=sql.Identifier(role))

    with _ended(role, end):
        with _session(url, application, "let that role restore") as conn:
            password = _enable_login(conn, role)
        found.url = _login_url(url, application, user, role, password)
        yield found


@contextmanager
def logged_in(url: str, application: str, owner: str) -> Iterator[str]:
    """Yields a URL by which the owner of the restored objects can log in meanwhile.

    The owner can log in until the block ends if `restorer` has created that role; else the URL is
    that of the user. The function raises as `restorer` does.
    """
    with _session(url, application, "let a role log in") as conn:
        user = conn.info.user
        password = _enable_login(conn, owner) if user != owner else ""
    if user == owner:
        yield url
        return

    def end() -> None:
        with _session(url, application, "end its sessions") as conn:
            _disable_login(conn, owner)

    with _ended(owner, end):
        yield _login_url(url, application, user, owner, password)


@contextmanager
def _session(url: str, application: str, doing: str) -> Iterator[Connection]:
    with connect(url, application, no_tables=True) as conn, translated(doing):
        yield conn


@contextmanager
def _ended(role: str, end: Callable[[], None]) -> Iterator[None]:
    """Calls end afterwards; its own error hides none that came before."""
    try:
        yield
    except BaseException as error:
        try:
            end()
        except CatalogError as also:
            if isinstance(error, BackupError):
                error.detail += f"; the role {role} is left: {also.detail or also.message}"
        raise
    end()


def _names(conn: Connection, role: str) -> dict[str, sql.Composable]:
    return {"role": sql.Identifier(role), "database": sql.Identifier(conn.info.dbname)}


def _enable_login(conn: Connection, role: str) -> str:
    """Lets a role log in for some days; returns its password."""
    password = secrets.token_urlsafe(24)
    # What is sent is not the password: the server may log statements.
    sent = conn.pgconn.encrypt_password(password.encode(), role.encode(), _SCRAM.encode())
    until = (datetime.now(UTC) + _VALID).isoformat()
    said = {"password": sql.Literal(sent.decode()), "until": sql.Literal(until)}
    conn.rows("enable_login", role=sql.Identifier(role), **said)
    return password


def _disable_login(conn: Connection, role: str) -> None:
    """Ends a role's sessions, and undoes what code in the dump has set for later ones."""
    conn.rows("disable_login", **_names(conn, role))
    conn.rows("end_sessions", {"role": role})


def given_extensions(url: str, application: str) -> set[str]:
    """Returns the extensions that a superuser has created in a database for its user."""
    with _session(url, application, "list its extensions") as conn:
        return {name for (name,) in conn.rows("given_extensions")}


def relations_there(
    url: str, application: str, names: Iterable[tuple[str, str]]
) -> set[tuple[str, str | None]]:
    """Returns schema and name of relations that a database has; None where only the schema."""
    values = dict(zip(("schemas", "names"), map(list, zip(*names, strict=True)), strict=True))
    with _session(url, application, "look for tables") as conn:
        return set(conn.rows("relations_there", values))


def require_extensions(url: str, application: str, names: Iterable[str]) -> None:
    """Raises DumpFailed where a restore would end at an extension.

    names: The extensions of the dump.
    """
    with _session(url, application, "look for extensions") as conn:
        rows = conn.rows("impossible_extensions", {"names": sorted(set(names))})
        database = conn.info.dbname
        idents = [sql.Identifier(name).as_string(conn) for name, _ in rows]
    if lacking := [name for name, offered in rows if not offered]:
        raise DumpFailed(
            f"the dump needs extensions that this server does not have: {', '.join(lacking)}",
            hint="install them on the server, then run the command again",
        )
    if rows:
        script = " ".join(f"create extension {ident};" for ident in idents)
        raise DumpFailed(
            "the dump needs extensions that only a superuser creates",
            detail="the database is as it was, and only the beginning of the dump was read",
            hint=f"as a superuser, in the database {database}: {script} Then call it again",
        )


def _owner_of_public(conn: Connection) -> str | None:
    return next((owner for (owner,) in conn.rows("owner_of_public")), None)


def _login_url(url: str, application: str, user: str, role: str, password: str) -> str:
    """Returns a URL by which the role can log in.

    The role logs in as the user does, or by TCP on this machine if a socket accepts only the names
    of system users.
    """
    ways = [make_conninfo(url, user=role, password=password)]
    with connect(url, application, no_tables=True) as conn:
        if conn.info.host.startswith("/"):
            ways.append(make_conninfo(ways[0], host="127.0.0.1", port=str(conn.info.port)))
    said = ""
    for way in ways:
        try:
            with connect(way, application):
                return way
        except CatalogError as error:
            said = said or error.detail
    raise DumpFailed(
        f"a dump is not restored by the superuser {user}, and no lesser role can log in",
        detail=f"{describe(url)}: {said}",
        hint="let pg_hba.conf have a line for roles with a password (host all all 127.0.0.1/32"
        f" scram-sha-256); or {_ORDINARY.format(user=user)}",
    )


# --- the rows of a dump of strangers --------------------------------------------------------------
#
# Nothing of such a dump is executed: the tables are those of init-db, and of the rows only columns
# are taken that these tables have. See `dump.restore`.


class NewTables:
    """New, empty tables, in one transaction. columns: of each, by (schema, name)."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.columns = {
            (schema, name): frozenset(columns)
            for schema, name, columns in conn.rows("tables_of_ours")
            if name not in _OF_INIT_DB
        }

    def copy(
        self, table: tuple[str, str], columns: Sequence[str], encoding: str, rows: Iterable[bytes]
    ) -> None:
        """Adds rows with these columns, as COPY writes them, each with its line feed."""
        parts = {
            "table": sql.Identifier(*table),
            "columns": sql.SQL(", ").join(map(sql.Identifier, columns)),
            "encoding": sql.Literal(encoding),
        }
        query, held = statement("copy_rows", **parts), bytearray()
        with translated(f"take the rows of {table[1]}"), self.conn.cursor().copy(query) as copy:
            for row in rows:
                held += row
                if len(held) >= _AT_ONCE:
                    copy.write(bytes(held))
                    held.clear()
            copy.write(bytes(held))


@contextmanager
def new_tables(url: str, application: str, targets: Iterable[str]) -> Iterator[NewTables]:
    """Creates the tables of init-db in an empty database, and yields them within one transaction.

    If the block fails, the database is empty again. Raises CatalogError.
    """
    with connect(url, application, no_tables=True) as conn:
        try:
            for target in targets:
                init_db(conn, target)
            refuse_code_of_others(conn)
            with conn.transaction():
                yield NewTables(conn)
        except BaseException:
            _drop(conn)
            raise


def _drop(conn: Connection) -> None:
    """Drops what init-db has made."""
    if conn.closed:
        return
    with translated("drop the new tables"):
        found = conn.rows("tables_of_ours")
        for schema, name, _ in found:
            if schema != OWN_SCHEMA:
                conn.rows("drop_table", table=sql.Identifier(schema, name))
        if any(schema == OWN_SCHEMA for schema, _, _ in found):
            conn.rows("drop_own_schema")
