"""A restore fetches blobs from the remote into a directory.

It needs no catalog: what the remote lists says what there is, and a blob's name what it must be.
One thread lists, as fast as the others take what it has found; they leave out what the directory
has already and fetch the rest. Memory is bounded however many blobs there are, and a call that was
interrupted is made again. A blob that is missing, unreadable, or does not hash to its name is
reported and left out; all others are restored.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ntt_backup.blobdir.layout import BY_HASH_LAYOUT
from ntt_backup.config import RemoteConfig
from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.errors import SOME_FAILED, BackupError, DestinationError
from ntt_backup.model import WHOLE, Failure, Failures, Reason, Shard
from ntt_backup.name_hash import HashOfNames
from ntt_backup.process.threads import WorkQueue
from ntt_backup.restore.destination import Found, RestoreTarget, TargetWriter

if TYPE_CHECKING:
    from ntt_backup.restore.as_paths import FileRestore
    from ntt_backup.restore.from_packs import FromPacks
    from ntt_backup.restore.from_receiver import FromReceiver

Entry = tuple[bytes, int | None]
Job = TypeVar("Job")
Context = TypeVar("Context")

_DIGITS: Final = 64


@dataclass(slots=True)
class Restored:
    """The counts of a restore so far.

    Attributes:
        restored: Blobs that were written.
        right: Blobs that the destination had already.
        bytes: Bytes of content that were fetched.
        archived: Objects that must be thawed first, of `archived_bytes` in all. `thawing` of them
            are being thawed.
        strangers: Sealed packs that this host has not signed. Each blob is compared with its name.
        not_needed: The keys of damaged packs whose blobs are all in other packs.
        names: The hash of names on the source.
        part: How much of the work is done, from 0 to 1; None where that is not known.
        wrong: The failures.
    """

    restored: int = 0
    right: int = 0
    bytes: int = 0
    archived: int = 0
    archived_bytes: int = 0
    thawing: int = 0
    strangers: int = 0
    not_needed: list[str] = field(default_factory=list)
    names: HashOfNames = "blake3"
    part: float | None = None
    duration_s: float = 0.0
    wrong: Failures = field(default_factory=Failures)

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.wrong or self.archived else 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The blobs to restore: those that begin with prefix, or blobids in any order and number.

    shard: of these, those in this part alone. Other calls may restore the other parts at once.
    """

    prefix: str = ""
    blobids: Iterable[str] | None = None
    shard: Shard = WHOLE

    @property
    def interval(self) -> tuple[int, int]:
        """Returns the first blobid that is wanted, as a number, and the number of blobids."""
        first = int(self.prefix.ljust(_DIGITS, "0"), 16)
        end = min(self.shard.end, first + (1 << 4 * (_DIGITS - len(self.prefix))))
        first = max(self.shard.first, first)
        return first, max(1, end - first)


@dataclass(frozen=True, slots=True)
class Thaw:
    """A request to thaw archived objects for `days` days. tier: the speed of thawing."""

    days: int
    tier: str


