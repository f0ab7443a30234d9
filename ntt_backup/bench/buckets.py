"""`bench strategies` sends a sample of the user's blobs into a bucket, and fetches it back.

Every way out sends the same blobs below a prefix of its own; the ways back read what a way out of
the same round has sent. Ceilings are random parts of an upload that is dropped, and ranges that are
thrown away. The sample is read and hashed once before, so it comes from memory. The catalog is only
read.

The prefix lies below the target's own one, as `bench/<owner>-<pid>/`. What a killed bench leaves is
removed by the next one a day later. An append-only bucket removes nothing: then a bench runs only
where the operator has accepted that.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any, Final, TypeVar

from ntt_backup.bench import sample
from ntt_backup.bench.bucket_back import MOUNT, RANGES, Back, Fetch, bring_back, choose
from ntt_backup.bench.bucket_out import Out, send_out
from ntt_backup.bench.helpers import Answer, Ready, Task, run_together
from ntt_backup.bench.link import rate_of
from ntt_backup.bench.output import Progress
from ntt_backup.bench.results import MEGA
from ntt_backup.bench.runs import Cell, Findings, Run
from ntt_backup.bench.sending import Load
from ntt_backup.bench.strategies import MOST_SAMPLE, Options, population, readable
from ntt_backup.client.transport import Local
from ntt_backup.config import Settings
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import BackupError, ConfigError, RemoteDenied, SourceError, WorkerFailed
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.open import PACK_AREA
from ntt_backup.formatting import many, size
from ntt_backup.model import Blob
from ntt_backup.mount import kernel
from ntt_backup.objects.bucket import DEAD_SECONDS, Bucket, ObjectExists, ObjectInfo, sweep
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.packstore import marker
from ntt_backup.packstore.tables import ahead
from ntt_backup.wire.framing import FORMAT

# One request each, and one more to remove it, in every round.
_MOST_BLOBS: Final = 10_000
_PROBE_SECONDS: Final = 1.0
_LEAST_PART: Final = 1024**2
_MOST_PART: Final = 8 * 1024**2
_ROOM: Final = 2.5
T = TypeVar("T")
BENCH: Final = "bench/"
_DELETES_AT_ONCE: Final = 16
_AT_ONCE: Final = 2
_MOST_PARTS: Final = 10_000
_REFUSED: Final = "it refuses to delete"


@dataclass(slots=True)
class BucketFindings:
    """Holds what was found of the ways out, and the ways back. left: what stays in the bucket."""

    out: Findings
    back: Findings
    left: str = ""

    @property
    def skipped(self) -> dict[str, str]:
        return self.back.skipped

    def json(self) -> dict[str, Any]:
        """Returns the sample, the ceilings and every figure, as plain values."""
        out, back = self.out.json(), self.back.json()
        for direction, found in (("out", out), ("back", back)):
            for figure in found["figures"]:
                figure["direction"] = direction
        return {
            "sample": out["sample"],
            "link": out["link"],
            "link_back": back["link"],
            "figures": [*out["figures"], *back["figures"]],
            "left": self.left,
        }


def measure(
    settings: Settings, options: Options, progress: Progress, *, accepted: bool
) -> BucketFindings:
    """Measures all ways out and all ways back.

    Args:
        settings: The settings with the bucket.
        options: The options of the bench.
        progress: Shows the progress.
        accepted: Whether the objects that are sent may stay in a bucket that refuses to delete.

    Raises:
        ConfigError: The settings do not allow the bench.
        BackupError: The catalog, the store or the bucket has failed.
    """
    if settings.recipients:
        raise ConfigError(
            "what a bench sends is not sealed, and pack.recipients says that all is",
            hint="measure with a bucket of the same store that has no recipients (--target)",
        )
    out, back = choose(options.ways)
    progress.say("drawing a sample from the catalog")
    blobs = population(settings)
    most = options.rounds * len(out) * (options.sample or MOST_SAMPLE)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ntt-bench-")))
        directory = stack.enter_context(
            bucket_dir(settings, accepted=accepted, most=most, warn=progress.say)
        )
        (answer,) = run_together([partial(push, directory.at(), _LEAST_PART, _PROBE_SECONDS)])
        rate = rate_of([answer])
        drawn = sample.draw(blobs, options.budget(rate), _MOST_BLOBS)
        chosen, unreadable = readable(settings, drawn)
        if shutil.disk_usage(scratch).free < _ROOM * chosen.size:
            raise SourceError(
                "this machine has no room for an archive of the sample, and for what comes back",
                detail=f"{size(shutil.disk_usage(scratch).free)} free in {scratch.parent}, the"
                f" sample has {size(chosen.size)}",
                hint="set TMPDIR to a directory that has more, or take a smaller --sample",
            )
        workers = settings.run.workers
        found = BucketFindings(
            Findings(chosen, unreadable, workers), Findings(chosen, unreadable, workers)
        )
        part = int(min(_MOST_PART, max(_LEAST_PART, rate / 4)))
        batches = options.batches(chosen, settings.run)
        bench = _Bench(settings, options, progress, directory, scratch, found, part, batches)
        progress.say(f"a sample of {many(len(chosen.blobs), 'blob')}, {size(chosen.size)}")
        for number in range(1, options.rounds + 1):
            bench.round(number, out, back)
        found.left = directory.left()
    return found


@dataclass(slots=True)
class _Bench:
    """One bench under way. part: the bytes of a request that measures a ceiling."""

    settings: Settings
    options: Options
    progress: Progress
    directory: BucketDir
    scratch: Path
    found: BucketFindings
    part: int
    batches: Sequence[tuple[Blob, ...]]
    mark: str = ""

    def round(self, number: int, out: Sequence[Out], back: Sequence[Back]) -> None:
        """Measures everything once."""
        self.mark = f"round {number} of {self.options.rounds}: "
        common = self.settings.run.workers
        needed = {way.source for way in back}
        self._ceilings(self.found.out, "up", partial(push, self.directory.at()))
        for way in out:
            numbers = [one for one in self.options.workers if one != common and way.strategy]
            for workers in [*numbers, common]:
                place = f"{number}/{way.name}-{workers}"
                ran = self._out(way, workers, place)
                self._say(self.found.out.note(Cell(way, workers), ran))
                if workers != common or way.name not in needed:
                    self.directory.clear(place)
        for one in back:
            place = f"{number}/{one.source}-{common}"
            if one is back[0]:
                self._ceilings(self.found.back, "down", partial(pull, self.directory.at(place)))
            if one.name in self.found.skipped:
                continue
            try:
                run = self._back(one, place)
            except WorkerFailed as error:
                if one.form != MOUNT:
                    raise
                self.found.skipped[one.name] = str(error)
            else:
                self._say(self.found.back.note(Cell(one, common), run))
        self.directory.clear(str(number))

    def _say(self, text: str) -> None:
        self.progress.say(self.mark + text)

    def _ceilings(self, found: Findings, direction: str, task: Callable[..., Answer]) -> None:
        for streams in sorted({1, found.workers}):
            one = partial(task, self.part, self.options.seconds)
            rate = rate_of(run_together([one] * streams))
            found.ceilings.setdefault(streams, []).append(rate)
            told = f"ceiling {direction}, {many(streams, 'stream')}"
            self._say(f"{told}: {rate / MEGA:.1f} MB/s")

    def _out(self, way: Out, workers: int, place: str) -> Run:
        remote = self.directory.at(place)
        if way.strategy is not None:
            bucket = open_bucket(remote)
            with closing(FileStoreByBucket(bucket, remote.part_size, PACK_AREA)) as store:
                marker.make(store)
        source, run = self.settings.source.root, self.settings.run
        hands = enumerate(sample.deal(self.batches, workers))
        loads = [
            Load(way, Local(), source, "", str(worker), run, hand, remote) for worker, hand in hands
        ]
        answers = run_together([partial(send_out, load, self.scratch) for load in loads])
        objects = [one for one in self.directory.objects(place) if one.key != FORMAT]
        return replace(
            Run.of(answers, self.found.out.sample, sum(one.size for one in objects)),
            objects=len(objects),
            writes=sum(way.writes(one.size, remote.part_size) for one in objects),
        )

    def _back(self, way: Back, place: str) -> Run:
        workers = self.settings.run.workers
        settings = self.settings.model_copy(update={"remote": self.directory.at(place)})
        whole = way.form in (RANGES, MOUNT)
        hands = [self.batches] if whole else sample.deal(self.batches, workers)
        target = self.scratch / "back"
        tasks: list[Task] = []
        for worker, hand in enumerate(hands):
            directory = target / str(worker)
            directory.mkdir(parents=True)
            blobs = [blob for batch in hand for blob in batch]
            tasks.append(
                partial(
                    bring_back,
                    Fetch(way, settings, blobs, directory, self.scratch, str(worker), workers),
                )
            )
        try:
            answers = run_together(tasks)
            stored = None if whole else sum(one.size for one in self.directory.objects(place))
            ran = Run.of(answers, self.found.out.sample, stored)
            return replace(ran, first_s=answers[0].opening_s) if way.form == MOUNT else ran
        finally:
            if os.path.ismount(target / "0"):
                kernel.detach(target / "0")
            shutil.rmtree(target)


# --- the prefix in the bucket ---------------------------------------------------------------------


@dataclass(slots=True)
class BucketDir:
    """The prefix. keeps: why what is sent stays, in words; "" where all of it is removed."""

    _target: RemoteSettings
    _path: str
    keeps: str = ""

    def at(self, place: str = "") -> RemoteSettings:
        """Returns the settings of a place below the prefix.

        The settings have no storage class: archived objects cannot be read back, and are paid for
        by the month.
        """
        names = self._target.model_fields_set - {"url", "storage_class"}
        url = "/".join(filter(None, (self._target.url, self._path, place)))
        values = {name: getattr(self._target, name) for name in names}
        return RemoteSettings.model_validate({**values, "url": url})

    def objects(self, place: str = "") -> list[ObjectInfo]:
        """Returns the objects of a place."""
        return list(open_bucket(self.at(place)).list(""))

    def clear(self, place: str = "") -> None:
        """Removes the objects of a place and the unfinished uploads to this place.

        The objects remain if the bucket refuses to remove objects.
        """
        bucket = open_bucket(self.at(place))
        sweep(bucket, ("",), time.time() + DEAD_SECONDS)
        if self.keeps != _REFUSED:
            _delete(bucket, [one.key for one in bucket.list("")])

    def left(self) -> str:
        """Returns in words what stays in the bucket; "" for nothing."""
        if not self.keeps:
            return ""
        sizes = [one.size for one in self.objects()]
        stays = f"{many(len(sizes), 'object')}, {size(sum(sizes))}" if sizes else "old versions"
        return f"Left in the bucket, because {self.keeps}: {stays} below {self.at().url}"


@contextmanager
def bucket_dir(
    settings: Settings, *, accepted: bool, most: int, warn: Callable[[str], None]
) -> Iterator[BucketDir]:
    """Yields the prefix in the bucket, and empties the prefix at the end.

    Args:
        settings: The settings with the bucket.
        accepted: Whether the objects that are sent may stay in the bucket.
        most: The largest number of bytes that may stay, for the message.
        warn: Receives a warning if the prefix cannot be emptied.

    Raises:
        ConfigError: The objects would stay in the bucket, and that is not accepted.
    """
    remote, owner = settings.remote, settings.owner
    made = BucketDir(remote, f"{BENCH}{owner}-{os.getpid()}", _keeps(open_bucket(remote), owner))
    if made.keeps and not accepted:
        raise ConfigError(
            "what a bench sends would stay in this bucket",
            detail=f"{made.keeps}; up to {size(most)} below {remote.url}/{BENCH}",
            hint="--yes accepts that, --sample and --only make it less; or measure with a bucket of"
            " the same store that may be emptied (--target)",
        )
    try:
        yield made
    finally:
        try:
            made.clear()
        except BackupError as error:
            warn(f"{made.at().url} may not be empty ({error.message}); a bench in a day removes it")


def _keeps(bucket: Bucket, owner: str) -> str:
    """Returns why the bucket would keep what is sent; "" where it would not.

    Removes what a bench of this owner left more than a day ago.
    """
    trial, content = f"{BENCH}trial-{owner}", b"a trial"
    with suppress(ObjectExists):
        bucket.put(trial, content, sha256(content).digest())
    before = time.time() - DEAD_SECONDS
    sweep(bucket, (f"{BENCH}{owner}-",), before)
    try:
        bucket.delete(trial)
    except RemoteDenied:
        return _REFUSED
    _delete(
        bucket,
        [
            one.key
            for one in bucket.list(f"{BENCH}{owner}-")
            if one.modified is not None and one.modified < datetime.fromtimestamp(before, UTC)
        ],
    )
    return "it keeps old versions" if bucket.protection().versioning == "on" else ""


def _delete(bucket: Bucket, keys: Iterable[str]) -> None:
    with ThreadPoolExecutor(_DELETES_AT_ONCE) as threads:
        for _ in threads.map(bucket.delete, keys):
            pass


def push(remote: RemoteSettings, part: int, seconds: float, ready: Ready) -> Answer:
    """Sends random parts of an upload for so many seconds after the first, and drops them."""
    bucket = open_bucket(remote)
    data = os.urandom(part)
    digest, key = sha256(data).digest(), f"ceiling-{os.getpid()}"
    upload_id = bucket.create_upload(key)
    try:
        return _stream(
            lambda number: bucket.put_part(key, upload_id, number, data, digest).size,
            cycle(range(1, _MOST_PARTS + 1)),
            seconds,
            ready,
        )
    finally:
        bucket.abort(key, upload_id)


def pull(remote: RemoteSettings, part: int, seconds: float, ready: Ready) -> Answer:
    """Receives what lies at a place for so many seconds after the first answer, again and again."""
    bucket = open_bucket(remote)
    ranges = [
        (one.key, at, min(part, one.size - at))
        for one in bucket.list("")
        for at in range(0, one.size, part)
    ]
    return _stream(lambda wanted: len(bucket.get_range(*wanted)), cycle(ranges), seconds, ready)


def _stream(move: Callable[[T], int], items: Iterable[T], seconds: float, ready: Ready) -> Answer:
    """Moves one item after the other, two at once."""
    began = moved = 0.0
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        ready()
        for _, some in ahead(threads, move, items, _AT_ONCE):
            now = time.monotonic()
            if not began:
                began = now
                continue
            moved += some
            if now - began >= seconds:
                break
    return Answer(began=began, ended=now, size=int(moved))
