"""What reading in the order of the disk gains on a disk that turns, which is modelled.

    python -m tests.bench.disk --blobs 20000 --orders hash,auto

The store is an ext4 of its own: small blobs, written in no order, with something large after each,
so that they lie all over the disk. Its device is a file in a FUSE file system that takes the time
of a disk for each read, behind a loop device without a cache. The page cache is dropped before each
run. Needs root, FUSE (mfusepy, fuse3) and loop devices; the remote is on loopback.

The model (`Disk`): one head, 7,200 turns a minute, 1.25 MB a track. A read that does not go on
where the last one ended costs a seek (1 ms, and 14 ms more for the whole stroke, as the root of the
distance), and waits until its place comes round; then 150 MB/s. Of the 32 reads that have waited
longest, the disk serves the one that it can reach first, as disks with a command queue do; but one
that has waited for half a second goes first, as Linux sees to. It has no cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.demo.processes import Interrupts
from tests.bench.contender import Job
from tests.bench.lab import lab
from tests.bench.peers import Ours
from tests.bench.stores import Recipe, Store
from tests.helpers.postgres_server import Postgres

_SIZE = 16 << 30
_LARGE = 600_000
_TURN_S = 60 / 7200
_BYTES_A_SECOND = 150e6
_TRACK = _BYTES_A_SECOND * _TURN_S
_QUEUE = 32
# Seconds: without a bound, a read far from the head waits while others keep coming. Linux has the
# same one (mq-deadline, read_expire).
_LONGEST_S = 0.5
# Of 65,536 directories, as production fills them: many blobs in each.
_DIRECTORIES = 256
_SERVE = "import sys; from tests.bench.disk import serve; serve(*sys.argv[1:])"


class Disk:
    """A disk with one head."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        # Each with the time when it came; the oldest first.
        self._waiting: list[tuple[int, int, threading.Event, float]] = []
        self._busy = False
        self._ends = 0.0
        self._head = 0

    def read_for(self, offset: int, length: int) -> None:
        """Waits as long as the disk would take to read so many bytes from there."""
        turn = threading.Event()
        with self._lock:
            now = time.monotonic()
            self._waiting.append((offset, length, turn, now))
            if not self._busy:
                self._serve_next(now)
        turn.wait()
        time.sleep(max(0.0, self._ends - time.monotonic()))
        with self._lock:
            # The next read begins when this one ended: a thread that wakes up late delays nothing.
            self._serve_next(self._ends)

    def _serve_next(self, now: float) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            one = min(self._waiting[:_QUEUE], key=lambda one: self._reached(one[0], now))
            if now - self._waiting[0][3] > _LONGEST_S:
                one = self._waiting[0]
            self._waiting.remove(one)
            offset, length, turn, _ = one
            self._ends = self._reached(offset, now) + length / _BYTES_A_SECOND
            self._head = offset + length
            turn.set()

    def _reached(self, offset: int, now: float) -> float:
        """Returns the time when the head can read there, if it starts now."""
        if offset == self._head:
            return now
        seek: float = 0.001 + 0.014 * (abs(offset - self._head) / self._size) ** 0.5
        turned = (now + seek) / _TURN_S % 1
        return now + seek + (offset / _TRACK - turned) % 1 * _TURN_S


