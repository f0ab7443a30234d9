"""`bench strategies` compares the ways to send, on a sample of the user's blobs, over his link.

Every way sends the same blobs into a scratch directory on the remote: all ways with run.workers,
the strategies with other numbers of workers too. The link's ceiling is measured between them, in
the same rounds. The sample is read and hashed once before, so it comes from memory: ways are
compared, not disks. The catalog is only read.

The scratch directory lies below remote.path, on the backup's own file system, named like the
preflight's. It is removed when the connection that made it ends, for whatever reason; where the
remote went down, the next check, run or bench removes it once it is an hour old. Each run of a way
stores into a directory of its own in it, which is removed before the next run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ntt_backup.bench import link, sample
from ntt_backup.bench.helpers import run_together
from ntt_backup.bench.output import Progress
from ntt_backup.bench.remote import CountingSsh, wire_bytes
from ntt_backup.bench.runs import Cell, Findings, Run
from ntt_backup.bench.sample import Sample
from ntt_backup.bench.sending import Load, Way, choose, send, send_by_session
from ntt_backup.blobdir.layout import BY_HASH_LAYOUT
from ntt_backup.catalog import connection
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.catalog.selection import sample as draw_from_catalog
from ntt_backup.client.remote_errors import explain_root
from ntt_backup.client.remote_shell import ask
from ntt_backup.client.transport import Ssh, Transport, transport_to
from ntt_backup.config import RunSettings, Settings, application_name
from ntt_backup.errors import BackupError, ConfigError, RemoteCannotStore, RemoteDenied, SourceError
from ntt_backup.formatting import many, size
from ntt_backup.model import Blob
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies.probe import Facts
from ntt_backup.upload.strategies.tar_probe import ScratchDirectory

_POPULATION: Final = 100_000
_SAMPLE_SECONDS: Final = 10.0
_LEAST_SAMPLE: Final = 20 * 10**6
MOST_SAMPLE: Final = 10**9
_ROOM: Final = 1.2
_RENEW_SECONDS: Final = 60.0
_RENEW: Final = """
LC_ALL=C; export LC_ALL
cd "$scratch" || exit 1
rm -rf "$old"
message=$(mkdir "$new" "$new/by-hash" 2>&1) || echo "problem=$message"
sync -f . 2>/dev/null || sync
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Says how a bench measures. sample: bytes, None for what the link carries in ten seconds.

    workers: the numbers to try the strategies with. ways: by name, all for none.
    """

    rounds: int
    seconds: float
    sample: int | None
    workers: tuple[int, ...]
    ways: tuple[str, ...]

    def budget(self, bytes_per_s: float) -> int:
        """Returns the bytes of a sample, over a link of this speed."""
        guess = int(bytes_per_s * _SAMPLE_SECONDS)
        return self.sample or min(MOST_SAMPLE, max(_LEAST_SAMPLE, guess))

    def batches(self, chosen: Sample, run: RunSettings) -> list[tuple[Blob, ...]]:
        """Returns the sample in batches, enough for the highest number of workers."""
        most = max(run.workers, *self.workers)
        return sample.batches(chosen.blobs, run.batch_size, run.batch_bytes, most)


def measure(settings: Settings, options: Options, progress: Progress) -> Findings:
    """Measures all of it. Raises what the catalog, the store, the remote or the link did."""
    progress.say("drawing a sample from the catalog")
    blobs = population(settings)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="ntt-bench-"))
        journal = Path(scratch, "journal")
        directory = stack.enter_context(remote_dir(settings, progress.say))
        the_link = link.Link(transport_to(settings.remote), settings.run.stall_timeout)
        budget = options.budget(the_link.bytes_per_s)
        chosen, unreadable = readable(settings, sample.draw(blobs, budget))
        _require_room(directory, chosen)
        found = Findings(chosen, unreadable, settings.run.workers)
        batches = options.batches(chosen, settings.run)
        bench = _Bench(settings, options, progress, directory, journal, found, batches)
        cells = bench.plan()
        progress.say(
            f"a sample of {many(len(chosen.blobs), 'blob')}, {size(chosen.size)}, in"
            f" {many(len(batches), 'batch', 'batches')}"
        )
        bench.measure(the_link, cells)
    return found


def population(settings: Settings) -> list[Blob]:
    """Returns some blobs of the catalog with their sizes. Raises SourceError for none."""
    if (settings.source.layout, settings.source.hash) != (BY_HASH_LAYOUT.text, "blake3"):
        raise ConfigError(
            "bench is for a store of aa/bb/<BLAKE3>",
            hint="leave out source.layout and source.hash, and name such a store",
        )
    conn = connection.connect(settings.catalog.url, application_name("bench"), part=settings.part)
    try:
        verify_schema(conn, settings.target, "bench")
        drawn = draw_from_catalog(conn, settings.target, _POPULATION)
    finally:
        conn.close()
    blobs = [blob for blob in Store.of(settings.source).measure(drawn) if blob.size is not None]
    if not blobs:
        raise SourceError(
            "there is nothing to draw a sample from",
            detail=f"of {many(len(drawn), 'blob')} of the catalog none has a size, neither in the"
            " catalog nor in the store",
            hint="see `ntt-backup-remote status`, and source.root",
        )
    return blobs


def readable(settings: Settings, drawn: Sample) -> tuple[Sample, int]:
    """Reads the sample, so that the sample is in memory.

    Returns:
        The sound blobs, and the number of the other blobs.

    Raises:
        SourceError: No blob of the sample can be read.
    """
    checked = Store.of(settings.source).inspect(drawn.blobs, verify=True)
    if not checked.ready:
        raise SourceError(
            "no blob of the sample can be read",
            detail=f"looked for {many(len(checked.failed), 'blob')} in {settings.source.root}",
            hint="see what `ntt-backup-remote check` says about the source",
        )
    return Sample(tuple(checked.ready), drawn.missing), len(checked.failed)


def _require_room(directory: RemoteDir, chosen: Sample) -> None:
    free = directory.facts.free_bytes
    if free is not None and free < chosen.size * _ROOM:
        raise RemoteCannotStore(
            "the remote has no room for the sample",
            detail=f"{size(free)} free, {size(chosen.size)} to send",
            hint="use a smaller --sample",
        )


@dataclass(frozen=True, slots=True)
class _Bench:
    """One bench under way."""

    settings: Settings
    options: Options
    progress: Progress
    directory: RemoteDir
    journal: Path
    found: Findings
    batches: Sequence[tuple[Blob, ...]]

    def plan(self) -> list[Cell]:
        """Returns what is run in each round."""
        common = self.settings.run.workers
        ways = [way for way in choose(self.options.ways) if self._possible(way)]
        others = [number for number in self.options.workers if number != common]
        more = [Cell(way, number) for way in ways if way.strategy for number in others]
        return [*(Cell(way, common) for way in ways), *more]

    def _possible(self, way: Way) -> bool:
        """Tells whether the remote takes this way; notes why, where it does not."""
        try:
            if way.strategy is not None:
                send_by_session(self._load(way, transport_to(self.settings.remote)), way.strategy)
        except RemoteDenied as error:
            self.found.skipped[way.name] = str(error)
            return False
        return True

    def measure(self, the_link: link.Link, cells: Sequence[Cell]) -> None:
        """Does all rounds."""
        ceilings = [link.Streams("up", n) for n in sorted({1, self.settings.run.workers})]
        for number in range(1, self.options.rounds + 1):
            mark = f"round {number} of {self.options.rounds}: "
            for one in ceilings:
                rate = the_link.rate(one, self.options.seconds)
                self.found.ceilings.setdefault(one.count, []).append(rate)
                self.progress.say(f"{mark}ceiling, {one.name}: {rate / 1e6:.1f} MB/s")
            for cell in cells:
                self.progress.say(mark + self.found.note(cell, self._run(cell)))

    def _run(self, cell: Cell) -> Run:
        transport = transport_to(self.settings.remote)
        if isinstance(transport, Ssh):
            transport = CountingSsh(transport, self.journal)
        tasks = [
            partial(send, self._load(cell.way, transport, str(worker), hand))
            for worker, hand in enumerate(sample.deal(self.batches, cell.workers))
        ]
        answers = run_together(tasks)
        journal = self.journal.read_text(errors="replace") if self.journal.exists() else ""
        self.journal.unlink(missing_ok=True)
        self.directory.renew()
        return Run.of(answers, self.found.sample, wire_bytes(journal))

    def _load(
        self,
        way: Way,
        transport: Transport,
        worker: str = "0",
        batches: Sequence[tuple[Blob, ...]] = (),
    ) -> Load:
        settings = self.settings
        root = settings.source.root
        return Load(way, transport, root, self.directory.root, worker, settings.run, batches)


# --- the directory on the remote ------------------------------------------------------------------


@dataclass(slots=True)
class RemoteDir:
    """The directory. root: where the next run may store. facts: what the remote says of itself."""

    _transport: Transport
    _path: str
    facts: Facts
    _number: int = 0

    @property
    def root(self) -> str:
        return f"{self._path}/{self._number}"

    def renew(self) -> None:
        """Removes what the last run stored, and makes room for the next."""
        old, self._number = self._number, self._number + 1
        values = {"scratch": self._path, "old": str(old), "new": str(self._number)}
        said = ask(
            self._transport, _RENEW, values, doing="room for the next run", timeout=_RENEW_SECONDS
        )
        _, problem, why = said.decode("utf-8", "replace").partition("problem=")
        if problem:
            raise explain_root(why.strip())


@contextmanager
def remote_dir(settings: Settings, warn: Callable[[str], None]) -> Iterator[RemoteDir]:
    """Makes the directory, and removes it at the end; warn is told where that fails."""
    transport = transport_to(settings.remote)
    stem = f".ntt-check-{settings.owner}"
    path = f"{settings.remote.path}/{stem}.bench-{os.getpid()}"
    scratch = ScratchDirectory(transport, settings.remote.path, stem, path)
    try:
        made = RemoteDir(transport, path, scratch.facts)
        made.renew()
        yield made
    finally:
        try:
            scratch.close()
        except BackupError as error:
            warn(
                f"{path} may still stand on the remote ({error.message}); a check or run in an"
                " hour removes it"
            )
