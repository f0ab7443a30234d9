"""The loop of a simulated time, and the tables of what was seen."""

from __future__ import annotations

import json
import math
import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import psycopg

from tests.helpers.waiting import wait_until
from tests.soak.judge import IDLE_LINES, Flatness, Use, idle_lines
from tests.soak.timeline import Act
from tests.soak.world import World

# From one look at the processes to the next, in seconds.
_SAMPLE = 5.0
# Lives with fewer figures are summed up.
_SHORTEST_LIFE = 20
_MB = 1e6
# The most that each process may have, so many of them for each target: memory in MB, descriptors,
# threads. A coordinator has 12 descriptors, 3 for each child (a worker and four side jobs), and up
# to 16 peers of its control socket. A worker has two buffers of 32 MiB (bucket), or a compressor
# that takes 20 MiB at level 6 and 57 MiB at level 12, as long as a session is open (stream); up to
# 128 directories of the store, and threads that read ahead or send requests. A page has 32 clients.
_BOUNDS: Mapping[str, Sequence[tuple[float, float]]] = {
    "parent": ((64, 0), (12, 8), (1, 0)),
    "coordinator": ((64, 0), (43, 0), (1, 0)),
    "worker": ((160, 0), (150, 0), (64, 0)),
    "page": ((112, 0), (48, 0), (36, 0)),
}
_FIGURES = ("memory", "files", "threads")
# What may be added within a life; of memory also a tenth.
_TOLERANCES = (3.0, 2.0, 1.0)
_BLOAT, _SMALL = 3.0, 400_000
_LOCKS = 4096.0
_STATE, _INCOMING, _TMP = 12, 4, 12


