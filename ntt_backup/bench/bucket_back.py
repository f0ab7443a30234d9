"""`bench strategies` compares these ways back from a bucket.

Each ends with all blobs of the sample as files, synced; with the mount, when all were read once.
After its clock has stopped every blob is compared with its name, whatever the way itself compares.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.bench.bucket_out import CODECS, WAYS_OUT, Out, archive_key, unpacked
from ntt_backup.bench.helpers import Answer, Ready
from ntt_backup.bench.sending import Way
from ntt_backup.blobdir.descriptors import syncfs
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import RemoteCannotStore, SourceError
from ntt_backup.filestore.open import open_packs
from ntt_backup.model import Blob, total_size
from ntt_backup.mount import kernel
from ntt_backup.mount.image import Options
from ntt_backup.mount.packs_or_snapshot import mount_target
from ntt_backup.objects.bucket import Bucket
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.pack.reader import LARGEST_RANGE
from ntt_backup.packstore.tables import ahead
from ntt_backup.process.spawn import start, wait_for, write
from ntt_backup.restore.blobs import Wanted, restore
from ntt_backup.upload.strategies.tar import tar_environment

_AT_ONCE: Final = 2
_PIECE: Final = 1024**2
SEQUENTIAL: Final = "sequential"
PIPE: Final = "pipe"
RANGES: Final = "ranges"
MOUNT: Final = "mount"


@dataclass(frozen=True, slots=True)
class Back(Way):
    """A way back. source: the way out whose objects it reads."""

    form: str = ""
    source: str = ""


WAYS_BACK: Final = (
    *(
        Back(f"restore-{form}-{codec}", codec=codec, form=form, source=f"pipe-{codec}")
        for form in (SEQUENTIAL, PIPE)
        for codec in CODECS
    ),
    Back("restore-ranges", form=RANGES, source="packs-zst"),
    Back("restore-mount", form=MOUNT, source="packs-zst"),
)


def choose(names: Sequence[str]) -> tuple[list[Out], list[Back]]:
    """Returns the ways with these names, or all ways if there are no names.

    The result includes the ways out that the ways back read from.

    Raises:
        ValueError: A name is unknown.
    """
    known = [way.name for way in (*WAYS_OUT, *WAYS_BACK)]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{', '.join(unknown)}: none of {', '.join(known)}")
    back = [way for way in WAYS_BACK if not names or way.name in names]
    needed = {way.source for way in back}
    return [way for way in WAYS_OUT if not names or way.name in {*names, *needed}], back


@dataclass(frozen=True, slots=True)
class Fetch:
    """The share of the blobs that one worker brings back.

    Attributes:
        settings: The settings of the place in the bucket.
        blobs: All blobs that must come back.
        directory: An empty directory for this worker alone.
        scratch: A directory for data that is kept meanwhile.
        workers: The number of sessions of `restore`, which is one process.
    """

    way: Back
    settings: RemoteConfig
    blobs: Sequence[Blob]
    directory: Path
    scratch: Path
    worker: str
    workers: int


def bring_back(fetch: Fetch, ready: Ready) -> Answer:
    """Brings everything back. Raises RemoteCannotStore where a blob is not what its name says."""
    began = time.monotonic()
    if fetch.way.form == MOUNT:
        return _mounted(fetch, began, ready)
    ready()
    began = time.monotonic()
    if fetch.way.form == RANGES:
        _restore(fetch)
    else:
        _untar(fetch, open_bucket(fetch.settings.remote))
    ended = time.monotonic()
    _require_right(fetch)
    return Answer(began=began, ended=ended, size=total_size(fetch.blobs))


def _untar(fetch: Fetch, bucket: Bucket) -> None:
    chunks = _download(bucket, archive_key(fetch.worker))
    if fetch.way.form == SEQUENTIAL:
        file = fetch.scratch / f"back-{fetch.worker}"
        with file.open("wb") as stored:
            for chunk in chunks:
                stored.write(chunk)
        with file.open("rb") as stored:
            _extract(unpacked(iter(lambda: stored.read(_PIECE), b""), fetch.way.codec), fetch)
        file.unlink()
    else:
        _extract(unpacked(chunks, fetch.way.codec), fetch)
    directory = os.open(fetch.directory, os.O_RDONLY | os.O_DIRECTORY)
    syncfs(directory)
    os.close(directory)


def _download(bucket: Bucket, key: str) -> Iterator[bytes]:
    info = bucket.head(key)
    size = 0 if info is None else info.size
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for _, data in ahead(
            threads,
            lambda at: bucket.get_range(key, at, min(LARGEST_RANGE, size - at)),
            range(0, size, LARGEST_RANGE),
            _AT_ONCE,
        ):
            yield data


def _extract(chunks: Iterable[bytes], fetch: Fetch) -> None:
    argv = ["tar", "--extract", "--file=-", "--no-same-owner", f"--directory={fetch.directory}"]
    tar = start(argv, env=tar_environment(os.environ))
    try:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest := rest[write(tar.stdin_fd, rest) :]:
                wait_for(writing=[tar.stdin_fd], timeout=1.0)
                tar.drain_stderr()
        tar.close_stdin()
        while tar.wait(1.0) is None:
            pass
        failed = tar.status != 0
    except BrokenPipeError:
        failed = True
    finally:
        tar.kill()
    if failed:
        raise SourceError("tar failed on this machine", detail=tar.stderr.text)


def _restore(fetch: Fetch) -> None:
    # What it keeps of tables would lie in the operator's cache for nothing.
    os.environ["XDG_CACHE_HOME"] = str(fetch.scratch / "cache")
    restore(
        fetch.settings,
        fetch.directory,
        Wanted(),
        workers=fetch.workers,
        trust_size=False,
        on_progress=lambda _: None,
        on_outage=lambda *_: None,
    )


def _mounted(fetch: Fetch, began: float, ready: Ready) -> Answer:
    options = Options(fetch.scratch, prefix="", on_left_out=lambda _: None)
    mount_target(partial(open_packs, fetch.settings), fetch.directory, options)
    try:
        ready()
        for path in fetch.directory.glob("??/??/*"):
            with path.open("rb", buffering=0) as file:
                while file.read(_PIECE):
                    pass
        ended = time.monotonic()
        _require_right(fetch)
    finally:
        kernel.detach(fetch.directory)
    return Answer(began=began, ended=ended, size=total_size(fetch.blobs))


def _require_right(fetch: Fetch) -> None:
    for blob in fetch.blobs:
        path = fetch.directory / relative_path(blob.blobid)
        if not path.exists() or blake3().update_mmap(path).hexdigest() != blob.blobid:
            raise RemoteCannotStore(
                "what comes back from the bucket is not what was sent",
                detail=f"{fetch.way.name}: {blob.blobid}",
                hint="`ntt-backup-remote verify --download` reads what the bucket has",
            )
