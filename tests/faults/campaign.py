"""The campaign: rounds of a run under random faults, from a seed, with the model asked after each.

A round lasts seconds. Its faults strike while the run begins, or at moments counted in bytes on the
link or in time since its workers began; what lasts is undone before the round is over. A run that
has not ended by then is killed with all that it started. After a few rounds everything is put
right, one clean run must make all complete, and a new era begins.

What is decided comes from the seed alone, each round from its own; how processes interleave does
not, so a seed that fails may need to be played more than once.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.faults.environment import FaultEnvironment
from tests.faults.kinds import KINDS, Missed, Undo, choose, unavailable
from tests.faults.model import Model
from tests.files import tree

ROUNDS_AN_ERA = 5
ROUND_SECONDS = 2.5
_BEGINNING_SECONDS = 30.0
_NEW_BLOBS = 30
_DUMP_EVERY = 6


@dataclass
class Tally:
    """What a campaign did, for the figures. missed: faults that found nothing to strike."""

    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    unavailable: dict[str, str] = field(default_factory=dict)
    moved: int = 0
    moved_under_fire: int = 0
    bytes: int = 0
    blobs: int = 0
    violations: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def lines(self) -> list[str]:
        """The figures, for people."""
        struck = sum(self.faults.values())
        return [
            f"{self.rounds} rounds in {self.duration_s:.0f} s, {struck} faults",
            *(f"  {self.faults[kind]:5} {kind}" for kind in sorted({*self.faults, *self.missed})),
            *(f"      - {kind}: {why}" for kind, why in self.unavailable.items()),
            f"  runs: {', '.join(f'{count} {how}' for how, count in self.endings.items())}",
            f"  blobs: {self.blobs}, moved {self.moved} ({self.bytes / 1e6:.1f} MB),"
            f" {self.moved_under_fire} of them under fire",
        ]


@dataclass
class _Strike:
    """A fault that is to come: so many seconds after the run began, or after its workers did; or
    after so many bytes of theirs.
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
    say: Callable[[str], None],
) -> Tally:
    """Play the rounds; ends with the first that has violations, which are in the tally then."""
    tally, model = Tally(), Model()
    tally.unavailable = unavailable(environment)
    possible = [
        name
        for name, kind in KINDS.items()
        if name not in tally.unavailable and kind.target in ("", environment.target)
    ]
    began = time.monotonic()
    environment.begin_era()
    for number in range(rounds):
        environment.chance = random.Random(f"{seed}/{environment.strategy}/{number}")
        names = choose(environment.chance, possible)
        said = _round(environment, names, number, tally, model)
        tally.rounds += 1
        tally.duration_s = time.monotonic() - began
        last = number + 1 == rounds
        if not said and (last or (number + 1) % ROUNDS_AN_ERA == 0):
            said = _finish_era(environment, tally, model)
            if not said and not last:
                environment.begin_era()
                model.begin_era()
        say(f"round {number}: {', '.join(names)}; {said or 'as it must be'}")
        if said:
            tally.violations = [f"round {number} ({', '.join(names)}): {one}" for one in said]
            break
    tally.duration_s = time.monotonic() - began
    tally.moved = _copied(environment)
    tally.bytes = sum(line["bytes"] for line in _batches(environment))
    return tally


def _copied(environment: FaultEnvironment) -> int:
    """Blobs that the log says were copied, since the first round."""
    return sum(line["copied"] for line in _batches(environment))


def _batches(environment: FaultEnvironment) -> list[dict[str, Any]]:
    return [line for line in environment.events() if line["event"] == "batch_complete"]


def _round(
    environment: FaultEnvironment, names: list[str], number: int, tally: Tally, model: Model
) -> list[str]:
    chance, env = environment.chance, environment.env
    before = _copied(environment)
    environment.add(_NEW_BLOBS)
    again = chance.sample(sorted(environment.blobs), 5)
    env.query("update blobs set remote_copied = false where blobid = any(%s)", again)
    env.write_config(run={"skip_pgdump": number % _DUMP_EVERY != 0})
    undone: list[Undo] = []
    strikes = []
    for name in names:
        if KINDS[name].early:
            _strike(environment, name, tally, undone)
        else:
            when = chance.choice(("beginning", "bytes", "bytes", "time"))
            moment = (chance.randrange(700_000), chance.uniform(0.0, 1.2))
            strikes.append(_Strike(name, when, *moment, chance.uniform(0.05, 0.8)))
    try:
        with env.running("run") as run:
            environment.run = run
            status = _play(environment, strikes, tally, undone)
    finally:
        environment.run = None
        for undo in reversed(undone):
            undo()
        environment.peace()
    if status is None:
        tally.faults["kill everything"] += 1
    output = env.output()
    tally.endings["killed" if status is None or status < 0 else f"exit code {status}"] += 1
    environment.await_catalog()
    environment.await_quiet()
    tally.moved_under_fire += _copied(environment) - before
    return model.violations(environment, status, output)


def _strike(
    environment: FaultEnvironment, name: str, tally: Tally, undone: list[Undo]
) -> Undo | None:
    try:
        undo = KINDS[name].strike(environment)
    except Missed:
        tally.missed[name] += 1
        return None
    tally.faults[name] += 1
    if undo is not None:
        undone.append(undo)
    return undo


def _play(
    environment: FaultEnvironment, strikes: list[_Strike], tally: Tally, undone: list[Undo]
) -> int | None:
    """The run's exit status; None where it had to be killed."""
    run = environment.run
    assert run is not None
    pause = threading.Event()
    began, workers_began, sent = time.monotonic(), 0.0, 0
    lasting: list[tuple[float, Undo]] = []
    todo = list(strikes)
    while run.poll() is None:
        now = time.monotonic()
        if not workers_began and environment.workers():
            workers_began, sent = now, environment.link.sent
        until = workers_began + ROUND_SECONDS if workers_began else began + _BEGINNING_SECONDS
        if now > until:
            break
        progress = {"beginning": now - began}
        if workers_began:
            progress |= {"time": now - workers_began, "bytes": environment.link.sent - sent}
        for strike in [one for one in todo if _is_due(one, progress)]:
            todo.remove(strike)
            if undo := _strike(environment, strike.kind, tally, undone):
                lasting.append((now + strike.lasts_s, undo))
        for end, undo in [one for one in lasting if one[0] <= now]:
            lasting.remove((end, undo))
            undone.remove(undo)
            undo()
        pause.wait(0.02)
    tally.missed.update(one.kind for one in todo)
    return run.poll()


def _is_due(strike: _Strike, progress: Mapping[str, float]) -> bool:
    moment = strike.after_bytes if strike.when == "bytes" else strike.after_s
    return progress.get(strike.when, -1) >= moment


def _finish_era(environment: FaultEnvironment, tally: Tally, model: Model) -> list[str]:
    """Put everything right; then one run must make all complete, and nothing may be lost."""
    env = environment.env
    environment.put_right()
    env.register(sorted(environment.deleted))
    env.write_config(run={"skip_pgdump": False})
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
