"""The failover campaign: a daemon works on while its primary is lost and the standby is promoted.

One daemon lives through all rounds of an era. In a round the primary is killed, frozen, cut off,
made read-only, or comes back after its standby was promoted; with an asynchronous standby that lags
behind, commits are lost: marks, rows of blobs, of packs and of files. Then the model is asked, on
the new primary and on the target, and nobody helps the daemon:

    python -m tests.faults.failover --rounds 100 --seed 1
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import psycopg
import pytest
from blake3 import blake3
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog.connection import connect
from ntt_backup.catalog.schema import init_db
from tests.acceptance.conftest import validator
from tests.faults.cluster import Cluster, Node, running_cluster
from tests.faults.plain_packs import read_pack
from tests.helpers.blobs import tree
from tests.helpers.environment import Environment
from tests.helpers.parallel import memory
from tests.helpers.pooler import Pooler, running_pooler
from tests.helpers.program import Process
from tests.helpers.sshd import HOST, RemoteDir
from tests.helpers.waiting import wait_until

ROUNDS_AN_ERA = 10
# By their names, by their paths, in packs; `pooled`: through PgBouncer.
MODES = ("files", "paths", "pooled", "packs")
KINDS = ("kill", "freeze", "cut", "old primary returns", "read-only")
# After so many rounds each kind has come, and commits were lost.
ENOUGH_ROUNDS = 20
WORKERS = 2
_WAIT_SECONDS = 60.0


@dataclass
class Tally:
    """What a campaign did."""

    rounds: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    outages: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    blobs: int = 0
    violations: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The figures, for people."""

        def shown(counts: Counter[str]) -> str:
            return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "-"

        return [
            f"{self.rounds} rounds, {self.blobs} blobs, {len(self.violations)} violations",
            f"  {shown(self.kinds)}",
            f"  {shown(self.modes)}",
            f"  lost by the promotion: {shown(self.lost)}",
            *(f"  {count:4} {reason}" for reason, count in self.outages.most_common()),
        ]

    def problems(self) -> list[str]:
        """Why the campaign has failed, or has proved nothing."""
        wanted = {kind: self.kinds[kind] for kind in KINDS}
        wanted |= {f"lost {what}": self.lost[what] for what in ("marks", "rows")}
        wanted["an old primary was refused"] = self.refused
        never = [what for what, count in wanted.items() if not count]
        return [*self.violations, *(never if self.rounds >= ENOUGH_ROUNDS else ())]


