"""A bucket beside the peers: one SeaweedFS, the same files, in turns, and each way back.

Each contender sends a store into a new bucket, and then reads all of it back into an empty
directory, which is compared file by file. Ours also reads back the first 4,000 of its blobs. CPU
time is that of both ends, SeaweedFS (`weed`) and PostgreSQL included; the shares say whose it is.

A server that ends meanwhile is the error of whoever it served; another one serves the next.

With --requests a proxy counts what is asked of the store; it takes more time than the store does,
so times are not shown then. With --memory ours alone runs, and sends, and reads back the blobs of
one prefix; what its processes take together is shown. Start it as `python -m tests.bench.buckets`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from ntt_backup.demo.processes import Interrupts
from tests.bench import results
from tests.bench.bucket_lab import bucket_lab
from tests.bench.bucket_peers import CONTENDERS, FEW, OURS, PREFIX, RAW, BucketJob
from tests.bench.contender import Contender, Failed, compare
from tests.bench.cpu import Cpu, counted
from tests.bench.image_peers import IMAGES
from tests.bench.image_store import mounted
from tests.bench.lab import SHAPES, Lab, lab
from tests.bench.memory import Memory
from tests.bench.plan import Case
from tests.bench.results import Outcome, Sample
from tests.bench.slots import slot
from tests.bench.stores import Recipe, Store, cached
from tests.helpers.postgres_server import Postgres
from tests.helpers.s3_proxy import S3Proxy
from tests.helpers.s3_servers import S3Server

_RECIPES: Final = (
    Recipe("small", 48_000),
    Recipe("mix", bytes=1_000_000_000),
    Recipe("text", 34_500, each=20_058),
)
_LIMIT: Final = 600.0
_WAYS: Final = {
    "sent": "run",
    "all of it read back": "back",
    f"{FEW} blobs read back": "few",
    "mounted": "mounted",
    "read through the mount": "read",
    "one in a hundred read back": "one_in_a_hundred",
}
_WAYS_OF_MEMORY: Final = {"sent": "run", f"blobs of prefix {PREFIX} read back": "prefix"}


class Bench:
    """Runs the contenders over one store and one link. requests: these are counted; memory: that of
    ours is measured. limit: seconds for each command.
    """

    def __init__(
        self,
        home: Path,
        postgres: Postgres,
        cpu: Cpu,
        *,
        requests: bool,
        memory: bool,
        limit: float,
        workers: int | None,
    ) -> None:
        self._home = home
        self._postgres = postgres
        self._cpu = cpu
        self._requests = requests
        self._memory = memory
        self._limit = limit
        self._workers = workers
        self._jobs = 0

    def case(
        self, case: Case, store: Store, contenders: Sequence[Contender], rounds: int
    ) -> dict[str, Outcome]:
        """Returns what was measured of each way."""
        found: dict[str, Outcome] = {}
        with lab(case.link, self._home) as link, ExitStack() as stack:
            server = stack.enter_context(bucket_lab(link))
            for number in range(1, rounds + 1):
                for contender in contenders:
                    if server.ended():
                        stack.close()
                        server = stack.enter_context(bucket_lab(link))
                    for way, sample in self._turn(contender, number, store, link, server):
                        outcome = found.setdefault(way, Outcome(case, store, None, []))
                        outcome.samples.append(sample)
        return found

    def _turn(
        self, contender: Contender, number: int, store: Store, link: Lab, server: S3Server
    ) -> Iterator[tuple[str, Sample]]:
        """Yields what one contender takes for each way; the first that fails is its last."""
        self._jobs += 1
        scratch, destination = self._home / f"job-{self._jobs}", self._home / "back"
        for directory in (scratch, destination):
            directory.mkdir()
        remote = server.bucket(own=True)
        # SeaweedFS takes 0.2 s for the first object of a bucket, which restic and kopia make before
        # the clock starts.
        server.client().put_object(Bucket=remote.bucket, Key="first", Body=b"content")
        with S3Proxy(server) as proxy:
            job = BucketJob(
                store,
                link,
                scratch,
                destination,
                self._postgres,
                self._limit,
                thorough=True,
                workers=self._workers,
                environ=server.sender.environment,
                server=server.pid,
                endpoint=proxy.endpoint if self._requests else server.endpoint,
                bucket=remote.bucket,
            )
            ways = self._ways(contender)
            way, memory = next(iter(ways)), Memory()
            try:
                contender.prepare(job)
                for way, work in ways.items():
                    proxy.seen.clear()
                    memory = Memory()
                    job.watch = memory.watching if self._memory else None
                    sample = self._sample(contender, number, work, job)
                    _say(way, sample, proxy, memory)
                    yield way, sample
                    for directory in destination.iterdir():
                        shutil.rmtree(directory) if directory.is_dir() else directory.unlink()
            except Failed as failure:
                why = server.ended() or str(failure)
                sample = Sample(contender.name, number, None, why, os.getloadavg()[0])
                _say(way, sample, proxy, memory)
                yield way, sample
            finally:
                contender.finish(job)
                for directory in (scratch, destination):
                    shutil.rmtree(directory)
                if not server.ended():
                    server.client().delete_bucket(Bucket=remote.bucket)

    def _sample(
        self, contender: Contender, number: int, work: Callable[[BucketJob], float], job: BucketJob
    ) -> Sample:
        """Returns what one way takes. Raises Failed."""
        load, before = os.getloadavg()[0], self._cpu.seconds()
        with self._cpu.shares() as shares:
            seconds = work(job)
        used = self._cpu.seconds() - before
        if work == contender.run:
            contender.check(job)
        elif contender is not RAW and work.__name__ == "back":
            compare(job.store, job.destination)
        return Sample(contender.name, number, seconds, None, load, used, shares)

    def _ways(self, contender: Contender) -> dict[str, Callable[[BucketJob], float]]:
        ways = _WAYS_OF_MEMORY if self._memory else _WAYS
        return {
            way: found
            for way, name in ways.items()
            if (found := getattr(contender, name, None)) is not None
        }


def _say(way: str, sample: Sample, proxy: S3Proxy, memory: Memory) -> None:
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(proxy.requests.items()))
    if sample.error:
        said = sample.error
    elif not said:
        said = f"{sample.seconds:.2f} s, CPU {sample.cpu:.2f} s"
        said += f", {memory}" if memory.peak else ""
    print(f"  {sample.contender:14} {way}: {said}", file=sys.stderr, flush=True)


def main() -> int:
    """Compares a run into a bucket, and a restore from it, with the peers."""
    options = _parse()
    known = (*CONTENDERS, *IMAGES) if options.only else CONTENDERS
    contenders = [one for one in known if one.available() and _named(one, options.only)]
    if options.memory:
        contenders = [OURS]
    recipes = [one for one in _RECIPES if one.kind in options.store]
    if options.megabytes:
        recipes = [replace(one, bytes=options.megabytes * 10**6, blobs=None) for one in recipes]
    if options.blobs:
        recipes = [
            replace(one, blobs=options.blobs, bytes=None, each=options.each) for one in recipes
        ]
    outcomes = []
    interrupts = Interrupts()
    with interrupts.installed(), slot(options.disk) as workspace, counted() as cpu:
        home = workspace.home / "postgres"
        home.mkdir(mode=0o711)
        postgres = Postgres(home, interrupts)
        try:
            postgres.start()
            bench = Bench(
                workspace.home,
                postgres,
                cpu,
                requests=options.requests,
                memory=options.memory,
                limit=options.limit,
                workers=options.workers,
            )
            stores = options.cache or workspace.home / "stores"
            stores.mkdir(parents=True, exist_ok=True)
            for recipe in recipes:
                made = mounted(recipe, stores) if options.image else nullcontext()
                with made as image:
                    store = image or cached(recipe, stores)
                    case = Case(recipe, options.link)
                    outcomes.append(bench.case(case, store, contenders, options.rounds))
        finally:
            with interrupts.held():
                postgres.stop()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for found in [] if options.requests or options.memory else outcomes:
        for way, outcome in found.items():
            console.print(way, style="bold")
            console.print(results.figure_table(outcome, OURS.name, RAW.name))
            console.print(results.share_table(outcome))
    samples = [one for found in outcomes for out in found.values() for one in out.samples]
    return 1 if any(one.error for one in samples) else 0


def _named(contender: Contender, words: Sequence[str]) -> bool:
    return not words or any(contender.name.startswith(word) for word in words)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.buckets", description=main.__doc__)
    add = parser.add_argument
    add(
        "store",
        nargs="*",
        default=["small", "mix"],
        help="small, mix; both by default; text for images",
    )
    add("--only", nargs="+", default=[], metavar="NAME", help="contenders, by their first letters")
    add("--link", choices=list(SHAPES), default="loopback")
    add("--rounds", type=int, default=3)
    add("--megabytes", type=int, help="instead of the stores' own sizes")
    add("--blobs", type=int, metavar="N", help="so many, instead of the stores' own sizes")
    add("--each", type=int, metavar="BYTES", help="the size of each of them")
    add("--image", action="store_true", help="they are in an image: for millions; --disk a disk")
    add("--workers", type=int, metavar="N", help="instead of run.workers' default")
    add("--limit", type=float, default=_LIMIT, metavar="SECONDS", help="until one is given up")
    add("--requests", action="store_true", help="count requests instead of time")
    add("--memory", action="store_true", help="what our processes take, instead of time")
    add("--disk", type=Path, default=Path("/dev/shm"), metavar="DIR", help="work there")
    add("--cache", type=Path, metavar="DIR", help="keep the stores there; not kept by default")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
