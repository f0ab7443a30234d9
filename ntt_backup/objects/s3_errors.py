"""The errors of an object store and of the way to it, translated once.

A code is the word in the answer's XML. The answer to a HEAD has none, but its status.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from ntt_backup.errors import (
    BackupError,
    ProtocolViolation,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
    Unsupported,
)
from ntt_backup.formatting import duration, printable
from ntt_backup.objects.bucket import (
    ContentDamaged,
    ObjectArchived,
    ObjectExists,
    ObjectMissing,
    ThawUnderWay,
    UploadGone,
)
from ntt_backup.objects.s3_answers import AnswerTooLong

# What botocore raises for a request.
FAILURES: Final = (boto.BotoCoreError, boto.ClientError, ResponseParserError)
_SHOWN: Final = 300
_CHAIN: Final = (
    "they are looked for as by the AWS tools: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
    " AWS_PROFILE and ~/.aws, SSO, the role of the machine"
)


class BehindTheEnd(Exception):
    """The object ends before the range that was asked for."""


class Passing(RemoteUnreachable):
    """The store asks for time, or a connection broke: the same request may pass in a moment."""


@dataclass(frozen=True, slots=True)
class Case:
    """An error and the codes that it is recognized by."""

    codes: str
    error: type[BackupError]
    message: str
    hint: str = ""


_CASES: Final = (
    Case(
        "InvalidAccessKeyId SignatureDoesNotMatch InvalidSecurity Unauthorized AuthFailure"
        " UnrecognizedClientException",
        RemoteDenied,
        "the object store does not accept the credentials",
        f"look at key and secret; {_CHAIN}",
    ),
    Case(
        "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken RequestExpired",
        RemoteDenied,
        "the credentials have expired",
        "fetch new ones (aws sso login), or use a role or a key that lasts",
    ),
    Case(
        "NoSuchBucket",
        RemoteDenied,
        "there is no such bucket",
        "make it once, it is never made for you; look at remote.url and remote.endpoint",
    ),
    Case(
        "InvalidStorageClass",
        RemoteDenied,
        "the object store does not know the storage class",
        "look at remote.storage_class",
    ),
    Case(
        "EntityTooSmall EntityTooLarge InvalidPartOrder",
        RemoteDenied,
        "the object store refuses parts of this size",
        "look at remote.part_size: most stores want 5 MiB to 5 GiB",
    ),
    Case(
        "InsufficientStorage XMinioStorageFull QuotaExceeded XMinioAdminBucketQuotaExceeded"
        " StorageFull 507",
        RemoteCannotStore,
        "the object store is full",
        "free space in it, or raise the bucket's quota; nothing is lost",
    ),
    Case(
        "BadDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch IncompleteBody",
        ContentDamaged,
        "content was damaged on its way to the object store",
        "if it persists: memory or network of this machine, or a proxy before the store",
    ),
    Case(
        "GlacierExpeditedRetrievalNotAvailable",
        RemoteDenied,
        "the object store cannot thaw so fast now",
        "ask for --tier standard or bulk",
    ),
    Case("InvalidPart", RemoteUnreachable, "the object store has lost a part"),
    Case(
        "SlowDown ServiceUnavailable RequestLimitExceeded Throttling ThrottlingException"
        " TooManyRequests RequestTimeout OperationAborted ConditionalRequestConflict 429 409",
        Passing,
        "the object store is busy",
    ),
)
_BY_CODE: Final = {code: case for case in _CASES for code in case.codes.split()}
# What needs which right: an operator grants rights, not requests.
_RIGHTS: Final = {
    "put_object": ("store an object", "s3:PutObject"),
    "create_multipart_upload": ("begin an upload", "s3:PutObject"),
    "upload_part": ("store a part", "s3:PutObject"),
    "complete_multipart_upload": ("complete an upload", "s3:PutObject"),
    "abort_multipart_upload": ("abort an upload", "s3:AbortMultipartUpload"),
    "list_multipart_uploads": ("list uploads", "s3:ListBucketMultipartUploads"),
    "head_object": ("read an object", "s3:GetObject and s3:ListBucket"),
    "get_object": ("read an object", "s3:GetObject and s3:ListBucket"),
    "restore_object": ("thaw an object", "s3:RestoreObject"),
    "put_object_retention": ("lock an object", "s3:PutObjectRetention and s3:GetObjectRetention"),
    "list_objects_v2": ("list objects", "s3:ListBucket"),
    "delete_object": ("remove an object", "s3:DeleteObject"),
}

_OTHER: Final = ("tell about itself", "s3:GetBucket*")
_UNKNOWN: Final = ("NotImplemented", "UnsupportedOperation")
# What a server that has no word for it does not know of a request.
_HEADERS: Final = {
    "put_object": "x-amz-checksum-sha256 or if-none-match",
    "create_multipart_upload": "x-amz-checksum-algorithm",
    "upload_part": "x-amz-checksum-sha256",
    "complete_multipart_upload": "if-none-match",
    "head_object": "x-amz-checksum-mode",
}


def translated(failure: Exception, operation: str, name: str, endpoint: str) -> Exception:
    """Returns the error for a failed request. name: of the bucket, a slash, and the key."""
    if isinstance(failure, boto.ClientError):
        return _answered(failure, operation, name)
    return _unanswered(failure, endpoint)


def _answered(failure: boto.ClientError, operation: str, name: str) -> Exception:
    response: Any = failure.response
    said = response.get("Error", {})
    code = str(said.get("Code", ""))
    meta = response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode", 0))
    headers = meta.get("HTTPHeaders", {})
    if code == "NoSuchKey" or (status == 404 and operation == "head_object"):
        return ObjectMissing(name)
    if code == "InvalidRange" or status == 416:
        return BehindTheEnd(name)
    if code == "NoSuchUpload":
        return UploadGone(name)
    if code == "PreconditionFailed" or status == 412:
        return ObjectExists(name)
    if code == "RestoreAlreadyInProgress":
        return ThawUnderWay(name)
    if code == "InvalidObjectState":
        return ObjectArchived(name)
    detail = printable(f"{name}: {code}: {said.get('Message', '')}"[:_SHOWN])
    if code == "RequestTimeTooSkewed":
        return RemoteUnreachable(
            f"the clocks of this machine and of the object store differ{_by(headers)}",
            detail=detail,
            hint="set this machine's clock (timedatectl, chronyc tracking)",
        )
    region = printable(str(said.get("Region") or headers.get("x-amz-bucket-region") or ""))[:64]
    if region and (status in (301, 307) or code == "AuthorizationHeaderMalformed"):
        return RemoteDenied(
            f"the bucket is in the region {region}",
            detail=detail,
            hint=f'set remote.region = "{region}"',
        )
    if code in _UNKNOWN or status == 501:
        header = printable(str(said.get("Header", ""))[:64]) or _HEADERS.get(operation, "")
        does, _ = _RIGHTS.get(operation, _OTHER)
        return Unsupported(
            f"the object store cannot {does}: it does not know "
            + (f"the header {header}" if header else "the request"),
            detail=detail,
            hint="take another server (docs/object-stores.md has those that are known to work),"
            " or have it ignore headers that it does not know; s3proxy does so with"
            " s3proxy.ignore-unknown-headers=true",
        )
    if case := _BY_CODE.get(code) or _BY_CODE.get(str(status)):
        return case.error(case.message, detail=detail, hint=case.hint)
    if status >= 500:
        return Passing("the object store reports an error of its own", detail=detail)
    does, right = _RIGHTS.get(operation, _OTHER)
    if status in (401, 403):
        return RemoteDenied(
            f"the object store refuses to {does}",
            detail=detail,
            hint=f"give the credentials the right {right} (docs/object-stores.md)",
        )
    return RemoteDenied(
        f"the object store cannot {does}",
        detail=detail,
        hint="is remote.endpoint an S3-compatible store, and remote.url a bucket of it?",
    )


def _unanswered(failure: Exception, endpoint: str) -> BackupError:
    detail = printable(" ".join(str(failure)[: 4 * _SHOWN].split())[:_SHOWN])
    match failure:
        case AnswerTooLong():
            return ProtocolViolation(
                "the object store's answer is longer than any of its kind",
                detail=detail,
                hint="look at remote.endpoint, and at proxies on the way",
            )
        case boto.NoCredentialsError() | boto.PartialCredentialsError():
            return RemoteDenied("there are no credentials", detail=detail, hint=_CHAIN)
        case (
            boto.CredentialRetrievalError()
            | boto.TokenRetrievalError()
            | boto.SSOError()
            | boto.ProfileNotFound()
        ):
            return RemoteDenied(
                "the credentials cannot be fetched", detail=detail, hint="aws sso login"
            )
        case boto.SSLError():
            return _tls(detail)
        case boto.ConnectTimeoutError():
            return RemoteUnreachable("the object store does not answer", detail=detail)
        case boto.EndpointConnectionError():
            unknown = re.search(
                r"name or service not known|name resolution|nodename|no address associated",
                f"{detail} {failure.__cause__} {failure.kwargs.get('error')}",
                re.IGNORECASE,
            )
            why = "its name is not known" if unknown else "nothing answers at its endpoint"
            return RemoteUnreachable(
                f"the object store cannot be reached: {why}",
                detail=f"{endpoint}: {failure.kwargs.get('error', detail)}"[:_SHOWN],
                hint="look at remote.endpoint, and at the network",
            )
        case boto.ProxyConnectionError():
            return RemoteUnreachable(
                "the proxy before the object store does not answer",
                detail=detail,
                hint="look at HTTPS_PROXY and NO_PROXY",
            )
        case boto.ReadTimeoutError():
            return RemoteUnreachable("the object store has stopped answering", detail=detail)
        case boto.HTTPClientError() | boto.IncompleteReadError() | boto.ResponseStreamingError():
            return Passing("the connection to the object store broke", detail=detail)
        case ResponseParserError():
            return RemoteDenied(
                "what answers is no object store",
                detail=detail,
                hint="look at remote.endpoint, and at proxies on the way",
            )
    return RemoteDenied("a request cannot be made", detail=detail)


def _tls(detail: str) -> BackupError:
    if "CERTIFICATE_VERIFY_FAILED" in detail:
        return RemoteDenied(
            "the object store's certificate is not trusted",
            detail=detail,
            hint="set remote.ca_bundle to the certificate of its authority",
        )
    if "WRONG_VERSION_NUMBER" in detail or "record layer" in detail:
        return RemoteDenied(
            "the object store does not speak TLS",
            detail=detail,
            hint="is its endpoint http:// and not https://?",
        )
    return RemoteUnreachable("TLS to the object store failed", detail=detail)


def moment_of(headers: dict[str, str]) -> float | None:
    """Returns when an answer was written, by the clock of its server; None where it is not told."""
    try:
        return parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _by(headers: dict[str, str]) -> str:
    """Returns by how much our clock differs from the one of an answer, in words."""
    if (remote := moment_of(headers)) is None:
        return ""
    ahead = time.time() - remote
    return f" by {duration(abs(ahead))}: ours is {'ahead' if ahead > 0 else 'behind'}"
