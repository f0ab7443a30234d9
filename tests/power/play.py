"""Plays kinds on file systems, cuts the power, and looks; see README.md.

tests/power/run [--kinds A,B] [--fs ext4,xfs,btrfs] [--seed N] [--images N] [--again N]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from ntt_backup.demo.processes import Interrupts
from tests.helpers.parallel import memory
from tests.helpers.postgres_server import Postgres
from tests.power import kinds, local, stored
from tests.power.crashes import Images, Log, Moment, moments
from tests.power.disks import FILE_SYSTEMS, check, lacking, mounted
from tests.power.kinds import Kind, Scene, now
from tests.power.promising import BROKEN

KINDS: Final = kinds.kinds_of(kinds, stored, local)
CONTROLS: Final = tuple(name for name in KINDS if name.startswith("control-"))
# What has to be found of a program that is broken on purpose, and the kind that finds it.
BREAKS: Final = {
    "early-receipt": ("small", "LOST"),
    "early-name": ("workers", "VISIBLE"),
    "no-sync": ("snapshots", "LOST"),
    "early-pack": ("packs", "LOST"),
    "no-marker": ("snapshot-restore", "TRAP"),
    "no-fsync": ("install", "LOST"),
}
# xfs and btrfs have written the content once they write the name or the time.
_EXT4: Final = ("early-name", "no-marker")
_TRAPS: Final = 3
_DIRTY: Final = {"dirty_writeback_centisecs": "20", "dirty_expire_centisecs": "50"}
_SERVER: Final = (
    "fsync=off",
    "full_page_writes=off",
    "max_connections=60",
    "shared_buffers=32MB",
)


@dataclass(frozen=True, slots=True)
class How:
    """images: power cuts; again: how many of them the program goes on after; checks: how many
    file systems are checked by their own program.
    """

    images: int = 40
    again: int = 4
    checks: int = 3


@dataclass(slots=True)
class Played:
    """What came of a kind on a file system. wrong: by image, what was wrong."""

    kind: str
    fs: str
    seed: int
    broken: str = ""
    images: int = 0
    again: int = 0
    unsettled: int = 0
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    wrong: list[tuple[Moment, list[str]]] = field(default_factory=list)

    @property
    def classes(self) -> Counter[str]:
        """In how many images each sort of wrong was found: LOST, VISIBLE, TRAP, AGAIN, ..."""
        return Counter(
            one for _, many in self.wrong for one in {line.split(":")[0] for line in many}
        )

    @property
    def expected(self) -> str:
        """What has to be found, "" for nothing."""
        if self.broken:
            return BREAKS[self.broken][1] if self.fs == "ext4" or self.broken not in _EXT4 else ""
        return {"control-cp-sync": ""}.get(self.kind, "LOST") if self.kind in CONTROLS else ""

    @property
    def right(self) -> bool:
        """Whether what was found is what had to be found."""
        if self.kind in CONTROLS or self.broken:
            return not self.expected or self.classes[self.expected] > 0
        return not self.wrong

    def line(self) -> str:
        found = ", ".join(f"{count} {name}" for name, count in sorted(self.classes.items()))
        return (
            f"{self.kind:26}{self.fs:7}{self.broken:15}{self.images:7}{self.again:7}"
            f"{self.unsettled:11}{self.seconds:6.0f} s  {'' if self.right else 'WRONG '}{found}"
        )


HEADER: Final = (
    f"{'kind':26}{'fs':7}{'broken':15}{'images':>7}{'again':>7}{'unsettled':>11}{'time':>8}  found"
)


def play(name: str, scene: Scene, how: How) -> Played:
    """Play a kind, and look at what power cuts leave of it."""
    began = time.monotonic()
    scene.home.mkdir(parents=True)
    kind = KINDS[name](scene)
    done = Played(name, scene.fs, scene.seed, scene.broken)
    try:
        try:
            kind.disk.start()
            kind.work()
        except (AssertionError, RuntimeError) as error:
            done.wrong.append((Moment(now(), "all", 0, 0, "before any"), [f"PLAY: {error!r}"]))
            return done
        finally:
            kind.disk.stop()
        log = Log(kind.disk.logged)
        chance = random.Random(scene.seed * 7919)
        between = (kind.begin, kind.end)
        cuts = moments(log, between, how.images, chance, scene.fs, kind.promises())
        again = set(chance.sample(range(len(cuts)), min(how.again, len(cuts))))
        checked = set(chance.sample(range(len(cuts)), min(how.checks, len(cuts))))
        with closing(Images(log, scene.home)) as images:
            traps = 0
            for number, moment in enumerate(cuts):
                done.images += 1
                done.unsettled += images.make(moment) > 0
                wrong, worth = _look(kind, images.crash, moment)
                if number in checked and (said := check(scene.fs, images.crash)):
                    wrong.append(f"CHECKER: {said}")
                traps += worth
                if number in again or (worth and traps <= _TRAPS):
                    done.again += 1
                    wrong += _go_on(kind, images.crash, moment)
                if wrong:
                    done.wrong.append((moment, wrong))
        done.facts = {"writes": len(log.records), **kind.facts}
    finally:
        kind.close()
        shutil.rmtree(scene.home, ignore_errors=True)
    done.seconds = time.monotonic() - began
    return done


def _look(kind: Kind, image: Path, moment: Moment) -> tuple[list[str], bool]:
    """What is wrong on a crashed disk, and whether the program ought to go on with it."""
    top = kind.home / "crashed"
    with mounted(kind.scene.fs, image, top) as said:
        if said:
            return [f"MOUNT: {said}"], False
        return kind.check(top, moment), kind.worth_going_on(top, moment)


def _go_on(kind: Kind, image: Path, moment: Moment) -> list[str]:
    with mounted(kind.scene.fs, image, kind.disk.mnt) as said:
        return [f"MOUNT: {said}"] if said else kind.again(moment)


@contextmanager
def server(work: Path) -> Iterator[Postgres]:
    """A PostgreSQL that loses no power."""
    home, sockets = work / "postgres", work / "sockets"
    for place in (work, home, sockets):
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777 if place == sockets else 0o755)
    made = Postgres(home, Interrupts(), _SERVER, sockets)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@contextmanager
def early_writeback() -> Iterator[None]:
    """The kernel writes soon what nobody has synced, or little would be on its way."""
    place = Path("/proc/sys/vm")
    before = {name: (place / name).read_text() for name in _DIRTY}
    try:
        for name, value in _DIRTY.items():
            (place / name).write_text(value)
        yield
    finally:
        for name, value in before.items():
            (place / name).write_text(value)


def campaign(
    catalog: Postgres,
    work: Path,
    played: Iterable[tuple[str, str, str]],
    seed: int,
    how: How,
    out: TextIO | None = None,
) -> Iterator[Played]:
    """Play kinds, each with a file system and what is broken; results go to `out` as JSON lines."""
    with early_writeback():
        for name, fs, broken in played:
            home = work / f"{name}-{fs}-{seed}{broken and '-'}{broken}"
            done = play(name, Scene(fs, seed, home, work, catalog, broken), how)
            if out is not None:
                line = {
                    **{one: getattr(done, one) for one in ("kind", "fs", "seed", "broken")},
                    **{one: getattr(done, one) for one in ("images", "again", "unsettled")},
                    "seconds": round(done.seconds, 1),
                    "facts": done.facts,
                    "classes": done.classes,
                    "wrong": [(str(moment), many[:6]) for moment, many in done.wrong],
                }
                out.write(json.dumps(line) + "\n")
                out.flush()
            yield done


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/power/run")
    parser.add_argument("--kinds", default="all", help="names, `all`, `controls`, `ours`")
    parser.add_argument("--fs", default=",".join(FILE_SYSTEMS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--images", type=int, default=How().images)
    parser.add_argument("--again", type=int, default=How().again)
    parser.add_argument("--work", type=Path, help="where images lie: some 2 GB, best in memory")
    parser.add_argument("--out", type=argparse.FileType("a"), help="a file for JSON lines")
    return parser.parse_args()


def _chosen(names: str, file_systems: list[str]) -> list[tuple[str, str, str]]:
    ours = [name for name in KINDS if name not in CONTROLS]
    sets = {"ours": ours, "controls": [*CONTROLS, *BREAKS], "all": [*ours, *CONTROLS, *BREAKS]}
    wanted = sets.get(names) or names.split(",")
    if unknown := [one for one in wanted if one not in KINDS and one not in BROKEN]:
        sys.exit(f"no such kind: {', '.join(unknown)}; there are {', '.join(sets['all'])}")
    return [
        (BREAKS[one][0], fs, one) if one in BREAKS else (one, fs, "")
        for one in wanted
        for fs in file_systems
    ]


def main() -> None:
    chosen = _arguments()
    if missing := lacking():
        sys.exit(f"the lab cannot run: {missing}")
    how = How(chosen.images, chosen.again)
    played = _chosen(chosen.kinds, chosen.fs.split(","))
    wrong = 0
    with (
        tempfile.TemporaryDirectory(prefix="ntt-power-", dir=chosen.work or memory()) as work,
        server(Path(work)) as catalog,
    ):
        print(HEADER, flush=True)
        total: Counter[str] = Counter()
        for done in campaign(catalog, Path(work), played, chosen.seed, how, chosen.out):
            print(done.line(), flush=True)
            for moment, many in done.wrong[:5] if not done.right else ():
                print(f"    {moment}\n        " + "\n        ".join(many[:4]), flush=True)
            wrong += not done.right
            total.update(images=done.images, again=done.again)
    print(f"{total['images']:,} images, {total['again']:,} went on, {wrong} runs WRONG")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
