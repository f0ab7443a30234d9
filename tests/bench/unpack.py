"""Unpacking a pack beside GNU tar: the same files, both in memory, in turns.

Both begin from one file: ours is a pack, tar's is an archive of the same files. CPU time is that of
the program and of all that it starts. What our program takes for an empty pack is its start, and is
shown by itself: a restore of many packs starts once. The floor is a bare loop in Python.

Start it as `python -m tests.bench.unpack`.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from tests.bench import bare_unpack
from tests.helpers.blobs import pack

# The mean of the logarithms of the sizes, and how far they are spread: half the files are below
# 1.5 KB, and one in six is above 7.
_SIZES: Final = (7.3, 1.6)
_MOST: Final = 200_000
_PROGRAM: Final = (sys.executable, "-m", "ntt_backup", "unpack", "--quiet")
_START: Final = "start alone"
_TAR: Final = "tar"
_BARE: Final = "a bare loop"
_OURS: Final = ("unpack, no verify", "unpack", "unpack, 2 jobs")


def main() -> int:
    """Compares them, and prints the medians."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.unpack", description=main.__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("/dev/shm"), metavar="DIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.disk) as scratch:
        home = Path(scratch)
        size = _prepare(home, options.files)
        print(f"{options.files:,} files, {size / 1e6:.0f} MB; load {os.getloadavg()[0]:.1f}")
        samples: dict[str, list[tuple[float, float]]] = {}
        for _ in range(options.rounds):
            for name, argv in _contenders(home).items():
                samples.setdefault(name, []).append(_run(argv, home / "to"))
    seen = {
        name: tuple(median(column) for column in zip(*them, strict=True))
        for name, them in samples.items()
    }
    start, tar = seen[_START], seen[_TAR]
    print(f"{'':20}{'wall s':>8}{'CPU s':>8}{'tar / ours':>14}{'without start':>15}")
    for name, (wall, cpu) in seen.items():
        ratios = f"{tar[1] / cpu:14.2f}" if name in (_BARE, *_OURS) else ""
        if name in _OURS:
            ratios += f"{tar[1] / (cpu - start[1]):15.2f}"
        print(f"{name:20}{wall:8.2f}{cpu:8.2f}{ratios}")
    _, one, two = (seen[name][0] - start[0] for name in _OURS)
    print(f"two jobs are {one / two:.2f} times as fast as one (wall, without start)")
    return 0


def _prepare(home: Path, count: int) -> int:
    """Makes the pack and the archive; returns the bytes of content."""
    chance = random.Random(3)
    contents = [
        chance.randbytes(min(_MOST, int(chance.lognormvariate(*_SIZES)))) for _ in range(count)
    ]
    (home / "files.pack").write_bytes(pack(list(set(contents))))
    (home / "empty.pack").write_bytes(pack([]))
    with tarfile.open(home / "files.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for blobid, content in sorted((blake3(one).hexdigest(), one) for one in set(contents)):
            member = tarfile.TarInfo(relative_path(blobid))
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    bare_unpack.write_list(str(home / "files.list"), str(home / "files.tar"))
    return sum(map(len, contents))


def _contenders(home: Path) -> dict[str, Sequence[str]]:
    pack, to = str(home / "files.pack"), ("--to", str(home / "to"))
    plain, verified, two = _OURS
    archive, listed = str(home / "files.tar"), str(home / "files.list")
    bare = (sys.executable, "-I", "-S", bare_unpack.__file__, listed, archive, str(home / "to"))
    return {
        _TAR: ("tar", "xf", archive, "-C", str(home / "to")),
        _BARE: bare,
        plain: (*_PROGRAM, pack, *to, "--no-verify"),
        verified: (*_PROGRAM, pack, *to),
        two: (*_PROGRAM, pack, *to, "--jobs", "2"),
        _START: (*_PROGRAM, str(home / "empty.pack"), *to),
    }


def _run(argv: Sequence[str], to: Path) -> tuple[float, float]:
    """Seconds of wall time, and of CPU, for a command that fills a new directory."""
    to.mkdir()
    began = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{argv[0]} ended with {process.returncode}")
    shutil.rmtree(to)
    return wall, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
