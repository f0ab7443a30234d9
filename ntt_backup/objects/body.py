"""What a request sends, and what an answer brings: content in shares, at a pace."""

from __future__ import annotations

from typing import Any, Final

from botocore.exceptions import ResponseStreamingError
from urllib3.exceptions import HTTPError

from ntt_backup.client.throttle import SharedPace
from ntt_backup.objects.bucket import Buffer

# A time limit holds for each of these, whatever the size of the content.
_SHARE: Final = 256 * 1024


class Body:
    """Content as a file that is sent in shares, none of them copied."""

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


def content_of(answer: Any, most: int, pace: SharedPace | None) -> bytes:
    """Returns the content that an answer of botocore's brings: at most one byte more than `most`.

    Raises BotoCoreError.
    """
    try:
        return _read(answer["Body"], most + 1, pace)
    except HTTPError as error:  # Botocore leaves out what TLS finds wrong within an answer.
        raise ResponseStreamingError(error=error) from error


def _read(stream: Any, most: int, pace: SharedPace | None) -> bytes:
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
