"""In a session of questions, the client's end asks by a frame, and frames bring the answer.

The wait for an answer is bounded, also where signs of life come but no answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Final, TypeVar

from ntt_backup.client.channel import PATIENCE_FACTOR
from ntt_backup.client.connection import Connection, SessionSpec
from ntt_backup.client.greeting import Banner
from ntt_backup.errors import BackupError, RemoteUnreachable, Unsupported
from ntt_backup.wire import framing

# A slow disk reads this many bytes a second when it is asked for a sum.
SLOW: Final = 5_000_000
# What is to be done where the receiver is older than the word.
OLD: Final = (
    " (a receiver that does not know the word is old: copy it anew, see `ntt-backup-remote"
    " install-receiver --write FILE`)"
)
_POLL_SECONDS: Final = 0.5

E = TypeVar("E", bound=BackupError)


class QuestionSession:
    """A connection for questions, which has greeted. lengths: see `Connection`."""

    def __init__(self, spec: SessionSpec, lengths: dict[int, tuple[int, int]]) -> None:
        self._spec = spec
        self._unread: deque[bytes] = deque()
        self._frames: Iterator[tuple[int, memoryview]] = iter(())
        self._connection = Connection(spec, lengths)

    @property
    def banner(self) -> Banner:
        return self._connection.banner

    @property
    def answers(self) -> int:
        """The number of frames that have come."""
        return self._connection.received

    def require(self, word: str) -> None:
        """Raises Unsupported where the receiver may not do this: `list`, `verify` or `get`."""
        if word not in self.banner.allowed:
            message = f"the receiver on the remote may not {word}"
            raise self.refusal(
                Unsupported, message, word, ", or use another key (remote.identity_file)"
            )

    def refusal(self, kind: type[E], message: str, word: str, more: str = OLD) -> E:
        """Returns the error for what a forced command refuses, since its `--allow` lacks a word.
        more: of what to do.
        """
        return kind(
            message,
            detail=f"its --allow lists {','.join(sorted(self.banner.allowed))}",
            hint=f"add {word} to --allow in the line of our key in the remote's"
            f" authorized_keys{more}",
        )

    def show_life(self) -> None:
        """Tells the remote that this end is not gone, if it has said nothing for a while."""
        if self._connection.channel.quiet:
            with self._connection.checked():
                self._send(framing.frame(framing.PING, bytes(8)))

    def close(self) -> None:
        """Ends the session in good order, in bounded time."""
        self._connection.close()

    def abort(self) -> None:
        """Ends the session now. Never raises."""
        self._connection.abort()

    # --- for whoever builds on it -----------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        self._connection.send(frame, self._unread.append)

    def _answers(self, question: bytes, last: int) -> Iterator[tuple[int, memoryview]]:
        """Sends a question, and yields the frames up to the one of the last kind."""
        self._send(question)
        while (frame := self._next())[0] != last:
            yield frame

    def _next(self, more_patience: float = 0.0) -> tuple[int, memoryview]:
        """Returns the next frame; its payload holds until the one after it. more_patience: seconds
        for which signs of life alone will do, beyond what is usual.
        """
        asked = time.monotonic()
        while (frame := next(self._frames, None)) is None:
            self._spec.cancelled()
            if not self._unread:
                self._connection.channel.hear(self._unread.append, _POLL_SECONDS)
            self._require_life(asked, more_patience)
            if self._unread:
                self._frames = self._connection.frames(self._unread.popleft())
        return frame

    def _require_life(self, asked: float, more_patience: float) -> None:
        """Raises RemoteUnreachable after silence, or after signs of life without an answer."""
        run, now = self._spec.run, time.monotonic()
        heard = self._connection.channel.heard
        if not self._unread and now - max(asked, heard) > run.stall_timeout:
            said = f"nothing came for {run.stall_timeout:.0f} s"
        elif now - asked > PATIENCE_FACTOR * run.receipt_timeout + more_patience:
            said = f"nothing but signs of life came for {now - asked:.0f} s"
        else:
            return
        raise RemoteUnreachable("the remote does not answer", detail=said)
