"""The blobs that a target no longer needs, since no origin gives a file of that content any more.

The server keeps the list of them for the session. Files come back at any time: so each step locks
the places of some blobs, and looks at them again. What another session has locked has to wait.

`mark` is durable before the target is asked to remove anything, and has no worker send these blobs
meanwhile. `settle` tells what becomes of them once the target has removed them: a blob with a file
that has come back is pending, the row of one that no target has is deleted. A process that dies in
between leaves blobs that are failed for the reason `pruned`; the next call begins with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from psycopg import sql

from ntt_backup.catalog.connection import Connection, configure, translated
from ntt_backup.catalog.ledger import forget_packs
from ntt_backup.catalog.pending import columns
from ntt_backup.catalog.range_locks import wake_workers
from ntt_backup.catalog.statements import fragment

_PATHS: Final = 5
# A pass may take as long as this beyond twice its interval before what it said counts as old.
_LATE_S: Final = 3600.0
_LIST: Final = "list what may be removed"
_DOING: Final = "its files are gone; `prune` removes it from the target, or was interrupted"
_DONE: Final = "its files are gone; `prune` has removed it from this target, another one has it"


class Settled(NamedTuple):
    """What became of blobs that a target has removed.

    Attributes:
        deleted: The number of blobs that no target has any more.
        elsewhere: The number of blobs that another target still has.
        bytes: The bytes of the blobs of both kinds.
        back: The number of blobs that are pending, since one of their files has come back.
        left: The number of blobs whose places another session has locked.
    """

    deleted: int
    elsewhere: int
    bytes: int
    back: int
    left: int


def doubtful_origins(
    conn: Connection, origins: Sequence[tuple[str, str, float, float]]
) -> list[tuple[Any, ...]]:
    """Returns the origins of which it is not known which files are gone, each with the reason.

    Args:
        conn: The session.
        origins: The name of each, its definition, and the seconds between two passes, and between
            two that see all rows.
    """
    names, definitions, every, whole_every = map(list, zip(*origins, strict=True))
    values = {"names": names, "definitions": definitions, "every": every, "late": _LATE_S}
    doing = "look at the files that are registered"
    return conn.ask(doing, "doubtful_origins", **values, whole_every=whole_every)


class Prunable:
    """The list of the blobs of a target whose files are gone. Every method raises CatalogError.

    Args:
        conn: The session, which has one list.
        target: The name of the target.
        gone_for: The seconds for which all files of a blob must be gone.
        origins: The origins that are in use: nobody knows whether files of others are gone.
    """

    def __init__(
        self, conn: Connection, target: str, gone_for: float, origins: Collection[str]
    ) -> None:
        self._conn = conn
        self._values = {"target": target, "gone_for": gone_for, "origins": list(origins)}
        self._parts = {**columns(target), "known_at": fragment("known_at")}
        with translated(_LIST):
            # A mark that a crash of the server takes back would be of a blob that is not there.
            configure(conn, "synchronous_commit", "on")
            for name in ("create_prunable", "fill_prunable", "add_begun", "analyze_prunable"):
                conn.rows(name, self._values, **self._parts)
            others = [one for (one,) in conn.rows("targets") if one != target]
        has = (sql.SQL("{} is true").format(columns(one)["copied"]) for one in others)
        self._parts["elsewhere"] = sql.SQL(" or ").join([sql.SQL("false"), *has])

    def look(self) -> tuple[int, int, int, int, list[bytes]]:
        """Returns what is on the list.

        Returns:
            The number of blobs, their bytes, both without the removals that an earlier call has
            begun, and the first paths.
        """
        ((*counts, paths),) = self._conn.ask(_LIST, "look_at_prunable", limit=_PATHS)
        blobs, size, new, new_size = counts
        return blobs, size, new, new_size, paths or []

    def keep(self, blobids: Sequence[str]) -> None:
        """Takes blobs off the list."""
        self._conn.ask(_LIST, "keep_prunable", blobids=list(blobids))

    def which(self, blobids: Sequence[str]) -> dict[str, bool]:
        """Returns the blobs that are on the list, each with whether its removal was begun."""
        return dict(self._conn.ask(_LIST, "which_prunable", blobids=list(blobids)))

    def pages(self, limit: int, *, least: int = 0, begun: bool = False) -> Iterator[list[str]]:
        """Yields the blobs in order.

        Args:
            limit: The most blobs of a page.
            least: The least size of a blob in bytes.
            begun: All blobs whose removal was begun and not ended, also those with files.
        """
        name, past, found = "begun_prunable" if begun else "next_prunable", "", limit
        while found == limit:
            values = {**self._values, "past": past, "limit": limit, "least": least}
            with translated(_LIST):
                rows = self._conn.rows(name, values, **self._parts)
            found, past = len(rows), rows[-1][0] if rows else ""
            if rows:
                yield [blobid for (blobid,) in rows]

    def mark(self, blobids: Sequence[str]) -> list[str]:
        """Marks the blobs that still have no file as not copied, and returns these blobs."""

        def write() -> list[str]:
            self._conn.rows("lock_rows", {"blobids": list(blobids)})
            gone = [blobid for blobid, is_gone in self._lock_places(blobids) if is_gone]
            return [one for (one,) in self._rows("mark_pruned", gone, _DOING)]

        return self._conn.in_transaction("mark what is removed", write)

    def settle(self, blobids: Sequence[str], packs: Sequence[str] = ()) -> Settled:
        """Records that the target has removed blobs, as far as that was begun, and packs (ids)."""

        def write() -> Settled:
            locked = [blobid for (blobid,) in self._rows("lock_for_deletion", blobids)]
            # After the lock: whoever has registered a file meanwhile has held these rows.
            places = self._lock_places(locked)
            gone = [blobid for blobid, is_gone in places if is_gone]
            back = [blobid for blobid, is_gone in places if not is_gone]
            self._rows("send_pruned", back)
            ((deleted, size),) = self._rows("forget_pruned", gone, _DONE)
            if packs:  # Else no right on their table is needed.
                forget_packs(self._conn, str(self._values["target"]), packs)
            left = len(locked) - len(places)
            return Settled(deleted, len(gone) - deleted, size, len(back), left)

        settled = self._conn.in_transaction("record what is removed", write)
        if settled.back:
            wake_workers(self._conn)
        return settled

    def _lock_places(self, blobids: Sequence[str]) -> list[tuple[Any, ...]]:
        return self._conn.rows("lock_places", {**self._values, "blobids": list(blobids)})

    def _rows(self, name: str, blobids: Sequence[str], detail: str = "") -> list[tuple[Any, ...]]:
        values = {**self._values, "blobids": list(blobids), "detail": detail}
        return self._conn.rows(name, values, **self._parts)
