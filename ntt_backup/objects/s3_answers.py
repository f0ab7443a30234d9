"""Answers of an object store are bounded before botocore makes anything of them.

botocore reads an answer to its end, whatever its length, and parses all of it. So its HTTP session
is wrapped: of an answer that is XML no more is read than a page of a listing can have, and one that
would take more memory than its length once it is parsed is refused. The content of an object is
bounded by who asks for it, see `body`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import HTTPClientError, IncompleteReadError, ReadTimeoutError
from botocore.httpsession import URLLib3Session
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError
from urllib3.exceptions import ReadTimeoutError as TimedOut

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
