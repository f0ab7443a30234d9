"""In a session of questions, the receiver's end takes one at a time, and answers in frames.

An answer may be long (the names of 42 million blobs, a blob of gigabytes), so each is a generator
of frames, and the next frame is made when the client has taken most of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ntt_backup.receiver.workspace import Refusal

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.terms import Terms


class QuestionSession:
    """Answers questions. frames: the rest of the last answer; None where it is complete."""

    between_batches = True

    def __init__(self, terms: Terms, connection: Connection) -> None:
        self.terms = terms
        self.connection = connection
        self.frames: Generator[bytes, None, None] | None = None

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        """Returns the method for each kind of question."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether an answer is not complete: no other question is taken meanwhile."""
        return self.frames is not None

    @property
    def working(self) -> bool:
        """Whether the client waits for this end, and this end not for the client."""
        return self.busy and not self.connection.unread

    def advance(self) -> bool:
        """Sends the next frame; returns False where that must wait for a thread or the client."""
        if self.connection.deaf:
            self.connection.ended = True
        if self.frames is None or self.connection.choked:
            return False
        for frame in self.frames:
            if frame:
                self.connection.say(frame)
            return bool(frame)
        self.frames = None
        return True

    def interrupt(self) -> None:
        """Drops the rest of an answer."""
        if self.frames is not None:
            self.frames.close()
        self.frames = None

    def close(self) -> None:
        self.interrupt()

    def require(self, word: str) -> None:
        """Raises Refusal where `--allow` does not list the word."""
        if word not in self.terms.allow:
            raise Refusal("refused", f"this receiver's --allow does not list {word}")
