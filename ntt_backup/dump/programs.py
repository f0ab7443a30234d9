"""pg_dump and pg_restore on this machine: which ones, and whether they are new enough.

pg_dump refuses a server whose major version is above its own, with words about a mismatch that do
not say what to install. And a machine may have several: Debian keeps one a major version in
/usr/lib/postgresql, and whichever comes first on PATH is often the oldest. So each candidate is
asked for its version before anything is sent, and the first that is new enough is taken.

Called by `dump.job`, `dump.recall` and `preflight`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.errors import DumpImpossible, SourceError
from ntt_backup.process import output_of

_DEBIAN: Final = Path("/usr/lib/postgresql")
_VERSION: Final = re.compile(r"\(PostgreSQL\) (\d+)\S*")
_PATIENCE: Final = 10.0


@dataclass(frozen=True, slots=True)
class Programs:
    """A pg_dump, the pg_restore beside it, and what it says of its version, such as "16.4"."""

    pg_dump: Path
    pg_restore: Path
    version: str


def find(directory: Path | None, server_version: int) -> Programs:
    """The programs for a server, in directory or, where that is None, wherever they are.

    server_version: as the server counts, 160004 for 16.4. Raises DumpImpossible.
    """
    needed = server_version // 10_000
    places = [directory] if directory is not None else _places()
    found = list(_installed(places))
    for major, programs in found:
        if major >= needed:
            return programs
    hint = f"apt-get install postgresql-client-{needed}, or set dump.bin (NTT_PG_BIN)"
    if not found:
        where = f"in {directory}" if directory is not None else "on this machine"
        raise DumpImpossible(f"pg_dump and pg_restore are not installed {where}", hint=hint)
    said = ", ".join(f"{one.pg_dump} is version {one.version}" for _, one in found)
    raise DumpImpossible(
        "pg_dump is older than the server", detail=f"{said}; the server has {needed}", hint=hint
    )


def _places() -> list[Path]:
    on_path = shutil.which("pg_dump")
    packaged = [path for path in _DEBIAN.glob("[0-9]*/bin") if path.parent.name.isdigit()]
    return [
        *([Path(on_path).parent] if on_path else []),
        *sorted(packaged, key=lambda path: int(path.parent.name)),
    ]


def _installed(places: Iterable[Path]) -> Iterator[tuple[int, Programs]]:
    for place in places:
        pg_dump, pg_restore = place / "pg_dump", place / "pg_restore"
        try:
            said = output_of([str(pg_dump), "--version"], _PATIENCE)
        except SourceError:
            continue
        match = _VERSION.search(said)
        if match is not None and pg_restore.exists():
            version = match[0].removeprefix("(PostgreSQL) ")
            yield int(match[1]), Programs(pg_dump, pg_restore, version)
