"""The campaign: rounds of a run under random faults, from a seed, with the model asked after each.

Its faults strike while the run begins, or once content flows: at moments counted in bytes on the
link or in time since then. What lasts is undone while the run goes on, and the run must end by
itself, unless a fault has killed it. After a few rounds everything is put right, one clean run must
make all complete, and a new era begins.

What is decided comes from the seed alone, each round from its own; how processes interleave does
not, so a seed that fails may need to be played more than once.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.environment import FaultEnvironment
from tests.faults.kinds import KINDS, Missed, Undo, deal, unavailable
from tests.faults.model import Model
from tests.faults.snapshots import HAPPENS, ChangingTree
from tests.helpers.blobs import tree
from tests.helpers.waiting import PATIENCE

ROUNDS_AN_ERA = 5
ENOUGH_ROUNDS = 8
# After these nothing else of the round is met.
ENDS = ("kill coordinator", "kill everything")
LOSE_MARKS = {"crash and restart database", "kill database process", "kill everything"}
_NEW_BLOBS = 30
_BEGINNING_SHARE = 1 / 6
_DUMP_EVERY = 2
_DUMPS = ("plain", "full of a series", "increment")


@dataclass
class Tally:
    """What a campaign did, for the figures. possible: kinds of faults. missed: faults that found
    nothing to strike.
    """

    rounds: int = 0
    possible: Sequence[str] = ()
    faults: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    unavailable: dict[str, str] = field(default_factory=dict)
    moved: int = 0
    moved_under_fire: int = 0
    bytes: int = 0
    blobs: int = 0
    snapshots: Counter[str] = field(default_factory=Counter)
    dumps: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def lines(self) -> list[str]:
        """The figures, for people."""
        struck = sum(self.faults.values())
        return [
            f"{self.rounds} rounds in {self.duration_s:.0f} s, {struck} faults",
            *(self._line(kind) for kind in sorted({*self.faults, *self.missed})),
            *(f"      - {kind}: {why}" for kind, why in self.unavailable.items()),
            f"  runs: {', '.join(f'{count} {how}' for how, count in self.endings.items())}",
            f"  blobs: {self.blobs}, moved {self.moved} ({self.bytes / 1e6:.1f} MB),"
            f" {self.moved_under_fire} of them under fire",
            f"  snapshots: {', '.join(f'{count} {how}' for how, count in self.snapshots.items())}",
            f"  dumps: {', '.join(f'{count} {how}' for how, count in self.dumps.items())}",
            f"  never: {', '.join(self.never()) or '-'}",
        ]

    def _line(self, kind: str) -> str:
        missed = self.missed[kind]
        return f"  {self.faults[kind]:5} {kind}{f', missed {missed} times' if missed else ''}"

    def never(self) -> list[str]:
        """What was possible, and did not happen."""
        return [
            *(kind for kind in self.possible if not self.faults[kind]),
            *(f"snapshot {how}" for how in HAPPENS if not self.snapshots[how]),
            *(f"dump {how}" for how in _DUMPS if not self.dumps[how]),
        ]

    def problems(self) -> list[str]:
        """Why the campaign has failed, or has proved nothing. In a few rounds it may be that all
        strikes come too late, and not everything happens.
        """
        few = self.rounds < ENOUGH_ROUNDS
        nothing = {
            "no fault was injected": sum(self.faults.values()),
            "no blob was moved": self.moved,
            "no blob was moved under fire": self.moved_under_fire or few,
            "no snapshot was taken": self.snapshots["take"] or few,
            "no take was killed": self.snapshots["take killed"] or few,
            "no snapshot was restored": self.snapshots["restore"] or few,
            "no dump was an increment of a series": self.dumps["increment"] or few,
        }
        return [*self.violations, *(why for why, count in nothing.items() if not count)]


@dataclass
class _Strike:
    """A fault that is to come: so many seconds after the run began, or after content flowed; or
    after so many bytes since then.
    """

    kind: str
    when: str
    after_bytes: int
    after_s: float
    lasts_s: float


def campaign(
    environment: FaultEnvironment,
    seed: int,
    rounds: int,
    tally: Tally,
    say: Callable[[str], None],
) -> None:
    """Play the rounds; ends with the first that has violations. What was done is said and in the
    tally, also where this is interrupted.
    """
    model, began = Model(), time.monotonic()
    tally.unavailable = unavailable(environment)
    possible = [
        name
        for name, kind in KINDS.items()
        if name not in tally.unavailable
        and (not kind.targets or environment.target in kind.targets)
    ]
    tally.possible = possible
    changing = ChangingTree(environment, possible, tally.snapshots, tally.faults)
    environment.begin_era()
    changing.begin_era()
    try:
        hands = deal(random.Random(f"{seed}/{environment.strategy}"), possible)
        for number, names in zip(range(rounds), hands, strict=False):
            environment.chance = random.Random(f"{seed}/{environment.strategy}/{number}")
            # What one mode has left is for the other to go on with.
            mode = environment.chance.choice(("full", "series", "series"))
            environment.env.write_config(dump={"mode": mode, "full_every": 3})
            said = _Round(environment, tally, model).play(names, number)
            said = said or changing.play()
            tally.rounds += 1
            last = number + 1 == rounds
            if not said and (last or (number + 1) % ROUNDS_AN_ERA == 0):
                said = _finish_era(environment, tally, model)
                if not said and not last:
                    environment.begin_era()
                    changing.begin_era()
                    model.begin_era()
            say(f"round {number}: {', '.join(names)}; {said or 'as it must be'}")
            if said:
                tally.violations = [f"round {number} ({', '.join(names)}): {one}" for one in said]
                break
    finally:
        tally.duration_s = time.monotonic() - began
        tally.dumps = _dumped(environment)
        tally.moved = _copied(environment)
        tally.bytes = sum(line["bytes"] for line in _batches(environment))
        say("\n".join(tally.lines()))


def _copied(environment: FaultEnvironment) -> int:
    """Blobs that the log says were copied, since the first round."""
    return sum(line["copied"] for line in _batches(environment))


def _dumped(environment: FaultEnvironment) -> Counter[str]:
    """Dumps that the log says were made, by what they are."""
    made = [line for line in environment.events() if line["event"] == "dump_complete"]
    return Counter(
        "increment" if one["base"] else _DUMPS[one["text_bytes"] != one["bytes"]] for one in made
    )


def _batches(environment: FaultEnvironment) -> list[dict[str, Any]]:
    return [line for line in environment.events() if line["event"] == "batch_complete"]


class _Round:
    """One round. undone: what takes back the strikes; moved: blobs before the first of them."""

    def __init__(self, environment: FaultEnvironment, tally: Tally, model: Model) -> None:
        self.environment = environment
        self.tally = tally
        self.model = model
        self.undone: list[Undo] = []
        self.moved: int | None = None

    def play(self, names: list[str], number: int) -> list[str]:
        """Returns the violations."""
        environment, chance, env = self.environment, self.environment.chance, self.environment.env
        environment.begin_round()
        new = environment.add(_NEW_BLOBS)
        again = chance.sample(sorted(environment.blobs), 5)
        env.query("update blobs set remote_copied = false where blobid = any(%s)", again)
        env.write_config(run={"skip_pgdump": number % _DUMP_EVERY != 0})
        size = sum(len(environment.blobs[blobid]) for blobid in {*new, *again})
        # A database that crashes may lose the last marks: the next run makes them again.
        known = set(environment.blobs) if LOSE_MARKS.isdisjoint(names) else set()
        strikes = []
        # One that ends the run while it begins would leave nothing for others that come later.
        beginning = chance.random() < _BEGINNING_SHARE
        for name in names:
            if KINDS[name].early:
                self._strike(name)
            else:
                later = chance.choice(("bytes", "bytes", "bytes", "time", "time"))
                when = "beginning" if beginning else later
                moment = (chance.randrange(size // 3), chance.uniform(0.0, 0.6))
                lasts = chance.choice(((0.05, 0.8), (0.05, 0.8), (2.0, 6.0)))
                strikes.append(_Strike(name, when, *moment, chance.uniform(*lasts)))
        try:
            with env.running("run") as run:
                environment.run = run
                status = self._run(strikes)
        finally:
            environment.run = None
            for undo in reversed(self.undone):
                undo()
            environment.peace()
        output = env.output()
        if status is None:
            return [f"the run does not end: {output[-1500:]}"]
        self.tally.endings["killed" if status < 0 else f"exit code {status}"] += 1
        environment.await_catalog()
        environment.await_quiet()
        if self.moved is not None:
            self.tally.moved_under_fire += _copied(environment) - self.moved
        return self.model.violations(environment, status, output, known)

    def _strike(self, name: str) -> Undo | None:
        moved = _copied(self.environment) if self.moved is None else self.moved
        try:
            undo = KINDS[name].strike(self.environment)
        except Missed:
            self.tally.missed[name] += 1
            return None
        self.moved = moved
        self.tally.faults[name] += 1
        if undo is not None:
            self.undone.append(undo)
        return undo

    def _run(self, strikes: list[_Strike]) -> int | None:
        """The run's exit status; None where it goes on for ever."""
        environment, run = self.environment, self.environment.run
        assert run is not None
        pause = threading.Event()
        began, flowing, sent = time.monotonic(), 0.0, 0
        lasting: list[tuple[float, Undo]] = []
        todo = list(strikes)
        while run.poll() is None and (now := time.monotonic()) < began + PATIENCE:
            if not flowing and environment.flowing():
                flowing, sent = now, environment.sent
            progress = {"beginning": now - began}
            if flowing:
                progress |= {"time": now - flowing, "bytes": environment.sent - sent}
            for strike in _due(todo, progress):
                todo.remove(strike)
                if undo := self._strike(strike.kind):
                    lasting.append((now + strike.lasts_s, undo))
            for end, undo in [one for one in lasting if one[0] <= now]:
                lasting.remove((end, undo))
                self.undone.remove(undo)
                undo()
            pause.wait(0.02)
        self.tally.missed.update(one.kind for one in todo)
        return run.poll()


