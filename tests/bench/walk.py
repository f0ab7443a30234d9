"""What a walk of many files takes: the first pass, with nothing new, with one new file, and a pass
that lists all.

python -m tests.bench.walk --url URL [--files N] [--directories N] DIRECTORY

URL names an empty database of a server on this host, DIRECTORY a place for the files, which are
made where they are missing. `--directories 1` puts all of them into one directory.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

from ntt_backup.audit import directory_walk
from ntt_backup.audit.register import register_files
from ntt_backup.catalog.connection import connect
from ntt_backup.catalog.schema import init_db
from ntt_backup.config import StoreConfig


def make_files(root: Path, files: int, directories: int) -> None:
    for nth in range(directories):
        directory = root / f"{nth // 100:03}" / f"{nth % 100:02}"
        directory.mkdir(parents=True, exist_ok=True)
        for each in range(files // directories):
            (directory / f"{each:06}.jpg").touch()


def cpu_of(pid: int) -> float:
    """Returns the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--directories", type=int, default=10_000)
    parser.add_argument("root", type=Path)
    args = parser.parse_args()
    root = args.root.resolve()
    if not root.exists():
        make_files(root, args.files, args.directories)
    directory_walk.TRUSTED_NS = -1  # type: ignore[misc]
    settings = StoreConfig.model_validate(
        {"source": {"root": str(root)}, "files": {"bench": {"paths": [str(root)]}}}
    )

    with connect(args.url, "walk") as conn:
        init_db(conn, "remote")
        for what in ("first", "nothing new", "one new", "whole"):
            if what == "one new":
                (root / "000" / "00" / f"{time.time_ns()}.jpg").touch()
            pids = os.getpid(), conn.info.backend_pid
            began, before = time.monotonic(), [cpu_of(pid) for pid in pids]
            done = register_files(conn, settings, whole=what == "whole")
            cpu, server = (cpu_of(pid) - was for pid, was in zip(pids, before, strict=True))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{what}: {time.monotonic() - began:.2f} s, CPU {cpu:.2f} s, of the server"
                f" {server:.2f} s, peak {peak:.0f} MiB: {done}",
                flush=True,
            )


if __name__ == "__main__":
    main()
