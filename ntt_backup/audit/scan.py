"""A scan registers in the catalog the blobs that the store has and the catalog lacks.

Names go to the catalog in thousands, and only those that it lacks, or that it has without a size,
are looked at again for their size. A file that may still be being written (`source.grace`) has no
size yet: it is registered without one. After each batch the last finished directory is saved in the
catalog, where an interrupted scan continues: walking tens of millions of files takes hours. Memory
is that of one batch.

A host that holds a part of the store walks this part alone. Whatever in the store is not a blob is
reported and left alone: counted, never followed or registered. Content is not read; a blob that
does not hash to its name is found when it is sent.
"""

from __future__ import annotations

import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ntt_backup.blobdir.walk import Stray, StrayKind
from ntt_backup.catalog import ledger
from ntt_backup.catalog.connection import Connection
from ntt_backup.errors import SOME_FAILED
from ntt_backup.model import Blob
from ntt_backup.source.store import SourceTree, Store

BATCH_SIZE: Final = 10_000


@dataclass(slots=True)
class ScanResult:
    """The counts of one call of `scan` so far.

    Attributes:
        registered: Blobs that were added to the catalog, with so many `bytes` of content.
        known: Blobs that the catalog had.
        young: Those of the added blobs that may still be being written, and have no size yet.
        sized: Those of the known blobs whose size was noted, since the catalog lacked it.
        strays: Entries that are no blobs, by kind.
        directories: The number of finished directories of blobs; `directory` is the last of them.
        resumed_from: The last directory of the scan that was continued, or None.
        outside: A blob of each prefix of other hosts that the store has. These are left alone.
    """

    registered: int = 0
    young: int = 0
    known: int = 0
    sized: int = 0
    bytes: int = 0
    strays: Counter[StrayKind] = field(default_factory=Counter)
    directories: int = 0
    directory: str | None = None
    duration_s: float = 0.0
    resumed_from: str | None = None
    outside: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Returns 7 where a directory or file could not be read: it may have unknown blobs."""
        return SOME_FAILED if self.strays[StrayKind.UNREADABLE] else 0


def scan(
    conn: Connection,
    store: Store,
    *,
    restart: bool = False,
    on_begin: Callable[[str | None], None] = lambda _: None,
    on_progress: Callable[[ScanResult], None] = lambda _: None,
    on_stray: Callable[[Stray], None] = lambda _: None,
) -> ScanResult:
    """Registers what the catalog lacks. restart: do not continue an interrupted scan. on_begin is
    told `resumed_from`. on_progress comes after each batch, once it is saved, and may end the scan
    by raising. Raises SourceError (what was saved stays), CatalogError.
    """
    store.probe()
    with store.tree() as tree:
        return _Scan(conn, store, tree, on_progress, on_stray).run(on_begin, restart=restart)


@dataclass(slots=True)
class _Scan:
    conn: Connection
    store: Store
    tree: SourceTree
    on_progress: Callable[[ScanResult], None]
    on_stray: Callable[[Stray], None]
    root: str = ""
    # Registered, and strays, by the scan that is continued.
    before: tuple[int, int] = (0, 0)
    result: ScanResult = field(default_factory=ScanResult)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # Hosts that each hold a part may call their roots the same.
        self.root = f"{self.store.root} {self.store.part}".rstrip()

    def run(self, on_begin: Callable[[str | None], None], *, restart: bool) -> ScanResult:
        result, root = self.result, self.root
        result.outside = self.tree.outside()
        earlier = ledger.load_scan(self.conn, root)
        if restart or earlier is None or earlier.finished:
            ledger.begin_scan(self.conn, root)
        else:
            self.before = (earlier.registered, earlier.strays)
            result.directory = result.resumed_from = earlier.directory
        on_begin(result.resumed_from)
        batch: list[str] = []
        for directory in self.tree.directories(result.directory):
            if isinstance(directory, Stray):
                self._note(directory)
                continue
            for entry in self.tree.entries(directory):
                if isinstance(entry, Stray):
                    self._note(entry)
                    continue
                batch.append(entry)
                if len(batch) == 2 * BATCH_SIZE:
                    self._register(batch)
                    batch = []
            result.directory = directory
            result.directories += 1
            # As a rule all blobids of some directories, which the catalog compares as a whole.
            if len(batch) >= BATCH_SIZE:
                self._register(batch)
                batch = []
        self._register(batch, finished=True)
        return result

    def _register(self, blobids: Sequence[str], *, finished: bool = False) -> None:
        """Registers a batch, then saves the last finished directory."""
        result = self.result
        absent, unsized = ledger.missing_blobs(self.conn, blobids)
        result.known += len(blobids) - len(absent)
        if found := [blob for one in blobids if one in absent if (blob := self._measure(one))]:
            result.registered += ledger.register_blobs(self.conn, found)
            result.young += sum(blob.size is None for blob in found)
            result.bytes += sum(blob.size or 0 for blob in found)
        known = [blob for one in blobids if one in unsized if (blob := self._measure(one))]
        if sized := [blob for blob in known if blob.size is not None]:
            result.sized += ledger.record_sizes(self.conn, sized)
        registered, strays = self.before
        progress = ledger.ScanProgress(
            result.directory,
            registered + result.registered,
            strays + result.strays.total(),
            finished,
        )
        ledger.save_scan(self.conn, self.root, progress)
        result.duration_s = time.monotonic() - self.started
        self.on_progress(result)

    def _measure(self, blobid: str) -> Blob | None:
        """Returns the blob with its size, if that is known; None if it was removed or replaced
        meanwhile.
        """
        path = self.tree.path_of(blobid)
        try:
            status = self.tree.lstat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(Stray(path, StrayKind.UNREADABLE, error.strerror or str(error)))
            return None
        if not stat.S_ISREG(status.st_mode):
            self._note(Stray(path, StrayKind.NOT_A_FILE))
            return None
        return Blob(blobid, None if self.store.is_young(status) else status.st_size)

    def _note(self, stray: Stray) -> None:
        self.result.strays[stray.kind] += 1
        self.on_stray(stray)
