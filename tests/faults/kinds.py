"""The faults: what is done to a run, and how it is undone.

Each is a function that strikes and returns how to undo it, or None where that needs nothing. It
raises `Missed` where there was nothing to strike (no such process any more): that is not counted.
`unavailable` says which cannot be done on this machine at all, and why.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.faults.buckets import BucketFaults, is_content
from tests.faults.environment import FaultEnvironment
from tests.helpers.link import Link
from tests.helpers.s3_proxy import (
    Trouble,
    closed,
    lose_answer,
    passed,
    short_body,
    slow_body,
    status,
    weak,
)

PROJECT = Path(__file__).resolve().parents[2]
_CLOCK_LIBRARIES = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1")
_MEET_SECONDS = 3.0
_DIRECTORIES = ("ssh", "disk")

Undo = Callable[[], object]


class Missed(Exception):
    """There was nothing to strike."""


@dataclass(frozen=True)
class Kind:
    """strike: what is done. early: before the run starts, and undone after it. weight: how often it
    is dealt before others come again. targets: the only kinds of targets that it is for, if any.
    """

    strike: Callable[[FaultEnvironment], Undo | None]
    early: bool = False
    weight: int = 1
    targets: tuple[str, ...] = ()


def _must(done: bool) -> None:
    if not done:
        raise Missed


# --- kill -9 --------------------------------------------------------------------------------------


def _everything(environment: FaultEnvironment) -> None:
    environment.env.kill_all(environment.chance)


def _run_itself(environment: FaultEnvironment) -> list[int]:
    run = environment.run
    return [run.pid] if run is not None and run.poll() is None else []


def _coordinator(environment: FaultEnvironment) -> None:
    _must(environment.kill(_run_itself(environment)))


def _worker(environment: FaultEnvironment) -> None:
    _must(environment.kill(environment.workers()))


def _met(strike: Callable[[FaultEnvironment], bool]) -> Callable[[FaultEnvironment], None]:
    """What lives only as long as a batch is waited for. strike: returns whether it met one."""

    def wait(environment: FaultEnvironment) -> None:
        end = time.monotonic() + _MEET_SECONDS
        while not strike(environment):
            _must(time.monotonic() < end and bool(_run_itself(environment)))

    return wait


def _child(name: str) -> Callable[[FaultEnvironment], None]:
    def strike(environment: FaultEnvironment) -> bool:
        of_workers = [environment.env.children(worker) for worker in environment.workers()]
        found = [pid for some in of_workers for pid, comm in some.items() if comm == name]
        return environment.kill(sorted(found))

    return _met(strike)


def _sessions(environment: FaultEnvironment) -> None:
    environment.remote.kill_sessions()


# Whoever has a file or directory open below the path, as the receiver, its shell and its tar do.
_RECEIVER = """
find /proc/[0-9]*/fd /proc/[0-9]*/cwd -maxdepth 1 -lname '{path}*' 2>/dev/null |
    cut -d / -f 3 | sort -u | while read pid; do kill -KILL $pid && echo $pid; done 2>/dev/null
"""


def _receiver(environment: FaultEnvironment) -> bool:
    return environment.on_target(_RECEIVER.format(path=environment.env.remote.path)) != b""


def _backend(environment: FaultEnvironment) -> None:
    """PostgreSQL ends all its sessions when one of its processes is killed."""
    with suppress(psycopg.Error):
        rows = environment.env.query(
            "select pid from pg_stat_activity where application_name like 'ntt-backup-remote/%'"
        )
        _must(environment.kill(sorted(pid for (pid,) in rows)))
        return
    raise Missed


# --- the database ---------------------------------------------------------------------------------


def _crash_database(environment: FaultEnvironment) -> Undo:
    environment.postgres.stop()
    return environment.postgres.start


def _insert_rows(environment: FaultEnvironment) -> None:
    with suppress(psycopg.Error):
        environment.add(environment.chance.randrange(1, 12))


def _delete_rows(environment: FaultEnvironment) -> None:
    victims = environment.chance.sample(sorted(environment.blobs), min(5, len(environment.blobs)))
    with suppress(psycopg.Error):
        environment.env.query("delete from blobs where blobid = any(%s)", victims)
        return
    raise Missed


# --- the link -------------------------------------------------------------------------------------


def _link(strike: Callable[[Link, random.Random], object]) -> Kind:
    def on_link(environment: FaultEnvironment) -> Undo:
        strike(environment.link, environment.chance)
        return lambda: FaultEnvironment.peace(environment)

    return Kind(on_link, targets=("ssh", "bucket"))


# Every ssh of the round goes through tests/helpers/bit_flips.py, which alters one bit for each line
# of its book.
_FLIPPER = (
    "#!/bin/sh\nPYTHONPATH={project} exec {python} -m tests.helpers.bit_flips"
    ' {book} /usr/bin/ssh "$@"\n'
)


def _flip_in_flight(environment: FaultEnvironment) -> Undo:
    """Between the strategy and ssh, where no checksum of ssh's reaches."""
    chance, book = environment.chance, environment.tools / "book"
    lines = ["up 999999999 0"]  # the preflight's session, which is not tried again
    for _ in range(chance.randrange(1, 4)):
        way, byte = chance.choice((("up", 400), ("up", 200_000), ("down", 400)))
        lines.append(f"{way} {chance.randrange(byte)} {chance.randrange(8)}")
    book.write_text("\n".join(lines) + "\n")
    ssh = environment.tools / "ssh"
    ssh.write_text(_FLIPPER.format(project=PROJECT, python=sys.executable, book=book))
    ssh.chmod(0o755)
    environment.env.environ["PATH"] = f"{environment.tools}:{os.environ['PATH']}"
    return lambda: environment.env.environ.pop("PATH", None)


