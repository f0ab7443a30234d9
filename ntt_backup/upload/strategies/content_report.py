"""A session to a bucket reports content when it is sent, and not when it was put into a buffer.

Two parts of an upload wait in buffers, of 32 MiB each: over a slow link they take minutes.
"""

from __future__ import annotations

from collections.abc import Callable

from ntt_backup.objects.outbox import Outbox


class ContentReport:
    """Counts the content of batches that was put into an outbox, and reports what was sent of it.

    on_content gets what is to be added to all that was reported before.
    """

    def __init__(self, outbox: Outbox, on_content: Callable[[int], None]) -> None:
        self._outbox = outbox
        self._on_content = on_content
        self._put_ever = 0
        # Of the batches in flight: all content, and how much of it was not reported yet.
        self._in_flight = 0
        self._waits = 0
        # How many requests had been answered at the last look, and the bytes sent when that rose.
        self._answers = 0
        self._sent_then = 0

    def put(self, count: int) -> None:
        """Counts content that was put into the outbox. count: below 0 where it was taken back."""
        self._put_ever += count
        self._in_flight += count
        self._waits += count

    def hear(self, sent: int) -> None:
        """Reports content that has been sent. sent: the bytes that the session sent so far. Those
        since the last answer belong to parts that are still in buffers; what went of these before
        is not known, and counts as not sent.
        """
        outbox = self._outbox
        if outbox.answers != self._answers:
            self._answers, self._sent_then = outbox.answers, sent
        unsent = max(0, outbox.held - (sent - self._sent_then))
        # What is compressed has fewer bytes than content.
        waits = self._put_ever * unsent // max(1, outbox.written)
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
