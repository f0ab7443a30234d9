"""A bucket keeps the files of an area, each as an object; see `contract.FileStore`.

A file is sent in parts. It becomes an object, under its name, only when it is published: until then
the bucket shows its parts to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from typing import Final

from ntt_backup.errors import NameTaken, ProtocolViolation, RemoteCannotStore
from ntt_backup.filestore.contract import (
    UNKNOWN_ARRIVAL,
    Area,
    Buffer,
    FileMissing,
    FileUnreadable,
    Range,
    StoredFile,
    Sum,
    ask_ahead,
)
from ntt_backup.objects import store_format
from ntt_backup.objects.bucket import (
    DEAD_SECONDS,
    Bucket,
    ObjectArchived,
    ObjectMissing,
    sweep,
)
from ntt_backup.objects.outbox import KeyTaken, Outbox

_REQUESTS: Final = 8
# Two parts are in memory; one of this size is on a slow link for a second.
_LARGEST_PART: Final = 16 << 20
_WAIT_SECONDS: Final = 0.2


class FileStoreByBucket:
    """See the module. part_size: of the parts in which files are sent, in bytes; large ones are
    made smaller.
    """

    def __init__(self, bucket: Bucket, part_size: int, area: Area) -> None:
        self._bucket = bucket
        self._part_size = min(part_size, _LARGEST_PART)
        self._area = area
        self._below = f"{area.name}/"
        self._threads = ThreadPoolExecutor(_REQUESTS, "read")
        self._swept = False

    @property
    def placed(self) -> bool:
        return store_format.read(self._bucket) is not None

    def list(self, below: str = "") -> Iterator[StoredFile]:
        for count, info in enumerate(self._bucket.list(self._below + below), 1):
            if count > self._area.most:
                raise ProtocolViolation(
                    f"the bucket lists more {self._area.files} than there can be",
                    detail=f"{self._area.most:,} below {self._below}{below}",
                    hint="somebody else has written there; look at the bucket",
                )
            name = info.key.removeprefix(self._below)
            if below and not below.endswith("/") and name != below:
                continue
            with suppress(ValueError):
                self._area.require_name(name)
                yield StoredFile(name, info.size, info.modified or UNKNOWN_ARRIVAL)

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        return ask_ahead(ranges, _REQUESTS, self._ask, Future.result)

    def write(self, name: str) -> FileByBucket:
        key = self._key(name)
        if not self._swept:
            sweep(self._bucket, (self._below,), time.time() - DEAD_SECONDS)
            self._swept = True
        # A weak server would let it be overwritten.
        if self._bucket.head(key) is not None:
            raise NameTaken(key, self._area.file)
        return FileByBucket(self._bucket, key, self._part_size, self._area)

    def try_out(self) -> None:
        trial = FileByBucket(self._bucket, f"{self._below}trial", self._part_size, self._area)
        try:
            trial.add(b"0")
            trial.send_all()
        finally:
            trial.discard()

    def remove(self, names: Sequence[str]) -> int:
        for key in [self._key(name) for name in names]:
            self._bucket.delete(key)
        return len(names)

    def close(self) -> None:
        # A process with threads could not be copied, as a restore is into its jobs.
        self._threads.shutdown(cancel_futures=True)

    def _key(self, name: str) -> str:
        return self._below + self._area.require_name(name)

    def _ask(self, one: Range) -> Future[bytes]:
        return self._threads.submit(self._get, one)

    def _get(self, one: Range) -> bytes:
        key = self._key(one.name)
        try:
            return self._bucket.get_range(key, one.start, one.length)
        except ObjectMissing as error:
            raise FileMissing(one.name) from error
        except ObjectArchived as error:
            raise FileUnreadable(
                f"{self._area.file} is in an archive class",
                detail=key,
                hint="thaw it, and let the bucket's rules archive packs/ and blobs/ alone",
            ) from error


class FileByBucket:
    """An object on its way; see `contract.NewFile`. Two parts of part_size bytes are in memory."""

    def __init__(self, bucket: Bucket, key: str, part_size: int, area: Area) -> None:
        self._outbox = Outbox(bucket, part_size, self.poll)
        self._out = self._outbox.begin(key)
        self._area = area
        self._digest = sha256()

    def add(self, data: Buffer) -> None:
        self.poll()
        self._digest.update(data)
        self._outbox.write(self._out, data)

    def poll(self) -> None:
        if (trouble := self._outbox.trouble) is not None:
            raise trouble

    def finish(self) -> Sum:
        # A file of one part takes one request, which publishes it, and is compared then.
        if self._out.parts:
            self.send_all()
        return Sum(self._out.size, self._digest.digest())

    def send_all(self) -> None:
        """Returns when all of the file is in the bucket, which shows it to nobody yet."""
        self._outbox.flush(self._out)

    def publish(self) -> None:
        key = self._out.key
        try:
            self._outbox.finish(self._out)
            assert self._out.done is not None
            while not self._out.done.done():
                self._outbox.wait(_WAIT_SECONDS)
            self._out.done.result()
        except KeyTaken as error:
            if error.older:
                raise NameTaken(key, self._area.file) from error
            raise RemoteCannotStore(
                f"{self._area.file} in the bucket is not what was sent",
                detail=key,
                hint="something in the object store damages content: do not rely on it",
            ) from error
        finally:
            self.discard()

    def discard(self) -> None:
        self._outbox.abort()