# --- the remote's disk ----------------------------------------------------------------------------


def _fill(environment: FaultEnvironment) -> Undo:
    if environment.disk.struck:
        raise Missed
    environment.disk.fill()
    return environment.disk.free


def _read_only(environment: FaultEnvironment) -> Undo:
    if environment.disk.struck:
        raise Missed
    for _ in range(50):  # not while a file is open for writing
        if environment.disk.remount("ro"):
            break
        time.sleep(0.01)
    else:
        raise Missed
    return lambda: environment.disk.remount("rw")


# --- the source -----------------------------------------------------------------------------------


def _alter_source(environment: FaultEnvironment) -> Undo:
    for blobid in environment.chance.sample(
        sorted(environment.blobs), min(3, len(environment.blobs))
    ):
        if blobid not in environment.damaged:
            environment.alter(blobid)
    return environment.put_right


# --- the clock, and a hurried operator ------------------------------------------------------------


def _move_clock(environment: FaultEnvironment) -> Undo:
    """For our processes alone. Where time jumps for them, deadlines must not."""
    days = environment.chance.choice((-400, -1, 1, 400))
    faked = {
        "LD_PRELOAD": str(_clock_library()),
        "FAKETIME": f"{days:+d}d",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    environment.env.environ.update(faked)
    return lambda: [environment.env.environ.pop(name, None) for name in faked]


def _clock_library() -> Path | None:
    found = [path for pattern in _CLOCK_LIBRARIES for path in Path("/").glob(pattern[1:])]
    return found[0] if found else None


def _stop_signal(environment: FaultEnvironment) -> None:
    how = environment.chance.choice((signal.SIGTERM, signal.SIGINT))
    _must(environment.kill(_run_itself(environment), how))


# --- SIGSTOP --------------------------------------------------------------------------------------


def _freeze(find: Callable[[FaultEnvironment], list[int]]) -> Callable[[FaultEnvironment], Undo]:
    """For some seconds, whatever else is done meanwhile: the campaign asks the database, too."""

    def strike(environment: FaultEnvironment) -> Undo:
        pids = find(environment)
        _must(bool(pids))

        def send(number: int) -> None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        timer = threading.Timer(environment.chance.uniform(0.3, 4.0), send, [signal.SIGCONT])
        send(signal.SIGSTOP)
        timer.start()
        return timer.join

    return strike


def _store(environment: FaultEnvironment) -> list[int]:
    assert isinstance(environment, BucketFaults)
    return [environment.store.pid]


# --- a bucket -------------------------------------------------------------------------------------


def _kill_store(environment: FaultEnvironment) -> Undo:
    assert isinstance(environment, BucketFaults)
    environment.store.kill()
    return environment.store.start


def _answers(kind: str, trouble: Trouble) -> Callable[[FaultEnvironment], Undo]:
    def strike(environment: FaultEnvironment) -> Undo:
        assert isinstance(environment, BucketFaults)
        times = environment.chance.choice((1, 3, 30))
        environment.proxy.trouble(kind, trouble, times=times)
        return environment.proxy.peace

    return strike


def _damage(kind: str, answer: Trouble = passed) -> Callable[[FaultEnvironment], Undo]:
    def strike(environment: FaultEnvironment) -> Undo:
        """Of packs and blobs: what else there is, nobody checks but those who read it."""
        assert isinstance(environment, BucketFaults)
        times = environment.chance.choice((1, 3))
        environment.proxy.trouble(kind, environment.damaging(answer), times=times, when=is_content)
        if answer is not passed:
            environment.proxy.trouble("any", answer, times=10**6)
        return environment.proxy.peace

    return strike


def _of_bucket(strike: Callable[[FaultEnvironment], Undo | None]) -> Kind:
    return Kind(strike, targets=("bucket",))


KINDS: Mapping[str, Kind] = {
    "kill everything": Kind(_everything, weight=3),
    "kill coordinator": Kind(_coordinator),
    "kill worker": Kind(_worker),
    "kill ssh": Kind(_child("ssh"), targets=("ssh",)),
    "kill tar": Kind(_child("tar"), targets=("ssh",)),
    "kill sshd sessions": Kind(_sessions, targets=("ssh",)),
    "kill receiver": Kind(_met(_receiver), targets=_DIRECTORIES),
    "kill database process": Kind(_backend),
    "crash and restart database": Kind(_crash_database),
    "insert rows": Kind(_insert_rows),
    "delete rows": Kind(_delete_rows),
    "cut link": _link(lambda link, _: link.cut()),
    "cut link after some bytes": _link(
        lambda link, chance: link.cut_after(chance.randrange(1, 400_000))
    ),
    "stall link": _link(lambda link, _: link.stall()),
    "throttle link": _link(lambda link, chance: link.throttle(chance.randrange(30_000, 300_000))),
    "flip bits in flight": Kind(_flip_in_flight, early=True, targets=("ssh",)),
    "fill remote disk": Kind(_fill),
    "remote disk read-only": Kind(_read_only, targets=_DIRECTORIES),
    "alter source": Kind(_alter_source),
    "alter source before the run": Kind(_alter_source, early=True),
    "move clock": Kind(_move_clock, early=True),
    "stop signal": Kind(_stop_signal),
    "freeze coordinator": Kind(_freeze(_run_itself)),
    "freeze worker": Kind(_freeze(lambda environment: environment.workers()[-1:])),
    "freeze database": Kind(_freeze(lambda environment: environment.postgres.processes)),
    "freeze object store": _of_bucket(_freeze(_store)),
    "kill object store": _of_bucket(_kill_store),
    "500 of the store": _of_bucket(_answers("any", status(500, "InternalError"))),
    "503 of the store": _of_bucket(_answers("any", status(503, "SlowDown"))),
    "lost answer to Complete": _of_bucket(_answers("complete", lose_answer)),
    "lost answers": _of_bucket(_answers("any", lose_answer)),
    "closed connections": _of_bucket(_answers("any", closed)),
    "short answers": _of_bucket(_answers("any", short_body)),
    "slow answers": _of_bucket(_answers("any", slow_body(0.3))),
    "full store": _of_bucket(_answers("part", status(507, "InsufficientStorage"))),
    "expired credentials": _of_bucket(_answers("any", status(403, "ExpiredToken"))),
    "store without checksums": _of_bucket(_answers("any", weak)),
    "wrong part taken": _of_bucket(_damage("part")),
    "wrong object taken": _of_bucket(_damage("put")),
    "wrong part taken by a weak store": _of_bucket(_damage("part", weak)),
    "wrong object taken by a weak store": _of_bucket(_damage("put", weak)),
}


def unavailable(environment: FaultEnvironment) -> dict[str, str]:
    """The kinds that are not used with this environment, and why."""
    reasons = {}
    if environment.strategy == "tar":
        reasons["flip bits in flight"] = "tar has no checksum from end to end"
        reasons["alter source"] = "tar does not hash what it reads after the inspection"
    else:
        reasons["kill tar"] = "tar alone starts it"
    if not environment.disk.small:
        reasons["fill remote disk"] = "needs a container, or mounts"
        reasons["remote disk read-only"] = "needs a container, or mounts"
    elif environment.target in _DIRECTORIES and not _may_remount(environment):
        reasons["remote disk read-only"] = "needs the right to mount"
    if _clock_library() is None:
        reasons["move clock"] = "libfaketime is not installed"
    if environment.target == "disk":
        reasons["move clock"] = "the target has the same clock"
    if os.geteuid() != 0:
        reasons["kill database process"] = "the server may run as another user"
    return reasons


def _may_remount(environment: FaultEnvironment) -> bool:
    return environment.disk.remount("ro") and environment.disk.remount("rw")


def deal(chance: random.Random, possible: list[str]) -> Iterator[list[str]]:
    """One to three kinds for each round. None comes again before all have come."""
    deck: list[str] = []
    while True:
        hand = []
        for _ in range(chance.choice((1, 2, 2, 3))):
            if not deck:
                deck = [name for name in possible for _ in range(KINDS[name].weight)]
                chance.shuffle(deck)
            hand.append(deck.pop())
        yield list(dict.fromkeys(hand))
