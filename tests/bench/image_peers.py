"""A tree in a bucket as a squashfs image, or as the archive of what an overlay has got.

mksquashfs cannot write into a pipe, so an image is a file first, and travels like an archive: by
boto3 in parts, see raw_bucket. An overlay's upper directory has one file in a hundred, changed;
beside it ours sends as many blobs again, of a store that was sent before.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import psycopg

from tests.bench.bucket_peers import BucketJob, OursToBucket
from tests.bench.contender import PROJECT, Contender, Failed, Job

_EVERY: Final = 100
# Blobids below it are one in a hundred.
_FEW_BELOW: Final = "029"


class _File(Contender):
    """What makes one local file of a tree, and sends that."""

    def packed(self, job: Job, file: Path) -> str:
        """Returns a shell command that makes the file."""
        raise NotImplementedError

    def unpacked(self, job: Job, file: Path) -> str:
        """Returns a shell command that fills the destination."""
        raise NotImplementedError

    def run(self, job: Job) -> float:
        file = job.scratch / "image"
        return self._sh(job, f"{self.packed(job, file)} && {self._raw(job, 'put', file)}")

    def check(self, job: Job) -> None:
        (job.scratch / "image").unlink()

    def _sh(self, job: Job, script: str) -> float:
        job.environ["PYTHONPATH"] = str(PROJECT)
        return job.call(["bash", "-e", "-o", "pipefail", "-c", script])

    @staticmethod
    def _raw(job: Job, way: str, file: Path) -> str:
        assert isinstance(job, BucketJob)
        argv = [sys.executable, "-m", "tests.bench.raw_bucket", way, str(file)]
        return shlex.join([*argv, job.endpoint, job.bucket])

    def _back(self, job: BucketJob) -> float:
        file = job.scratch / "image"
        return self._sh(job, f"{self._raw(job, 'get', file)} && {self.unpacked(job, file)}")


class Tar(_File):
    """tar, and zstd at its default level; the file is sent when it is whole."""

    name = "tar-zst-direct"
    tools = ("tar", "zstd")

    def packed(self, job: Job, file: Path) -> str:
        return f"tar cf - -C {job.store.root} . | zstd -q -o {file}"

    def unpacked(self, job: Job, file: Path) -> str:
        return f"zstd -qdc {file} | tar xf - -C {job.destination}"

    def back(self, job: BucketJob) -> float:
        return self._back(job)


class _Mounted(Contender):
    """What can be read through a mount, without being unpacked."""

    def mounting(self, job: BucketJob, point: Path) -> float:
        """Mounts what is in the bucket; seconds."""
        raise NotImplementedError

    def mounted(self, job: BucketJob) -> float:
        point = job.scratch / "mount"
        point.mkdir()
        return self.mounting(job, point)

    def read(self, job: BucketJob) -> float:
        script = f"find {job.scratch}/mount -type f -print0 | xargs -0 cat | wc -c"
        seconds = job.call(["bash", "-o", "pipefail", "-c", script])
        if (found := (job.scratch / "stdout").read_text().strip()) != str(job.store.bytes):
            raise Failed(f"{found} bytes of {job.store.bytes}")
        return seconds

    def finish(self, job: Job) -> None:
        subprocess.run(["umount", job.scratch / "mount"], capture_output=True, check=False)
        super().finish(job)


class Squashfs(_Mounted, _File):
    """mksquashfs with its default block of 128 KiB, by all cores."""

    tools = ("mksquashfs", "unsquashfs")

    def __init__(self, codec: str) -> None:
        self.name, self._codec = f"squashfs-{codec}", codec

    def packed(self, job: Job, file: Path) -> str:
        options = f"-comp {self._codec} -quiet -no-progress -no-xattrs"
        return f"mksquashfs {job.store.root} {file} {options}"

    def unpacked(self, job: Job, file: Path) -> str:
        return f"unsquashfs -quiet -no-progress -f -d {job.destination} {file}"

    def back(self, job: BucketJob) -> float:
        return self._back(job)

    def mounting(self, job: BucketJob, point: Path) -> float:
        file = job.scratch / "image"
        mount = f"mount -t squashfs -o loop,ro {file} {point}"
        return self._sh(job, f"{self._raw(job, 'get', file)} && {mount}")


class OverlayTar(_File):
    """The archive of an overlay's upper directory. It comes back into a directory of its own."""

    tools = ("tar", "zstd")

    def __init__(self, name: str, packer: str, unpacker: str) -> None:
        self.name, self._packer, self._unpacker = name, packer, unpacker

    def prepare(self, job: Job) -> None:
        for name in ("upper", "work", "merged"):
            (job.scratch / name).mkdir()
        options = (
            f"lowerdir={job.store.root},upperdir={self._upper(job)},workdir={job.scratch}/work"
        )
        argv = ["mount", "-t", "overlay", "overlay", "-o", options, str(job.scratch / "merged")]
        job.call(argv)
        files = sorted((job.scratch / "merged").glob("*/*/*"))[::_EVERY]
        for path in files:
            with path.open("ab") as file:
                file.write(b"changed")

    def packed(self, job: Job, file: Path) -> str:
        return f"tar cf - -C {self._upper(job)} . {self._packer} >{file}"

    def unpacked(self, job: Job, file: Path) -> str:
        return f"<{file} {self._unpacker} tar xf - -C {job.destination}"

    def one_in_a_hundred(self, job: BucketJob) -> float:
        seconds = self._back(job)
        found = sum(path.is_file() for path in job.destination.rglob("*"))
        if found != sum(path.is_file() for path in self._upper(job).rglob("*")):
            raise Failed(f"{found} files came back")
        return seconds

    def finish(self, job: Job) -> None:
        subprocess.run(["umount", job.scratch / "merged"], capture_output=True, check=False)

    @staticmethod
    def _upper(job: Job) -> Path:
        return job.scratch / "upper"


class OursMounted(_Mounted, OursToBucket):
    """`run`, `restore` and `mount`."""

    name = "packs"
    few = None  # type: ignore[assignment]

    def mounting(self, job: BucketJob, point: Path) -> float:
        return job.call(self._argv(job, "mount", "--quiet", str(point)))


class OursAgain(OursToBucket):
    """One blob in a hundred, of a store that was sent before."""

    name = "packs of what is new"
    few = None  # type: ignore[assignment]
    back = None  # type: ignore[assignment]

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        job.call(self._argv(job, "run", "--once", "--skip-pgdump"))
        with psycopg.connect(self._url(job)) as conn:
            query = "update blobs set remote_copied = false where blobid < %s"
            self._new = conn.execute(query, [_FEW_BELOW]).rowcount

    def check(self, job: Job) -> None:
        self._require_marked(job)

    def one_in_a_hundred(self, job: BucketJob) -> float:
        wanted = sorted(path.name for path in job.store.root.glob("*/*/*"))[: self._new]
        (job.scratch / "wanted").write_text("\n".join(wanted) + "\n")
        listed = ["--list", str(job.scratch / "wanted"), "--to", str(job.destination)]
        return job.call(self._argv(job, "restore", "--quiet", *listed))


IMAGES: Final[tuple[Contender, ...]] = (
    OursMounted(),
    Tar(),
    *map(Squashfs, ("zstd", "lzo", "gzip")),
    OursAgain(),
    OverlayTar("overlay-tar", "", ""),
    OverlayTar("overlay-tar-zst", "| zstd -q", "zstd -qdc |"),
)
