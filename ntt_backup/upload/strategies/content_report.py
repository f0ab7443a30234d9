"""A session of packs reports content when it is sent, and not when it was put into a buffer.

Two parts of an upload wait in buffers, of 32 MiB each: over a slow link they take minutes.
"""

from __future__ import annotations

from collections.abc import Callable

from ntt_backup.filestore.contract import Progress


class ContentReport:
    """Counts the content of batches that was added to files, and reports what was sent of it.

    on_content gets what is to be added to all that was reported before.
    """

    def __init__(self, on_content: Callable[[int], None]) -> None:
        self._on_content = on_content
        self._put_ever = 0
        # Of the batches in flight: all content, and how much of it was not reported yet.
        self._in_flight = 0
        self._waits = 0

    def put(self, count: int) -> None:
        """Counts content that was added. count: below 0 where it was taken back."""
        self._put_ever += count
        self._in_flight += count
        self._waits += count

    def hear(self, progress: Progress) -> None:
        """Reports content that has been sent."""
        # What is compressed has fewer bytes than content.
        waits = self._put_ever * progress.unsent // max(1, progress.added)
        self._report_but(min(self._waits, waits))

    def settle(self, put: int, stored: int) -> None:
        """Reports what was stored of a batch, in place of what was put for it."""
        self._in_flight -= put
        self._on_content(stored - put)
        self._report_but(self._waits)

    def _report_but(self, waits: int) -> None:
        waits = max(0, min(waits, self._in_flight))
        if count := self._waits - waits:
            self._waits = waits
            self._on_content(count)
