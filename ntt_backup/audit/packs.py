"""Checks one pack, or one blob that is an object of its own, in a bucket: by what the object store
says of it, or by reading it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ntt_backup.audit.hashing import Hashing
from ntt_backup.model import Blob, Failure, Reason, StoredPack
from ntt_backup.objects.bucket import ObjectArchived, ObjectMissing, ObjectUnreadable, still
from ntt_backup.objects.contents import give_blobs, give_elsewhere, give_large
from ntt_backup.objects.keys import PackKey, blob_key
from ntt_backup.objects.patient import PatientBucket
from ntt_backup.objects.ranges import jobs
from ntt_backup.objects.tables import PackObject, Tables, entries_of
from ntt_backup.pack.format import PackError
from ntt_backup.pack.seal import NotSealed, SealedForOthers

Checkable = StoredPack | Blob


@dataclass(frozen=True, slots=True)
class Checked:
    """Holds what came of a check. blobs: how many it was about; bytes: of content that was hashed.

    failures: blobs that the bucket has nowhere right. lost: why the pack as a whole does not count
    any more, None where it does. whole: all of it was looked at. by_size: of all that a server says
    only the size could be compared.
    """

    what: Checkable
    blobs: int
    bytes: int = 0
    failures: tuple[Failure, ...] = ()
    lost: Failure | None = None
    whole: bool = True
    by_size: bool = False


def look(bucket: PatientBucket, what: Checkable) -> Checked:
    """Checks an object by its size and by the checksum that the server keeps: nothing is read."""
    try:
        return _look(bucket, what)
    except ObjectUnreadable as trouble:
        return _unread(what, str(trouble))


def _look(bucket: PatientBucket, what: Checkable) -> Checked:
    if isinstance(what, Blob):
        info = bucket.head(blob_key(what.blobid))
        failure = None
        if info is None:
            failure = _failure(what, Reason.REMOTE_MISSING, "its object is gone")
        elif what.size is not None and info.size != what.size:
            text = f"its object has {info.size} bytes, {what.size} expected"
            failure = _failure(what, Reason.REMOTE_CORRUPT, text)
        # The catalog has no checksum of it but its name, which no server knows.
        failures = () if failure is None else (failure,)
        return Checked(what, 1, failures=failures, by_size=not failures)
    info = bucket.head(what.key)
    lost, same = None, None
    if info is None:
        lost = _failure(what, Reason.REMOTE_MISSING, f"the pack {what.key} is gone")
    elif info.size != what.size:
        text = f"the pack {what.key} has {info.size} bytes, {what.size} were sent"
        lost = _failure(what, Reason.REMOTE_CORRUPT, text)
    elif (same := still(info, what.checksum)) is False:
        text = f"the pack {what.key} is another one than was sent, by its checksum"
        lost = _failure(what, Reason.REMOTE_CORRUPT, text)
    return Checked(what, what.blobs, lost=lost, by_size=lost is None and same is None)


def read(bucket: PatientBucket, tables: Tables, what: Checkable, prefix: str) -> Checked:
    """Reads and hashes a blob, or those of a pack with a prefix. What is wrong in this pack and
    right in another one is no failure.
    """
    sink = Hashing()
    try:
        if isinstance(what, Blob):
            return _read_large(bucket, tables, what, sink)
        return _read_pack(bucket, tables, what, prefix, sink)
    except ObjectMissing:
        return look(bucket, what)
    except (ObjectArchived, ObjectUnreadable, SealedForOthers, NotSealed) as trouble:
        text = str(trouble)
        if isinstance(trouble, ObjectArchived):
            text = "it lies in an archive class: thaw it to read it"
        return _unread(what, text)
    except PackError as error:
        assert isinstance(what, StoredPack)
        text = f"the pack {what.key} is damaged: {error}"
        lost = _failure(what, Reason.REMOTE_CORRUPT, text)
        return Checked(what, what.blobs, sink.bytes, lost=lost)


def _read_large(bucket: PatientBucket, tables: Tables, blob: Blob, sink: Hashing) -> Checked:
    digest = bytes.fromhex(blob.blobid)
    give_large(bucket, digest, None, sink)
    give_elsewhere(bucket, tables, sink, None, ())
    return Checked(blob, 1, sink.bytes, tuple(sink.failures))


def _read_pack(
    bucket: PatientBucket, tables: Tables, what: StoredPack, prefix: str, sink: Hashing
) -> Checked:
    name = PackKey.read(what.key)
    if name is None:
        text = f"the ledger names a pack that can be none, {what.key}"
        return Checked(what, what.blobs, lost=_failure(what, Reason.REMOTE_MISSING, text))
    info = bucket.head(what.key)
    if info is None or info.size != what.size:
        # Who restores looks for the table at the end that the bucket tells.
        return look(bucket, what)
    pack = PackObject(name, what.size, info.modified)
    reader = tables.open(pack)
    entries = list(entries_of(reader, prefix))
    for some in jobs(entries):
        give_blobs(pack, reader, some, sink)
    give_elsewhere(bucket, tables, sink, pack, None)
    whole = len(entries) == len(reader.table)
    return Checked(what, len(entries), sink.bytes, tuple(sink.failures), whole=whole)


def _unread(what: Checkable, text: str) -> Checked:
    """Returns what came of a check of an object that is there, and cannot be checked."""
    count = 1 if isinstance(what, Blob) else what.blobs
    key = blob_key(what.blobid) if isinstance(what, Blob) else what.key
    failure = Failure(key, Reason.REMOTE_UNREADABLE, text)
    return Checked(what, count, failures=(failure,), whole=False)


def _failure(what: Checkable, reason: Reason, text: str) -> Failure:
    return Failure(what.blobid if isinstance(what, Blob) else what.key, reason, text)
