"""Heal restores missing or damaged blobs of the store from the targets.

No other module writes into the store. A blob is examined first, and right content stays as it is.
The others are fetched as a restore fetches them: into scratch space of the store's own file system,
hashed, synced, and renamed to their names, with the owner and the mode of their neighbours. So a
name has its old content or the right one, whenever the process dies, and whatever a target sends.

An empty mount point looks like a store that lost everything. So some blob must be readable before
anything is written, and the root that is written to must be the one that was examined.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Final, Literal, NamedTuple

from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.blobdir.walk import Stray
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.failures import iter_damaged, ledger_of, targets_of
from ntt_backup.catalog.ledger import requeue
from ntt_backup.catalog.selection import Checks, Choice
from ntt_backup.config import Settings, SourceSettings
from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.errors import (
    SOME_FAILED,
    BackupError,
    ConfigError,
    RemoteError,
    RemoteUnreachable,
    SourceError,
)
from ntt_backup.formatting import many
from ntt_backup.model import Blob, Failure, Failures, Reason
from ntt_backup.packstore.tables import ahead
from ntt_backup.process.threads import Cancelled
from ntt_backup.restore.blobs import Restored, Wanted, work_from
from ntt_backup.restore.destination import InStore, Look, RestoreTarget, directories_to
from ntt_backup.source.store import Inspection, Store

# The reasons for which a blob is fetched. What is no file was put there by somebody.
_HEALED: Final = {Reason.MISSING, Reason.UNREADABLE, Reason.WRONG_SIZE, Reason.CORRUPT_SOURCE}
_EXAMINED: Final = 64
# The most blobs that are fetched at once, and the seconds that the first of them waits for others.
_FETCHED: Final = 1000
_WAIT_SECONDS: Final = 60.0
_NEAREST: Final = ("file", "ssh", "sftp", "s3")

# Scripts read the words in JSON.
Word = Literal["healed", "right", "wrong", "would-heal"]


class Outcome(NamedTuple):
    """What came of one blob. target: the one that it comes from, "" for none."""

    blobid: str
    outcome: Word
    target: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Suspects:
    """The blobs to examine.

    Attributes:
        blobids: These; where there are none, what the catalog calls failed for the store's sake.
        prefix: Only blobids that begin with this.
        all: Besides what failed, all blobs that the catalog has.
    """

    blobids: Sequence[str] = ()
    prefix: str = ""
    all: bool = False


@dataclass(slots=True)
class Healed:
    """The results so far.

    Attributes:
        examined: Blobs whose content in the store was hashed; `total` are in the catalog, if all
            are examined.
        right: Those that needed nothing.
        healed: Blobs that were put in place.
        would_heal: Blobs that would be fetched, if it were no trial.
        bytes: Bytes of content that were fetched.
        requeued: Failed marks that were removed, of all targets.
        sources: How many blobs came from each target.
        troubles: The targets that could not be asked, with the error.
        wrong: The blobs that were not healed.
    """

    examined: int = 0
    total: int = 0
    right: int = 0
    healed: int = 0
    would_heal: int = 0
    bytes: int = 0
    requeued: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    troubles: dict[str, str] = field(default_factory=dict)
    duration_s: float = 0.0
    wrong: Failures = field(default_factory=Failures)

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.wrong else 0


def nearest_first(targets: Mapping[str, Settings]) -> dict[str, Settings]:
    """Returns the targets in the order in which they are asked: this machine, ssh, buckets."""
    names = sorted(targets, key=lambda name: _NEAREST.index(targets[name].remote.kind))
    return {name: targets[name] for name in names}


class _Job(NamedTuple):
    """Blobs to examine. named: whether those that are right are reported, too."""

    blobids: list[str]
    named: bool


@dataclass
class Healing:
    """One call of heal.

    Attributes:
        conn: The catalog.
        source: The settings of the store.
        targets: The settings of each target, in the order in which they are asked.
        workers: The number of threads that examine, and of those that fetch.
        dry_run: Whether nothing is fetched and nothing is written.
        bwlimit: The limit of what is fetched.
        on_progress: Is called while blobs are examined and fetched.
        on_outcome: Is told what came of a blob that was named, or was not right.
        on_outage: Is told the error, and the seconds until the next attempt.
    """

    conn: Connection
    source: SourceSettings
    targets: Mapping[str, Settings]
    workers: int
    dry_run: bool
    bwlimit: Timetable | None
    on_progress: Callable[[Healed], None]
    on_outcome: Callable[[Outcome], None]
    on_outage: Callable[[BackupError, float], None]

    def __post_init__(self) -> None:
        self.done = Healed()
        self._started = time.monotonic()
        self._stop = threading.Event()
        self.root = self.source.root
        self._store = Store.of(self.source, self._alive)
        self._of_catalog = targets_of(self.conn)
        self._errors: dict[str, BackupError] = {}

    def run(self, suspects: Suspects) -> Healed:
        """Heals what is not right. Raises BackupError; what was put in place before stays.

        Raises SourceError, and heals nothing, where no blob of the store can be read.
        """
        for one in suspects.blobids:
            if not self.conn.part.has(one):
                said = f"source.prefixes of this host is {self.conn.part}"
                raise ConfigError(f"{one} belongs to another host", hint=f"heal it there: {said}")
        # While the root is open, its disk is not unmounted.
        with self._store.tree() as self._tree, ThreadPoolExecutor(self.workers) as threads:
            self._tree.sign_of_life()
            try:
                self._run(ahead(threads, self._examine, self._jobs(suspects), 2 * self.workers))
            except BaseException:
                self._stop.set()
                raise
        self._progress()
        return self.done

    def _alive(self) -> None:
        if self._stop.is_set():
            raise Cancelled

    def _progress(self) -> None:
        self.done.duration_s = time.monotonic() - self._started
        self.on_progress(self.done)

    # --- what the store has -----------------------------------------------------------------------

    def _jobs(self, suspects: Suspects) -> Iterator[_Job]:
        failed = (one for one in iter_damaged(self.conn) if one.startswith(suspects.prefix))
        named = iter(suspects.blobids or filter(is_blobid, failed))
        while some := list(islice(named, _EXAMINED)):
            yield _Job(some, named=True)
        if suspects.all:
            target, choice = next(iter(self.targets)), Choice(suspects.prefix)
            checks = Checks(self.conn, target, choice, local=True)
            self.done.total = checks.total
            while blobs := checks.next(_EXAMINED):
                yield _Job([one.blobid for one in blobs if is_blobid(one.blobid)], named=False)

    def _examine(self, job: _Job) -> Inspection:
        return self._inspect(job.blobids)

    def _inspect(self, blobids: Iterable[str]) -> Inspection:
        # Without sizes: that of the catalog may be wrong, and a hash is not.
        return self._store.inspect([Blob(blobid) for blobid in blobids], verify=True)

    def _run(self, examined: Iterator[tuple[_Job, Inspection]]) -> None:
        wrong: list[Failure] = []
        since = self._started
        for job, seen in examined:
            self.done.examined += len(job.blobids)
            self.done.right += len(seen.ready)
            if job.named:
                self._settle_right(seen.ready)
            since = since if wrong else time.monotonic()
            wrong += seen.failed
            if len(wrong) >= _FETCHED or time.monotonic() - since > _WAIT_SECONDS:
                self._heal(wrong)
                wrong = []
            self._progress()
        self._heal(wrong)

    def _settle_right(self, blobs: Sequence[Blob]) -> None:
        """Removes the failed marks of blobs that the store has right by now."""
        good: list[str] = []
        for blob in blobs:
            known = next((one.size for one in ledger_of(self.conn, blob.blobid)), None)
            if known in (None, blob.size):
                good.append(blob.blobid)
                self.on_outcome(Outcome(blob.blobid, "right"))
                continue
            self.done.right -= 1
            text = f"its content is right, {blob.size} bytes, and the catalog says {known}"
            failure = Failure(blob.blobid, Reason.WRONG_SIZE, text)
            self._report_wrong(failure, ["correct the row"])
        self._requeue(good)

    def _requeue(self, blobids: Sequence[str]) -> None:
        for target in self._of_catalog if blobids and not self.dry_run else ():
            self.done.requeued += requeue(self.conn, target, None, blobids)

    def _report_wrong(self, failure: Failure, more: Sequence[str]) -> None:
        detail = "; ".join([failure.detail, *more])
        self.done.wrong.add(Failure(failure.blobid, failure.reason, detail))
        self.on_outcome(Outcome(failure.blobid, "wrong", "", f"{failure.reason}: {detail}"))

    # --- what targets have ------------------------------------------------------------------------

    def _heal(self, failures: Sequence[Failure]) -> None:
        """Fetches blobs from one target after the other, until all are right."""
        wrong: dict[str, Failure] = {}
        for failure in failures:
            if failure.reason in _HEALED:
                wrong[failure.blobid] = failure
            else:
                self._report_wrong(failure, ["remove what stands there, then heal again"])
        ledger = {blobid: ledger_of(self.conn, blobid) for blobid in wrong}
        if self.dry_run:
            for blobid, failure in wrong.items():
                marked = {entry.target for entry in ledger[blobid] if entry.copied}
                first = next((name for name in self.targets if name in marked), "")
                self.done.would_heal += 1
                text = f"{failure.reason}: {failure.detail}"
                self.on_outcome(Outcome(blobid, "would-heal", first, text))
            return
        sizes = {blobid: entries[0].size for blobid, entries in ledger.items() if entries}
        told: dict[str, list[str]] = {blobid: [] for blobid in wrong}
        left = dict(wrong)
        for name, settings in self.targets.items():
            if not left:
                break
            said: Mapping[str, str] = {}
            if name not in self.done.troubles:
                links = {blobid: self._other_links(blobid) for blobid in left}
                said = self._fetch(name, settings, left, sizes)
                # What the store has now decides, and not what was said about it.
                for blob in self._inspect(left).ready:
                    detail = f"{left.pop(blob.blobid).reason}{links[blob.blobid]}"
                    self.done.healed += 1
                    self.done.sources[name] += 1
                    self.on_outcome(Outcome(blob.blobid, "healed", name, detail))
            for blobid in left:
                text = self.done.troubles.get(name) or said.get(blobid, "it did not come")
                told[blobid].append(f"{name}: {text}")
        self._requeue(sorted(wrong.keys() - left.keys()))
        if left and not self.done.healed:
            self._require_answers()
        for blobid, failure in left.items():
            self._report_wrong(failure, told[blobid])

    def _require_answers(self) -> None:
        """Raises the error where no target could be asked, so that nothing is known of any blob."""
        if self._errors.keys() == self.targets.keys():
            if len(self._errors) == 1:
                raise next(iter(self._errors.values()))
            raise RemoteUnreachable(
                "no target can be asked",
                detail="; ".join(f"{name}: {one}" for name, one in self._errors.items()),
                hint="`ntt-backup-remote --target NAME check` says why",
            )

    def _fetch(
        self,
        name: str,
        settings: Settings,
        wrong: Mapping[str, Failure],
        sizes: Mapping[str, int | None],
    ) -> dict[str, str]:
        """Fetches blobs from one target. Returns why some did not come, by blobid."""
        before, said = self.done.bytes, dict[str, str]()

        def progress(restored: Restored) -> None:
            self.done.bytes = before + restored.bytes
            self._progress()

        with closing(
            RestoreTarget(self.root, self._in_store(wrong, sizes), layout=self._store.layout)
        ) as target:
            if not os.path.samestat(os.fstat(target.fd), os.fstat(self._tree.fd)):
                raise SourceError(
                    f"the store {self.root} was replaced while it was healed",
                    hint="a disk was mounted or unmounted: start again when it is in place",
                )
            try:
                wanted = Wanted(blobids=sorted(wrong))
                work = work_from(settings, wanted, self.on_outage, bwlimit=self.bwlimit)
                got = work.run(target, self.workers, progress, trust_size=False)
            except (RemoteError, ConfigError) as error:
                self._errors[name] = error
                self.done.troubles[name] = str(error)
            else:
                if got.archived:
                    text = "its object is archived: `ntt-backup-remote restore --thaw` thaws it"
                    said = dict.fromkeys(wrong, text)
                said |= {one.blobid: f"{one.reason} {one.detail}" for one in got.wrong.first}
        return said

    # --- how neighbours look ----------------------------------------------------------------------

    def _in_store(self, blobids: Iterable[str], sizes: Mapping[str, int | None]) -> InStore:
        """Returns how blobs, and the directories that may be made for them, have to look."""
        place = InStore()
        for blobid in blobids:
            digest, below = bytes.fromhex(blobid), self._store.layout.directory(blobid)
            if (size := sizes.get(blobid)) is not None:
                place.sizes[digest] = size
            look = Look.of(os.fstat(self._tree.fd))
            for path in directories_to(below):
                parent = path.rpartition("/")[0]
                if path not in place.directories:
                    beside = chain([path], _names(self._tree.level(parent)))
                    place.directories[path] = self._look(beside, stat.S_ISDIR) or look
                look = place.directories[path]
            blobs = chain([blobid], _names(self._tree.entries(below)))
            found = self._look(map(self._tree.path_of, blobs), stat.S_ISREG) or self._any_blob
            place.files[digest] = found or look._replace(mode=look.mode & 0o666)
        return place

    def _look(self, paths: Iterable[str], fits: Callable[[int], bool]) -> Look | None:
        """Returns how the first of these looks that is a file, or a directory."""
        for path in paths:
            with suppress(OSError):
                status = self._tree.lstat(path)
                if fits(status.st_mode):
                    return Look.of(status)
        return None

    @cached_property
    def _any_blob(self) -> Look | None:
        """How any blob of the store looks, for those that are alone in their directories."""
        directories = _names(self._tree.directories())
        blobs = (one for directory in directories for one in _names(self._tree.entries(directory)))
        return self._look(map(self._tree.path_of, blobs), stat.S_ISREG)

    def _other_links(self, blobid: str) -> str:
        """Returns in words that a file that will be replaced has other names, which keep it."""
        with suppress(OSError):
            status = self._tree.lstat(self._tree.path_of(blobid))
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                names = many(status.st_nlink - 1, "other hard link keeps", "other hard links keep")
                return f"; {names} the wrong content"
        return ""


def _names(found: Iterator[str | Stray]) -> Iterator[str]:
    return (one for one in found if isinstance(one, str))
