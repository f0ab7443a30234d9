"""The receiver's end of a connection has frames on two descriptors, and never blocks.

All that can grow is bounded: the inbox, and the answers that the client does not take. What takes
long runs in threads, which end with a byte on a pipe that wakes up `wait`.
"""

from __future__ import annotations

import os
import select
import time

from ntt_backup.receiver.workspace import Refusal
from ntt_backup.wire import messages
from ntt_backup.wire.framing import Inbox

_BUSY_SECONDS = 5.0
# The longest sleep: how often a session looks whether it was superseded.
_LOOK_SECONDS = 1.0
_LAST_WORDS_SECONDS = 10.0
# Once so many bytes of answers are not taken, nothing more is read or made.
_UNREAD_ANSWERS = 1 << 20


class Connection:
    """Takes frames from the client, and keeps what it has not taken yet.

    wake: the descriptor where threads write a byte when they have ended.
    """

    def __init__(self, reading: int, writing: int, idle_timeout: float) -> None:
        self._reading = reading
        self._writing = writing
        self._idle_timeout = idle_timeout
        self._inbox = Inbox(messages.to_receiver(messages.WRITING))
        self._outbox = bytearray()
        self._moved = self._spoke = time.monotonic()
        self._wake, self.wake = os.pipe()
        os.set_blocking(self._wake, False)
        self.ended = False
        self.deaf = False  # The client takes no answers any more.

    def admit(self, lengths: dict[int, tuple[int, int]]) -> None:
        """Takes frames of these kinds from now on, in place of those of a session that writes."""
        self._inbox.admit(lengths)

    @property
    def unread(self) -> bool:
        """Whether the client has not taken all answers."""
        return bool(self._outbox)

    @property
    def choked(self) -> bool:
        """Whether it has left so many untaken that no more may be made."""
        return len(self._outbox) > _UNREAD_ANSWERS

    @property
    def waiting(self) -> int:
        """The number of bytes that have come in and are no frame yet."""
        return self._inbox.waiting

    def next(self) -> tuple[int, memoryview] | None:
        """Returns the next frame that is complete."""
        return self._inbox.next()

    def read(self) -> bool:
        """Reads what has come in; returns False where nothing has."""
        try:
            count = os.readv(self._reading, [self._inbox.space()])
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if count == 0:
            self.ended = True
        self._inbox.filled(count)
        return True

    def say(self, frame: bytes) -> None:
        self._outbox += frame
        self._spoke = time.monotonic()
        self._flush()

    def show_life(self) -> None:
        """Sends BUSY where nothing was sent for some seconds."""
        if time.monotonic() - self._spoke >= _BUSY_SECONDS:
            self.say(messages.BUSY.frame())

    def wait(self, reading: bool, working: bool) -> None:
        """Waits until a descriptor is ready, or a second. reading: for input, too.

        working: this end has work, so the client is shown life, and its silence is no idleness.
        Raises Refusal when nothing has moved for too long.
        """
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if reading:
            poll.register(self._reading, select.POLLIN)
        if self._outbox:
            poll.register(self._writing, select.POLLOUT)
        ready = [fd for fd, _ in poll.poll(min(_LOOK_SECONDS, self._idle_timeout) * 1000)]
        if self._wake in ready:
            os.read(self._wake, 64)
        if self._writing in ready:
            self._flush()
        now = time.monotonic()
        if working or any(fd != self._wake for fd in ready):
            self._moved = now
        if working and not self._outbox:
            self.show_life()
        if now - self._moved > self._idle_timeout:
            raise Refusal("idle", f"nothing was heard for {self._idle_timeout:.0f} s")

    def close(self) -> None:
        """Gives the client some seconds to take the last answers."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._outbox and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(self._writing, select.POLLOUT)
            poll.poll(_LAST_WORDS_SECONDS * 1000)
            self._flush()
        os.close(self._wake)
        os.close(self.wake)

    def _flush(self) -> None:
        while self._outbox and not self.deaf:
            try:
                sent = os.write(self._writing, self._outbox)
            except BlockingIOError:
                return
            except OSError:
                self.deaf = True
                break
            del self._outbox[:sent]
            self._moved = time.monotonic()
        if self.deaf:
            self._outbox.clear()
