"""`bench strategies` compares the ways to send, on a sample of the user's blobs, over his link.

Every way sends the same blobs into a scratch directory on the remote: all ways with run.workers,
the strategies with other numbers of workers too, and once for each class of sizes. The link's
ceiling is measured between them, in the same rounds. The sample is read and hashed once before, so
it comes from memory: ways are compared, not disks. The catalog is only read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from ntt_backup.bench import link, sample
from ntt_backup.bench.helpers import run_together
from ntt_backup.bench.population import population, readable
from ntt_backup.bench.progress import StepView
from ntt_backup.bench.remote import MeasuredSsh, wire_bytes
from ntt_backup.bench.remote_dir import RemoteDir, remote_dir
from ntt_backup.bench.runs import MIX, Cell, Findings, Run, Runs
from ntt_backup.bench.sample import Sample
from ntt_backup.bench.sending import Load, send, send_by_session
from ntt_backup.bench.ways import PLAIN, Way, choose
from ntt_backup.client.ssh import Ssh
from ntt_backup.client.transport import Transport
from ntt_backup.config import Settings
from ntt_backup.errors import RemoteCannotStore, RemoteDenied, SourceError
from ntt_backup.format import many, size
from ntt_backup.model import Blob, total_size

_SAMPLE_SECONDS: Final = 10.0
_LEAST_SAMPLE: Final = 20 * 10**6
_MOST_SAMPLE: Final = 10**9
_CLASS_SHARE: Final = 4
_CLASS_BLOBS: Final = 5000
_ROOM: Final = 1.2


@dataclass(frozen=True, slots=True)
class Options:
    """How it is measured. sample: bytes, None for what the link carries in ten seconds.

    workers: the numbers to try the strategies with. ways: by name, all for none.
    """

    rounds: int = 3
    seconds: float = 3.0
    sample: int | None = None
    workers: tuple[int, ...] = (1, 2, 4, 8)
    ways: tuple[str, ...] = ()


def measure(settings: Settings, options: Options, view: StepView) -> Findings:
    """Measures all of it. Raises what the catalog, the store, the remote or the link did."""
    view.doing("drawing a sample from the catalog")
    blobs = population(settings)
    with ExitStack() as stack:
        journals = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ntt-bench-")))
        directory = stack.enter_context(remote_dir(settings, view.say))
        view.doing("looking at the link")
        the_link = link.Link(Ssh(settings.remote), settings.run.stall_timeout, view.tick)
        guess = int(the_link.bytes_per_s * _SAMPLE_SECONDS)
        budget = options.sample or min(_MOST_SAMPLE, max(_LEAST_SAMPLE, guess))
        view.doing("reading the sample")
        chosen, unreadable = readable(settings, sample.draw(blobs, budget))
        _require_room(settings, directory, chosen, unreadable)
        found = Findings(chosen, unreadable, settings.run.workers)
        bench = _Bench(settings, options, view, directory, journals, found)
        cells = bench.plan(blobs, budget)
        view.say(
            f"a sample of {many(len(chosen.blobs), 'blob')}, {size(chosen.size)}, in"
            f" {many(len(bench.loads[MIX]), 'batch', 'batches')}"
        )
        bench.measure(the_link, cells)
    return found


def _require_room(
    settings: Settings, directory: RemoteDir, chosen: Sample, unreadable: int
) -> None:
    if not chosen.blobs:
        raise SourceError(
            "no blob of the sample can be read",
            detail=f"looked for {many(unreadable, 'blob')} in {settings.source.root}",
            hint="see what `ntt-backup-remote check` says about the source",
        )
    free = directory.facts.free_bytes
    if free is not None and free < chosen.size * _ROOM:
        raise RemoteCannotStore(
            "the remote has no room for the sample",
            detail=f"{size(free)} free, {size(chosen.size)} to send",
            hint="a smaller --sample does",
        )


@dataclass(slots=True)
class _Bench:
    """One bench under way. loads: the batches of the whole sample and of each class of sizes."""

    settings: Settings
    options: Options
    view: StepView
    directory: RemoteDir
    journals: Path
    found: Findings
    loads: dict[str, list[tuple[Blob, ...]]] = field(default_factory=dict)

    def plan(self, blobs: Sequence[Blob], budget: int) -> list[Cell]:
        """Cuts the batches of each load; returns what is run in each round."""
        run, found = self.settings.run, self.found
        samples = {MIX: found.sample}
        for name, members in sample.by_class(blobs).items():
            if name not in found.sample.missing:
                few = sample.draw_class(members, budget // _CLASS_SHARE, _CLASS_BLOBS)
                samples[name] = readable(self.settings, few)[0]
        most = max(run.workers, *self.options.workers)
        self.loads = {
            name: sample.batches(one.blobs, run.batch_size, run.batch_bytes, most)
            for name, one in samples.items()
            if one.blobs
        }
        ways = [way for way in choose(self.options.ways) if self._possible(way)]
        strategies = [way for way in ways if way.strategy is not None]
        others = [number for number in self.options.workers if number != run.workers]
        in_classes = [way for way in (*strategies, PLAIN) if way in ways]
        return [
            *(Cell(way, run.workers) for way in ways),
            *(Cell(way, workers) for way in strategies for workers in others),
            *(
                Cell(way, run.workers, name)
                for name in self.loads
                if name != MIX
                for way in in_classes
            ),
        ]

    def _possible(self, way: Way) -> bool:
        """Tells whether the remote takes this way; notes why, where it does not."""
        try:
            if way.strategy is not None:
                send_by_session(self._load(way, Ssh(self.settings.remote)), way.strategy)
        except RemoteDenied as error:
            self.found.skipped[way.name] = str(error)
            return False
        return True

    def measure(self, the_link: link.Link, cells: Sequence[Cell]) -> None:
        """Does all rounds."""
        ceilings = [link.Cell("up", n) for n in sorted({1, self.settings.run.workers})]
        self.view.begin(self.options.rounds * (len(cells) + len(ceilings)))
        for number in range(1, self.options.rounds + 1):
            mark = f"round {number} of {self.options.rounds}: "
            for one in ceilings:
                self.view.doing(mark + one.name)
                rate = the_link.rate(one, self.options.seconds)
                self.found.ceilings.setdefault(one.streams, []).append(rate)
                self.view.step(f"{mark}ceiling, {one.name}: {rate / 1e6:.1f} MB/s")
            for cell in cells:
                self.view.doing(mark + cell.name)
                run = self._run(cell)
                self.found.runs.setdefault(cell, Runs()).append(run)
                self.view.step(
                    f"{mark}{cell.name}: {run.seconds:.2f} s, {run.rate / 1e6:.1f} MB/s,"
                    f" {run.files_rate:,.0f} files/s"
                )

    def _run(self, cell: Cell) -> Run:
        batches = self.loads[cell.load]
        ssh = Ssh(self.settings.remote)
        options = {"Compression": "yes"} if cell.way.compressed else {}
        hands = sample.deal(batches, cell.workers)
        journals = [self.journals / str(worker) for worker in range(len(hands))]
        tasks = []
        for hand, journal in zip(hands, journals, strict=True):
            transport = MeasuredSsh(ssh, options, journal, self.directory.account)
            tasks.append(partial(send, self._load(cell.way, transport, journal.name, hand)))
        answers = run_together(tasks, self.view.tick)
        wires = [wire_bytes(journal.read_text(errors="replace")) for journal in journals]
        for journal in journals:
            journal.unlink()
        known = [wire for wire in wires if wire is not None]
        return Run(
            seconds=max(one.ended for one in answers) - min(one.began for one in answers),
            files=sum(map(len, batches)),
            size=sum(map(total_size, batches)),
            wire_bytes=sum(known) if len(known) == len(wires) else None,
            cpu_here=sum(one.cpu_s for one in answers),
            cpu_there=self.directory.renew(),
        )

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
