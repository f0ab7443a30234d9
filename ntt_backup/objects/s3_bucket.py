"""A bucket of an S3-compatible object store, on botocore.

An answer that only asks for time is waited out here, and so is a connection that breaks; what lasts
is the worker's outage. botocore finds credentials (environment, profile, SSO, role), signs, and
parses answers; it repeats nothing. What is sent carries its SHA-256 in a signed header, so that it
is not hashed again to be signed, and no trailer is used, which some stores refuse.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import md5
from typing import Any, Final

from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ResponseStreamingError
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError
from botocore.session import get_session
from botocore.utils import parse_timestamp
from urllib3.exceptions import HTTPError

from ntt_backup import __version__
from ntt_backup.client.throttle import SharedPace
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import ConfigError, ProtocolViolation, RemoteCannotStore
from ntt_backup.formatting import printable
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
    agree,
    checksum,
    composite,
    md5_in,
)
from ntt_backup.objects.s3_answers import BoundedSession, Pages, etag, moment, size, word
from ntt_backup.objects.s3_errors import FAILURES, BehindTheEnd, Passing, moment_of, translated
from ntt_backup.pack.names import BLOBS, PACKS

# Keys of a listing that come with one answer; stores give no more.
PAGE = 1000
# So long is waited, in all, for a store that asks for time.
_PATIENCE: Final = 15.0
_LONGEST_WAIT: Final = 4.0
# Of what a server calls itself.
_LONGEST_NAME: Final = 100
# A time limit holds for each share of this size, whatever the size of the content.
_SHARE: Final = 256 * 1024
_CONNECTIONS: Final = 64
# An answer may take so long; a store that joins parts may need a while for it.
_ANSWER_SECONDS: Final = 120
# So often content is sent that is damaged on its way.
_ATTEMPTS: Final = 2


class Body:
    """Content as a file that is sent in shares, at a pace; no share is copied."""

    def __init__(self, data: Buffer, pace: SharedPace | None) -> None:
        self._data = memoryview(data)
        self._pace = pace
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        """Returns the next share, larger than the few kilobytes that an HTTP library asks for."""
        share = min(_SHARE, len(self._data) - self._at)
        if self._pace is not None and share:
            share = self._pace.take(share, begun=self._at > 0)
        start, self._at = self._at, self._at + share
        return self._data[start : self._at]

    def seek(self, place: int) -> None:
        self._at = place

    def tell(self) -> int:
        return self._at


class S3Bucket:
    """See `bucket.Bucket`. patience: seconds that an answer which asks for time is waited out."""

    def __init__(
        self,
        client: BaseClient,
        settings: RemoteSettings,
        pace: SharedPace | None = None,
        fetch: SharedPace | None = None,
    ) -> None:
        self._client = client
        self._bucket = settings.bucket
        self._prefix = f"{settings.prefix}/" if settings.prefix else ""
        self._storage_class = settings.storage_class
        self._pace = pace
        self._fetch = fetch
        self.patience = _PATIENCE
        self._endpoint = client.meta.endpoint_url

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
        return self._taken(key, len(data), answer, checksum(sha256))

    def create_upload(self, key: str) -> str:
        answer = self._ask(
            "create_multipart_upload",
            key,
            ChecksumAlgorithm="SHA256",
            ChecksumType="COMPOSITE",
            **self._stored_as(key),
        )
        return word(answer, "UploadId")

    def put_part(self, key: str, upload_id: str, number: int, data: Buffer, sha256: bytes) -> Part:
        answer = self._ask(
            "upload_part",
            key,
            UploadId=upload_id,
            PartNumber=number,
            Body=Body(data, self._pace),
            ChecksumSHA256=checksum(sha256),
        )
        taken = self._taken(key, len(data), answer, checksum(sha256))
        said, confirmed = word(answer, "ETag"), bool(taken.checksum)
        # Where the server says no SHA-256 of a part, it keeps none of the object. Some servers say
        # it of parts alone.
        summed = md5_in(said) if confirmed else md5(data, usedforsecurity=False).digest()
        return Part(number, said, sha256, len(data), summed, confirmed)

    def complete(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        listed = [
            {"PartNumber": part.number, "ETag": part.etag, "ChecksumSHA256": checksum(part.sha256)}
            for part in parts
        ]
        answer = self._ask(
            "complete_multipart_upload",
            key,
            UploadId=upload_id,
            MultipartUpload={"Parts": listed},
            IfNoneMatch="*",
        )
        length = sum(part.size for part in parts)
        return self._taken(key, length, answer, composite(parts))

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
    def _taken(key: str, length: int, answer: dict[str, Any], sent: str) -> ObjectInfo:
        """Compares the checksum that the server has answered with ours; it may answer none."""
        said = word(answer, "ChecksumSHA256", required=False)
        if agree(said, sent) is False:
            raise RemoteCannotStore(
                "the object store has stored something else than was sent",
                detail=f"{key}: its SHA-256 is {printable(said)}, ours {sent}",
                hint="something in the object store damages content: do not rely on it",
            )
        return ObjectInfo(key, length, said, etag=etag(answer))

    # --- reading ----------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo | None:
        try:
            answer = self._ask("head_object", key, ChecksumMode="ENABLED")
        except ObjectMissing:
            return None
        return ObjectInfo(
            key,
            size(answer, "ContentLength"),
            word(answer, "ChecksumSHA256", required=False),
            moment(answer, "LastModified"),
            word(answer, "StorageClass", required=False),
            etag(answer),
            printable(word(answer, "ObjectLockMode", required=False))[:_LONGEST_NAME],
            moment(answer, "ObjectLockRetainUntilDate"),
        )

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if start >= 0 and not length:
            return b""
        wanted = f"bytes={start}-{start + length - 1}" if start >= 0 else f"bytes={start}"
        most = length if start >= 0 else -start

        def read(answer: Any) -> bytes:
            content = content_of(answer, most, self._fetch)
            if len(content) > most:
                answer["Body"].close()
                raise ProtocolViolation(
                    "the object store answers with more than was asked for",
                    detail=f"{key}: {wanted}",
                    hint="does it, or a proxy before it, support ranges?",
                )
            if not _is_range(answer, start, length):
                raise ProtocolViolation(
                    "the object store answers with another range than was asked for",
                    detail=f"{key}: {wanted}, and it sends {_range_of(answer)[:100]}",
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

    def lock(self, key: str, mode: str, until: datetime) -> None:
        self._ask("put_object_retention", key, Retention={"Mode": mode, "RetainUntilDate": until})

    def facts(self) -> BucketFacts:
        before = time.time()
        page = self._ask("list_objects_v2", "", Prefix=self._prefix, MaxKeys=1)
        after = time.time()
        Pages(self._prefix).entries(page, "Contents")
        headers = page["ResponseMetadata"]["HTTPHeaders"]
        clock = moment_of(headers)
        # A server's clock is told in whole seconds.
        skew = 0.0 if clock is None else max(0.0, before - clock - 1, clock - after)
        server = printable(headers.get("server", ""))[:_LONGEST_NAME]
        return BucketFacts(server or "unknown server", skew)

    def protection(self) -> Protection:
        versioning = self._told("get_bucket_versioning")
        lock = self._told("get_object_lock_configuration")
        lock = lock and lock.get("ObjectLockConfiguration", {})
        default = (lock or {}).get("Rule", {}).get("DefaultRetention", {})
        return Protection(
            _state(versioning, "Status"),
            _state(lock, "ObjectLockEnabled"),
            default.get("Days", 0) + 365 * default.get("Years", 0),
            printable(str(default.get("Mode", "")))[:_LONGEST_NAME],
        )

    def _told(self, operation: str) -> dict[str, Any] | None:
        """Returns what the bucket tells of itself, nothing where that was never set; None where the
        credentials may not ask.
        """
        try:
            return self._call(operation)
        except FAILURES as failure:
            return {} if "NotFound" in str(failure) else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        pages = Pages(self._prefix + prefix)
        further = {"ContinuationToken": "NextContinuationToken"}
        for page in self._pages("list_objects_v2", pages, further, MaxKeys=PAGE):
            yield from [
                ObjectInfo(
                    entry["Key"].removeprefix(self._prefix),
                    size(entry, "Size"),
                    modified=moment(entry, "LastModified"),
                    storage_class=word(entry, "StorageClass", required=False),
                    etag=etag(entry),
                )
                for entry in pages.entries(page, "Contents")
            ]

    def uploads(self, prefix: str) -> Iterator[Upload]:
        pages = Pages(self._prefix + prefix, ordered=False)
        further = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        with suppress(UploadGone):  # So rclone says that there is none.
            for page in self._pages("list_multipart_uploads", pages, further):
                for entry in pages.entries(page, "Uploads"):
                    # One whose time is not told was begun just now, for all that is known.
                    begun = moment(entry, "Initiated") or datetime.now(UTC)
                    key = entry["Key"].removeprefix(self._prefix)
                    yield Upload(key, word(entry, "UploadId"), begun)

    def _pages(
        self, operation: str, pages: Pages, further: dict[str, str], **arguments: Any
    ) -> Iterator[dict[str, Any]]:
        """Yields the pages of a listing. further: see `Pages.following`."""
        following: dict[str, str] = {}
        while True:
            wanted = {"Prefix": pages.prefix, **arguments, **following}
            page = self._ask(operation, pages.prefix.removeprefix(self._prefix), **wanted)
            yield page
            if not (following := pages.following(page, **further)):
                return

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
                return read(self._call(operation, **arguments))
            except FAILURES as failure:
                if operation == "head_object" and _is_mute(failure):
                    self._ask_and_read(_no_pace, "get_object", key, Range="bytes=0-0")
                name = f"{self._bucket}/{key}"
                error = translated(failure, operation, name, self._endpoint)
                damaged += isinstance(error, ContentDamaged)
                passing = isinstance(error, Passing) and waited < self.patience
                again = isinstance(error, ContentDamaged) and damaged < _ATTEMPTS
                if not (passing or again):
                    raise error from failure
            pause = wait * (0.1 + 0.9 * random.random())
            time.sleep(pause)
            waited += pause
            wait = min(_LONGEST_WAIT, 2 * wait)

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Makes a request once. Raises one of FAILURES."""
        try:
            answer: dict[str, Any] = getattr(self._client, operation)(
                Bucket=self._bucket, **arguments
            )
        except FAILURES:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # botocore takes the form of an answer for granted.
            raise ResponseParserError(f"{type(error).__name__}: {error}") from error
        return answer


