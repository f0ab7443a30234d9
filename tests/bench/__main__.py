"""The peer table: us and the others, the same files, the same links, in turns.

Runs case by case (a store over a link), in each round by round, in each contender by contender; so
a busy minute of the machine falls on all alike. Before each run everything that the one before left
is gone: its files are removed, its sessions have ended, the file system is synced. Store and
destination are in memory unless --disk says otherwise: what is compared is what the contenders and
the link do, not a disk. There our syncs cost little; no peer syncs anything.

Start it by tests/bench/run, or as `python -m tests.bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ntt_backup.demo.processes import Interrupts
from ntt_backup.errors import BackupError, Stopped
from tests.bench import plan, results
from tests.bench.contender import Contender, Failed, Job
from tests.bench.cpu import Cpu, NoCgroup, Share, counted
from tests.bench.lab import Lab, LabError, lab, missing
from tests.bench.machine import describe_machine
from tests.bench.measure import measure
from tests.bench.peers import CEILING, CONTENDERS, OURS, OursFixed
from tests.bench.plan import Case
from tests.bench.results import Outcome, Sample
from tests.bench.slots import NoSlot, slot
from tests.bench.stores import Store, cached
from tests.helpers.postgres_server import Postgres


@dataclass
class Bench:
    """One run of the whole: what is wanted, and where it works."""

    home: Path
    stores: Path
    postgres: Postgres
    contenders: tuple[Contender, ...]
    rounds: int
    limit: float
    patience: float
    workers: int | None
    cipher: str | None
    bare: bool
    local: bool
    cpu: Cpu | None
    profile: bool
    started: float
    jobs: int = 0
    # Those whose form of keeping files was read back once.
    restored: frozenset[str] = frozenset()

    def case(self, case: Case) -> Outcome:
        """Measure one case. Raises LabError."""
        store = cached(case.recipe, self.stores)
        with lab(case.link, self.home, cipher=self.cipher, bare=self.bare) as link:
            measured = measure(link)
            outcome = Outcome(case, store, measured, [])
            self._say(results.title(outcome))
            for number in range(1, self.rounds + 1):
                # Forwards and backwards, so that nobody always comes behind the same other.
                for contender in self.contenders[:: 1 if number % 2 else -1]:
                    if self._wanted(contender, outcome):
                        sample = self._sample(contender, number, store, link)
                        outcome.samples.append(sample)
                        self._say(f"  round {number} of {self.rounds}: {_line(sample)}")
        return outcome

    def _wanted(self, contender: Contender, outcome: Outcome) -> bool:
        """Whether one more run of it tells us anything, and is worth its time."""
        if outcome.error(contender.name) or outcome.case.link not in contender.links:
            return False
        return contender.name == OURS or outcome.spent(contender.name) < self.patience

    def _sample(self, contender: Contender, number: int, store: Store, link: Lab) -> Sample:
        load = os.getloadavg()[0]
        used = None
        shares: dict[str, Share] = {}
        try:
            with self._job(contender, store, link) as job:
                contender.prepare(job)
                link.settle()
                subprocess.run(["sync", "--file-system", str(self.home)], check=False)
                with ExitStack() as stack:
                    if self.cpu is not None:
                        before = self.cpu.seconds()
                        shares = stack.enter_context(self.cpu.shares()) if self.profile else {}
                    seconds = contender.run(job)
                    link.settle()
                if self.cpu is not None:
                    used = self.cpu.seconds() - before
                contender.check(job)
        except Failed as failure:
            return Sample(contender.name, number, None, str(failure), load)
        self.restored |= {contender.name}
        return Sample(contender.name, number, seconds, None, load, used, shares)

    @contextmanager
    def _job(self, contender: Contender, store: Store, link: Lab) -> Iterator[Job]:
        """A job in directories of its own, which go at the end."""
        self.jobs += 1
        scratch = self.home / f"job-{self.jobs}"
        scratch.mkdir()
        destination = link.destination(f"job-{self.jobs}")
        thorough = contender.name not in self.restored
        job = Job(
            store,
            link,
            scratch,
            destination,
            self.postgres,
            self.limit,
            thorough,
            self.workers,
            self.local,
        )
        try:
            yield job
        finally:
            contender.finish(job)
            link.settle()
            for directory in (scratch, destination):
                shutil.rmtree(directory)

    def _say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {text}", file=sys.stderr, flush=True)


def _line(sample: Sample) -> str:
    said = f"{sample.seconds:.2f} s" if sample.seconds is not None else f"ERROR: {sample.error}"
    return f"{sample.contender:16s} {said}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare ntt-backup with its peers on this machine."""
    options = _parse(arguments)
    interrupts = Interrupts()
    with interrupts.installed():
        try:
            return _bench(options, interrupts)
        except (LabError, NoSlot, ValueError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
        except Stopped as stopped:
            print("bench: stopped, everything is removed", file=sys.stderr)
            return stopped.exit_code
        except BackupError as error:
            print(f"bench: {error}", file=sys.stderr)
            return error.exit_code


def _bench(options: argparse.Namespace, interrupts: Interrupts) -> int:
    names = {one.name: one for one in CONTENDERS}
    wanted: plan.Plan = options.plan
    choice = plan.choose(wanted, list(names), options.only)
    cases = [case for case in choice.cases if _possible(case)]
    chosen = [names[name] for name in choice.contenders]
    fixed = [OursFixed(codec) for codec in options.codec]
    contenders = tuple(one for one in (*chosen[:1], *fixed, *chosen[1:]) if _present(one))
    if options.local:
        contenders = tuple(one for one in contenders if one.local)
        cases = [case for case in cases if case.link == "loopback"]
    if not cases or not contenders:
        raise LabError("nothing is left to measure")
    outcomes: list[Outcome] = []
    started = time.monotonic()
    with slot(options.disk) as workspace, ExitStack() as stack:
        cpu = None
        try:
            cpu = stack.enter_context(counted())
        except NoCgroup as error:
            print(f"bench: no CPU time is counted, that takes a cgroup: {error}", file=sys.stderr)
        _require_passable(workspace.home)
        machine = describe_machine(contenders, workspace.home)
        _describe(machine)
        home = workspace.home / "postgres"
        home.mkdir(mode=0o711)
        postgres = Postgres(home, interrupts)
        try:
            postgres.start()
            bench = Bench(
                home=workspace.home,
                stores=options.cache or workspace.home / "stores",
                postgres=postgres,
                contenders=contenders,
                rounds=options.rounds,
                limit=options.limit or wanted.limit,
                patience=wanted.patience,
                workers=options.workers,
                cipher=options.cipher,
                bare=options.bare,
                local=options.local,
                cpu=cpu,
                profile=options.profile,
                started=started,
            )
            bench.stores.mkdir(parents=True, exist_ok=True)
            for case in cases:
                outcomes.append(bench.case(case))
        finally:
            with interrupts.held():
                postgres.stop()
    _show(outcomes)
    took = time.monotonic() - started
    print(f"took {took / 60:.1f} minutes, load now {os.getloadavg()[0]:.1f}")
    if options.json:
        cases_said = [outcome.report(OURS, CEILING) for outcome in outcomes]
        report = {"machine": machine, "took_s": took, "rounds": options.rounds, "cases": cases_said}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(sample.error for one in outcomes for sample in one.samples) else 0


def _possible(case: Case) -> bool:
    why = missing(case.link)
    if why:
        print(f"bench: no {case.recipe.kind} over {case.link}: {why}", file=sys.stderr)
    return why is None


def _present(contender: Contender) -> bool:
    if contender.available():
        return True
    tools = ", ".join(tool for tool in contender.tools if shutil.which(tool) is None)
    print(f"bench: no {contender.name}: no {tools}; see tests/bench/install", file=sys.stderr)
    return False


def _require_passable(home: Path) -> None:
    """Raise LabError where PostgreSQL's user, who is not root, cannot reach home."""
    if os.geteuid() == 0:
        closed = [one for one in home.parents if not one.stat().st_mode & 0o001]
        if closed:
            raise LabError(f"{closed[0]} is closed to other users; name another --disk")


def _describe(machine: dict[str, Any]) -> None:
    load = " ".join(f"{value:.1f}" for value in machine["load"])
    print(f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; load {load}")
    print(f"Linux {machine['kernel']}; {machine['file_system']} at {machine['directory']}")
    print("; ".join(f"{name}: {text}" for name, text in machine["versions"].items()), flush=True)


def _show(outcomes: Sequence[Outcome]) -> None:
    # A pipe has no width; tables must not be cut for it.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.contenders)
    console.print(results.ratio_table(outcomes, OURS, names))
    for outcome in outcomes:
        console.print(results.figure_table(outcome, OURS, CEILING))
        if any(sample.shares for sample in outcome.samples):
            console.print(results.share_table(outcome))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/bench/run", description=main.__doc__)
    add = parser.add_argument
    other = parser.add_mutually_exclusive_group()
    for flag, cases, told in (
        ("--quick", plan.QUICK, "a smaller table, in under 4 minutes"),
        ("--long", plan.LONG, "large stores; use it with --only"),
        ("--contents", plan.CONTENTS, "what compresses and what does not; use it with --codec"),
        ("--long-contents", plan.LONG_CONTENTS, "the same, large: a run's start is not felt"),
        ("--start", plan.START, "a store of 100 blobs: the start and the end of a run"),
    ):
        other.add_argument(flag, action="store_const", dest="plan", const=cases, help=told)
    parser.set_defaults(plan=plan.FULL)
    add(
        "--only",
        type=_words,
        default=[],
        metavar="WORDS",
        help="stores, links and contenders, such as: mix,slow,ntt,rsync",
    )
    add(
        "--codec",
        type=_words,
        default=[],
        metavar="CODECS",
        help="ours once more with each of these, such as: none,zstd-1,zstd-6",
    )
    add("--rounds", type=_positive, default=plan.ROUNDS, metavar="N", help="3 by default")
    add("--profile", action="store_true", help="show which process takes how much CPU, too")
    add("--json", type=Path, metavar="FILE", help="write all figures and samples there")
    add("--disk", type=Path, default=Path("/dev/shm"), metavar="DIR", help="work there")
    add("--cache", type=Path, metavar="DIR", help="keep the stores there; not kept by default")
    add("--limit", type=float, metavar="SECONDS", help="give a run up after that long")
    add("--workers", type=_positive, metavar="N", help="ours, instead of its default")
    add("--bare", action="store_true", help="a remote whose Python has neither BLAKE3 nor zstd")
    add("--local", action="store_true", help="the remote is a directory, without ssh")
    add("--cipher", metavar="NAME", help="for every ssh; by default what each picks itself")
    return parser.parse_args(arguments)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
