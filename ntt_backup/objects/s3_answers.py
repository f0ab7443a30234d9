"""Answers of an object store are bounded before botocore parses them, and checked afterwards.

botocore reads an answer to its end, whatever its length, and parses all of it. So its HTTP session
is wrapped: of an answer that is XML no more is read than a page of a listing can have, and one that
would take more memory than its length once it is parsed is refused. The content of an object is
bounded by the caller, see `s3_bucket`.

A listing has to prove that it is one: a page of HTML, or an answer without a body, is no empty
bucket. Its keys lie below the prefix that was asked for and ascend, so it advances; and it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import HTTPClientError, IncompleteReadError, ReadTimeoutError
from botocore.httpsession import URLLib3Session
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError
from urllib3.exceptions import ReadTimeoutError as TimedOut

from ntt_backup.errors import ProtocolViolation

# Of a page of a listing: a thousand entries with the longest keys, which are percent-encoded.
MOST_BYTES: Final = 4 << 20
# Such a page has 30,000 of these; each is an object in memory once it is parsed.
_MARKS: Final = (b"<", b'"', b"'")
_MOST_MARKS: Final = 200_000
# An answer that is XML comes within this time, or its sender does not mean to end.
SLOWEST_SECONDS = 300.0
_PIECE: Final = 1 << 16


class AnswerTooLong(HTTPClientError):
    """An answer is longer than any answer of its kind."""

    fmt = "the answer is longer than {most} bytes"


class BoundedSession:
    """A session of botocore's that reads bounded answers."""

    def __init__(self, session: URLLib3Session) -> None:
        self._session = session

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """Sends a request. Raises HTTPClientError, ReadTimeoutError, IncompleteReadError and
        ResponseParserError.
        """
        is_content = request.stream_output
        # Else the session reads all of the answer.
        request.stream_output = True
        answer = self._session.send(request)
        if is_content and answer.status_code < 300:
            return answer
        raw: Any = answer.raw
        document = _Document(_read(answer, request.url, has_body=request.method != "HEAD"))
        return AWSResponse(answer.url, answer.status_code, raw.headers, document)

    def close(self) -> None:
        self._session.close()