class Era:
    """A store, a target and a daemon over the rounds of an era."""

    def __init__(self, cluster: Cluster, env: Environment, mode: str, chance: random.Random):
        self.cluster, self.env, self.mode, self.chance = cluster, env, mode, chance
        self.contents: dict[str, bytes] = {}
        self.pooler: Pooler | None = None
        self.told = 0
        self._made = 0

    @contextmanager
    def running(self) -> Iterator[Process]:
        """The daemon."""
        with self.env.running("run", "--watch") as daemon:
            yield daemon

    def add(self, count: int) -> set[str]:
        """New blobs in the store; where their names are hashes, another program registers them."""
        made = set()
        for _ in range(count):
            content = self.chance.randbytes(self.chance.choice((1, 600, 5_000, 30_000)))
            content += self._made.to_bytes(4, "big")
            self._made += 1
            blobid = blake3(content).hexdigest()
            if self.mode == "paths":
                # Now and then a second file with the same content.
                for name in (f"{blobid[:2]}/{blobid}", *[f"same/{blobid}"] * (self._made % 7 == 0)):
                    path = self.env.store / name
                    path.parent.mkdir(exist_ok=True)
                    new = self.env.root / "new"
                    new.write_bytes(content)
                    new.rename(path)
            else:
                self.env.put_in_store(content)
            self.contents[blobid] = content
            made.add(blobid)
        self.register(made)
        return made

    def register(self, blobids: set[str]) -> None:
        """As the program that owns the table does; it repeats what the new primary lacks."""
        if self.mode == "paths":
            return
        with psycopg.connect(self.cluster.primary.address(), autocommit=True) as conn:
            insert = b"insert into blobs (blobid) values (%s) on conflict do nothing"
            conn.cursor().executemany(insert, [(blobid,) for blobid in sorted(blobids)])

    def marked(self, node: Node | None = None) -> set[str]:
        node = node or self.cluster.primary
        return {row[0] for row in node.ask("select blobid from blobs where remote_copied")}

    def rows(self, node: Node | None = None) -> set[str]:
        node = node or self.cluster.primary
        return {row[0] for row in node.ask("select blobid from blobs")}

    def on_target(self) -> dict[str, bytes]:
        """Blobid to content of all that is right there, and what is wrong by its path."""
        below = self.env.remote.local
        if self.mode != "packs":
            return {Path(name).name: content for name, content in tree(below / "by-hash").items()}
        found: dict[str, bytes] = {}
        for name, content in tree(below / "packs").items():
            if name.endswith(".tar"):
                found |= read_pack(content)[0]
        return found

    def new_events(self) -> list[dict[str, Any]]:
        """The lines of the log since the last call."""
        events = self.env.events()
        new, self.told = events[self.told :], len(events)
        return new

    def await_moves(self, count: int) -> None:
        """Until the daemon has told so often that the catalog has moved."""
        told = partial(self.env.events, "catalog_moved")
        wait_until(lambda: len(told()) >= count, "the daemon to follow", _WAIT_SECONDS)

    def await_end_of_outages(self) -> None:
        """Until the log says of no side that it is unreachable."""

        def lasts() -> bool:
            told = [one for one in self.env.events() if one["event"].startswith("outage")]
            return bool(told) and told[-1]["event"] == "outage"

        wait_until(lambda: not lasts(), "the end of the outage", _WAIT_SECONDS)

    def await_complete(self, daemon: Process) -> None:
        """Until the catalog has a true mark for each blob of the store."""

        def complete() -> bool:
            if daemon.poll() is not None:
                pytest.fail(f"the daemon has ended: {self.env.output()[-2000:]}")
            self.register(set(self.contents) - self.rows())
            return set(self.contents) <= self.marked()

        def said() -> str:
            missing = set(self.contents) - self.marked()
            return f"{len(missing)} missing, such as {min(missing)}\n{self.env.output()[-3000:]}"

        wait_until(complete, "the daemon to complete all", _WAIT_SECONDS, said)

    def violations(self, daemon: Process) -> Iterator[str]:
        """Everything that is not as it must be."""
        there = self.on_target()
        for blobid, content in there.items():
            if self.contents.get(blobid) != content:
                yield f"{blobid} on the target is not what it should be"
        if unfounded := self.marked() - there.keys():
            yield f"{len(unfounded)} blobs are marked and not there, such as {min(unfounded)}"
        if lost := self.contents.keys() - there.keys():
            yield f"{len(lost)} blobs are lost, such as {min(lost)}"
        if failed := self.cluster.primary.ask("select blobid from blobs where remote_copy_failed"):
            yield f"{len(failed)} good blobs are failed"
        if self.mode == "paths":
            unread = "select path from ntt_backup.places where failed is not null"
            if bad := self.cluster.primary.ask(unread):
                yield f"{len(bad)} files are failed"
        if daemon.poll() is not None:
            yield f"the daemon has ended with {daemon.poll()}"
        output = self.env.output()
        if "Traceback" in output or "unforeseen" in output:
            yield f"the daemon did not foresee: {output[-1500:]}"


