"""`bench strategies` compares these ways into a bucket; one worker does this in each.

A tar archive is made by tar and goes up in parts. Packs go as a run sends them, each blob hashed on
its way; for the others nothing but the SHA-256 of the requests is computed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import zstandard

from ntt_backup.bench.helpers import Answer, Ready
from ntt_backup.bench.sending import Load, Way, archive, send_by_session
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.open import PACK_AREA
from ntt_backup.model import Blob, total_size
from ntt_backup.objects.bucket import Bucket
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.pack.names import blob_key

CODECS: Final = ("none", "zst", "gz")
# The smallest part that an object store takes.
SMALL_PART: Final = 5 * 1024**2
_PUTS_AT_ONCE: Final = 4
_PIECE: Final = 1024**2
_ZSTD_LEVEL: Final = 3
_GZIP_LEVEL: Final = 6
_GZIP: Final = 31


@dataclass(frozen=True, slots=True)
class Out(Way):
    """A way into a bucket. form: a key of FORMS, where no strategy sends."""

    form: str = ""

    def writes(self, size: int, part_size: int) -> int:
        """Returns the requests that make an object of this size."""
        if self.form == "chunked":
            return 2 + max(1, -(-size // SMALL_PART))
        return 1 if size <= part_size else 2 + -(-size // part_size)


def archive_key(worker: str) -> str:
    """Returns the key of a worker's archive."""
    return f"{worker}.archive"


def send_out(load: Load, scratch: Path, ready: Ready) -> Answer:
    """Sends all blobs, and returns when the bucket has answered for all of them.

    Args:
        load: The blobs, and the way in which they are sent.
        scratch: A local directory.
        ready: Is called before the clock starts.
    """
    assert load.bucket is not None
    assert isinstance(load.way, Out)
    ready()
    began = time.monotonic()
    if load.way.strategy is not None:
        send_by_session(load, load.way.strategy)
    else:
        FORMS[load.way.form](open_bucket(load.bucket), load, scratch)
    return Answer(began=began, ended=time.monotonic(), size=total_size(load.blobs))


def _direct(bucket: Bucket, load: Load, scratch: Path) -> None:
    """Stores the archive as a local file first."""
    file = scratch / f"out-{load.worker}"
    with file.open("wb") as stored:
        for data in _archive(load):
            stored.write(data)
    _send(bucket, load, archive_key(load.worker), _pieces(file))
    file.unlink()


def _pipe(bucket: Bucket, load: Load, _scratch: Path) -> None:
    """Sends the archive while it is made."""
    _send(bucket, load, archive_key(load.worker), _archive(load))


def _chunked(bucket: Bucket, load: Load, _scratch: Path) -> None:
    """Sends the archive in small parts, one after the other."""
    key = archive_key(load.worker)
    upload_id = bucket.create_upload(key)
    try:
        parts = [
            bucket.put_part(key, upload_id, number, data, sha256(data).digest())
            for number, data in enumerate(_cut(_archive(load)), 1)
        ]
        bucket.complete(key, upload_id, parts)
    except BaseException:
        bucket.abort(key, upload_id)
        raise


def _each(bucket: Bucket, load: Load, _scratch: Path) -> None:
    """Sends each blob as an object of its own, several at once."""
    assert load.bucket is not None
    most = load.bucket.part_size

    def put(blob: Blob) -> None:
        content = (load.store / relative_path(blob.blobid)).read_bytes()
        bucket.put(blob_key(blob.blobid), content, sha256(content).digest())

    with ThreadPoolExecutor(_PUTS_AT_ONCE) as threads:
        for _ in threads.map(put, [blob for blob in load.blobs if blob.expected <= most]):
            pass
    for blob in [blob for blob in load.blobs if blob.expected > most]:
        _send(bucket, load, blob_key(blob.blobid), _pieces(load.store / relative_path(blob.blobid)))


FORMS: Final = {"direct": _direct, "pipe": _pipe, "chunked": _chunked, "each": _each}
WAYS_OUT: Final = (
    *(Out(f"{form}-{codec}", codec=codec, form=form) for form in [*FORMS][:3] for codec in CODECS),
    Out("put-each", form="each"),
    Out("packs-none", strategy="packs", codec="none"),
    Out("packs-zst", strategy="packs", codec=f"zstd-{_ZSTD_LEVEL}"),
)


def _send(bucket: Bucket, load: Load, key: str, chunks: Iterable[bytes]) -> None:
    """Makes an object as a run makes a pack: in equal parts, two on their way."""
    assert load.bucket is not None
    with closing(FileStoreByBucket(bucket, load.bucket.part_size, PACK_AREA)) as store:
        file = store.begin(key, key)
        for chunk in chunks:
            file.add(chunk)
        file.commit()
        while not file.settled:
            store.wait(1.0)


def _archive(load: Load) -> Iterator[bytes]:
    made = archive(load.store, load.blobs)
    if load.way.codec == "none":
        return made
    packer = (
        zstandard.ZstdCompressor(_ZSTD_LEVEL).compressobj()
        if load.way.codec == "zst"
        else zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP)
    )
    return _through(packer.compress, packer.flush, made)


def unpacked(chunks: Iterable[bytes], codec: str) -> Iterator[bytes]:
    """Yields what an archive was before it was compressed."""
    if codec == "none":
        return iter(chunks)
    unpacker = (
        zstandard.ZstdDecompressor().decompressobj()
        if codec == "zst"
        else zlib.decompressobj(_GZIP)
    )
    return _through(unpacker.decompress, unpacker.flush, chunks)


def _through(
    convert: Callable[[bytes], bytes], flush: Callable[[], bytes | None], chunks: Iterable[bytes]
) -> Iterator[bytes]:
    for chunk in chunks:
        if data := convert(chunk):
            yield data
    if data := flush() or b"":
        yield data


def _cut(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the same bytes in small parts of one size, the last one shorter."""
    left = bytearray()
    for chunk in chunks:
        left += chunk
        while len(left) >= SMALL_PART:
            yield bytes(left[:SMALL_PART])
            del left[:SMALL_PART]
    if left:
        yield bytes(left)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_PIECE):
            yield data
