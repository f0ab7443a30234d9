"""Runs the tests that write real files on a file system of another kind than the machine's.

    tests/filesystems/run ext4|xfs|btrfs|sshfs [pytest's arguments]

The file system lies in an image, or behind an sshd of this machine, and has pytest's directories.
Needs root, loop devices and mkfs of that kind; for sshfs FUSE, sshfs and sshd.
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

from ntt_backup.demo.processes import Interrupts
from ntt_backup.demo.ssh import SshFiles
from ntt_backup.demo.sshd import LOOPBACK, Sshd
from tests.helpers.parallel import memory, ports
from tests.power.disks import FILE_SYSTEMS, call, mounted, new_image, unmount

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
    "integration/test_receiver_durable.py",
    "integration/test_receiver_files.py",
    "integration/test_receiver_hostile.py",
    "integration/test_receiver_large.py",
    "integration/test_receiver_one_name.py",
    "integration/test_receiver_promises.py",
    "integration/test_receiver_reading.py",
    "integration/test_stale_listings.py",
)

# By way of sshfs no file has flags, ACLs, holes, extended attributes or other names, a path has at
# most 4,096 bytes, and each call takes its time: what remains is whole targets and takes.
OVER_SSHFS: Final = (
    "integration/test_receiver_directories.py",
    "integration/test_receiver_files.py",
    "acceptance/test_local_disk.py::test_every_command_works_on_a_directory",
    "acceptance/test_local_disk.py::test_a_disk_that_is_not_mounted_gets_nothing",
    "acceptance/test_snapshots.py",
)


@contextmanager
def image(fs: str, work: Path) -> Iterator[Path]:
    """A file system in an image."""
    where = work / "mnt"
    with mounted(fs, new_image(fs, _SIZE, work), where) as said:
        if said:
            sys.exit(f"{fs} cannot be mounted: {said}")
        yield where


@contextmanager
def sshfs(work: Path) -> Iterator[Path]:
    """A directory of this machine, by way of an sshd."""
    files, where, there = SshFiles(work), work / "mnt", work / "there"
    files.write()
    for place in (where, there):
        place.mkdir()
    port = ports()[0]
    files.pin(port)
    extra = "Subsystem sftp internal-sftp\n"
    server = Sshd(work, files.host_key, files.authorized_keys, Interrupts(), extra=extra)
    server.start(port)
    options = [
        "allow_other",
        "default_permissions",
        "no_contain_symlinks",  # Else pytest cannot read its own links.
        f"IdentityFile={files.identity}",
        f"UserKnownHostsFile={files.known_hosts}",
        "StrictHostKeyChecking=yes",
    ]
    try:
        call("sshfs", "-p", str(port), "-o", ",".join(options), f"{LOOPBACK}:{there}", where)
        yield where
        unmount(where)
    finally:
        server.stop()


def main() -> None:
    kinds: dict[str, Callable[[Path], AbstractContextManager[Path]]] = {
        **{fs: partial(image, fs) for fs in FILE_SYSTEMS},
        "sshfs": sshfs,
    }
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(f"usage: tests/filesystems/run {'|'.join(kinds)} [pytest's arguments]")
    fs, *more = sys.argv[1:]
    chosen = [one for one in more if one.startswith("tests/")]
    tests = chosen or [f"tests/{one}" for one in (OVER_SSHFS if fs == "sshfs" else TESTS)]
    if fs == "sshfs":
        more += ["-k", "not bucket"]  # They are about what a bucket's server keeps.
    with (
        tempfile.TemporaryDirectory(prefix="ntt-files-", dir=memory()) as work,
        kinds[fs](Path(work)) as where,
    ):
        Path(work).chmod(0o755)
        argv = [sys.executable, "-m", "pytest", "-n0", "-q", f"--basetemp={where / 'pytest'}"]
        # Else links of pytest to its last directories would lie there, and be followed.
        argv += ["-p", "no:cacheprovider", *tests, *(one for one in more if one not in chosen)]
        done = subprocess.run(argv, cwd=_ROOT, env=os.environ, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
