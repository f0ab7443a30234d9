"""A bucket in memory: the contract of `objects.bucket`, faults on request, and a count of requests.

    bucket = FakeBucket()
    bucket.before = lambda verb, key: ...     # may raise: the request did not arrive
    bucket.after = lambda verb, key: ...      # may raise: the answer was lost
    bucket.requests["put_part"]               # how many were made
    bucket.append_only = True                 # nothing may be overwritten or deleted

`FakeBucket(weak=True)` keeps no checksums and overwrites what is there, as a weak server does; its
ETags are MD5 sums, or with `opaque=True` nothing that can be compared. `FakeBucket(of_parts=True)`
says the SHA-256 of each part, and none of an object of parts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import md5
from hashlib import sha256 as new_sha256
from threading import RLock

from ntt_backup.errors import RemoteDenied
from ntt_backup.objects.bucket import (
    BucketFacts,
    Buffer,
    ContentDamaged,
    ObjectArchived,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    Part,
    Protection,
    Upload,
    UploadGone,
    checksum,
    composite,
    md5_in,
)

Hook = Callable[[str, str], object]
SMALLEST_PART = 5 * 1024**2


@dataclass
class _Pending:
    upload: Upload
    parts: dict[int, tuple[Part, bytes]] = field(default_factory=dict)


def _nothing(verb: str, key: str) -> None: ...


class FakeBucket:
    """See the module. objects: the content by key, which a test may change as it likes.

    marked: keys that are refused as taken although they have no object. archived: keys that must be
    thawed first; thawing: those for which that was asked, with days and tier. said: what it says of
    its protection.
    """

    def __init__(self, *, weak: bool = False, opaque: bool = False, of_parts: bool = False) -> None:
        self.objects: dict[str, bytes] = {}
        self.marked: set[str] = set()
        self.archived: set[str] = set()
        self.thawing: dict[str, tuple[int, str]] = {}
        self.append_only = False
        self.said = Protection()
        self.requests: Counter[str] = Counter()
        self.before: Hook = _nothing
        self.after: Hook = _nothing
        self._weak = weak
        self._opaque = opaque
        self._of_parts = of_parts
        self._infos: dict[str, ObjectInfo] = {}
        self._uploads: dict[str, _Pending] = {}
        self._numbers = itertools.count(1)
        self._lock = RLock()

    def facts(self) -> BucketFacts:
        with self._request("facts", ""):
            return BucketFacts("a bucket in memory", 0.0)

    def protection(self) -> Protection:
        with self._request("protection", ""):
            return self.said

    def put(self, key: str, data: Buffer, sha256: bytes) -> ObjectInfo:
        with self._request("put", key):
            content = self._checked(data, sha256)
            return self._store(key, content, checksum(sha256), md5(content).hexdigest())

    def overwrite(self, key: str, data: Buffer, sha256: bytes) -> None:
        with self._request("overwrite", key):
            if self.append_only and key in self.objects:
                raise RemoteDenied("the object store refuses to store an object")
            self.objects.pop(key, None)
            content = self._checked(data, sha256)
            self._store(key, content, checksum(sha256), md5(content).hexdigest())

    def create_upload(self, key: str) -> str:
        with self._request("create_upload", key):
            upload_id = f"upload-{next(self._numbers)}"
            upload = Upload(key, upload_id, datetime.now(UTC))
            self._uploads[upload_id] = _Pending(upload)
            return upload_id

    def put_part(self, key: str, upload_id: str, number: int, data: Buffer, sha256: bytes) -> Part:
        with self._request("put_part", key):
            content = self._checked(data, sha256)
            etag = f"{next(self._numbers):x}" if self._opaque else md5(content).hexdigest()
            summed = md5(data).digest() if self._weak else md5_in(f'"{etag}"')
            part = Part(number, f'"{etag}"', sha256, len(content), summed, not self._weak)
            self._pending(key, upload_id).parts[number] = part, content
            return part

    def complete(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        with self._request("complete", key):
            pending = self._pending(key, upload_id)
            kept = [pending.parts.get(part.number, (None, b"")) for part in parts]
            sizes = {len(content) for _, content in kept[:-1]}
            if [part and part.etag for part, _ in kept] != [part.etag for part in parts]:
                raise RemoteDenied("the object store refuses the parts")
            if len(sizes) > 1:
                raise RemoteDenied("the object store refuses the parts")
            if sizes and min(sizes) < SMALLEST_PART:
                raise RemoteDenied("the object store refuses parts of this size")
            content = b"".join(content for _, content in kept)
            sums = b"".join(md5(one).digest() for _, one in kept)
            etag = f"{md5(sums).hexdigest()}-{len(kept)}"
            summed = "" if self._of_parts else composite(parts)
            info = self._store(key, content, summed, etag)
            del self._uploads[upload_id]
            return info

    def abort(self, key: str, upload_id: str) -> None:
        with self._request("abort", key):
            self._uploads.pop(upload_id, None)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        with self._request("uploads", prefix):
            found = [pending.upload for pending in self._uploads.values()]
        yield from sorted(
            (upload for upload in found if upload.key.startswith(prefix)), key=lambda one: one.key
        )

    def head(self, key: str) -> ObjectInfo | None:
        with self._request("head", key):
            content = self.objects.get(key)
            return None if content is None else self._info(key, content)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if start >= 0 and not length:
            return b""
        with self._request("get_range", key):
            if key not in self.objects:
                raise ObjectMissing(key)
            if key in self.archived:
                raise ObjectArchived(key)
            content = self.objects[key]
            return content[start:] if start < 0 else content[start : start + length]

    def thaw(self, key: str, days: int, tier: str) -> bool:
        with self._request("thaw", key):
            assert key in self.archived
            begun = key not in self.thawing
            self.thawing.setdefault(key, (days, tier))
            return begun

    def lock(self, key: str, mode: str, until: datetime) -> None:
        with self._request("lock", key):
            if key not in self.objects:
                raise ObjectMissing(key)
            info = self._info(key, self.objects[key])
            if info.locked_until is not None and info.locked_until > until:
                raise RemoteDenied("the object store refuses to lock an object")
            self._infos[key] = replace(info, lock=mode, locked_until=until)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        for first in range(0, max(1, len(keys)), 1000):
            with self._request("list", prefix):
                page = [(key, self.objects[key]) for key in keys[first : first + 1000]]
            for key, content in page:
                yield replace(self._info(key, content), checksum="")

    def delete(self, key: str) -> None:
        with self._request("delete", key):
            if self.append_only:
                raise RemoteDenied("the object store refuses to remove an object")
            self.objects.pop(key, None)

    def came(self, key: str, when: datetime) -> None:
        """Lets an object have arrived at another time."""
        self._infos[key] = replace(self._infos[key], modified=when)

    def tells(self, key: str, *, etag: str) -> None:
        """Says another ETag of an object."""
        self._infos[key] = replace(self._infos[key], etag=etag)

    def begun(self, upload_id: str, when: datetime) -> None:
        """Lets an upload have begun at another time."""
        pending = self._uploads[upload_id]
        pending.upload = replace(pending.upload, begun=when)

    def _request(self, verb: str, key: str) -> _Request:
        return _Request(self, verb, key)

    def _checked(self, data: Buffer, sha256: bytes) -> bytes:
        content = bytes(data)
        if not self._weak and new_sha256(content).digest() != sha256:
            raise ContentDamaged("content was damaged on its way to the object store")
        return content

    def _store(self, key: str, content: bytes, summed: str, etag: str) -> ObjectInfo:
        if key in self.marked or (key in self.objects and not self._weak):
            raise ObjectExists(key)
        self.objects[key] = content
        said = "" if self._weak else summed
        etag = f"{next(self._numbers):032x}" if self._opaque else etag
        now = datetime.now(UTC)
        self._infos[key] = ObjectInfo(key, len(content), said, now, etag=etag)
        return self._infos[key]

    def _pending(self, key: str, upload_id: str) -> _Pending:
        pending = self._uploads.get(upload_id)
        if pending is None or pending.upload.key != key:
            raise UploadGone(key)
        return pending

    def _info(self, key: str, content: bytes) -> ObjectInfo:
        """Returns what was noted when the object was stored; its size is that of its content."""
        return replace(self._infos.get(key) or ObjectInfo(key, 0), size=len(content))


@dataclass
class _Request:
    """One request at a time, counted, with the bucket's hooks before and after it."""

    bucket: FakeBucket
    verb: str
    key: str

    def __enter__(self) -> None:
        self.bucket.before(self.verb, self.key)
        self.bucket._lock.acquire()
        self.bucket.requests[self.verb] += 1

    def __exit__(self, kind: object, *_: object) -> None:
        self.bucket._lock.release()
        if kind is None:
            self.bucket.after(self.verb, self.key)