class _Document:
    """Stands in the place of a connection for an answer that was read."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self) -> Iterator[bytes]:
        yield self._content


def _read(answer: AWSResponse, url: str, *, has_body: bool) -> bytes:
    raw: Any = answer.raw
    content = bytearray()
    deadline = time.monotonic() + SLOWEST_SECONDS
    try:
        while piece := raw.read1(_PIECE):
            content += piece
            if len(content) > MOST_BYTES:
                raw.close()
                raise AnswerTooLong(most=MOST_BYTES)
            if time.monotonic() > deadline:
                raw.close()
                raise ReadTimeoutError(endpoint_url=url)
    except TimedOut as error:
        raise ReadTimeoutError(endpoint_url=url, error=error) from error
    except HTTPError as error:
        raise HTTPClientError(error=error) from error
    announced = answer.headers.get("Content-Length", "")
    if has_body and announced.isdecimal() and str(len(content)) != announced:
        raise IncompleteReadError(actual_bytes=len(content), expected_bytes=int(announced))
    if b"<!" in content or sum(map(content.count, _MARKS)) > _MOST_MARKS:
        if answer.status_code >= 300:
            return b""  # A proxy's page about an error: its status says enough.
        raise ResponseParserError("the answer is no XML of an object store's")
    return bytes(content)


# --- what an answer says --------------------------------------------------------------------------

# Pages of one listing, a thousand keys each: 200 million objects.
MOST_PAGES = 200_000
_MOST_EMPTY: Final = 100
_LONGEST_KEY: Final = 1024
_LONGEST_WORD: Final = 2048
_LARGEST: Final = 1 << 60
_WHAT_TO_DO: Final = "is remote.endpoint the object store itself? Look at proxies before it"


class Pages:
    """Checks the pages of one listing in their order.

    Args:
        prefix: what each key begins with.
        ordered: keys ascend. Those of uploads need not: a key may have several, and SeaweedFS lists
            them by their ids.

    Keys ascend by their bytes, as S3 has it, or name by name, as of servers that walk directories:
    SeaweedFS lists `a/1` before `a-b`.
    """

    def __init__(self, prefix: str, *, ordered: bool = True) -> None:
        self.prefix = prefix
        self._last = ""
        self._ordered = ordered
        # By the bytes of the keys, or by the names in them.
        self._orders: list[Callable[[str], list[str]]] = [
            lambda key: [key],
            lambda key: key.split("/"),
        ]
        self._pages = 0
        self._empty = 0
        self._following: dict[str, str] = {}

    def entries(self, page: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
        """Returns the entries of a page, whose keys are right.

        Args:
            page: the answer, as botocore has parsed it.
            name: the field that has the entries.

        Raises:
            ProtocolViolation: this is no page of the listing.
        """
        # rclone leaves that out of a listing of uploads; there nothing rests on it.
        if self._ordered and "IsTruncated" not in page:
            raise _wrong("the answer is no listing", "it does not say whether it is complete")
        found: list[Mapping[str, Any]] = page.get(name, [])
        for entry in found:
            key = word(entry, "Key", most=_LONGEST_KEY)
            if not key.startswith(self.prefix):
                raise _wrong("the object store lists what was not asked for", key)
            last, self._last = self._last, key
            self._orders = [one for one in self._orders if one(key) > one(last)]
            if self._ordered and not self._orders:
                raise _wrong("the object store's listing is not in order", key)
        self._pages += 1
        self._empty = 0 if found else self._empty + 1
        return found

    def following(self, page: Mapping[str, Any], **names: str) -> dict[str, str]:
        """Returns the arguments that ask for the page after this one; nothing after the last page.

        Args:
            page: the answer, as botocore has parsed it.
            names: the arguments, and the fields that have their values.

        Raises:
            ProtocolViolation: the listing does not go on, or does not end.
        """
        if not page.get("IsTruncated"):
            return {}
        said = {name: word(page, field, required=False) for name, field in names.items()}
        following = {name: text for name, text in said.items() if text}
        if not following or following == self._following:
            raise _wrong("the object store's listing does not go on")
        if self._pages >= MOST_PAGES or self._empty >= _MOST_EMPTY:
            raise _wrong("the object store's listing does not end", f"{self._pages:,} pages")
        self._following = following
        return following


def word(
    answer: Mapping[str, Any], name: str, *, most: int = _LONGEST_WORD, required: bool = True
) -> str:
    """Returns a text of an answer, "" where it is missing and not required.

    Raises:
        ProtocolViolation: the text is missing, or longer than `most` characters.
    """
    text = answer.get(name, "")
    if not isinstance(text, str) or len(text) > most or (required and not text):
        why = f"{name} has {len(text)} characters" if text else f"it has no {name}"
        raise _wrong("the object store's answer is none of its kind", why)
    return text


def size(answer: Mapping[str, Any], name: str) -> int:
    """Returns a count of bytes in an answer.

    Raises:
        ProtocolViolation: it is missing, or no object has so many bytes.
    """
    count = answer.get(name)
    if not isinstance(count, int) or not 0 <= count <= _LARGEST:
        raise _wrong("the object store does not tell the size of an object", f"{name}: {count}")
    return count


def etag(answer: Mapping[str, Any]) -> str:
    """Returns the ETag in an answer, without its quotes; "" where there is none."""
    return word(answer, "ETag", required=False).removeprefix("W/").strip('"')


def moment(answer: Mapping[str, Any], name: str) -> datetime | None:
    """Returns a time of an answer; None where it is not told."""
    found = answer.get(name)
    return found if isinstance(found, datetime) else None


def _wrong(message: str, detail: str = "") -> ProtocolViolation:
    return ProtocolViolation(message, detail=ascii(detail)[1:-1][:300], hint=_WHAT_TO_DO)
