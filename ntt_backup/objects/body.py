"""What a request sends: content in shares, at a pace."""

from __future__ import annotations

import time
from threading import Lock
from typing import Final

from ntt_backup.objects.bucket import Buffer, Pace

# A time limit holds for each of these, whatever the size of the content.
_SHARE: Final = 256 * 1024


class SharedPace:
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
            share = self._pace.take(share)
        start, self._at = self._at, self._at + share
        return self._data[start : self._at]

    def seek(self, place: int) -> None:
        self._at = place

    def tell(self) -> int:
        return self._at
