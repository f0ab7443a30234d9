"""A bucket of an S3-compatible object store, on botocore.

botocore signs, finds credentials (environment, profile, SSO, role) and parses answers. It repeats
nothing: an answer that only asks for time is waited out here, and what lasts is the worker's
outage. What is sent carries its SHA-256 in a signed header, so that it is not hashed again to be
signed, and no trailer is used, which some stores refuse.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, Final

from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.handlers import add_expect_header
from botocore.session import get_session

from ntt_backup.config.models import RemoteSettings
from ntt_backup.errors import ConfigError, ProtocolViolation, RemoteCannotStore
from ntt_backup.objects.bucket import (
    BucketFacts,
    Buffer,
    ContentDamaged,
    ObjectInfo,
    ObjectMissing,
    Pace,
    Part,
    Upload,
    UploadGone,
    checksum,
    composite,
)
from ntt_backup.objects.keys import BLOBS, PACKS
from ntt_backup.objects.s3_errors import FAILURES, BehindTheEnd, Passing, Translator, moment_of

# Keys of a listing that come with one answer; stores give no more.
PAGE = 1000
_CONNECTIONS: Final = 64
# An answer may take so long; a store that joins parts may need a while for it.
_ANSWER_SECONDS: Final = 120
# So long is waited, in all, for a store that asks for time.
_PATIENCE: Final = 15.0
_LONGEST_WAIT: Final = 4.0
# So often content is sent that is damaged on its way.
_ATTEMPTS: Final = 3
# A time limit holds for each of these, whatever the part's size.
_SHARE: Final = 256 * 1024


def make_client(remote: RemoteSettings) -> BaseClient:
    """Returns botocore's client for the settings; asks nothing yet. Raises ConfigError where the
    settings, or AWS's own files, cannot be used.
    """
    config = Config(
        signature_version="s3v4",
        retries={"total_max_attempts": 1},
        connect_timeout=remote.connect_timeout,
        read_timeout=_ANSWER_SECONDS,
        tcp_keepalive=True,
        max_pool_connections=_CONNECTIONS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="ntt-backup",
        s3={
            "addressing_style": remote.addressing,
            # The checksum is signed, and it is one of the content.
            "payload_signing_enabled": False,
        },
    )
    ca_bundle = None if remote.ca_bundle is None else str(remote.ca_bundle)
    if ca_bundle is not None and not os.access(ca_bundle, os.R_OK):
        raise ConfigError("remote.ca_bundle cannot be read", detail=ca_bundle)
    try:
        client = get_session().create_client(
            "s3", remote.region, endpoint_url=remote.endpoint, verify=ca_bundle, config=config
        )
    except (BotoCoreError, ValueError, OSError) as error:
        raise ConfigError(
            "the object store's settings cannot be used",
            detail=str(error),
            hint="look at remote.endpoint, remote.region, AWS_PROFILE and ~/.aws/config",
        ) from error
    # Some stores never answer it, and a second would be waited before each body. Whether we may
    # write is answered to `create_upload`.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return client


class S3Bucket:
    """See `bucket.Bucket`. patience: seconds that an answer which asks for time is waited out."""

    def __init__(
        self,
        client: BaseClient,
        settings: RemoteSettings,
        pace: Pace | None = None,
        patience: float = _PATIENCE,
    ) -> None:
        self._client = client
        self._bucket = settings.bucket
        self._prefix = f"{settings.prefix}/" if settings.prefix else ""
        self._storage_class = settings.storage_class
        self._pace = _SharedPace(pace) if pace is not None else None
        self.patience = patience
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
            Body=_Body(data, self._pace),
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
            Body=_Body(data, self._pace),
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
            content = _body(answer)
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
            return b""
        return content

    def facts(self) -> BucketFacts:
        before = time.time()
        page = self._ask("list_objects_v2", "", Prefix=self._prefix, MaxKeys=1)
        after = time.time()
        headers = page["ResponseMetadata"]["HTTPHeaders"]
        clock = moment_of(headers)
        # A server's clock is told in whole seconds.
        skew = 0.0 if clock is None else max(0.0, before - clock - 1, clock - after)
        versioning = self._told("get_bucket_versioning", "Status")
        lock = self._told("get_object_lock_configuration", "ObjectLockConfiguration")
        return BucketFacts(headers.get("server", "unknown server"), skew, versioning, lock)

    def _told(self, operation: str, name: str) -> str:
        """Returns whether something of the bucket is on; "" where the credentials may not ask."""
        try:
            answer = getattr(self._client, operation)(Bucket=self._bucket)
        except FAILURES as failure:
            return "off" if "NotFound" in str(failure) else ""
        return "on" if answer.get(name) not in (None, "Suspended") else "off"

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
                    self._ask_and_read(_body, "get_object", key, Range="bytes=0-0")
                error = self._errors.translated(failure, operation, key)
                damaged += isinstance(error, ContentDamaged)
                again = isinstance(error, Passing) and waited < self.patience
                if not again and not 0 < damaged < _ATTEMPTS:
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


def _body(answer: Any) -> bytes:
    content: bytes = answer["Body"].read()
    return content


def _place(start: int, length: int, total: int) -> str:
    """Returns the range that an answer must have for an object of total bytes."""
    if start < 0:
        return f"{max(0, total + start)}-{total - 1}"
    return f"{start}-{min(start + length, total) - 1}"


class _SharedPace:
    """A pace for the threads of one sender."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._lock = Lock()

    def take(self, wanted: int) -> int:
        """Waits for a share, counts it as sent, and returns its bytes."""
        while True:
            with self._lock:
                if allowed := min(wanted, self._pace.allowance()):
                    self._pace.spend(allowed)
                    return allowed
                delay = self._pace.delay()
            time.sleep(delay)


class _Body:
    """Content as a file that is sent in shares, none of them copied."""

    def __init__(self, data: Buffer, pace: _SharedPace | None) -> None:
        self._data = memoryview(data)
        self._pace = pace
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        """Returns the next share, larger than the few kilobytes that an HTTP library asks for."""
        share = min(_SHARE, len(self._data) - self._at)
        if self._pace is not None and share:
            share = self._pace.take(share)
        start, self._at = self._at, self._at + share
        return self._data[start : self._at]

    def seek(self, place: int) -> None:
        self._at = place

    def tell(self) -> int:
        return self._at
