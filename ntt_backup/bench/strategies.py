"""`bench strategies`: the ways to send, on a sample of the user's own blobs, over his own link.

Made-up files and a made-up link answer made-up questions. So a sample is drawn from the catalog and
read from the store, and every way sends the same blobs into a scratch directory on the remote: all
of them with the configured number of workers, the strategies of the registry with other numbers
too, and once for each class of sizes. The link's ceiling is measured between them, in the same
rounds.

The sample is read and hashed once before, so all of it comes from memory: ways are compared here,
not disks. The catalog is read and left as it is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ntt_backup.bench import link, sample, ways
from ntt_backup.bench import population as blobs_of
from ntt_backup.bench.helpers import Crew
from ntt_backup.bench.progress import StepView
from ntt_backup.bench.remote_dir import Scratch, scratch
from ntt_backup.bench.runs import MIX, Cell, Findings, Run
from ntt_backup.bench.sample import Sample
from ntt_backup.bench.tasks import Answer, Fetch, Item, Reach, Send
from ntt_backup.bench.ways import PLAIN, Way
from ntt_backup.client.connection import SessionSpec
from ntt_backup.client.ssh import Ssh
from ntt_backup.config import Settings
from ntt_backup.errors import RemoteCannotStore, RemoteDenied, SourceError
from ntt_backup.format import many, size
from ntt_backup.model import Blob, total_size
from ntt_backup.process.interrupts import Interrupts
from ntt_backup.source.inspection import Store
from ntt_backup.upload.strategies import open_session

_CLASS_SHARE: Final = 4
_CLASS_BLOBS: Final = 5000
_ROOM: Final = 1.2


@dataclass(frozen=True, slots=True)
class Options:
    """How it is measured. sample: bytes, None for what the link carries in ten seconds.

    workers: the numbers to try the registry's strategies with. ways: by name, all for none.
    """

    rounds: int = 3
    seconds: float = 3.0
    sample: int | None = None
    workers: tuple[int, ...] = (1, 2, 4, 8)
    ways: tuple[str, ...] = ()


@dataclass(slots=True)
class Bench:
    """One bench under way: what it works with, and what it has found."""

    settings: Settings
    options: Options
    view: StepView
    crew: Crew
    scratch: Scratch
    back: Path
    found: Findings
    loads: dict[str, list[tuple[Blob, ...]]] = field(default_factory=dict)

    def plan(self, wanted: Sequence[Way], population: Sequence[Blob], budget: int) -> list[Cell]:
        """What is run in each round; cuts the batches of each load."""
        run, found = self.settings.run, self.found
        most = max(run.workers, *self.options.workers)
        loads = {MIX: found.sample.blobs}
        for name, members in sample.by_class(population).items():
            if name not in found.sample.missing:
                few = sample.draw_class(members, budget // _CLASS_SHARE, _CLASS_BLOBS)
                loads[name] = blobs_of.sound(self.settings, Sample(few, ()))[0].blobs
        self.loads = {
            name: sample.batches(blobs, run.batch_size, run.batch_bytes, most)
            for name, blobs in loads.items()
            if blobs
        }
        registered = [way for way in wanted if way.strategy is not None]
        cells = [Cell(way, run.workers) for way in wanted]
        cells += [
            Cell(way, workers)
            for way in registered
            for workers in self.options.workers
            if workers != run.workers
        ]
        if registered and "tar-back" not in found.skipped:
            found.returning = Cell(registered[0], run.workers)
        in_classes = [way for way in (*registered, PLAIN) if way in wanted]
        return cells + [
            Cell(way, run.workers, name) for name in self.loads if name != MIX for way in in_classes
        ]

    def measure(self, reach: Reach, warm: int, cells: Sequence[Cell]) -> None:
        """All rounds."""
        ceilings = [link.Cell("up", n) for n in sorted({1, self.settings.run.workers})]
        self.view.begin(self.options.rounds * (len(cells) + len(ceilings)))
        for number in range(1, self.options.rounds + 1):
            mark = f"round {number} of {self.options.rounds}: "
            for one in ceilings:
                self.view.doing(mark + one.name)
                rate = link.measure_rate(self.crew, reach, one, self.options.seconds, warm)
                self.found.ceilings.setdefault(one.streams, []).append(rate)
                self.view.step(f"{mark}ceiling, {one.name}: {rate / 1e6:.1f} MB/s")
            for cell in cells:
                self.view.doing(mark + cell.name)
                run = self._run(cell)
                self.found.runs.setdefault(cell, []).append(run)
                self.view.step(
                    f"{mark}{cell.name}: {run.seconds:.2f} s, {run.rate / 1e6:.1f} MB/s,"
                    f" {run.files_rate:,.0f} files/s"
                )

    def _run(self, cell: Cell) -> Run:
        batches = self.loads[cell.load]
        way = cell.way
        reach = Reach(
            remote=self.settings.remote,
            options={"Compression": "yes"} if way.compressed else {},
            account=self.scratch.account,
            patience=self.settings.run.stall_timeout,
        )
        tasks = [
            Send(
                reach=reach,
                store=self.settings.source.root,
                root=self.scratch.root,
                slot=str(slot),
                run=self.settings.run,
                strategy=way.strategy,
                codec=way.codec,
                reconnect=way.reconnect,
                stored=way.stored,
                batches=[[_item(blob) for blob in batch] for batch in hand],
            )
            for slot, hand in enumerate(sample.deal(batches, cell.workers))
        ]
        answers = self.crew.run(tasks)
        if cell == self.found.returning:
            self._fetch(cell)
        return _outcome(answers, batches, self.scratch.turn())

    def _fetch(self, cell: Cell) -> None:
        """Bring back what was just sent, and see that all of it came."""
        batches = self.loads[cell.load]
        prefixes = sorted({blob.blobid[:2] for batch in batches for blob in batch})
        reach = Reach(remote=self.settings.remote, patience=self.settings.run.stall_timeout)
        with tempfile.TemporaryDirectory(prefix="ntt-bench-", dir=self.back) as place:
            tasks = [
                Fetch(reach=reach, root=self.scratch.root, prefixes=share, into=Path(place))
                for share in (prefixes[n :: cell.workers] for n in range(cell.workers))
                if share
            ]
            answers = self.crew.run(tasks)
            came = sum(len(files) for _, _, files in os.walk(place))
        if came != sum(map(len, batches)):
            raise RemoteCannotStore("not all came back", detail=f"{many(came, 'file')} did")
        self.found.back.append(_outcome(answers, batches, None))


def measure(
    settings: Settings, options: Options, interrupts: Interrupts, view: StepView
) -> Findings:
    """All of it. Raises what the catalog, the store, the remote or the link did."""
    view.doing("drawing a sample from the catalog")
    population = blobs_of.population(settings)
    reach = Reach(remote=settings.remote, patience=settings.run.stall_timeout)
    with ExitStack() as stack:
        back = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ntt-bench-")))
        place = stack.enter_context(scratch(settings, interrupts, view.say))
        crew = stack.enter_context(Crew(view.tick))
        view.doing("looking at the link")
        warm = link.warm_bytes(crew, reach)
        budget = options.sample or blobs_of.budget(warm / link.WARM_SECONDS)
        view.doing("reading the sample")
        chosen, gone = blobs_of.sound(settings, sample.draw(population, budget))
        if not chosen.blobs:
            raise SourceError(
                "no blob of the sample can be read",
                detail=f"looked for {many(gone, 'blob')} in {settings.source.root}",
                hint="see what `ntt-backup-remote check` says about the source",
            )
        _require_room(place, chosen)
        found = Findings(chosen, gone, settings.run.workers)
        wanted = _possible(settings, options, place, found)
        if shutil.disk_usage(back).free < chosen.size * _ROOM:
            why = f"no room for the sample in {back.parent} (TMPDIR)"
            found.skipped.update({"tar-stored": why, "tar-back": why})
            wanted = [way for way in wanted if not way.stored]
        bench = Bench(settings, options, view, crew, place, back, found)
        cells = bench.plan(wanted, population, budget)
        view.say(
            f"a sample of {many(len(chosen.blobs), 'blob')}, {size(chosen.size)}, in"
            f" {many(len(bench.loads[MIX]), 'batch', 'batches')}"
        )
        bench.measure(reach, warm, cells)
    return found


def _possible(settings: Settings, options: Options, place: Scratch, found: Findings) -> list[Way]:
    """The ways that both sides have what it takes for; why others do not goes to found."""
    tools = sorted({tool for way in ways.VARIATIONS for tool in way.tools})
    absent = [*place.absent(tools), *(tool for tool in tools if shutil.which(tool) is None)]
    wanted, found.skipped = ways.choose(options.ways, absent)
    for way in list(wanted):
        if way.strategy is not None and (why := _refusal(settings, way, place)):
            found.skipped[way.name] = why
            wanted.remove(way)
    return wanted


def _refusal(settings: Settings, way: Way, place: Scratch) -> str:
    """Why the remote cannot be sent to by this way's strategy; nothing where it can."""
    run = settings.run.model_copy(update={"codec": way.codec}) if way.codec else settings.run
    spec = SessionSpec(
        transport=Ssh(settings.remote),
        root=place.root,
        owner="bench",
        run_id="bench",
        slot="0",
        run=run,
    )
    try:
        open_session(way.strategy or "", spec, Store(settings.source.root)).close()
    except RemoteDenied as error:
        return str(error)
    return ""


def _require_room(place: Scratch, chosen: Sample) -> None:
    free = place.facts.free_bytes
    if free is not None and free < chosen.size * _ROOM:
        raise RemoteCannotStore(
            "the remote has no room for the sample",
            detail=f"{size(free)} free, {size(chosen.size)} to send",
            hint="a smaller --sample does",
        )


def _item(blob: Blob) -> Item:
    return Item(blobid=blob.blobid, size=blob.size or 0)


def _outcome(
    answers: Sequence[Answer], batches: Sequence[tuple[Blob, ...]], cpu_there: float | None
) -> Run:
    wires = [one.wire_bytes for one in answers]
    known = [wire for wire in wires if wire is not None]
    return Run(
        seconds=max(one.ended for one in answers) - min(one.began for one in answers),
        files=sum(map(len, batches)),
        size=sum(map(total_size, batches)),
        wire_bytes=sum(known) if len(known) == len(wires) else None,
        cpu_here=sum(one.cpu_s for one in answers),
        cpu_there=cpu_there,
    )
