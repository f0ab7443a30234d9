"""pg_dump and pg_restore of this machine are found: those that are new enough, and their calls.

pg_dump refuses a server whose major version is above its own, with words about a mismatch that do
not say what to install. And a machine may have several: Debian keeps one a major version in
/usr/lib/postgresql, and whichever comes first on PATH is often the oldest. So each candidate is
asked for its version before anything is sent, and the first that is new enough is taken.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.catalog import connection
from ntt_backup.errors import DumpFailed, DumpImpossible, SourceError
from ntt_backup.process import postgres
from ntt_backup.process.spawn import Child, output_of, run, start, wait_for

_DEBIAN: Final = Path("/usr/lib/postgresql")
_MAJOR: Final = re.compile(r"\d{1,3}", re.ASCII)
_VERSION: Final = re.compile(r"\(PostgreSQL\) (\d+)\S*")
# The beginning of a dump that has its table of contents.
HEAD_BYTES: Final = 64 * 1024**2
_PATIENCE: Final = 10.0
_READ_SECONDS: Final = 60.0
_LOCK_WAIT_MS: Final = 60_000
_SHOWN: Final = 500
_KNOWS_ZSTD: Final = 16
_NOWHERE: Final = "--dbname=host=/nonexistent"


@dataclass(frozen=True, slots=True)
class Programs:
    """A pg_dump, the pg_restore beside it, and what it says of its version, such as "16.4"."""

    pg_dump: Path
    pg_restore: Path
    version: str


def find(directory: Path | None, server_version: int) -> Programs:
    """Returns the programs for a server, in a directory (None: wherever they are).

    server_version: in the server's own notation, 160004 for 16.4.

    Raises:
        DumpImpossible: No pg_dump that is new enough is installed.
    """
    needed = server_version // 10_000
    found = _all(directory, needed)
    for major, programs in found:
        if major >= needed:
            return programs
    said = ", ".join(f"{one.pg_dump} is version {one.version}" for _, one in found)
    raise DumpImpossible(
        "pg_dump is older than the server",
        detail=f"{said}; the server has {needed}",
        hint=_hint(needed),
    )


def find_restore(directory: Path | None, server_version: int, made_by: int | None) -> Path:
    """Returns the pg_restore that fits the dump and the server best.

    A pg_restore that is older than the server is acceptable if it can read the dump. A newer one
    may send settings that the server does not know. Arguments and errors are those of `find`.
    made_by: the major version of the pg_dump that made the dump; None where it is not known.
    """
    server = server_version // 10_000
    found = _all(directory, server)
    fit = [one for one in found if made_by is None or one[0] >= made_by] or found[-1:]
    return min(fit, key=lambda one: (one[0] < server, abs(one[0] - server)))[1].pg_restore


def major_of(version: str) -> int | None:
    """Returns the major version in a text that a stranger may have written."""
    match = _MAJOR.match(version)
    return int(match[0]) if match is not None else None


def _all(directory: Path | None, needed: int) -> list[tuple[int, Programs]]:
    """Returns all installed programs, each with its major version. Raises DumpImpossible."""
    found = []
    for place in [directory] if directory is not None else _places():
        pg_dump, pg_restore = place / "pg_dump", place / "pg_restore"
        with suppress(SourceError):
            match = _VERSION.search(output_of([str(pg_dump), "--version"], _PATIENCE))
            if match is not None and pg_restore.exists():
                version = match[0].removeprefix("(PostgreSQL) ")
                found.append((int(match[1]), Programs(pg_dump, pg_restore, version)))
    if not found:
        where = f"in {directory}" if directory is not None else "on this machine"
        said = f"pg_dump and pg_restore are not installed {where}"
        raise DumpImpossible(said, hint=_hint(needed))
    return found


def _places() -> list[Path]:
    on_path = shutil.which("pg_dump")
    packaged = [path for path in _DEBIAN.glob("[0-9]*/bin") if path.parent.name.isdigit()]
    packaged.sort(key=lambda path: int(path.parent.name))
    first = [Path(on_path).parent] if on_path else []
    return [*first, *packaged, *(one / "bin" for one in postgres.installations())]


def _hint(needed: int) -> str:
    return f"apt-get install postgresql-client-{needed}, or set dump.bin (NTT_PG_BIN)"


def start_pg_dump(pg_dump: Path, url: str, application: str, *options: str) -> Child:
    """Returns pg_dump, which writes a dump of the database of url to its output.

    The password is in its environment: arguments are shown to everybody. Raises ConfigError for a
    url that it cannot be given.
    """
    place, secret = connection.for_program(url, application)
    argv = [str(pg_dump), "--format=custom", "--no-password", *options]
    argv += [f"--lock-wait-timeout={_LOCK_WAIT_MS}", f"--dbname={place}"]
    child = start(argv, env={**os.environ, **secret, "LC_ALL": "C"})
    child.close_stdin()
    return child


def dumped(
    programs: Programs, url: str, application: str, patience: float, *options: str
) -> Generator[bytes, None, None]:
    """Yields the output of pg_dump, and an empty piece each second in which there is none.

    patience: the seconds for which pg_dump may be silent. Raises DumpFailed.
    """
    child = start_pg_dump(programs.pg_dump, url, application, *options)
    deadline = time.monotonic() + patience
    try:
        while (data := child.read()) != b"":
            child.drain_stderr()
            if data is None:
                if time.monotonic() > deadline:
                    raise DumpFailed(
                        "pg_dump has stalled",
                        detail=f"it wrote nothing for {patience:.0f} s; {child.stderr.text}",
                        hint="look at pg_stat_activity of the catalog's server; or raise"
                        " run.receipt_timeout, which is how long pg_dump may be silent",
                    )
                yield b""
                wait_for(reading=child.fds, timeout=1.0)
                continue
            yield data
            deadline = time.monotonic() + patience
        status = child.wait(patience)
    finally:
        child.kill()
    if status != 0:
        raise pg_dump_failed(status, child.stderr.text)


def best_compression(programs: Programs) -> tuple[str, ...]:
    """Returns the option of pg_dump for zstd, a quarter of the work of gzip, where it has that.

    Since PostgreSQL 16 it may; not every build does, and only a call tells.
    """
    if (major_of(programs.version) or 0) < _KNOWS_ZSTD:
        return ()
    option = "--compress=zstd"
    argv = [str(programs.pg_dump), "--format=custom", option, "--no-password", _NOWHERE]
    _, _, said = run(argv, _PATIENCE, env={**os.environ, "LC_ALL": "C"})
    return (option,) if "connection to server" in said else ()


def whole_output(child: Child, patience: float) -> tuple[bytes, int | None]:
    """Returns all that a program writes, and its exit status; None where it has not ended."""
    try:
        return child.output(patience), child.status
    finally:
        child.kill()


def pg_dump_failed(status: int | None, said: str) -> DumpFailed:
    """Returns the error for a pg_dump that has failed. status: None where it has not ended."""
    hint = ""
    if "permission denied" in said:
        hint = "`ntt-backup-remote init-db --print-sql dba` prints the grants for all tables of"
        hint += " today, and for those that their owners add: a superuser executes them"
    elif "lock" in said and "timeout" in said:
        hint = "another session holds a lock on a table for long: see pg_locks in the database"
    lines = [line for line in said.splitlines() if line.strip()]
    ended = "it did not end in time" if status is None else f"status {status}"
    detail = "; ".join(lines)[-_SHOWN:] or ended
    return DumpFailed("pg_dump failed", detail=detail, hint=hint)


def read_head(pg_restore: Path, head: bytes, *options: str) -> bytes:
    """Returns the output of pg_restore for a head, which has all of a dump but rows of tables.

    Raises DumpFailed where pg_restore cannot read it.
    """
    with os.fdopen(os.memfd_create("head-of-dump"), "wb") as memory:
        memory.write(head)
        memory.seek(0)
        child = start([str(pg_restore), *options], stdin=memory.fileno())
        said, status = whole_output(child, _READ_SECONDS)
    if status != 0:
        raise DumpFailed(
            "pg_restore cannot read the dump",
            detail=child.stderr.text[-_SHOWN:],
            hint=f"are pg_dump and {pg_restore} of one version? See dump.bin",
        )
    return said