def campaign(
    cluster: Cluster,
    seed: int,
    rounds: int,
    tally: Tally,
    say: Callable[[str], object],
    modes: tuple[str, ...] = MODES,
    kinds: tuple[str, ...] = KINDS,
) -> None:
    """Play the rounds; ends with the first that has a violation."""
    deck: list[str] = []
    for first in range(0, rounds, ROUNDS_AN_ERA):
        mode = modes[first // ROUNDS_AN_ERA % len(modes)]
        chance = random.Random(f"{seed} {first}")
        with new_era(cluster, mode, chance) as one, one.running() as daemon:
            one.add(3)
            one.await_complete(daemon)
            one.new_events()
            for number in range(first, min(rounds, first + ROUNDS_AN_ERA)):
                if not deck:
                    deck = chance.sample(kinds, len(kinds))
                kind = deck.pop()
                began, before = time.monotonic(), sum(tally.lost.values())
                _play(one, daemon, kind, tally)
                lost, lasted = sum(tally.lost.values()) - before, time.monotonic() - began
                tally.rounds += 1
                tally.kinds[kind] += 1
                tally.modes[mode] += 1
                well = "; ".join(tally.violations) or "well"
                say(f"round {number}: {mode}, {kind}, lost {lost}, {lasted:.1f} s: {well}")
                if tally.violations:
                    return
            tally.blobs += len(one.contents)


def _play(era: Era, daemon: Process, kind: str, tally: Tally) -> None:
    cluster, chance = era.cluster, era.chance
    if chance.random() < 0.3:
        cluster.synchronise(True)
    moves = len(era.env.events("catalog_moved"))
    before = era.add(chance.randrange(4, 12))
    if kind == "read-only":
        _read_only(era)
    else:
        _fail_over(era, kind, before, moves, tally)
    era.await_complete(daemon)
    if kind != "read-only":
        era.await_moves(moves + 1)
    era.await_end_of_outages()
    tally.violations += era.violations(daemon)
    events = era.new_events()
    tally.violations += _told(events, moved=kind != "read-only")
    for event in events:
        if event["event"] == "outage":
            tally.outages[f"{event['what']}: {event['reason']}"] += 1
    if era.chance.random() < 0.2:
        second = era.env.call("run")
        if second.returncode != 3:
            tally.violations.append(f"a second coordinator ended with {second.returncode}")
    if kind != "read-only":
        cluster.rejoin()
    cluster.synchronise(False)


def _told(events: list[dict[str, Any]], *, moved: bool) -> Iterator[str]:
    """What was not said of a round."""
    names = Counter(event["event"] for event in events)
    for name in ("worker_restart", "worker_stall", "error", "blob_failed", "file_failed"):
        if names[name]:
            yield f"there was {name}: {next(one for one in events if one['event'] == name)}"
    for event in events:
        if error := next(iter(validator(event["event"]).iter_errors(event)), None):
            yield f"a line of the log breaks the schema: {error.message}: {event}"
    if moved and names["catalog_moved"] not in range(1, WORKERS + 1):
        yield f"catalog_moved was said {names['catalog_moved']} times"
    if not moved and names["catalog_moved"]:
        yield "catalog_moved was said, and nothing has moved"


def _read_only(era: Era) -> None:
    primary = era.cluster.primary
    primary.ask("alter system set default_transaction_read_only = on")
    primary.ask("select pg_reload_conf()")
    era.cluster.end_sessions()
    outages = len(era.env.events("outage"))
    wait_until(lambda: len(era.env.events("outage")) > outages, "an outage", _WAIT_SECONDS)
    with psycopg.connect(primary.address(), autocommit=True) as conn:
        conn.execute("set default_transaction_read_only = off")
        conn.execute("alter system reset default_transaction_read_only")
        conn.execute("select pg_reload_conf()")


def _fail_over(era: Era, kind: str, before: set[str], moves: int, tally: Tally) -> None:
    cluster, chance = era.cluster, era.chance
    old = cluster.primary
    if not cluster.synchronous and chance.random() < 0.7:
        # What is committed from here on is lost; some of it is marked.
        wait_until(lambda: before <= era.marked(), "the blobs to be marked", _WAIT_SECONDS)
        cluster.lag()
        doomed = era.add(chance.randrange(3, 10))
        some = chance.randrange(0, len(doomed) + 1)
        wait_until(lambda: len(doomed & era.marked()) >= some, "marks", _WAIT_SECONDS)
    else:
        wait_until(lambda: era.rows() >= (before if era.mode != "paths" else set()), "rows")
        threading.Event().wait(chance.uniform(0, 0.3))
    rows, marks = era.rows(), era.marked()
    if kind == "freeze":
        old.freeze()
    elif kind == "cut":
        old.clients.stall()
    else:
        old.kill()
    cluster.promote()
    if era.pooler is not None:
        era.pooler.lead_to(cluster.primary.behind_link)
    lost = {"rows": rows - era.rows(), "marks": marks - era.marked()}
    for what, blobids in lost.items():
        tally.lost[what] += len(blobids)
    if kind == "old primary returns":
        _return(era, old, moves, tally)


def _return(era: Era, old: Node, moves: int, tally: Tally) -> None:
    """The old primary comes back, and accepts writes, until it is fenced. moves: how often the
    catalog had moved before.
    """
    cluster = era.cluster
    era.await_moves(moves + 1)
    old.serve()
    before = era.marked(old)
    cluster.end_sessions()
    new = era.add(3)
    if cluster.nodes.index(old) == 0 and era.pooler is None:
        # It is the first host of the URL: the daemon says so, and waits.
        def refused() -> bool:
            return any("old primary" in one["reason"] for one in era.env.events("outage"))

        wait_until(refused, "the old primary to be refused", _WAIT_SECONDS)
        tally.refused += 1
    else:
        wait_until(lambda: new <= era.marked(), "the new primary to be used", _WAIT_SECONDS)
    assert era.marked(old) == before, "marks were written to the old primary"
    old.kill()


@contextmanager
def new_era(cluster: Cluster, mode: str, chance: random.Random) -> Iterator[Era]:
    """An empty store, an empty target, and an empty catalog on both servers."""
    url = _new_catalog(cluster)
    with ExitStack() as stack:
        home = stack.enter_context(TemporaryDirectory(prefix="ntt-failover-", dir=memory()))
        target = Path(home) / "target"
        target.mkdir()
        nothing = cast(Any, None)
        env = Environment(Path(home), url, nothing, RemoteDir(str(target), target))
        env.settings["remote"] = {"url": f"file://{target}"}
        env.begin()
        made = Era(cluster, env, mode, chance)
        if mode == "pooled":
            behind = make_conninfo(url, host=HOST, port=cluster.primary.clients.port)
            server = cluster.primary.behind_link
            made.pooler = stack.enter_context(running_pooler("session", server, behind))
            env.write_config(catalog={"url": made.pooler.through(url)})
        elif mode == "paths":
            env.write_config(**{"files.all": {"paths": [str(env.store)], "every": 1}})
        elif mode == "packs":
            env.write_config(remote={"layout": "packs"})
        env.write_config(run={"workers": WORKERS, "poll_interval": 0.3, "batch_size": 5})
        yield made


def _new_catalog(cluster: Cluster) -> str:
    primary = cluster.primary
    with psycopg.connect(primary.address("postgres"), autocommit=True) as conn:
        conn.execute("drop database if exists copyjob with (force)")
        conn.execute("create database copyjob strategy wal_log")
    with connect(primary.address(), "test") as conn:
        init_db(conn, "remote", notify=True)
    cluster.await_standby()
    return cluster.url


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.failover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=MODES, action="append", help="of the store and the way")
    parser.add_argument("--kind", choices=KINDS, action="append", help="of the fault")
    asked = parser.parse_args()
    tally, began = Tally(), time.monotonic()
    say = partial(print, flush=True)
    modes, kinds = tuple(asked.mode or MODES), tuple(asked.kind or KINDS)
    try:
        with running_cluster() as made:
            campaign(made, asked.seed, asked.rounds, tally, say, modes, kinds)
    finally:
        print(f"seed {asked.seed}, {time.monotonic() - began:.0f} s", *tally.lines(), sep="\n")
    for problem in tally.problems():
        print(f"  problem: {problem}")
    return 1 if tally.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