def _is_mute(failure: Exception) -> bool:
    """Returns whether a HEAD was refused without a word: another request is told why."""
    if not isinstance(failure, ClientError):
        return False
    return failure.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 403)


def _no_pace(answer: Any) -> bytes:
    return content_of(answer, 1, None)


def _is_range(answer: Any, start: int, length: int) -> bool:
    """Returns whether an answer says that it has the range that was asked for. One that has the
    whole object names no range.
    """
    said = _range_of(answer)
    if not said:
        return start <= 0
    place, _, total = said.removeprefix("bytes ").partition("/")
    return total.isdecimal() and len(total) < 20 and place == _place(start, length, int(total))


def _range_of(answer: Any) -> str:
    return printable(word(answer, "ContentRange", required=False))


def _place(start: int, length: int, total: int) -> str:
    """Returns the range that an answer must have for an object of total bytes."""
    if start < 0:
        return f"{max(0, total + start)}-{total - 1}"
    return f"{start}-{min(start + length, total) - 1}"


def _state(said: dict[str, Any] | None, name: str) -> str:
    if said is None:
        return ""
    return "on" if said.get(name) == "Enabled" else "off"


def content_of(answer: Any, most: int, pace: SharedPace | None) -> bytes:
    """Returns the content that an answer of botocore's brings: at most one byte more than `most`.

    Raises BotoCoreError.
    """
    try:
        return _read_stream(answer["Body"], most + 1, pace)
    except HTTPError as error:  # Botocore leaves out what TLS finds wrong within an answer.
        raise ResponseStreamingError(error=error) from error


