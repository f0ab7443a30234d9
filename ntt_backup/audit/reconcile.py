"""Reconcile compares the catalog, the store and the remote in one pass over all names.

All three lists come in the order of blobids, range by range: the catalog's rows of one range are
read and sorted, the store's directories and the remote's listing are sorted as they come. A merge
of the three sees every blob once, with the memory of a 256th of the catalog, or of 100,000 rows.
A host that holds a part of the store compares this part alone.

In every range the catalog is read first. A blob that a run copies at this moment may then show as
not marked yet, which is harmless; it can never show as copied and absent.

Only names and sizes are compared; `verify` reads contents. What `apply` changes is in the safe
direction: what the remote lacks is pending again, and nothing is deleted on it. It marks nothing as
copied, except what a target's packs name: a run makes a pack visible only once all that it names
was verified and stored, and the next run would not find it there, as it finds files. The ledger has
the pack before the mark, so checks look at it, whoever stored it. What a check has found damaged
stays pending, although its pack still names it.

`adopt` marks files, too, that somebody else has put there, once the remote has proved each of them
(`audit.proof`). Where sizes are trusted, it marks by size; the next `verify` begins with these.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from functools import cached_property
from typing import Any, Final

from ntt_backup.audit.proof import Blobs, Proof, Proved, answer_questions, cut_jobs
from ntt_backup.audit.register import open_store
from ntt_backup.audit.remote_names import PackNames, ReceiverNames, RemoteNames
from ntt_backup.audit.verify import settling
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.blobdir.walk import Stray, StrayKind
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.failures import failed_for
from ntt_backup.catalog.identities import identified
from ntt_backup.catalog.ledger import Ledger, forget_packs, iter_packs, record_checks, record_pack
from ntt_backup.catalog.listed_files import listed_blobs
from ntt_backup.catalog.pending import rows_about
from ntt_backup.catalog.range_locks import RANGES, ranges_below
from ntt_backup.catalog.selection import Row, rows_in
from ntt_backup.client.session_pool import ReconnectingSession, SessionPool
from ntt_backup.config import Settings
from ntt_backup.errors import SOME_FAILED, BackupError, RemoteUnreachable
from ntt_backup.filestore.contract import FileUnreadable
from ntt_backup.formatting import many
from ntt_backup.model import Blob, BlobRange, Failure, Reason, StoredPack
from ntt_backup.pack.names import PackKey
from ntt_backup.packstore.tables import PackObject, open_to_read, packs_of
from ntt_backup.process.threads import WorkQueue
from ntt_backup.source.store import SourceTree, Store

_APPLY_BLOBS: Final = 1000
_EXAMPLES: Final = 5
# The rows of one listing of the remote, as far as ranges of two digits have fewer.
_RANGE_ROWS: Final = 100_000


class Difference(StrEnum):
    """A kind of difference. Scripts read the words, as names of files and as keys."""

    LOST = "copied-but-absent"
    REMOTE_SIZE = "remote-size-differs"
    UNREADABLE = "remote-unreadable"
    PACK_LOST = "pack-recorded-but-absent"
    UNMARKED = "there-but-not-marked"
    UNRECORDED = "pack-there-but-not-recorded"
    UNKNOWN = "there-but-not-in-catalog"
    UNREGISTERED = "in-store-but-not-in-catalog"
    SOURCELESS = "in-catalog-but-not-in-store"
    STORE_SIZE = "store-size-differs"
    UNPROVED = "there-but-not-proved"
    BAD_BLOBID = "no-blobid-in-catalog"
    STRAY_STORE = "stray-in-store"
    STRAY_REMOTE = "stray-on-remote"


# The remote lacks what the catalog calls copied.
SERIOUS: Final = frozenset({Difference.LOST, Difference.REMOTE_SIZE, Difference.UNREADABLE})
_REASONS: Final = {
    Difference.LOST: Reason.REMOTE_MISSING,
    Difference.REMOTE_SIZE: Reason.REMOTE_CORRUPT,
}


class Adoption(Enum):
    """How blobs that are there and not marked come to be marked."""

    NO = auto()
    BY_PROOF = auto()
    BY_SIZE = auto()


@dataclass(slots=True)
class Comparison:
    """The counts of a comparison so far.

    Attributes:
        rows: Rows of the catalog that have a blobid.
        in_store: Blobs in the store.
        on_remote: Blobs on the remote.
        agreed: Rows without any difference.
        part: How much of the work is done, from 0 to 1.
        requeued: Blobs that were made pending again.
        marked: Blobs that were marked as copied.
        strangers: Sealed packs that this host has not signed.
        examples: The first differences of each kind, each with a remark.
        outside: A blob of each prefix of other hosts that the store has.
    """

    rows: int = 0
    in_store: int = 0
    on_remote: int = 0
    agreed: int = 0
    part: float = 0.0
    requeued: int = 0
    marked: int = 0
    strangers: int = 0
    duration_s: float = 0.0
    differences: Counter[Difference] = field(
        default_factory=lambda: Counter(dict.fromkeys(Difference, 0))
    )
    examples: dict[Difference, list[str]] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if any(self.differences[what] for what in SERIOUS) else 0


def reconcile(
    conn: Connection,
    settings: Settings,
    *,
    apply: bool,
    adoption: Adoption = Adoption.NO,
    workers: int = 2,
    first: int = 0,
    on_wait: Callable[[], None] = lambda: None,
    on_progress: Callable[[Comparison], None],
    on_difference: Callable[[Difference, str, str], None],
    on_outage: Callable[[BackupError, float], None],
) -> Comparison:
    """Compares the three. Raises BackupError.

    Args:
        conn: The catalog.
        settings: The settings.
        apply: Whether what the remote lacks becomes pending, and what packs name is marked.
        adoption: How blobs that are there and not marked come to be marked.
        workers: The number of connections that prove blobs.
        first: The two-digit prefix to begin with, as a number.
        on_wait: Is called with each pack that is listed or read, and may raise.
        on_progress: Receives the counts after each range, and while blobs are proved.
        on_difference: Receives kind, blobid or path, and remark of each difference.
        on_outage: Receives the error of an outage, and the seconds of the wait.
    """
    settings = identified(conn, settings)
    store = open_store(settings, conn)
    store.probe()
    names: RemoteNames
    if settings.remote.packs:
        packs, tables = open_to_read(settings, on_outage, threading.Event())
        names = PackNames(packs, tables, lambda: iter_packs(conn, settings.target), on_wait=on_wait)
        # What a pack names was compared when the pack was made.
        adoption = Adoption.NO if adoption is Adoption.NO else Adoption.BY_SIZE
    else:
        names = ReceiverNames(settings, on_outage)
    try:
        with store.tree() as tree:
            by_path = settings.by_path
            work = _Work(
                conn, settings.target, tree, by_path, names, apply, adoption, first, on_difference
            )
            if (apply or adoption is not Adoption.NO) and names.is_empty():
                raise RemoteUnreachable(
                    "there is no blob on the remote",
                    hint="is its disk mounted, is it the right target? Nothing was marked. Without"
                    " --apply and --adopt the comparison is made nevertheless",
                )
            gone = work.compare_packs(names, on_wait) if isinstance(names, PackNames) else []
            with settling(work.record):
                if adoption is Adoption.BY_PROOF:
                    pool = SessionPool(settings, "reconcile", ("verify",), on_outage)
                    work.adopt(store, pool, workers, on_progress)
                else:
                    for _ in work.ranges(on_progress):
                        pass
            if isinstance(names, PackNames):
                work.seen.strangers = len(names.tables.strangers)
            return work.end(gone)
    finally:
        names.close()


@dataclass
class _Work:
    conn: Connection
    target: str
    tree: SourceTree
    by_path: bool
    names: RemoteNames
    apply: bool
    adoption: Adoption
    first: int
    on_difference: Callable[[Difference, str, str], None]
    started: float = field(default_factory=time.monotonic)
    lost: list[Failure] = field(default_factory=list)
    found: list[Blob] = field(default_factory=list)
    # Blobs that are there and not marked, until the remote is asked to prove them.
    unproved: list[Blob] = field(default_factory=list)
    # Directories that the remote cannot read. Their blobs may exist without being listed.
    unreadable: list[str] = field(default_factory=list)
    seen: Comparison = field(default_factory=Comparison)
    # How many differences were told.
    told: int = 0

    def __post_init__(self) -> None:
        self.seen.outside = [] if self.by_path else self.tree.outside()
        self.prefixes = [] if self.by_path else self._in_order(self.tree.level(""))

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self.conn, self.target)

    def ranges(self, on_progress: Callable[[Comparison], None]) -> Iterator[list[Blob]]:
        """Compares one range after the other. Yields the blobs of each that remain to be proved."""
        # Each range costs the remote's answer to a listing, and holds its rows in memory.
        rows = rows_about(self.conn)
        digits = next((some for some in range(2) if rows <= _RANGE_ROWS * 16**some), 2)
        if not self.conn.part.whole:
            digits = 2
        ranges = [one for one in ranges_below(digits) if digits < 2 or self.conn.part.has(one[0])]
        first = self.first * len(ranges) // RANGES
        for number, (prefix, one) in enumerate((*ranges[first:], *ranges[:first]), 1):
            self.compare(prefix, one)
            self.seen.part = number / len(ranges)
            on_progress(self.seen)
            unproved, self.unproved = self.unproved, []
            yield unproved

    def adopt(
        self,
        store: Store,
        pool: SessionPool,
        workers: int,
        on_progress: Callable[[Comparison], None],
    ) -> None:
        """Compares all ranges, and marks what the remote proves meanwhile."""
        queue: WorkQueue[Blobs, Proved] = WorkQueue(2 * workers, pool.cancelled, pool.wake)
        jobs = (job for blobs in self.ranges(on_progress) for job in cut_jobs(blobs))

        def step() -> None:
            self._judge_proofs(queue.take_results())
            while not queue.full:
                if (job := next(jobs, None)) is None:
                    queue.close()
                    break
                queue.add_job(job)
            on_progress(self.seen)

        def work(session: ReconnectingSession) -> None:
            answer_questions(queue, lambda job: Proof(job, store), lambda found: found, session)

        try:
            pool.run(workers, work, step)
        finally:
            queue.close()
            pool.close()
            self._judge_proofs(queue.take_results())

    def _judge_proofs(self, results: Iterable[Proved]) -> None:
        """Marks what was proved, and tells what was not."""
        for proved in results:
            of_source = {failure.blobid for failure in proved.of_source}
            left = {failure.blobid: str(failure.detail) for failure in proved.failures}
            for blobid in (*proved.by_remote_hash, *proved.unchecked):
                damaged = blobid in of_source
                left[blobid] = "the store's copy is damaged" if damaged else "the store has no copy"
            for blobid, remark in left.items():
                self.tell(Difference.UNPROVED, blobid, remark)
            self.found += [blob for blob in proved.job if blob.blobid not in left]
        self.record()

    def compare(self, prefix: str, one: BlobRange) -> None:
        """Compares one range, which has the blobids with a prefix."""
        rows = self._rows(one)  # Read first of all three.
        remote, local = self._remote(prefix), self._local(prefix)
        agreed = 0
        for blobid, (row, sizes, size) in _merge(((r.blobid, r) for r in rows), remote, local):
            # As a rule all is well, and there are many blobs.
            if row and row[0].copied and sizes == size == [row[0].size]:
                agreed += 1
            else:
                self._judge(blobid, sizes, next(iter(row), None), next(iter(size), None))
        self.seen.on_remote += agreed
        self.seen.agreed += agreed
        self.seen.duration_s = time.monotonic() - self.started

    def compare_packs(self, names: PackNames, on_wait: Callable[[], None]) -> list[StoredPack]:
        """Compares the packs that the ledger knows with those of the target. Where blobs may be
        marked, it learns what the target has, before a blob is marked because of that: checks look
        at what the ledger has. Which blobs are copied is another question, see `reconcile`.

        Returns the packs that the target has lost.
        """
        lost: list[StoredPack] = []
        rows = ((one.key, one) for one in iter_packs(self.conn, self.target) if self._mine(one))
        listed = ((one.key, one) for one in packs_of(names.store) if self._mine(one))

        def unrecorded() -> Iterator[PackObject]:
            for key, (recorded, objects) in _merge(rows, listed):
                on_wait()
                for pack in objects:
                    if not recorded:
                        self.tell(Difference.UNRECORDED, key, f"{pack.size} bytes")
                        yield pack
                    elif recorded[0].size != pack.size:
                        said = f"{pack.size} bytes, {recorded[0].size} were sent"
                        self.tell(Difference.UNRECORDED, key, said)
                # A run may have stored a pack after its part of the listing was made.
                if not objects and _is_gone(names, key):
                    self.tell(Difference.PACK_LOST, key, many(recorded[0].blobs, "blob"))
                    lost.append(recorded[0])

        for stored in names.learn(unrecorded(), self._stray_on_remote):
            if self.apply or self.adoption is not Adoption.NO:
                record_pack(self.conn, self.target, stored)
        return lost

    def _mine(self, pack: StoredPack | PackObject) -> bool:
        """Returns whether a pack is of the part that is compared, by its smallest blobid."""
        name = PackKey.read(pack.key)
        return name is None or self.conn.part.has(name.low)

    def end(self, gone: Sequence[StoredPack]) -> Comparison:
        self.record()
        # Once their blobs are pending.
        if gone and self.apply:
            forget_packs(self.conn, self.target, [pack.pack_id for pack in gone])
        self.seen.duration_s = time.monotonic() - self.started
        return self.seen

    def _rows(self, one: BlobRange) -> list[Row]:
        found: list[Row] = []
        for row in rows_in(self.conn, self.target, one):
            if is_blobid(row.blobid):
                found.append(row)
            else:
                self.tell(Difference.BAD_BLOBID, row.blobid, "")
        self.seen.rows += len(found)
        return sorted(found)

    def _remote(self, prefix: str) -> Iterator[tuple[str, int]]:
        for digest, size in self.names.below(prefix, self._stray_on_remote):
            yield digest.hex(), size

    def _local(self, prefix: str) -> Iterator[tuple[str, int]]:
        if self.by_path:
            for listed in listed_blobs(self.conn, prefix):
                self.seen.in_store += 1
                yield listed
            return
        prefixes = [one for one in self.prefixes if one.startswith(prefix)]
        tree = self.tree
        for directory in (each for one in prefixes for each in tree.directories(below=one)):
            for found in [directory] if isinstance(directory, Stray) else tree.sizes(directory):
                if isinstance(found, Stray):
                    self._tell_stray(found)
                else:
                    self.seen.in_store += 1
                    yield found

    def _in_order(self, entries: Iterable[str | Stray]) -> list[str]:
        """Reports the strays, and returns the others in order."""
        found: list[str] = []
        for one in entries:
            if isinstance(one, Stray):
                self._tell_stray(one)
            else:
                found.append(one)
        return sorted(found)

    def _tell_stray(self, one: Stray) -> None:
        self.tell(Difference.STRAY_STORE, one.path, f"{one.kind} {one.detail}".strip())

    def _stray_on_remote(self, path: str, kind: StrayKind, detail: str = "") -> None:
        if kind is StrayKind.UNREADABLE:
            self.unreadable.append("" if path == "." else path.replace("/", ""))
        self.tell(Difference.STRAY_REMOTE, path, f"{kind} {detail}".strip())

    def _judge(self, blobid: str, sizes: Sequence[int], row: Row | None, local: int | None) -> None:
        """Reports the differences of one blob. sizes: the size of the blob in each place of the
        remote that has it. local: its size in the store, None for absent.
        """
        before = self.told
        # The store's size was checked when the blob was sent; the catalog's is second best.
        expected = local if local is not None or row is None else row.size
        names = self.names
        packs = isinstance(names, PackNames)
        # Somebody else's pack may say any size: one place that fits is enough.
        remote = expected if expected in sizes else next(iter(sizes), None)
        self.seen.on_remote += remote is not None
        if row is None:
            if local is not None:
                self.tell(Difference.UNREGISTERED, blobid, f"{local} bytes")
            if remote is not None:
                self.tell(Difference.UNKNOWN, blobid, f"{remote} bytes")
            return
        if local is None:
            self.tell(Difference.SOURCELESS, blobid, "copied" if row.copied else "not copied")
        elif row.size is not None and row.size != local:
            self.tell(Difference.STORE_SIZE, blobid, f"{local} bytes, {row.size} in the catalog")
        if row.copied:
            if remote is None and blobid.startswith(tuple(self.unreadable)):
                self.tell(Difference.UNREADABLE, blobid, "its remote directory is unreadable")
            elif remote is None and isinstance(names, PackNames) and names.hides(blobid):
                said = "it may be in a pack that is sealed for other identities"
                self.tell(Difference.UNREADABLE, blobid, said)
            elif remote is None:
                self._lose(Difference.LOST, blobid, "not listed on the remote")
            elif expected is not None and remote != expected:
                said = f"{remote} bytes on the remote, {expected} expected"
                self._lose(Difference.REMOTE_SIZE, blobid, said)
        elif remote is not None:
            self.tell(Difference.UNMARKED, blobid, "failed" if row.failed else "pending")
            if self.adoption is Adoption.BY_PROOF:
                if expected in (None, remote):
                    self.unproved.append(Blob(blobid, remote))
                else:
                    said = f"{remote} bytes on the remote, {expected} expected"
                    self.tell(Difference.UNPROVED, blobid, said)
            elif not row.failed and (expected == remote or (packs and expected is None)):
                self._find(Blob(blobid, remote))
        self.seen.agreed += self.told == before

    def tell(self, what: Difference, name: str, remark: str) -> None:
        """Reports a difference."""
        self.seen.differences[what] += 1
        self.told += 1
        examples = self.seen.examples.setdefault(what, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{name} {remark}".strip())
        self.on_difference(what, name, remark)

    def _lose(self, what: Difference, blobid: str, remark: str) -> None:
        self.tell(what, blobid, remark)
        if self.apply:
            self.lost.append(Failure(blobid, _REASONS[what], remark))
            if len(self.lost) >= _APPLY_BLOBS:
                self.record()

    def _find(self, blob: Blob) -> None:
        """Marks a blob, if that is wanted without a proof."""
        named = self.apply and isinstance(self.names, PackNames)
        if named or self.adoption is Adoption.BY_SIZE:
            self.found.append(blob)
            if len(self.found) >= _APPLY_BLOBS:
                self.record()

    def record(self) -> None:
        """Applies the differences that were found since the last call."""
        lost, self.lost = self.lost, []
        if lost:
            self.seen.requeued += record_checks(self.conn, self.target, [], lost)
        found, self.found = self.found, []
        if found:
            proved = self.adoption is Adoption.BY_PROOF
            if not proved:
                names = [blob.blobid for blob in found]
                damaged = failed_for(self.conn, self.target, Reason.REMOTE_CORRUPT, names)
                found = [blob for blob in found if blob.blobid not in damaged]
            # The size of a file proves nothing about its content.
            checked = proved or isinstance(self.names, PackNames)
            self._ledger.record(found, [], checked=checked)
            self.seen.marked += len(found)


def _merge(*lists: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, list[list[Any]]]]:
    """Yields the names in lists that come in order, each once, with its values in each list."""
    sources = [iter(one) for one in lists]
    heads = [next(source, None) for source in sources]
    # A heap costs more than to look at two or three.
    while names := [head[0] for head in heads if head is not None]:
        name = min(names)
        values: list[list[Any]] = []
        for number, source in enumerate(sources):
            head, found = heads[number], []
            while head is not None and head[0] == name:
                found.append(head[1])
                head = next(source, None)
            heads[number] = head
            values.append(found)
        yield name, values


def _is_gone(names: PackNames, key: str) -> bool:
    """Returns whether the target says that it has no such pack, or no pack can have that name."""
    if PackKey.read(key) is None:
        return True
    try:
        return names.store.stat(key) is None
    except FileUnreadable:
        return False
