"""Verify checks a bucket pack by pack, those first that were checked longest ago.

A bucket hashes nothing. Asked for the size and the checksum of each object it tells what is missing
or was replaced, for little money; only reading the packs proves their contents, and costs what all
that is read costs.

A blob that is wrong, and right in no other pack, becomes pending again. So do all blobs of a pack
that is lost, unless another pack of the ledger names them: which they are, the catalog knows and
the tables of these packs. Whatever else lies in the bucket anybody may have put there, and no later
check looks at it: it counts once it was read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from ntt_backup.audit.hashing import Hashing
from ntt_backup.audit.packs import Checkable, Checked, look, read
from ntt_backup.audit.remote_names import BucketNames
from ntt_backup.audit.verify import LOST, Budget, Findings, Question, settling
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.ledger import record_checks
from ntt_backup.catalog.packs import (
    PackChecks,
    forget_packs,
    insert_packs,
    iter_packs,
    mark_packs_checked,
)
from ntt_backup.catalog.ranges import prefix_ranges, range_name
from ntt_backup.catalog.selection import Checks, rows_in
from ntt_backup.client.shared_pace import SharedPace
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import BackupError, ConfigError, RemoteUnreachable, Unsupported
from ntt_backup.format import many
from ntt_backup.model import Blob, BlobRange, Failure, StoredPack
from ntt_backup.objects.bucket import ObjectUnreadable
from ntt_backup.objects.contents import give_elsewhere
from ntt_backup.objects.keys import FORMAT, LARGE_BLOB, PackKey, blob_key
from ntt_backup.objects.open import open_to_read
from ntt_backup.objects.patient import PatientBucket
from ntt_backup.objects.tables import PackObject, Tables
from ntt_backup.process.threads import WorkQueue, run_threads

_PAGE: Final = 100
_RECORD_SECONDS: Final = 5.0
_RECORD_BLOBS: Final = 1000


def verify_bucket(
    conn: Connection,
    settings: RemoteConfig,
    question: Question,
    *,
    on_progress: Callable[[Findings], None],
    on_outage: Callable[[BackupError, float], None],
) -> Findings:
    """Checks what is copied to the target: reads it where the question's way is `download`, and
    else asks the object store. Raises BackupError; what was found is recorded.
    """
    stop, news = threading.Event(), threading.Event()
    bucket, tables = open_to_read(
        settings, on_outage, stop, cached=False, fetch=SharedPace.of(question.bwlimit)
    )
    jobs: WorkQueue[Checkable, Checked] = WorkQueue(
        2 * question.workers, bucket.cancelled, news.set
    )
    check = _Check(conn, settings.target, question, bucket, tables, jobs, on_progress)
    # That it is not there must be noticed also where nothing is to be checked.
    next(bucket.list(FORMAT), None)
    try:
        with settling(check.settle):
            run_threads(question.workers, lambda _: check.work(), check.step, stop, news)
    finally:
        jobs.close()
    found = check.end()
    found.strangers = len(tables.strangers)
    check.names().require_fit()
    return found


@dataclass
class _Check:
    """Feeds the queue from the ledger, and records the results."""

    conn: Connection
    target: str
    question: Question
    bucket: PatientBucket
    tables: Tables
    jobs: WorkQueue[Checkable, Checked]
    on_progress: Callable[[Findings], None]
    ahead: deque[Checkable] = field(default_factory=deque)
    exhausted: bool = False
    has_blobs: bool = False
    right: list[str] = field(default_factory=list)
    read_packs: list[str] = field(default_factory=list)
    wrong: list[Failure] = field(default_factory=list)
    lost: dict[str, tuple[StoredPack, Failure]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = Budget(self.question)
        self.recorded = self.budget.started
        choice = self.question.choice
        self.packs = PackChecks(self.conn, self.target, choice)
        self.large = Checks(self.conn, self.target, choice, least=LARGE_BLOB)
        self.found = Findings(total=self.packs.blobs + self.large.total)

    def work(self) -> None:
        """Does the jobs of one thread."""
        while (what := self.jobs.take(wait=True)) is not None:
            if self.question.way == "download":
                checked = read(self.bucket, self.tables, what, self.question.prefix)
            else:
                checked = look(self.bucket, what)
            self.jobs.give(checked)

    def step(self) -> None:
        """Takes results and adds jobs, without waiting."""
        self._take_results()
        while not self.jobs.full and (what := self._next()) is not None:
            self.jobs.put(what)
        if self.exhausted:
            self.jobs.close()
        if time.monotonic() - self.recorded > _RECORD_SECONDS or len(self.wrong) > _RECORD_BLOBS:
            self._record()
        self.on_progress(self.found)

    def end(self) -> Findings:
        """Records the last results, and makes pending what lost packs held. The threads have
        ended.
        """
        self.settle()
        if self.lost:
            self._require_blobs()
            self._requeue_lost()
        self.found.duration_s = time.monotonic() - self.budget.started
        self.found.complete = self.found.checked >= self.found.total
        return self.found

    def names(self) -> BucketNames:
        """Returns what the packs name that are not lost."""

        def recorded() -> Iterator[StoredPack]:
            return iter_packs(self.conn, self.target)

        return BucketNames(self.bucket, self.tables, recorded, self.lost.keys(), signed=True)

    def settle(self) -> None:
        """Records what is known, but for lost packs: what they held takes long to find out."""
        self._take_results()
        self._record()

    def _next(self) -> Checkable | None:
        """Returns what to check next; None where the limits do not allow it, or nothing is left."""
        reads = self.question.way == "download"
        while not (self.exhausted or self.budget.time_is_up):
            if not self.ahead:
                self.ahead.extend(self.packs.next(_PAGE) or self._large_blobs())
            if not self.ahead:
                break
            what = self.ahead.popleft()
            size = self._size(what) if reads else 0
            if not self.budget.ever_allows(size):
                self.found.left_out += 1 if isinstance(what, Blob) else what.blobs
            elif self.budget.allows(size):
                return what
            else:
                break
        self.exhausted = True
        return None

    def _size(self, what: Checkable) -> int:
        """Returns how much is read of an object, which the catalog may not know."""
        if what.size is None and isinstance(what, Blob) and self.question.max_bytes is not None:
            with suppress(ObjectUnreadable):
                info = self.bucket.head(blob_key(what.blobid))
                return info.size if info is not None else 0
        return what.size or 0

    def _large_blobs(self) -> list[Blob]:
        """Returns more of the blobs that are objects of their own."""
        while blobs := self.large.next(_PAGE):
            good = [blob for blob in blobs if is_blobid(blob.blobid)]
            self.found.total -= len(blobs) - len(good)
            if good:
                return good
        return []

    def _take_results(self) -> None:
        found = self.found
        for checked in self.jobs.done():
            what = checked.what
            found.checked += checked.blobs
            found.bytes += checked.bytes
            found.by_size += checked.blobs if checked.by_size else 0
            self.wrong += checked.failures
            for failure in checked.failures:
                found.wrong.add(failure)
            if isinstance(what, Blob):
                self.right += [] if checked.failures else [what.blobid]
                continue
            found.total += checked.blobs - what.blobs
            if checked.lost is not None:
                found.lost_packs += 1
                self.lost[what.key] = what, checked.lost
            elif checked.whole and self.question.way == "download":
                self.read_packs.append(what.pack_id)
            self.has_blobs = self.has_blobs or checked.lost is None
        found.duration_s = time.monotonic() - self.budget.started

    def _record(self) -> None:
        self.recorded = time.monotonic()
        # A look at an object's size proves nothing about it.
        right = self.right if self.question.way == "download" else []
        self.has_blobs = self.has_blobs or bool(self.right)
        # What is wrong in several places is found wrong in each.
        bad = {one.blobid: one for one in self.wrong if one.reason in LOST}
        lost = list(bad.values())
        packs = self.read_packs
        self.right, self.wrong, self.read_packs = [], [], []
        if lost and not self.has_blobs:
            self._require_blobs()
        if right or lost:
            self.found.requeued += record_checks(self.conn, self.target, right, lost)
        if packs:
            with translated("record a check"), self.conn.transaction():
                mark_packs_checked(self.conn, self.target, packs)

    def _require_blobs(self) -> None:
        """Raises RemoteUnreachable where the bucket has nothing at all."""
        if not self.has_blobs and self.names().is_empty():
            raise RemoteUnreachable(
                "the bucket is empty below the target's prefix",
                detail=f"looked for {many(self.found.checked, 'blob')} that should be there",
                hint="is remote.url right? Nothing was marked. If the backup is really lost, see"
                " 'When the remote has lost its disk' in docs/first-aid.md",
            )
        self.has_blobs = True

    def _requeue_lost(self) -> None:
        try:
            self._requeue_ranges(self.names())
        except ConfigError:  # Other packs are sealed, and no identity is given that opens them.
            self._tell_lost("which blobs it had is known by --identity alone")
            return
        except Unsupported as error:
            self._tell_lost(f"which blobs it had is known once all are thawed: {error.detail}")
            return
        # A run may have stored one again by now: the same blobs make the same pack.
        ids = [pack.pack_id for pack, _ in self.lost.values()]
        with translated("forget packs"), self.conn.transaction():
            forget_packs(self.conn, self.target, ids, self.packs.began)

    def _tell_lost(self, more: str) -> None:
        """Tells of the lost packs themselves. They stay in the ledger, for the next check."""
        for _, failure in self.lost.values():
            self.found.wrong.add(replace(failure, detail=f"{failure.detail}; {more}"))

    def _requeue_ranges(self, names: BucketNames) -> None:
        for one in prefix_ranges():
            name = range_name(one.index)
            held = [
                (pack, failure)
                for pack, failure in self.lost.values()
                if pack.low[:2] <= name <= pack.high[:2]
            ]
            if held:
                self._requeue_range(one, name, held, names)

    def _requeue_range(
        self,
        one: BlobRange,
        name: str,
        held: list[tuple[StoredPack, Failure]],
        names: BucketNames,
    ) -> None:
        """Makes pending what is nowhere else, of the blobids in one range that packs may have held.
        The catalog is read before the bucket: what is sent meanwhile is not missed.
        """
        missing: dict[str, Failure] = {}
        sizes: dict[str, int | None] = {}
        for row in rows_in(self.conn, self.target, one):
            if row.copied and is_blobid(row.blobid):
                large = row.size is not None and row.size >= LARGE_BLOB
                for pack, failure in held:
                    # A large blob is in a pack alone, or an object of its own.
                    if pack.low <= row.blobid <= pack.high and (not large or pack.low == pack.high):
                        missing[row.blobid] = Failure(row.blobid, failure.reason, failure.detail)
                        sizes[row.blobid] = row.size
                        break
        # Where a pack has one blob, its own key had something else.
        alone = {pack.low for pack, _ in held if pack.low == pack.high}
        for digest, size in names.below(name, lambda *_: None):
            blobid = digest.hex()
            if blobid not in alone and sizes.get(blobid) in (None, size):
                missing.pop(blobid, None)
        if names.closed:
            raise self.tables.keyring.foreign()
        gone = list(missing.values())
        if gone and self.question.way == "download":
            own = {bytes.fromhex(one) for one in missing if (sizes[one] or 0) >= LARGE_BLOB}
            gone = self._read_elsewhere(gone, names, own)
        for failure in gone:
            self.found.wrong.add(failure)
        for first in range(0, len(gone), _RECORD_BLOBS):
            some = gone[first : first + _RECORD_BLOBS]
            self.found.requeued += record_checks(self.conn, self.target, [], some)
        self.on_progress(self.found)

    def _read_elsewhere(
        self, lost: list[Failure], names: BucketNames, own: Container[bytes]
    ) -> list[Failure]:
        """Reads blobs from packs that the ledger does not have, such as a run has left that died,
        and those in `own` from objects of their own. Packs in which some are right the ledger has
        from now on, so that checks look at them.

        Returns what is right nowhere.
        """
        sink = Hashing()
        sink.failures = lost
        good: list[PackObject] = []
        for key in give_elsewhere(self.bucket, self.tables, sink, None, own):
            name, info = PackKey.read(key), self.bucket.head(key)
            if name is not None and info is not None:
                good.append(PackObject(name, info.size, info.modified))
        new = [pack for pack in good if not names.knows(pack)]
        for stored in names.learn(new, lambda *_: None):
            with translated("record a pack"), self.conn.transaction():
                insert_packs(self.conn, self.target, [stored])
        self.found.bytes += sink.bytes
        return sink.failures