class Work(ABC, Generic[Job, Context]):
    """A restore from one kind of source: one thread lists jobs, the others fetch.

    Attributes:
        wanted: What to restore.
        cancelled: Raises where the command is ending.
        done: What was restored so far. lock: is held while that is changed.
        target: The directory, once `run` was called.
        queue: Jobs that are listed, and that no thread has taken yet.
    """

    target: RestoreTarget
    queue: WorkQueue[Job, None]

    def __init__(self, wanted: Wanted, cancelled: Callable[[], None]) -> None:
        self.wanted = wanted
        self.cancelled = cancelled
        self.done = Restored()
        self.lock = threading.Lock()
        self._trust_size = False
        self._threads = itertools.count()

    @abstractmethod
    def run_threads(self, count: int, tick: Callable[[], None]) -> None:
        """Calls `work` in threads, and tick meanwhile."""

    @abstractmethod
    def hash_of_names(self, context: Context) -> HashOfNames:
        """Returns the hash of names on the source. context: as of `list_jobs`."""

    @abstractmethod
    def list_jobs(self, context: Context) -> Iterator[Job]:
        """Yields what to fetch. context: of the thread, such as its session."""

    @abstractmethod
    def fetch_jobs(self, writer: TargetWriter, context: Context) -> None:
        """Fetches the jobs of one thread, and writes what comes."""

    def run(
        self,
        target: RestoreTarget,
        workers: int,
        on_progress: Callable[[Restored], None],
        *,
        trust_size: bool,
    ) -> Restored:
        """Restores what is wanted into the target. trust_size: a file of the right size is taken
        for right. Raises BackupError.
        """
        self.target, self._trust_size = target, trust_size
        self.queue = WorkQueue(2 * workers, self.cancelled)
        started = time.monotonic()

        def tick() -> None:
            self.done.duration_s = time.monotonic() - started
            on_progress(self.done)

        self.run_threads(workers + 1, tick)
        target.sync_names()
        self.done.duration_s = time.monotonic() - started
        return self.done

    def work(self, context: Context) -> None:
        """Does the work of one thread: the first one puts jobs into the queue, the others fetch."""
        number = next(self._threads)
        if number == 0:
            for job in self.list_jobs(context):
                self.queue.add_job(job)
            self.queue.close()
            return
        names = self.hash_of_names(context)
        with closing(TargetWriter(self.target, f"w{number}", self._fetched, names=names)) as writer:
            self.done.names = names
            self.fetch_jobs(writer, context)

    def has(self, writer: TargetWriter, entry: Entry) -> bool:
        """Returns whether the destination has this blob with the right content."""
        self.cancelled()
        found = writer.find(*entry, trust_size=self._trust_size)
        with self.lock:
            # What this call has restored, from another pack, was counted then.
            self.done.right += found is Found.BEFORE
        return found is not Found.NOT_RIGHT

    def finish(self, writer: TargetWriter, part: float | None) -> None:
        """Publishes the blobs that were written, and counts them. part: of all the work."""
        restored = writer.publish()
        failures, writer.failures = writer.failures, []
        refused, writer.refused = writer.refused, []
        for digest, text in refused:
            name = digest.hex()
            if self.target.in_store is None:
                raise DestinationError(
                    f"cannot restore into {self.target.root / self.target.layout.directory(name)}",
                    detail=f"{name}: {text}",
                    hint="remove it, and run the command again",
                )
            failures.append(Failure(name, Reason.UNREADABLE, f"it cannot be put in place: {text}"))
        with self.lock:
            self.done.restored += restored
            for failure in failures:
                self.done.wrong.add(failure)
            if part is not None:
                self.done.part = (self.done.part or 0.0) + part

    def fail(self, failure: Failure) -> None:
        """Reports a blob or an object that could not be restored."""
        with self.lock:
            self.done.wrong.add(failure)

    def _fetched(self, count: int) -> None:
        with self.lock:
            self.done.bytes += count


def restore(
    settings: RemoteConfig,
    destination: Path,
    wanted: Wanted,
    *,
    workers: int,
    trust_size: bool,
    on_progress: Callable[[Restored], None],
    on_outage: Callable[[BackupError, float], None],
    on_archived: Callable[[str], None] = lambda key: None,
    thaw: Thaw | None = None,
    bwlimit: Timetable | None = None,
    files: FileRestore | None = None,
) -> Restored:
    """Fetches the wanted blobs that the destination lacks, by `workers` threads. Raises
    BackupError. Each blob that is in the destination then is right.

    Args:
        trust_size: Keep a file of the right size without hashing it.
        on_progress: Is called about five times a second.
        on_outage: Is told the error, and the seconds until the next attempt.
        on_archived: Is told the keys of objects that must be thawed first.
        thaw: Asks the object store to thaw these objects.
        bwlimit: The limit of all that is fetched.
        files: The blobs come back as files under their paths, and these say which are wanted.
    """

    def work_on(wanted: Wanted) -> FromReceiver | FromPacks:
        return work_from(settings, wanted, on_outage, on_archived, thaw, bwlimit)

    if files is not None:
        return files.run(
            work_on, destination, workers=workers, trust_size=trust_size, on_progress=on_progress
        )
    work = work_on(wanted)
    layout = settings.source.path_layout if settings.source is not None else BY_HASH_LAYOUT
    with closing(RestoreTarget(destination, shard=wanted.shard, layout=layout)) as target:
        return work.run(target, workers, on_progress, trust_size=trust_size)


def work_from(
    settings: RemoteConfig,
    wanted: Wanted,
    on_outage: Callable[[BackupError, float], None],
    on_archived: Callable[[str], None] = lambda key: None,
    thaw: Thaw | None = None,
    bwlimit: Timetable | None = None,
) -> FromReceiver | FromPacks:
    """Returns the restore from a target; see `restore`."""
    # Each of the two takes a while to load.
    if settings.remote.packs:
        from ntt_backup.restore.from_packs import FromPacks

        return FromPacks(settings, wanted, on_outage, on_archived, thaw, bwlimit)
    from ntt_backup.restore.from_receiver import FromReceiver

    return FromReceiver(settings, wanted, on_outage, bwlimit)