def serve(image: str, mount: str) -> None:
    """Serves the image as the file `disk` in mount, at the speed of a disk, until it is
    unmounted.
    """
    os.environ["FUSE_LIBRARY_NAME"] = "fuse3"  # Version 2 has no bound of threads.
    import mfusepy

    fd = os.open(image, os.O_RDONLY)
    size = os.fstat(fd).st_size
    disk = Disk(size)

    class Files(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def init_with_config(self, connection: Any, config: Any) -> None:
            connection.max_background = 2 * _QUEUE  # By default no more than 12 reads may wait.

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            return (
                {"st_mode": 0o100444, "st_nlink": 1, "st_size": size}
                if path == "/disk"
                else {"st_mode": 0o040555, "st_nlink": 2}
            )

        def read(self, path: str, count: int, offset: int, fh: int) -> bytes:
            disk.read_for(offset, count)
            return os.pread(fd, count, offset)

    mfusepy.FUSE(Files(), mount, foreground=True, direct_io=True, max_threads=2 * _QUEUE)


@contextmanager
def mounted(device: Path, where: Path, options: str) -> Iterator[None]:
    """Mounts a device or an image."""
    _call("mount", "-o", options, str(device), str(where))
    try:
        yield
    finally:
        _call("umount", str(where))


@contextmanager
def slow(image: Path, home: Path) -> Iterator[Path]:
    """Gives a block device with the content of the image and the speed of a disk."""
    mount = home / "fuse"
    mount.mkdir(exist_ok=True)
    with subprocess.Popen([sys.executable, "-c", _SERVE, str(image), str(mount)]) as server:
        try:
            while not (mount / "disk").exists():
                if server.poll() is not None:
                    raise SystemExit("the modelled disk did not come up")
                time.sleep(0.05)
            argv = ["losetup", "--find", "--show", "--read-only", "--direct-io=on"]
            device = _call(*argv, str(mount / "disk")).strip()
            try:
                yield Path(device)
            finally:
                _call("losetup", "--detach", device)
        finally:
            _call("umount", "--lazy", str(mount))
            with suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.terminate()


def fill(root: Path, blobs: int) -> Store:
    """Writes blobs under 8 kB in no order, and after each something large."""
    chance = random.Random(1)
    large = root.parent / "large"
    large.mkdir()
    # Else ext4 keeps room for small files, and lays those side by side that are written together.
    device = _call("findmnt", "-no", "SOURCE", str(root.parent)).strip()
    Path("/sys/fs/ext4", Path(device).name, "mb_stream_req").write_text("0")
    total, directories = 0, set()
    for nth in range(blobs):
        content = chance.randbytes(chance.randrange(100, 8000))
        base = blake3(content)
        for tried in itertools.count():
            hasher = base.copy()
            hasher.update(tried.to_bytes(4, "big"))
            blobid = hasher.hexdigest()
            if blobid[1] == blobid[3] == "0":
                break
        path = root / relative_path(blobid)
        path.parent.mkdir(parents=True, exist_ok=True)
        directories |= {path.parent, path.parent.parent}
        path.write_bytes(content + tried.to_bytes(4, "big"))
        total += len(content) + 4
        with (large / str(nth)).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _LARGE)
    return Store(Recipe("small", blobs), root, blobs, total, len(directories))


def _call(*argv: str) -> str:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blobs", type=int, default=20_000)
    parser.add_argument("--orders", default="hash,auto")
    parser.add_argument("--workers", type=int, default=4)
    asked = parser.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ntt-disk-")))
        home.chmod(0o711)
        image, top = home / "image", home / "mount"
        top.mkdir()
        with image.open("wb") as file:
            file.truncate(_SIZE)
        _call("mkfs.ext4", "-q", "-F", str(image))
        with mounted(image, top, "loop,noatime,nodelalloc"):
            store = fill(top / "store", asked.blobs)
        link = stack.enter_context(lab("loopback", home))
        (home / "postgres").mkdir()
        postgres = Postgres(home / "postgres", Interrupts(), ("fsync=off",))
        postgres.start()
        stack.callback(postgres.stop)
        for nth, order in enumerate(asked.orders.split(",")):
            scratch = home / f"job-{nth}"
            scratch.mkdir()
            destination = link.destination(f"job-{nth}")
            job = Job(store, link, scratch, destination, postgres, 3600, False, asked.workers)
            with mounted(image, top, "loop,ro,noload"):
                Ours().prepare(job)
            job.environ["NTT_READ_ORDER"] = order
            with slow(image, home) as device, mounted(device, top, "ro,noload,noatime"):
                Path("/proc/sys/vm/drop_caches").write_text("3")
                seconds = Ours().run(job)
            rate = store.blobs / seconds
            figures = {"order": order, "seconds": seconds, "blobs_per_s": round(rate, 1)}
            print(json.dumps(figures), flush=True)
            shutil.rmtree(destination)


if __name__ == "__main__":
    main()