def _due(todo: list[_Strike], progress: Mapping[str, float]) -> list[_Strike]:
    """Those whose moment has come; all that are left, just before the run is ended by one."""
    moments = [one.after_bytes if one.when == "bytes" else one.after_s for one in todo]
    due = [
        one
        for one, moment in zip(todo, moments, strict=True)
        if progress.get(one.when, -1) >= moment
    ]
    if any(one.kind in ENDS for one in due):
        due = sorted(todo, key=lambda one: ENDS.index(one.kind) + 1 if one.kind in ENDS else 0)
    return due


def _finish_era(environment: FaultEnvironment, tally: Tally, model: Model) -> list[str]:
    """Put everything right; then one run must make all complete, and nothing may be lost."""
    env = environment.env
    environment.put_right()
    # Rows were deleted, and could not be inserted while there was no database.
    env.register(sorted(environment.blobs))
    env.write_config(run={"skip_pgdump": False}, dump={"mode": "series"})
    env.run("requeue")
    env.run("run")
    before = env.copied()
    altered = environment.alter_remote(2)
    tally.faults["alter remote"] += 2
    verified = env.run("verify", "--download")
    if altered and verified.returncode != 7:
        return [f"verify ended with {verified.returncode} over {altered}: {verified.stdout[-500:]}"]
    if (found := before - env.copied()) != altered:
        return [f"verify has found {found}, not {altered}: {verified.stdout[-500:]}"]
    environment.add(1)  # An increment is made for what has changed.
    for command in (("run",), ("verify", "--download")):
        done = env.run(*command)
        if done.returncode != 0:
            return [f"{command} ended with {done.returncode}: {done.stdout[-1500:]}{done.stderr}"]
    back = env.root / "back"
    for left in (back, env.root / "cache"):
        shutil.rmtree(left, ignore_errors=True)
    restored = env.run("restore", str(back))
    if tree(back) != env.in_store():
        return [f"what is restored differs: {restored.stdout[-1500:]}{restored.stderr}"]
    tally.blobs += len(environment.blobs)
    return model.complete(environment)
