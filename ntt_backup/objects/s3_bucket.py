"""A bucket of an S3-compatible object store, on botocore.

An answer that only asks for time is waited out here, and so is a connection that breaks; what lasts
is the worker's outage.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from botocore.client import BaseClient
from botocore.exceptions import ClientError

from ntt_backup.client.shared_pace import Pace, SharedPace
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import ProtocolViolation, RemoteCannotStore
from ntt_backup.objects.body import Body, content_of
from ntt_backup.objects.bucket import (
    BucketFacts,
    Buffer,
    ContentDamaged,
    ObjectInfo,
    ObjectMissing,
    Part,
    Protection,
    ThawUnderWay,
    Upload,
    UploadGone,
    checksum,
    composite,
)
from ntt_backup.objects.keys import BLOBS, PACKS
from ntt_backup.objects.s3_errors import FAILURES, BehindTheEnd, Passing, Translator, moment_of

# Keys of a listing that come with one answer; stores give no more.
PAGE = 1000
# So long is waited, in all, for a store that asks for time.
_PATIENCE: Final = 15.0
_LONGEST_WAIT: Final = 4.0
# So often content is sent that is damaged on its way.
_ATTEMPTS: Final = 2


class S3Bucket:
    """See `bucket.Bucket`. patience: seconds that an answer which asks for time is waited out."""

    def __init__(
        self,
        client: BaseClient,
        settings: RemoteSettings,
        pace: Pace | None = None,
        fetch: SharedPace | None = None,
    ) -> None:
        self._client = client
        self._bucket = settings.bucket
        self._prefix = f"{settings.prefix}/" if settings.prefix else ""
        self._storage_class = settings.storage_class
        self._pace = SharedPace(pace) if pace is not None else None
        self._fetch = fetch
        self.patience = _PATIENCE
        self._errors = Translator(settings.bucket, client.meta.endpoint_url)

    # --- writing ----------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer, sha256: bytes) -> ObjectInfo:
        return self._put(key, data, sha256, IfNoneMatch="*")

    def overwrite(self, key: str, data: Buffer, sha256: bytes) -> None:
        self._put(key, data, sha256)

    def _put(self, key: str, data: Buffer, sha256: bytes, **condition: str) -> ObjectInfo:
        answer = self._ask(
            "put_object",
            key,
            Body=Body(data, self._pace),
            ChecksumSHA256=checksum(sha256),
            **self._stored_as(key),
            **condition,
        )
        return self._taken(key, len(data), answer.get("ChecksumSHA256", ""), checksum(sha256))

    def create_upload(self, key: str) -> str:
        answer = self._ask(
            "create_multipart_upload",
            key,
            ChecksumAlgorithm="SHA256",
            ChecksumType="COMPOSITE",
            **self._stored_as(key),
        )
        return str(answer["UploadId"])

    def put_part(self, key: str, upload_id: str, number: int, data: Buffer, sha256: bytes) -> Part:
        answer = self._ask(
            "upload_part",
            key,
            UploadId=upload_id,
            PartNumber=number,
            Body=Body(data, self._pace),
            ChecksumSHA256=checksum(sha256),
        )
        self._taken(key, len(data), answer.get("ChecksumSHA256", ""), checksum(sha256))
        return Part(number, str(answer["ETag"]), sha256, len(data))

    def complete(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        listed = [
            {
                "PartNumber": part.number,
                "ETag": part.etag,
                "ChecksumSHA256": checksum(part.sha256),
            }
            for part in parts
        ]
        answer = self._ask(
            "complete_multipart_upload",
            key,
            UploadId=upload_id,
            MultipartUpload={"Parts": listed},
            IfNoneMatch="*",
        )
        size = sum(part.size for part in parts)
        return self._taken(key, size, answer.get("ChecksumSHA256", ""), composite(parts))

    def abort(self, key: str, upload_id: str) -> None:
        try:
            self._ask("abort_multipart_upload", key, UploadId=upload_id)
        except UploadGone:
            return

    def delete(self, key: str) -> None:
        self._ask("delete_object", key)

    def _stored_as(self, key: str) -> dict[str, str]:
        """Returns the storage class of an object. Only what lies still has another than the
        bucket's own: an index or a dump must be readable at once.
        """
        still = self._storage_class is not None and key.startswith((PACKS, BLOBS))
        return {"StorageClass": str(self._storage_class)} if still else {}

    @staticmethod
    def _taken(key: str, size: int, said: str, sent: str) -> ObjectInfo:
        """Compares the checksum that the server has answered with ours; it may answer none."""
        if said and said != sent:
            raise RemoteCannotStore(
                "the object store has stored something else than was sent",
                detail=f"{key}: its SHA-256 is {said}, ours {sent}",
                hint="something in the object store damages content: do not rely on it",
            )
        return ObjectInfo(key, size, said)

    # --- reading ----------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo | None:
        try:
            answer = self._ask("head_object", key, ChecksumMode="ENABLED")
        except ObjectMissing:
            return None
        return ObjectInfo(
            key,
            answer["ContentLength"],
            answer.get("ChecksumSHA256", ""),
            answer.get("LastModified"),
            answer.get("StorageClass", ""),
        )

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if start >= 0 and not length:
            return b""
        wanted = f"bytes={start}-{start + length - 1}" if start >= 0 else f"bytes={start}"
        most = length if start >= 0 else -start

        def read(answer: Any) -> bytes:
            body, size = answer["Body"], answer["ContentLength"]
            if size > most:
                body.close()
                raise ProtocolViolation(
                    "the object store answers with more than was asked for",
                    detail=f"{key}: {wanted}, and it sends {size} bytes",
                    hint="does it, or a proxy before it, support ranges?",
                )
            content = content_of(answer, self._fetch)
            place, _, total = answer.get("ContentRange", "").removeprefix("bytes ").partition("/")
            if total and place != _place(start, length, int(total)):
                raise ProtocolViolation(
                    "the object store answers with another range than was asked for",
                    detail=f"{key}: {wanted}, and it sends {place} of {total}",
                )
            return content

        try:
            content: bytes = self._ask_and_read(read, "get_object", key, Range=wanted)
        except BehindTheEnd:
            # Some servers refuse to give more of the end than there is.
            found = self.head(key) if start < 0 else None
            return self.get_range(key, 0, found.size) if found is not None else b""
        return content

    def thaw(self, key: str, days: int, tier: str) -> bool:
        wanted = {"Days": days, "GlacierJobParameters": {"Tier": tier.capitalize()}}
        try:
            self._ask("restore_object", key, RestoreRequest=wanted)
        except ThawUnderWay:
            return False
        return True

    def facts(self) -> BucketFacts:
        before = time.time()
        page = self._ask("list_objects_v2", "", Prefix=self._prefix, MaxKeys=1)
        after = time.time()
        headers = page["ResponseMetadata"]["HTTPHeaders"]
        clock = moment_of(headers)
        # A server's clock is told in whole seconds.
        skew = 0.0 if clock is None else max(0.0, before - clock - 1, clock - after)
        return BucketFacts(headers.get("server", "unknown server"), skew)

    def protection(self) -> Protection:
        versioning = self._told("get_bucket_versioning")
        lock = self._told("get_object_lock_configuration")
        lock = lock and lock.get("ObjectLockConfiguration", {})
        default = (lock or {}).get("Rule", {}).get("DefaultRetention", {})
        return Protection(
            _state(versioning, "Status"),
            _state(lock, "ObjectLockEnabled"),
            default.get("Days", 0) + 365 * default.get("Years", 0),
        )

    def _told(self, operation: str) -> dict[str, Any] | None:
        """Returns what the bucket tells of itself, nothing where that was never set; None where the
        credentials may not ask.
        """
        try:
            said: dict[str, Any] = getattr(self._client, operation)(Bucket=self._bucket)
        except FAILURES as failure:
            return {} if "NotFound" in str(failure) else None
        return said

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        following = {"StartAfter": self._prefix + after} if after else {}
        while True:
            page = self._ask(
                "list_objects_v2",
                prefix,
                Prefix=self._prefix + prefix,
                MaxKeys=PAGE,
                **following,
            )
            for entry in page.get("Contents", ()):
                yield ObjectInfo(
                    entry["Key"].removeprefix(self._prefix),
                    entry["Size"],
                    modified=entry.get("LastModified"),
                    storage_class=entry.get("StorageClass", ""),
                )
            following = self._next(page, following, ContinuationToken="NextContinuationToken")
            if not following:
                return

    def uploads(self, prefix: str) -> Iterator[Upload]:
        following: dict[str, str] = {}
        while True:
            page = self._ask(
                "list_multipart_uploads", prefix, Prefix=self._prefix + prefix, **following
            )
            for entry in page.get("Uploads", ()):
                key = entry["Key"].removeprefix(self._prefix)
                yield Upload(key, entry["UploadId"], entry["Initiated"])
            following = self._next(
                page, following, KeyMarker="NextKeyMarker", UploadIdMarker="NextUploadIdMarker"
            )
            if not following:
                return

    @staticmethod
    def _next(page: dict[str, Any], before: dict[str, str], **names: str) -> dict[str, str]:
        """Returns what asks for the page after this one; nothing where this is the last."""
        if not page.get("IsTruncated"):
            return {}
        following = {name: page[said] for name, said in names.items() if page.get(said)}
        if not following or following == before:
            raise ProtocolViolation("the object store's listing does not go on")
        return following

    # --- requests ---------------------------------------------------------------------------------

    def _ask(self, operation: str, key: str, **arguments: Any) -> dict[str, Any]:
        """Makes a request, and returns its answer. Waits a while for a store that asks for time."""
        answer: dict[str, Any] = self._ask_and_read(dict, operation, key, **arguments)
        return answer

    def _ask_and_read(
        self, read: Callable[[Any], Any], operation: str, key: str, **arguments: Any
    ) -> Any:
        """Makes a request, and returns what `read` makes of its answer; see `_ask`."""
        if not operation.startswith("list_"):
            arguments["Key"] = self._prefix + key
        waited, damaged = 0.0, 0
        wait = 0.25
        while True:
            if body := arguments.get("Body"):
                body.seek(0)
            try:
                return read(getattr(self._client, operation)(Bucket=self._bucket, **arguments))
            except FAILURES as failure:
                if operation == "head_object" and _is_mute(failure):
                    self._ask_and_read(_no_pace, "get_object", key, Range="bytes=0-0")
                error = self._errors.translated(failure, operation, key)
                damaged += isinstance(error, ContentDamaged)
                passing = isinstance(error, Passing) and waited < self.patience
                again = isinstance(error, ContentDamaged) and damaged < _ATTEMPTS
                if not (passing or again):
                    raise error from failure
            pause = wait * (0.1 + 0.9 * random.random())
            time.sleep(pause)
            waited += pause
            wait = min(_LONGEST_WAIT, 2 * wait)


def _is_mute(failure: Exception) -> bool:
    """Returns whether a HEAD was refused without a word: another request is told why."""
    if not isinstance(failure, ClientError):
        return False
    return failure.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 403)


def _no_pace(answer: Any) -> bytes:
    return content_of(answer, None)


def _place(start: int, length: int, total: int) -> str:
    """Returns the range that an answer must have for an object of total bytes."""
    if start < 0:
        return f"{max(0, total + start)}-{total - 1}"
    return f"{start}-{min(start + length, total) - 1}"


def _state(said: dict[str, Any] | None, name: str) -> str:
    if said is None:
        return ""
    return "on" if said.get(name) == "Enabled" else "off"