def _read_stream(stream: Any, most: int, pace: SharedPace | None) -> bytes:
    pieces: list[bytes] = []
    left = most
    # The last, empty piece has botocore compare the length with the one announced.
    while left and pieces[-1:] != [b""]:
        share = left if pace is None else pace.take(min(_SHARE, left), begun=True)
        pieces.append(stream.read(share))
        left -= len(pieces[-1])
        if pace is not None:
            pace.give_back(share - len(pieces[-1]))
    return pieces[0] if pieces[1:] == [b""] else b"".join(pieces)


# --- the client -----------------------------------------------------------------------------------


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
        # botocore would put its own together anew, twice for each request.
        user_agent=f"ntt-backup/{__version__}",
        s3={
            "addressing_style": remote.addressing,
            # The checksum is signed, and it is one of the content.
            "payload_signing_enabled": False,
        },
    )
    ca_bundle = None if remote.ca_bundle is None else str(remote.ca_bundle)
    if ca_bundle is not None and not os.access(ca_bundle, os.R_OK):
        raise ConfigError(
            "remote.ca_bundle cannot be read",
            detail=ca_bundle,
            hint="name a file with the certificate of the store's authority that this user may"
            " read; without the setting the system's authorities are trusted",
        )
    session = get_session()
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_moment)
    try:
        client: Any = session.create_client(
            "s3", remote.region, endpoint_url=remote.endpoint, verify=ca_bundle, config=config
        )
    except (BotoCoreError, ValueError, OSError) as error:
        raise ConfigError(
            "the object store's settings cannot be used",
            detail=str(error),
            hint="look at remote.endpoint, remote.region, AWS_PROFILE and ~/.aws/config",
        ) from error
    endpoint = client._endpoint
    endpoint.http_session = BoundedSession(endpoint.http_session)
    # Some stores never answer it, and a second would be waited before each body. Whether we may
    # write is answered to `create_upload`.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    made: BaseClient = client
    return made


_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(9999, 1, 1, tzinfo=UTC)


def _moment(text: str) -> datetime:
    """Returns a time of an answer in UTC, which is also meant where it names no zone. A time before
    1970 counts as 1970, one of the year 9999 as its beginning: nobody who counts days from there
    may leave what a datetime can hold. Raises ResponseParserError.
    """
    # A listing has a thousand: botocore would spend three quarters of its work on them. The header
    # of each object has one, too.
    found: datetime | None = None
    with suppress(ValueError):
        if text[10:11] == "T":
            found = datetime.fromisoformat(text)
        elif text[3:5] == ", ":
            found = parsedate_to_datetime(text)
    try:
        found = found or parse_timestamp(text)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ResponseParserError(str(error)) from error
    known = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return min(max(known, _EARLIEST), _LATEST).astimezone(UTC)
