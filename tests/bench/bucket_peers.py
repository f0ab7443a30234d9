"""Ours and its peers send a store into a bucket, and read it back."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from psycopg import sql

from ntt_backup.config.sections import RunSettings
from ntt_backup.daemon.workers import workers_needed
from ntt_backup.model import PendingEstimate
from tests.bench.archivers import ARCHIVERS, Archived, Place
from tests.bench.contender import PROJECT, Contender, Failed, Job, compare
from tests.bench.peers import Ceiling, Copy, Ours, seal

# Ours alone also reads back so many blobs by their ids, and those of a prefix.
FEW: Final = 4000
PREFIX: Final = "00"


@dataclass(kw_only=True)
class BucketJob(Job):
    """A job whose remote is a new, empty bucket."""

    endpoint: str
    bucket: str


class _WithCatalog(Ours):
    """The catalog knows the blobs, and the bucket has none."""

    layout = "packs"

    def _remote(self, job: Job) -> dict[str, object]:
        assert isinstance(job, BucketJob)
        url = f"s3://{job.bucket}/backup"
        return {"url": url, "endpoint": job.endpoint, "addressing": "path"}


class OursToBucket(_WithCatalog):
    """`run --once` and `restore` with the default settings."""

    def check(self, job: Job) -> None:
        self._require_recorded(job)

    def back(self, job: BucketJob) -> float:
        return job.call(self._argv(job, "restore", "--quiet", "--to", str(job.destination)))

    def prefix(self, job: BucketJob) -> float:
        """Restores what begins with a prefix, without tables that an earlier command has kept."""
        job.environ["XDG_CACHE_HOME"] = str(job.scratch / "cache")
        wanted = ["--prefix", PREFIX, "--to", str(job.destination)]
        seconds = job.call(self._argv(job, "restore", "--quiet", *wanted))
        compare(replace(job.store, root=job.store.root / PREFIX), job.destination / PREFIX)
        return seconds

    def few(self, job: BucketJob) -> float:
        """Restores the first blobs by their ids."""
        wanted = sorted(path.name for path in job.store.root.glob("*/*/*"))[:FEW]
        (job.scratch / "wanted").write_text("\n".join(wanted) + "\n")
        listed = ["--list", str(job.scratch / "wanted"), "--to", str(job.destination)]
        return job.call(self._argv(job, "restore", "--quiet", *listed))


class SealedToBucket(OursToBucket):
    """The same, sealed."""

    name = "sealed"

    def prepare(self, job: Job) -> None:
        seal(job)
        super().prepare(job)


class Bare(_WithCatalog):
    """The same work in the plainest Python, for the same catalog, in as many processes as ours has
    workers: what is above it is what our promises cost.
    """

    name = "bare"

    def run(self, job: Job) -> float:
        return self._call(job, "put", job.store.root)

    def check(self, job: Job) -> None:
        if self._rows(job, sql.SQL("remote_copied")) != job.store.blobs:
            raise Failed("the catalog does not have all as copied")

    def back(self, job: BucketJob) -> float:
        return self._call(job, "get", job.destination)

    def _call(self, job: Job, way: str, directory: Path) -> float:
        assert isinstance(job, BucketJob)
        run = RunSettings(workers=job.workers or RunSettings().workers).for_packs()
        pending = PendingEstimate(job.store.blobs, job.store.bytes, 0, exact=True)
        argv = [sys.executable, "-m", "tests.bench.bare_bucket", way, str(directory)]
        argv += [job.endpoint, job.bucket, str(workers_needed(pending, run)), self._url(job)]
        return job.call(argv)


class ArchivedInBucket(Archived):
    """A program that keeps a repository in a bucket."""

    def _place(self, job: Job) -> Place:
        assert isinstance(job, BucketJob)
        bucket = job.endpoint, job.bucket
        return Place(None, job.scratch, job.store.root, job.scratch, bucket)

    def check(self, job: Job) -> None:
        self._said = (job.scratch / "stdout").read_text()

    def back(self, job: BucketJob) -> float:
        return self._restore(job, self._said, job.destination)


class Rclone(Contender):
    """`rclone copy`, 64 transfers at once: a request a file and more."""

    name = "rclone copy"
    tools = ("rclone",)
    version_argv = ("rclone", "version")

    def run(self, job: Job) -> float:
        assert isinstance(job, BucketJob)
        job.environ |= {
            "RCLONE_CONFIG": os.devnull,
            "RCLONE_S3_PROVIDER": "Other",
            "RCLONE_S3_ENDPOINT": job.endpoint,
            "RCLONE_S3_ENV_AUTH": "true",
            "RCLONE_S3_NO_CHECK_BUCKET": "true",
        }
        sides = ["--transfers", "64", "--checkers", "64"]
        return job.call(["rclone", "copy", *sides, str(job.store.root), f":s3:{job.bucket}/rclone"])

    def check(self, job: Job) -> None: ...


class Raw(Ceiling):
    """As many random bytes as the store has, from one file, by one multipart upload of boto3, and
    back into a file.
    """

    name = "raw multipart"

    def run(self, job: Job) -> float:
        return self._call(job, "put", self._file(job))

    def back(self, job: BucketJob) -> float:
        return self._call(job, "get", job.destination / "raw")

    @staticmethod
    def _call(job: Job, way: str, file: Path) -> float:
        assert isinstance(job, BucketJob)
        job.environ["PYTHONPATH"] = str(PROJECT)
        argv = [sys.executable, "-m", "tests.bench.raw_bucket", way, str(file)]
        return job.call([*argv, job.endpoint, job.bucket])


OURS: Final = OursToBucket()
RAW: Final = Raw()
CONTENDERS: Final[tuple[Contender, ...]] = (
    OURS,
    SealedToBucket(),
    Bare(),
    Copy(),
    RAW,
    *(ArchivedInBucket(one) for one in ARCHIVERS if one.buckets),
    Rclone(),
)
