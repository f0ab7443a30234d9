"""A session to a bucket reports content when it is sent, and not when it was put into a buffer.

Two parts of an upload wait in buffers, of 32 MiB each: on a slow link that is the work of minutes.
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
        # Of the batches in flight: all content, and what is still to be reported of it.
        self._in_flight = 0
        self._waits = 0
        # When the last request was answered.
        self._answers = 0
        self._sent_then = 0

    def put(self, count: int) -> None:
        """Counts content that was put into the outbox; below zero where it was taken back."""
        self._put_ever += count
        self._in_flight += count
        self._waits += count

    def hear(self, sent: int) -> None:
        """Reports by the bytes that were sent so far. Of a part that was begun before the last one
        was done nobody knows how much is gone, so that it counts as whole.
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
