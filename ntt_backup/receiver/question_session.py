"""In a session of questions, the receiver's end takes one at a time, and answers in frames.

An answer may be long (the names of 42 million blobs, a blob of gigabytes), so each is a generator
of frames, and the next frame is made when the client has taken most of the last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from ntt_backup.blobdir.descriptors import error_line
from ntt_backup.receiver.workspace import Refusal
from ntt_backup.wire import messages
from ntt_backup.wire.framing import MAX_CHUNK
from ntt_backup.wire.messages import BROKEN, COMPLETE

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


def in_threads(
    work: Callable[[], None], count: int, wake: int, stop: Callable[[], None] = lambda: None
) -> Generator[bytes, None, None]:
    """Yields empty frames while threads work. Raises what one of them has raised.

    Args:
        work: What each thread does.
        count: The number of threads.
        wake: A descriptor that gets a byte when a thread has ended.
        stop: Called before the threads are waited for, also where nobody wants the answer any more.
    """
    ended: list[None] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as problem:  # noqa: BLE001 - raised again below
            problems.append(problem)
        ended.append(None)
        os.write(wake, b"\0")

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        while len(ended) < count:
            yield b""
    finally:
        stop()
        for thread in threads:
            thread.join()
    for problem in problems:
        raise problem


def pieces(fd: int, begin: int, end: int) -> Iterator[bytes]:
    """Yields a file from begin up to end in pieces, and its BLOB_END."""
    status, why = COMPLETE, ""
    try:
        for at in range(begin, end, MAX_CHUNK):
            wanted = min(MAX_CHUNK, end - at)
            data = read_at(fd, wanted, at)
            if len(data) < wanted:
                status, why = BROKEN, f"it ends before byte {at + wanted}"
                break
            yield messages.piece(data)
    except OSError as problem:
        status, why = BROKEN, error_line(problem)
    yield messages.BLOB_END.frame(status, why)


def read_at(fd: int, length: int, at: int) -> bytes:
    """Returns length bytes from at on; fewer only where the file ends."""
    data = os.pread(fd, length, at)
    while len(data) < length:
        more = os.pread(fd, length - len(data), at + len(data))
        if not more:
            break
        data += more
    return data
