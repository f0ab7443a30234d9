"""Scan: tell the catalog of the blobs that the store has and it lacks.

The obvious way, a walk that looks up and inserts file by file, takes days for tens of millions of
files and starts over when it is interrupted. Here names go to the catalog in thousands, only those
it lacks are looked at again (for their size), and after each batch the last finished directory is
noted in the catalog: an interrupted scan goes on there. Memory is that of one batch.

Whatever in the store is no blob is told of and left alone: counted, never followed or registered.
Content is not read; a blob that does not hash to its name is found when it is sent.
"""

from __future__ import annotations

import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ntt_backup.blobdir.layout import Stray, StrayKind
from ntt_backup.catalog import scan_state
from ntt_backup.catalog.connection import Connection
from ntt_backup.model import Blob, relative_path
from ntt_backup.source.inspection import Store
from ntt_backup.source.tree import SourceTree

BATCH_SIZE: Final = 10_000


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What one call of `scan` has done so far.

    registered: rows added, bytes: their content. known: blobs that the catalog had. strays: how
    many of each kind (a scan that goes on meets those of the levels above again). directories:
    `aa/bb` walked through, directory: the last of them. resumed_from: where an earlier scan had got
    to, None for a scan from the beginning.
    """

    registered: int
    known: int
    bytes: int
    strays: Mapping[StrayKind, int]
    directories: int
    directory: str | None
    duration_s: float
    resumed_from: str | None


def scan(
    conn: Connection,
    store: Store,
    *,
    restart: bool = False,
    on_begin: Callable[[str | None], None] = lambda _: None,
    on_progress: Callable[[ScanResult], None] = lambda _: None,
    on_stray: Callable[[Stray], None] = lambda _: None,
) -> ScanResult:
    """Register what is missing. restart: do not go on where an earlier scan was interrupted.

    on_begin is told where an earlier scan had got to, None for a scan from the beginning.
    on_progress is called after each batch, once it is saved: the place to end a scan by raising.
    Raises SourceError for a store that is away (what was saved stays), CatalogError.
    """
    store.probe()
    with store.tree() as tree:
        return _Scan(conn, tree, on_begin, on_progress, on_stray).run(restart=restart)


class _Scan:
    def __init__(
        self,
        conn: Connection,
        tree: SourceTree,
        on_begin: Callable[[str | None], None],
        on_progress: Callable[[ScanResult], None],
        on_stray: Callable[[Stray], None],
    ) -> None:
        self._conn = conn
        self._tree = tree
        self._root = str(tree.root)
        self._on_begin = on_begin
        self._on_progress = on_progress
        self._on_stray = on_stray
        self._started = time.monotonic()
        self._registered = self._known = self._bytes = self._directories = 0
        self._strays: Counter[StrayKind] = Counter()
        self._directory: str | None = None
        self._resumed_from: str | None = None
        self._before = (0, 0)

    def run(self, *, restart: bool) -> ScanResult:
        self._begin(restart=restart)
        batch: list[str] = []
        # Every directory that sorts after this one.
        after = f"{self._directory}/" if self._directory else ""
        for directory in self._tree.directories(after):
            if isinstance(directory, Stray):
                self._note(directory)
                continue
            for entry in self._tree.entries(directory):
                if isinstance(entry, Stray):
                    self._note(entry)
                    continue
                batch.append(entry)
                if len(batch) == BATCH_SIZE:
                    self._settle(batch)
                    batch = []
            self._directory = directory
            self._directories += 1
        self._settle(batch, finished=True)
        return self._result()

    def _begin(self, *, restart: bool) -> None:
        earlier = scan_state.load_scan(self._conn, self._root)
        if restart or earlier is None or earlier.finished_at is not None:
            scan_state.begin_scan(self._conn, self._root)
        else:
            self._before = (earlier.registered, earlier.strays)
            self._directory = self._resumed_from = earlier.directory
        self._on_begin(self._resumed_from)

    def _settle(self, blobids: Sequence[str], *, finished: bool = False) -> None:
        """Register a batch, then save how far that brings us: the last directory that is done."""
        lacking = scan_state.missing(self._conn, blobids)
        self._known += len(blobids) - len(lacking)
        found = [blob for one in blobids if one in lacking if (blob := self._measure(one))]
        if found:
            self._registered += scan_state.register(self._conn, found)
            self._bytes += sum(blob.size or 0 for blob in found)
        registered, strays = self._before
        scan_state.save_scan(
            self._conn,
            self._root,
            self._directory,
            registered=registered + self._registered,
            strays=strays + self._strays.total(),
            finished=finished,
        )
        self._on_progress(self._result())

    def _measure(self, blobid: str) -> Blob | None:
        """The blob with its size, unless it went away or was replaced since it was listed."""
        path = relative_path(blobid)
        try:
            status = self._tree.lstat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(Stray(path, StrayKind.UNREADABLE, error.strerror or str(error)))
            return None
        if not stat.S_ISREG(status.st_mode):
            self._note(Stray(path, StrayKind.NOT_A_FILE))
            return None
        return Blob(blobid, status.st_size)

    def _note(self, stray: Stray) -> None:
        self._strays[stray.kind] += 1
        self._on_stray(stray)

    def _result(self) -> ScanResult:
        return ScanResult(
            registered=self._registered,
            known=self._known,
            bytes=self._bytes,
            strays=dict(self._strays),
            directories=self._directories,
            directory=self._directory,
            duration_s=time.monotonic() - self._started,
            resumed_from=self._resumed_from,
        )
