"""The contract of a bucket: the few requests that the program makes of an object store.

A key is relative to the prefix of the target's URL. What is written is checked by SHA-256 on its
way, and is visible all at once or not at all. Nothing is overwritten: a key that is taken stays as
it is.

Any method may raise RemoteUnreachable (retryable: a time-out, a 5xx, a clock that is wrong for
now), RemoteDenied (no right, no such bucket, wrong credentials) or RemoteCannotStore (full, or the
server has stored something else than was sent).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import md5 as new_md5
from hashlib import sha256 as new_sha256
from itertools import islice
from typing import Final, Protocol

from ntt_backup.errors import RemoteDenied, RemoteUnreachable

Buffer = bytes | bytearray | memoryview
# An upload that is older has no sender any more.
DEAD_SECONDS: Final = 86400.0
# What the ledger says of an object of which the server keeps no SHA-256 begins so.
MD5: Final = "md5:"
OPAQUE: Final = "etag:"
_MD5_BYTES: Final = 16
# The next sweep removes the rest.
_MOST_SWEPT: Final = 1000


class ObjectExists(Exception):
    """The key is taken already. versitygw also says so of an object that was deleted where the
    bucket keeps versions; then `head` finds none, and nothing can be stored under the key.
    """


class ObjectMissing(Exception):
    """There is no object of that key."""


class ObjectArchived(Exception):
    """The object lies in an archive class: the service must thaw it before it can be read."""


class ThawUnderWay(Exception):
    """The object is being thawed already."""


class ContentDamaged(RemoteUnreachable):
    """What arrived at the object store is not what was sent; it was not stored."""


class UploadGone(Exception):
    """The upload was completed or aborted before."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object. size in bytes. checksum: the SHA-256 that the server keeps, as it writes it
    (`base64`, or `base64-N` over the sums of N parts); "" where it keeps none or does not say.
    etag: of its content, without quotes; most servers make it of MD5 sums. "" where it has none.
    lock: the mode of its object lock, and locked_until the end of that (UTC), as `head` tells; ""
    and None where it has none, or where the credentials may not see it.
    """

    key: str
    size: int
    checksum: str = ""
    modified: datetime | None = None
    storage_class: str = ""
    etag: str = ""
    lock: str = ""
    locked_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part that was taken. number counts from 1; sha256 is of its bytes, 32 of them. md5: also of
    them, 16 bytes, where the server said no SHA-256 of the part; where it did, what its ETag says
    in that form, else b"". confirmed: the server said the SHA-256 of the part.
    """

    number: int
    etag: str
    sha256: bytes
    size: int
    md5: bytes = b""
    confirmed: bool = False


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts that was not completed. begun: when, as the server says."""

    key: str
    upload_id: str
    begun: datetime


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """What a bucket says about itself. skew_s: by how much its clock differs from ours."""

    server: str
    skew_s: float


@dataclass(frozen=True, slots=True)
class Protection:
    """How a bucket protects its objects. versioning and lock: `on`, `off`, or "" where it does not
    say. lock_days: for how long its lock protects an object unasked; 0 where it does not, or does
    not say. lock_mode: the mode of that lock; "" as well.
    """

    versioning: str = ""
    lock: str = ""
    lock_days: int = 0
    lock_mode: str = ""


def checksum(sha256: bytes) -> str:
    """Returns a SHA-256 as a server writes it."""
    return b64encode(sha256).decode()


def composite(parts: Sequence[Part]) -> str:
    """Returns the checksum that a server keeps for an object of these parts."""
    return f"{checksum(new_sha256(b''.join(part.sha256 for part in parts)).digest())}-{len(parts)}"


def md5_in(etag: str) -> bytes:
    """Returns the MD5 sum that an ETag may be, b"" where it can be none."""
    with suppress(ValueError):
        said = bytes.fromhex(etag.strip('"'))
        return said if len(said) == _MD5_BYTES else b""
    return b""


def composite_etag(parts: Sequence[Part]) -> str:
    """Returns the ETag that most servers give to an object of these parts; "" where the MD5 of a
    part is not known.
    """
    if not all(part.md5 for part in parts):
        return ""
    whole = new_md5(b"".join(part.md5 for part in parts), usedforsecurity=False)
    return f"{whole.hexdigest()}-{len(parts)}"


def agree(said: str, ours: str) -> bool | None:
    """Returns whether two checksums are of the same content; None where that cannot be told.

    Checksums can be compared where they have one form: that of the whole object, or over the sums
    of as many parts. A store that copies an object may make it of other parts. moto leaves the
    number of parts out.
    """
    if not said or not ours:
        return None
    if said in (ours, ours.partition("-")[0]):
        return True
    return False if said.partition("-")[2] == ours.partition("-")[2] else None


class Summed(Protocol):
    """An object, or a file, with what its store says of its content; see `ObjectInfo`."""

    @property
    def checksum(self) -> str: ...
    @property
    def etag(self) -> str: ...


def proof_of(info: Summed) -> str:
    """Returns what tells this object from another one later, for the ledger; see `still`."""
    return info.checksum or (f"{OPAQUE}{info.etag}" if info.etag else "")


def still(info: Summed, proof: str) -> bool | None:
    """Returns whether an object has the content that it had when the ledger recorded it.

    Args:
        info: the object as the server describes it now.
        proof: a SHA-256 as servers write it, an ETag behind `MD5` that is known to be an MD5 sum of
            the content, or one behind `OPAQUE` of which nothing is known.

    Returns:
        None where it cannot be told.
    """
    if proof.startswith(MD5):
        return agree(info.etag, proof.removeprefix(MD5))
    if proof.startswith(OPAQUE):
        return True if info.etag == proof.removeprefix(OPAQUE) else None
    return agree(info.checksum, proof)


class Bucket(Protocol):
    """One prefix of one bucket. It may be used by several threads at once."""

    def facts(self) -> BucketFacts:
        """Returns what the bucket says about itself."""
        ...

    def protection(self) -> Protection:
        """Returns what the bucket says about the protection of its objects."""
        ...

    def put(self, key: str, data: Buffer, sha256: bytes) -> ObjectInfo:
        """Stores a small object. Raises ObjectExists."""
        ...

    def create_upload(self, key: str) -> str:
        """Begins an upload in parts; returns its id."""
        ...

    def put_part(self, key: str, upload_id: str, number: int, data: Buffer, sha256: bytes) -> Part:
        """Stores a part: all but the last have the same size. Raises UploadGone."""
        ...

    def complete(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        """Makes the object of its parts. Raises ObjectExists, and UploadGone where an earlier
        answer may have been lost: `head` tells. Some servers answer a second time,
        perhaps without the checksum.
        """
        ...

    def abort(self, key: str, upload_id: str) -> None:
        """Removes the parts of an upload; one that is gone is no error."""
        ...

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yields the uploads that were begun and not ended."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Returns the object with its checksum; None where there is none."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Returns bytes of an object, fewer at its end. start below 0 counts from the end, and
        asks for all from there. Raises ObjectMissing and ObjectArchived.
        """
        ...

    def thaw(self, key: str, days: int, tier: str) -> bool:
        """Asks that an archived object can be read, for so many days. tier: how fast. Returns
        whether that has only begun now; False where it was under way. It takes hours.
        """
        ...

    def lock(self, key: str, mode: str, until: datetime) -> None:
        """Locks the current version of an object until a time: in the mode GOVERNANCE or COMPLIANCE
        nobody removes or shortens that, but, in the first, who has a right of its own. Raises
        ObjectMissing.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yields the objects below prefix in the order of keys."""
        ...

    def overwrite(self, key: str, data: Buffer, sha256: bytes) -> None:
        """Stores a small object in the place of another: the trial of what a bucket refuses. Raises
        RemoteDenied, or ObjectExists, where the bucket is append-only.
        """
        ...

    def delete(self, key: str) -> None:
        """Removes an object: a dump or a snapshot past its retention, or what `prune` removes. One
        that is gone is no error. Raises RemoteDenied where the bucket is append-only.
        """
        ...


def sweep(bucket: Bucket, below: tuple[str, ...], dead_before: float) -> None:
    """Removes the uploads below these prefixes that were begun before this time of the epoch. An
    append-only bucket may not allow that: then its own rule removes them.
    """
    before = datetime.fromtimestamp(dead_before, UTC)
    with suppress(RemoteDenied):
        dead = (
            upload
            for upload in bucket.uploads("")
            if upload.key.startswith(below) and upload.begun < before
        )
        for upload in list(islice(dead, _MOST_SWEPT)):
            bucket.abort(upload.key, upload.upload_id)
