"""Snapshots beside the peers: what changed in place, taken, kept, and brought back over a link.

A case is a directory in two states. Each contender takes the first in full and the second as an
increment, puts a copy of the second back to the first, and restores the first into an empty
directory. What comes back is compared, file by file. Repositories lie behind the link; on
`loopback` in a directory of this machine; with `--bucket` in a bucket of a SeaweedFS at the end of
the link.

Start it as `python -m tests.bench.snapshots`; see `--help`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.bench import bare_restore, bare_unpack
from tests.bench.archivers import Place
from tests.bench.bucket_lab import bucket_lab
from tests.bench.codecs import codecs
from tests.bench.contender import Failed
from tests.bench.lab import SHAPES, Lab, describe, lab
from tests.bench.slots import slot
from tests.bench.snapshot_peers import (
    ARCHIVED,
    Contender,
    Ours,
    OursInPlace,
    OursWhole,
    PgBackRest,
    PgBackRestBlocks,
    PgBackRestGz,
    PgBackRestLz4,
    spend,
)
from tests.bench.snapshot_states import (
    changed_super_blocks,
    database,
    different,
    mirror,
    pages,
    small_files,
    tree_files,
)
from tests.helpers.s3_servers import S3Server

_CONTENDERS: Final[tuple[type[Contender], ...]] = (
    Ours,
    OursInPlace,
    OursWhole,
    *ARCHIVED,
    PgBackRest,
    PgBackRestBlocks,
    PgBackRestGz,
    PgBackRestLz4,
)
_FEW: Final = 4000
# Files, directories that have files, and the mean of the logarithms of the sizes. `linux` has the
# shape of a kernel's source: 79,455 files in 5,136 directories.
_TREES: Final = {"tree": (70_000, 700, 7.3), "linux": (79_455, 5_085, 8.55)}
_COLUMNS: Final = ("full", "stored", "increment", "stored", "restore", "put back")
_MB: Final = 1e6

States = Callable[[Path], tuple[Path, ...]]


class Bench:
    """Works in home, over a link; None for a directory of this machine. server: that of buckets."""

    def __init__(
        self, home: Path, link: Lab | None, only: Sequence[str], server: S3Server | None
    ) -> None:
        self._home = home
        self._link = link
        self._only = only
        self._server = server
        self._turns = 0

    def case(self, title: str, make: States, *, of_postgres: bool = False) -> Table:
        """Measures all contenders with the states that `make` makes below a directory."""
        states = make(self._home / "states")
        raw = size_of(states[0])
        names = _COLUMNS if len(states) > 1 else (_COLUMNS[0], _COLUMNS[1], _COLUMNS[4])
        table = Table(title=f"{title}, {raw / _MB:,.0f} MB", title_justify="left")
        for name in ("", *names):
            table.add_column(name, justify="right" if name else "left")
        for kind in _CONTENDERS:
            if issubclass(kind, PgBackRest) and not of_postgres:
                continue
            if self._only and not kind.name.startswith(tuple(self._only)):
                continue
            if why := kind.missing(link=self._link is not None, bucket=self._server is not None):
                print(f"{kind.name}: not measured: {why}", file=sys.stderr)
                continue
            try:
                table.add_row(kind.name, *self._turn(kind, states))
            except Failed as failure:
                print(f"{kind.name}: {failure}", file=sys.stderr)
        shutil.rmtree(self._home / "states")
        return table

    def _turn(self, kind: type[Contender], states: Sequence[Path]) -> list[str]:
        """Returns the cells of a contender."""
        self._turns += 1
        home = self._home / f"turn-{self._turns}"
        work, data, to = home / "work", home / "data", home / "to"
        for directory in (work, data, to):
            directory.mkdir(parents=True)
        repository, bucket = home / "repository", None
        if self._link:
            repository = self._link.destination(str(self._turns))
        repository.mkdir(exist_ok=True)
        size = partial(size_of, repository)
        if self._server:
            name = self._server.bucket(own=True).bucket
            bucket = self._server.endpoint, name
            size = partial(_size_of_bucket, self._server, name)
        contender = kind(Place(self._link, work, data, repository, bucket))
        cells, taken, before = [], [], 0
        mirror(states[0], data)
        contender.prepare()
        for state in states:
            mirror(state, data)
            took = contender.take()
            taken.append(took.version)
            after = size()
            stored = f"{(after - before) / _MB:.2f} MB, {(after - before) / size_of(state):.2%}"
            cells += [_seconds(took.seconds), stored]
            before = after
        put_back = []
        if len(states) > 1:
            mirror(states[1], contender.inside(to))
            back = contender.restore(taken[0], to, delta=True)
            different(states[0], contender.inside(to), kind.leaves_out)
            put_back = [_seconds(back.seconds)]
            if back.fetched:
                put_back[0] += f", {back.fetched / _MB:.2f} MB fetched"
            if kind is Ours and not bucket:
                self._say_more(contender, taken, states, back.fetched)
            shutil.rmtree(to)
            to.mkdir()
        # It may be on another machine, and some keep content that they have read.
        shutil.rmtree(work / "cache", ignore_errors=True)
        back = contender.restore(taken[0], to, delta=False)
        different(states[0], contender.inside(to), kind.leaves_out)
        cells += [_seconds(back.seconds), *put_back]
        if self._link is not None:
            shutil.rmtree(repository)
        if self._server and bucket:
            self._server.client().delete_bucket(Bucket=bucket[1])
        shutil.rmtree(home)
        return cells

    def _say_more(
        self, contender: Contender, taken: Sequence[str], states: Sequence[Path], fetched: int
    ) -> None:
        assert isinstance(contender, Ours)
        changed = changed_super_blocks(contender.manifest(taken[0]), contender.place.data, states)
        idle, all_of_it = contender.take(), contender.take("--paranoid")
        speed = size_of(contender.place.data) / max(1e-9, all_of_it.cpu - idle.cpu)
        print(
            f"fetched {fetched / max(1, changed):.2f} of the changed super blocks"
            f" ({changed / _MB:.2f} MB); a core reads and hashes {speed / 1e9:.2f} GB/s; a take"
            f" where nothing has changed {idle.seconds:.2f} s",
            file=sys.stderr,
        )


def unpacking(home: Path, rounds: int, count: int, leaves: int, size: float) -> Table:
    """Takes and restores a tree of small files in memory, beside GNU tar, cpio and the floors, in
    turns; see `tree_files`.
    """
    states = tree_files(home / "states", count, leaves, size)
    work, repository, to = home / "work", home / "repository", home / "to"
    for directory in (work, repository):
        directory.mkdir()
    archive = home / "files.tar"
    spend(("tar", "cf", str(archive), "-C", str(states), "."), work)
    copy = home / "files.cpio"
    packing = f"cd {states} && find . -depth | sort | cpio -o -H newc --quiet"
    spend(("sh", "-c", f"{packing} >{copy}"), work)
    ours = Ours(Place(None, work, states, repository))
    ours.prepare()
    version = ours.take().version
    plain = ("tar", "xf", str(archive), "-C", str(to))
    listed = home / "files.list"
    bare_unpack.write_list(str(listed), str(archive))
    program = (sys.executable, "-I", "-S", bare_unpack.__file__)
    bare = (
        *(sys.executable, bare_restore.__file__, str(work / "settings.toml")),
        *(str(ours.manifest(version).parent), str(to)),
    )
    out = work / "packed"
    ways = {
        "tar": plain,
        "cpio": ("sh", "-c", f"cd {to} && cpio -idm --quiet <{copy}"),
        "a bare loop in Python": (*program, str(listed), str(archive), str(to)),
        "a bare restore": (*bare, "1"),
        "a bare restore, 2 processes": (*bare, "2"),
        "restore --no-verify": ours.restoring(version, to, "--no-verify"),
        "restore": ours.restoring(version, to),
        "restore --jobs 2": ours.restoring(version, to, "--jobs", "2"),
        "packed by tar": ("tar", "cf", str(out), "-C", str(states), "."),
        "packed by cpio": ("sh", "-c", f"{packing} >{out}"),
        "take --full": ours.taking("--full"),
    }
    seen: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, argv in ways.items():
            to.mkdir()
            spent = spend(argv, work, ours.environ)
            seen.setdefault(name, []).append((spent.seconds, spent.cpu))
            shutil.rmtree(to)
            out.unlink(missing_ok=True)
    table = Table(title=f"{count:,} files, {size_of(states) / _MB:,.0f} MB", title_justify="left")
    for column in ("", "wall", "CPU", "CPU of tar's"):
        table.add_column(column, justify="right" if column else "left")
    for name, samples in seen.items():
        wall, cpu = (sorted(column)[rounds // 2] for column in zip(*samples, strict=True))
        tar = sorted(sample[1] for sample in seen["tar"])[rounds // 2]
        table.add_row(name, _seconds(wall), _seconds(cpu), f"{cpu / tar:.2f}")
    return table


def size_of(top: Path) -> int:
    """Returns the bytes of all files below a directory."""
    return sum(path.lstat().st_size for path in top.rglob("*") if path.is_file())


def _size_of_bucket(server: S3Server, name: str) -> int:
    """Returns the bytes of all objects in a bucket."""
    listed = server.client().get_paginator("list_objects_v2").paginate(Bucket=name)
    return sum(one["Size"] for page in listed for one in page.get("Contents", ()))


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def main() -> int:
    """Compares snapshots of what changes in place with what the peers make of it."""
    options = _parse()
    megabytes = options.megabytes
    cases: dict[str, tuple[str, States, bool]] = {
        "random": ("1 % of the pages changed at random", pages(megabytes, stretch=False), False),
        "stretch": (
            "1 % of the pages changed in one stretch",
            pages(megabytes, stretch=True),
            False,
        ),
        "database": ("ten tables, 1 % of each deleted", database(megabytes), True),
        "small": (f"{_FEW:,} small files", small_files(_FEW), False),
    }
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    with ExitStack() as stack:
        home = stack.enter_context(slot(options.disk)).home
        link = server = None
        if options.link != "loopback" or options.bucket:
            link = stack.enter_context(lab(options.link, home))
        if link and options.bucket:
            server = stack.enter_context(bucket_lab(link))
            os.environ |= server.sender.environment
        bench = Bench(home / "bench", link, options.only, server)
        for word in options.case:
            if word in _TREES:
                console.print(unpacking(home / word, options.rounds, *_TREES[word]))
            elif word == "codecs":
                console.print(codecs(home / word, megabytes))
            else:
                title, make, of_postgres = cases[word]
                console.print(
                    bench.case(f"{title}; {describe(options.link)}", make, of_postgres=of_postgres)
                )
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.snapshots", description=main.__doc__
    )
    add = parser.add_argument
    words = ["random", "stretch", "database", "small", "tree"]
    told = f"{', '.join(words)} by default, linux, codecs"
    add("case", nargs="*", default=words, help=told)
    add("--only", nargs="+", default=[], metavar="NAME", help="contenders, by their first letters")
    add("--link", choices=list(SHAPES), default="loopback")
    add("--bucket", action="store_true", help="repositories are in buckets at the end of the link")
    add("--megabytes", type=int, default=1074, help="of the pages, and about of the database")
    add("--rounds", type=int, default=3, help="of the tree")
    add("--disk", type=Path, default=Path("/dev/shm"), metavar="DIR", help="work there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
