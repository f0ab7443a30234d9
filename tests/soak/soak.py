"""The loop of a simulated time, and the table of what was seen."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psycopg

from tests.helpers.waiting import wait_until
from tests.soak.judge import IDLE_LINES, Use, growths, idle_lines
from tests.soak.timeline import Act
from tests.soak.world import World

# They live as long as the daemon.
_LASTING = ("parent", "coordinator", "worker", "page")
_BLOAT = 3.0
_SMALL = 400_000
_MOST_STATE = 60


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
                    with world.without_catalog():
                        getattr(world, act.name)(*act.values)
                end = began + (hour + 1) * self._hour_s
                while (left := end - time.monotonic()) > 0:
                    # The page is looked at once an hour; in a slow simulation more often.
                    pause.wait(min(left, 15))
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
        world = self._world
        world.hour = self._now()
        self._sample()
        if world.ended:
            world.wrong.append(f"hour {hour}: the daemon ended with {world.ended}")
            world.start_daemon()
        try:
            for one in world.expectations.hear(world.hour, world.look()):
                self._say(f"  FALSE ALARM? {one}")
        except OSError as error:
            world.wrong.append(f"hour {hour}: the page cannot be read: {error}")
        with suppress(psycopg.Error):
            self._locks.append(world.locks())
            if hour % 24 == 7:
                self._tables.append(world.tables())
        self._files.append(world.files())
        self._read_log(hour)

    def _read_log(self, hour: int) -> None:
        with self._world.env.log.open("rb") as log:
            log.seek(self._read)
            whole = log.read().rpartition(b"\n")[0]
            self._read += len(whole) + bool(whole)
        lines = [json.loads(line) for line in whole.splitlines() if line]
        self._lines.setdefault(hour, []).extend(one["event"] for one in lines)

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
        if files["state"] > _MOST_STATE:
            found.append(f"{files['state']} files of state")
        return found

    def _judge(self, took: float) -> list[str]:
        world, expectations = self._world, self._world.expectations
        idle, mean, most, events = idle_lines(self._lines, self._busy, self._hours)
        grown = growths(self._uses, _LASTING)
        problems = [
            *world.wrong,
            *expectations.false_alarms,
            *expectations.silences(),
            *(problem for one in grown for problem in one.problems()),
        ]
        if idle and mean >= IDLE_LINES:
            problems.append(f"{mean:.1f} lines of the log in an idle hour")
        problems += self._bloat()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime
        acts = ", ".join(f"{count} {name}" for name, count in sorted(self._counts.items()))
        files = {one: max(seen[one] for seen in self._files) for one in self._files[0]}
        days, minutes, lines = self._hours / 24, took / 60, sum(map(len, self._lines.values()))
        alarms, silences = len(expectations.false_alarms), len(expectations.silences())
        self._say(
            f"\n{days:.1f} days in {minutes:.1f} minutes, {cpu / 60:.1f} minutes of CPU\n"
            f"acts: {acts}\n"
            f"blobs: {len(world.ever)}, {sum(world.ever.values()) / 1e6:.1f} MB;"
            f" {len(world.given_up)} given up; targets: {', '.join(world.names)}\n"
            f"page: read {expectations.pages} times, asked for action {expectations.alarmed} times;"
            f" false alarms {alarms}, silences {silences}\n"
            f"log: {lines} lines; {idle} idle hours with {mean:.1f} lines, at most {most}:"
            f" {dict(events.most_common(6))}\n"
            f"advisory locks: {min(self._locks)} to {max(self._locks)}, 0 at the end\n"
            f"files at most: {files}; at the end: {world.files()}\n"
            "| process | lives | memory | more at the end | files | more | threads | more |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        for one in grown:
            more = {what: f"{value:+.0f}" for what, value in one.grown.items()}
            if more:
                more["memory"] = f"{one.grown['memory'] / 1e6:+.1f} MB"
            cells = (
                one.role,
                one.lives,
                f"{one.memory / 1e6:.1f} MB",
                more.get("memory", ""),
                one.files,
                more.get("files", ""),
                one.threads,
                more.get("threads", ""),
            )
            self._say(f"| {' | '.join(map(str, cells))} |")
        self._say("| table | kB, first and last | rows | dead, at most |\n|---|---|---|---|")
        for name in sorted(self._tables[-1] if self._tables else ()):
            sizes = [seen[name] for seen in self._tables if name in seen]
            self._say(
                f"| {name} | {sizes[0][0] // 1024} to {sizes[-1][0] // 1024} | {sizes[-1][1]}"
                f" | {max(dead for _, _, dead in sizes)} |"
            )
        self._say("\n".join(["problems:", *problems] if problems else ["all as it must be"]))
        return problems

    def _bloat(self) -> list[str]:
        """Tables that have grown by more than their rows."""
        if len(self._tables) < 4:
            return []
        first, last, found = self._tables[len(self._tables) // 2], self._tables[-1], []
        for name, (size, rows, _) in last.items():
            before = first.get(name, (0, 0, 0))
            if (
                before[1]
                and size > 400_000
                and size > _BLOAT * before[0] * max(1, rows / before[1])
            ):
                found.append(f"the table {name} has {size:,} bytes for {rows} rows")
        return found
