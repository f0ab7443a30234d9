"""A bucket that is read with patience: through outages, and past answers that break off.

The first contact has no patience: who has typed a command wants to hear at once that the bucket
cannot be reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from ntt_backup.client.backoff import OutageClock
from ntt_backup.errors import BackupError, RemoteUnreachable
from ntt_backup.objects.bucket import Bucket, ObjectInfo, ObjectUnreadable
from ntt_backup.objects.keys import FORMAT
from ntt_backup.process.threads import Cancelled

T = TypeVar("T")

# So often bytes are asked for that do not come while the bucket answers.
_TRIES: Final = 5


class PatientBucket:
    """Reads a bucket, in several threads. on_outage is told the error and for how many seconds it
    will be waited. Methods raise what those of `Bucket` do, and Cancelled once stop is set.
    """

    def __init__(
        self,
        bucket: Bucket,
        clock: OutageClock,
        on_outage: Callable[[BackupError, float], None],
        stop: threading.Event,
    ) -> None:
        self._bucket = bucket
        self._clock = clock
        self._on_outage = on_outage
        self._stop = stop
        self._lock = threading.Lock()
        self._met = False

    def cancelled(self) -> None:
        """Raises Cancelled where the command is ending."""
        if self._stop.is_set():
            raise Cancelled

    def head(self, key: str) -> ObjectInfo | None:
        """See `Bucket`. Raises ObjectUnreadable where of this object alone nothing is told."""
        return self._do(lambda: self._bucket.head(key), key)

    def thaw(self, key: str, days: int, tier: str) -> bool:
        return self._do(lambda: self._bucket.thaw(key, days, tier))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        last = ""
        while True:
            try:
                for one in self._bucket.list(prefix, last):
                    self._answered()
                    last = one.key
                    yield one
                self._answered()
                return
            except BackupError as error:
                self._wait(error)

    def read(self, key: str, start: int, length: int) -> bytes:
        """Returns that many bytes of an object; fewer only where it has no more.

        Raises ObjectUnreadable where these bytes alone do not come.
        """
        tried = 0
        while True:
            self.cancelled()
            try:
                found = self._bucket.get_range(key, start, length)
                self._answered()
                if len(found) == length or not self._has(key, start + length):
                    return found
                error: BackupError = RemoteUnreachable(
                    "the object store's answer breaks off",
                    detail=f"{key}: {len(found)} bytes of {length} from {start}",
                    hint="look at its log, and at proxies before it",
                )
            except BackupError as failure:
                error = failure
            tried = self._tried(tried, key, error)
            self._wait(error)

    def _has(self, key: str, size: int) -> bool:
        """Returns whether an object has so many bytes."""
        info = self.head(key)
        return info is not None and info.size >= size

    def _tried(self, before: int, key: str, error: BackupError) -> int:
        """Counts an error as one of the object's own, where the bucket answers otherwise. Raises
        ObjectUnreadable for the last one.
        """
        tried = before + 1 if self._met and error.retryable and self._answers() else 0
        if tried == _TRIES:
            raise ObjectUnreadable(f"{key}: {error}") from error
        return tried

    def _answers(self) -> bool:
        """Returns whether the bucket answers now. It is asked for an object that all stores have:
        of one that it has lost in part a server may refuse everything.
        """
        try:
            self._bucket.head(FORMAT)
        except BackupError:
            return False
        return True

    def _do(self, ask: Callable[[], T], key: str = "") -> T:
        """Asks until there is an answer. key: the object that may have errors of its own."""
        tried = 0
        while True:
            self.cancelled()
            try:
                answer = ask()
            except BackupError as error:
                tried = self._tried(tried, key, error) if key else 0
                self._wait(error)
            else:
                self._answered()
                return answer

    def _answered(self) -> None:
        with self._lock:
            self._met = True
            self._clock.over()

    def _wait(self, error: BackupError) -> None:
        with self._lock:
            hope = error.retryable and self._met
            wait_s = self._clock.next_wait(time.monotonic()) if hope else None
        if wait_s is None:
            raise error
        self._on_outage(error, wait_s)
        if self._stop.wait(wait_s):
            raise Cancelled