class Soak:
    """Plays what is planned, and watches."""

    def __init__(
        self,
        world: World,
        acts: Mapping[int, Sequence[Act]],
        hours: int,
        say: Callable[[str], None],
    ) -> None:
        self._world = world
        self._acts = acts
        self._hours = hours
        self._say = say
        self._hour_s = 3600 / world.factor
        self._uses: list[Use] = []
        self._locks: list[int] = []
        self._files: list[dict[str, int]] = []
        self._tables: list[dict[str, tuple[int, int, int]]] = []
        self._lines: dict[int, list[str]] = {}
        self._busy: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._read = 0
        self._began = 0.0

    def play(self) -> list[str]:
        """Returns all that is not as it should be."""
        world, pause = self._world, threading.Event()
        began = self._began = time.monotonic()
        with world.serving():
            for hour in range(self._hours):
                world.hour = self._now()
                for act in self._acts.get(hour, ()):
                    self._counts[act.name] += 1
                    self._busy.add(hour)
                    if act.name not in ("insert", "operate"):
                        self._say(f"day {hour // 24 + 1} {hour % 24:02}:00 {act}")
                    self._read_log(hour)
                    with world.without_catalog():
                        getattr(world, act.name)(*act.values)
                end = began + (hour + 1) * self._hour_s
                while (left := end - time.monotonic()) > 0:
                    pause.wait(min(left, _SAMPLE))
                    world.hour = self._now()
                    if end - time.monotonic() > 0:
                        self._sample()
                self._look(hour)
            took = time.monotonic() - began
            world.finish()
            world.stop_daemon()
            self._read_log(self._hours)
            world.wrong += self._left()
        world.wrong += world.incomplete()
        return self._judge(took)

    def _now(self) -> float:
        """The hour by the clock; that of the timeline is behind where acts take long."""
        return (time.monotonic() - self._began) / self._hour_s

    def _sample(self) -> None:
        self._uses += self._world.uses()

    def _look(self, hour: int) -> None:
        """Looks at everything. The log is read before the page, so it is never newer."""
        world = self._world
        world.hour = self._now()
        self._sample()
        if world.ended:
            world.wrong.append(f"hour {hour}: the daemon ended with {world.ended}")
            world.start_daemon()
        with suppress(psycopg.Error):
            world.watch_outages()
        self._read_log(hour)
        began = time.monotonic()
        try:
            asked = world.look()
        except OSError as error:
            world.wrong.append(f"hour {hour}: the page cannot be read: {error}")
        else:
            now = time.monotonic()
            for one in world.expectations.hear(world.hour, asked, now, now - began):
                self._say(f"  FALSE ALARM? {one}")
        with suppress(psycopg.Error):
            self._locks.append(world.locks())
            self._tables.append(world.tables())
        self._files.append(world.files())

    def _read_log(self, hour: int) -> None:
        if not self._world.env.log.exists():
            return
        with self._world.env.log.open("rb") as log:
            log.seek(self._read)
            whole = log.read().rpartition(b"\n")[0]
            self._read += len(whole) + bool(whole)
        lines = [json.loads(line) for line in whole.splitlines() if line]
        self._lines.setdefault(hour, []).extend(one["event"] for one in lines)
        self._world.expectations.take(lines)

    def _left(self) -> list[str]:
        """What a daemon that has ended has left."""
        world, found = self._world, []
        with suppress(Exception):
            wait_until(lambda: world.locks() == 0, "the locks to be released", 10)
        if world.locks():
            found.append(f"{world.locks()} advisory locks are left")
        drills = world.env.query("select datname from pg_database where datname like '%drill%'")
        if drills:
            found.append(f"databases of drills are left: {drills}")
        files = world.files()
        found += [
            f"{files[one]} files are left in {one}" for one in ("tmp", "scratch") if files[one]
        ]
        return found

    # --- the tables -------------------------------------------------------------------------------

    def _judge(self, took: float) -> list[str]:
        world, expectations = self._world, self._world.expectations
        problems = [*world.wrong, *expectations.false_alarms, *expectations.silences()]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime
        acts = ", ".join(f"{count} {name}" for name, count in sorted(self._counts.items()))
        days, minutes = self._hours / 24, took / 60
        alarms, silences = len(expectations.false_alarms), len(expectations.silences())
        passed = expectations.passed
        self._say(
            f"\n{days:.1f} days in {minutes:.1f} minutes, {cpu / 60:.1f} minutes of CPU\n"
            f"acts: {acts}\n"
            f"blobs: {len(world.ever)}, {sum(world.ever.values()) / 1e6:.1f} MB;"
            f" {len(world.given_up)} given up; targets: {', '.join(world.names)}\n"
            f"page: read {expectations.pages} times, asked for action {expectations.alarmed} times;"
            f" false alarms {alarms}, silences {silences}; {len(passed)} points that nothing"
            f" explained went by themselves, within {max(passed, default=0):.0f} s\n"
        )
        self._say(
            "memory in MB, descriptors, threads: start, mean of the first and last quarter, most"
            " of bound\n| process | hours | memory | descriptors | threads | verdict |\n"
            "|---|---|---|---|---|---|"
        )
        problems += self._lives()
        self._say("\n| figure | start | first | last | most | bound | verdict |\n|" + "---|" * 7)
        problems += self._others()
        self._say("\n| table | kB | rows | dead, at most | verdict |\n|---|---|---|---|---|")
        problems += self._bloat()
        self._say("\n".join(["problems:", *problems] if problems else ["all as it must be"]))
        return problems

    def _lives(self) -> Iterator[str]:
        """Says what each process had in its life. Yields what has grown."""
        lives: defaultdict[tuple[str, str, int], list[Use]] = defaultdict(list)
        for use in self._uses:
            lives[use.role, use.name, use.pid].append(use)
        short: defaultdict[str, list[list[Use]]] = defaultdict(list)
        for (role, name, pid), life in sorted(lives.items(), key=lambda one: one[0][:2]):
            if role not in _BOUNDS or len(life) < _SHORTEST_LIFE:
                short[role].append(life)
                continue
            found = list(self._flatness(role, life))
            bad = [one for one in found if one.wrong]
            verdict = bad[0].verdict if bad else max(found, key=_worse).verdict
            cells = [
                f"{one.start:.0f}, {one.first:.1f}, {one.last:.1f}, {one.highest:.0f}"
                f" of {one.bound:.0f}"
                for one in found
            ]
            ages = f"{life[0].hour:.0f} to {life[-1].hour:.0f}"
            self._say(f"| {name} | {ages} | {' | '.join(cells)} | {verdict} |")
            for figure, one in zip(_FIGURES, found, strict=True):
                if one.wrong:
                    kinds = f"; at most {self._world.most_files[pid][1]}" * (figure == "files")
                    yield (
                        f"{name}, {ages} h: {figure} {one.first:.1f} to {one.last:.1f}, at most"
                        f" {one.highest:.1f} of {one.bound:.0f}: {one.verdict}{kinds}"
                    )
        for role, some in sorted(short.items()):
            most = [
                max(getattr(use, what) for life in some for use in life) / (_MB, 1, 1)[index]
                for index, what in enumerate(_FIGURES)
            ]
            cells = [f"{value:.0f}" for value in most]
            self._say(f"| {role}, {len(some)} short lives | | {' | '.join(cells)} | |")

    def _flatness(self, role: str, life: Sequence[Use]) -> Iterator[Flatness]:
        targets = len(self._world.names)
        for index, what in enumerate(_FIGURES):
            values = [getattr(use, what) / (_MB, 1, 1)[index] for use in life]
            own, each = _BOUNDS[role][index]
            tolerance = max(_TOLERANCES[index], values[0] / 10 if what == "memory" else 0)
            yield Flatness.of(values, tolerance, own + each * targets)

    def _others(self) -> Iterator[str]:
        """Says what there was of files, locks and lines. Yields what has grown."""
        world, targets = self._world, len(self._world.names)
        idle, mean, most, events = idle_lines(self._lines, self._busy, self._hours)
        packs = self._tables[-1].get("packs", (0, 0, 0))[1] if self._tables else 0
        # With the most that there may be, and what may be added; what grows with the store may.
        bounds: Mapping[str, tuple[float, float]] = {
            "state": (_STATE * targets, 4.0),
            "incoming": (_INCOMING * targets, 4.0),
            "tmp": (_TMP * targets, 4.0),
            # A drill restores what there is, into a directory for each prefix.
            "scratch": (4 * targets * len(world.ever), math.inf),
            # Tables of packs, and the parts of the last versions.
            "cache": (4 * (packs + 10 * targets + 50), math.inf),
        }
        series = [
            (f"files in {one}", [float(seen[one]) for seen in self._files], *allowed)
            for one, allowed in bounds.items()
        ]
        series.append(("advisory locks", [*map(float, self._locks)], _LOCKS, math.inf))
        for name, values, bound, tolerance in series:
            found = Flatness.of(values, tolerance, bound)
            self._say(
                f"| {name} | {found.start:.0f} | {found.first:.1f} | {found.last:.1f}"
                f" | {found.highest:.0f} | {bound:.0f} | {found.verdict} |"
            )
            if found.wrong:
                yield f"{name}: {found.highest:.0f} of {bound:.0f}: {found.verdict}"
        lines = sum(map(len, self._lines.values()))
        # Checks, dumps and snapshots tell that they begin and end.
        allowed = targets * (IDLE_LINES + world.often)
        loud = bool(idle) and mean >= allowed
        self._say(
            f"| lines of the log in an idle hour, of {idle} | | | {mean:.1f} | {most}"
            f" | {allowed:.0f} | {'TOO HIGH' if loud else 'flat'} |\n"
            f"the log: {lines} lines, {self._read / 1e6:.1f} MB; in idle hours"
            f" {dict(events.most_common(6))}; files at the end: {world.files()}"
        )
        if loud:
            yield f"{mean:.1f} lines of the log in an idle hour"

    def _bloat(self) -> Iterator[str]:
        """Says how large the tables are. Yields those that have grown by more than their rows."""
        if len(self._tables) < 4:
            return
        middle = self._tables[len(self._tables) // 2]
        for name, (size, rows, _) in sorted(self._tables[-1].items()):
            seen = [one[name] for one in self._tables if name in one]
            before, had, _ = middle.get(name, (0, 0, 0))
            grows = had > 0 and size > max(_SMALL, _BLOAT * before * max(1, rows / had))
            dead = max(dead for _, _, dead in seen)
            self._say(
                f"| {name} | {seen[0][0] // 1024} to {size // 1024} | {seen[0][1]} to {rows}"
                f" | {dead} | {'GROWS' if grows else 'flat'} |"
            )
            if grows:
                yield f"the table {name} has {size:,} bytes for {rows} rows, and had {before:,}"


def _worse(one: Flatness) -> int:
    return ("flat", "higher", "bounded", "TOO HIGH", "GROWS").index(one.verdict)
