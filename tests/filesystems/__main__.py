"""Runs the tests that write real files on a file system of another kind than the machine's.

    tests/filesystems/run ext4|xfs|btrfs [pytest's arguments]

The file system lies in an image, and has pytest's directories. Needs root, loop devices and mkfs of
that kind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from tests.parallel import memory
from tests.power.disks import FILE_SYSTEMS, mounted, new_image

_SIZE: Final = 3 << 30
_ROOT: Final = Path(__file__).parents[2]
# What writes files: blob directories, the receiver, and all that restores, packs or takes.
TESTS: Final = (
    "unit/test_bad_sectors.py",
    "unit/test_durable.py",
    "unit/test_durable_files.py",
    "unit/test_half_store.py",
    "unit/test_one_blob.py",
    "unit/test_open.py",
    "unit/test_snapshot_restore.py",
    "unit/test_snapshot_take.py",
    "unit/test_snapshot_tree.py",
    "unit/test_snapshot_walk.py",
    "unit/test_syscalls.py",
    "unit/test_unpack.py",
    "integration/test_receiver.py",
    "integration/test_receiver_directories.py",
    "integration/test_receiver_dumps.py",
    "integration/test_receiver_durable.py",
    "integration/test_receiver_hostile.py",
    "integration/test_receiver_large.py",
    "integration/test_receiver_left_overs.py",
    "integration/test_receiver_promises.py",
    "integration/test_receiver_reading.py",
    "integration/test_receiver_snapshots.py",
    "integration/test_stale_listings.py",
)


@contextmanager
def image(fs: str, work: Path) -> Iterator[Path]:
    """A file system in an image."""
    where = work / "mnt"
    with mounted(fs, new_image(fs, _SIZE, work), where) as said:
        if said:
            sys.exit(f"{fs} cannot be mounted: {said}")
        yield where


def main() -> None:
    kinds: dict[str, Callable[[Path], AbstractContextManager[Path]]] = {
        **{fs: partial(image, fs) for fs in FILE_SYSTEMS},
    }
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(f"usage: tests/filesystems/run {'|'.join(kinds)} [pytest's arguments]")
    fs, *more = sys.argv[1:]
    tests = [one for one in more if one.startswith("tests/")]
    with (
        tempfile.TemporaryDirectory(prefix="ntt-files-", dir=memory()) as work,
        kinds[fs](Path(work)) as where,
    ):
        Path(work).chmod(0o755)
        argv = [sys.executable, "-m", "pytest", "-n0", "-q", f"--basetemp={where / 'pytest'}"]
        # Else links of pytest to its last directories would lie there, and be followed.
        argv += ["-p", "no:cacheprovider", *([] if tests else (f"tests/{one}" for one in TESTS))]
        done = subprocess.run([*argv, *more], cwd=_ROOT, env=os.environ, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
