"""A channel is a running remote command with its input and output; each wait has a limit.

Each step is one poll(2): write until the pipe is full, read the data that has arrived, keep the end
of stderr. So two full pipes do not block each other, and data that the remote sent before its end
is still read. Until the greeting the messages of ssh explain a failure; later the end of the
channel is a lost connection.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Final

from ntt_backup.client.throttle import Pace, SharedPace
from ntt_backup.client.transport import Transport
from ntt_backup.errors import BackupError, RemoteDenied, RemoteUnreachable
from ntt_backup.process.spawn import READ_BYTES, Child, start, wait_for, write

NOISE_LIMIT: Final = 256 * 1024
# The limit of mere signs of life, as a multiple of the limit of silence: a sync that hangs shows
# them, too.
PATIENCE_FACTOR: Final = 10
# The remote ends the session of a client that sends nothing for too long, also of a paused one.
_SIGN_SECONDS: Final = 15.0
_CLOSE_SECONDS: Final = 10.0
_LINGER_SECONDS: Final = 2.0
_LAST_WORDS_SECONDS: Final = 1.0
_RECEIVER: Final = re.compile(rb"^NTT-RECEIVE \d")


class Channel:
    """A running remote command.

    Attributes:
        heard: The time of the last data from the remote, in monotonic seconds.
        lingers: Whether, after `close`, another process on the remote held the connection open.
        ended: Whether the channel was aborted.
        greeted: Whether the remote has answered. From then on the end of the channel is a lost
            connection.

    Raises:
        SourceError: The local process cannot be started.
    """

    def __init__(
        self,
        transport: Transport,
        command: str,
        *,
        pace: Pace | None = None,
        fetch: SharedPace | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._transport = transport
        self.pace = pace
        self._fetch = fetch
        self.on_bytes = on_bytes
        self._child: Final[Child] = start(transport.argv(command), env=transport.environment())
        self._reads = True
        self.greeted = False
        self._ahead = b""
        self.heard = self._wrote = time.monotonic()
        self.lingers = False
        self.ended = False

    # --- before the greeting ----------------------------------------------------------------------

    def greet(
        self, script: bytes, greeting: re.Pattern[bytes], timeout: float, *, doing: str
    ) -> re.Match[bytes]:
        """Sends a script, and returns the match of the first line that is a greeting.

        Earlier lines are skipped. doing: the purpose, for the errors.

        Raises:
            RemoteUnreachable: No greeting has arrived in time.
            RemoteDenied: There is too much other output, or a receiver that was not asked for.
            BackupError: As `Transport.explain` returns, if the command has ended.
        """
        deadline = time.monotonic() + timeout
        pending = memoryview(script)
        seen = self._ahead
        while True:
            *lines, self._ahead = seen.split(b"\n")
            for number, line in enumerate(lines):
                if match := greeting.match(line):
                    self._ahead = b"\n".join((*lines[number + 1 :], self._ahead))
                    self.greeted = True
                    return match
                if _RECEIVER.match(line):
                    raise RemoteDenied(
                        f"the key leads to a forced command, which runs nothing else: {doing}",
                        hint="use a key with a shell for this (remote.identity_file)",
                    )
            if max(len(seen), self._child.stderr.size) > NOISE_LIMIT:
                raise RemoteDenied(
                    f"the remote prints too much: {doing}",
                    detail=self._last_words(seen),
                    hint="make its startup files silent for shells that are not interactive",
                )
            left = deadline - time.monotonic()
            if left <= 0:
                raise RemoteUnreachable(
                    f"the remote did not answer in time: {doing}",
                    detail=f"waited {timeout:.0f} s; it said {self._last_words(seen)}",
                    hint=self.hint
                    or "log in with the same options and see what its startup files do (do they"
                    " read from stdin, or start another program?)",
                )
            self._poll([self._child.stdin_fd] if pending else [], left, ())
            sent = self._write(pending)
            pending = pending[sent if self._reads else len(pending) :]
            data = self._read()
            if data == b"":
                raise self.lost(seen)
            seen += data or b""

    def _last_words(self, said: bytes) -> str:
        words = self.stderr or said[-200:].decode("utf-8", "backslashreplace").strip()
        return repr(words[-200:]) if words else "nothing"

    # --- the conversation -------------------------------------------------------------------------

    def send(
        self,
        data: memoryview,
        hear: Callable[[bytes], None],
        *,
        patience: float,
        beside: Iterable[int] = (),
    ) -> None:
        """Sends all of data; hear receives the data that arrives meanwhile.

        patience: see `is_silent`. beside: descriptors; a wait ends early when one is readable.

        Raises:
            RemoteUnreachable: The link has stalled, or the channel has ended. hear has received all
                data before that.
        """
        moved = time.monotonic()
        while data:
            pause = 0.0
            chunk = data
            if self.pace is not None:
                chunk = data[: self.pace.allowance() or int(self.quiet)]
                pause = self.pace.delay() if not chunk else 0.0
            sent = self._write(chunk)
            if not self._reads:
                self._hear_the_end(hear)
            now = time.monotonic()
            if sent:
                moved = self._wrote = now
                data = data[sent:]
                continue
            if pause:
                moved = now
            elif self.is_silent(moved, patience, now):
                raise RemoteUnreachable(
                    "the link has stalled",
                    detail=f"no byte went out for {patience:.0f} s; {self.stderr}".rstrip("; "),
                )
            self._poll([] if pause else [self._child.stdin_fd], pause or 1.0, beside)
            self.hear(hear, 0.0)

    @property
    def quiet(self) -> bool:
        """Whether nothing was sent for so long that the remote needs a sign of life."""
        return time.monotonic() - self._wrote >= _SIGN_SECONDS

    def hear(
        self, hear: Callable[[bytes], None], timeout: float, *, beside: Iterable[int] = ()
    ) -> None:
        """Waits for data, and passes it to hear.

        The wait ends early when one of the descriptors `beside` is readable. Raises
        RemoteUnreachable where the channel has ended.
        """
        data = self.read(timeout, beside)
        if data == b"":
            raise self.lost()
        if data:
            hear(data)

    def read(self, timeout: float, beside: Iterable[int] = ()) -> bytes | None:
        """Returns the data of up to timeout seconds: b"" at the end, None if there is none."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        self._poll([], timeout, beside)
        return self._read()

    def is_silent(self, since: float, patience: float, now: float, more: float = 0.0) -> bool:
        """Returns whether a wait has lasted too long.

        Args:
            since: The begin of the wait, in monotonic seconds.
            patience: The limit of silence in seconds. The limit of mere signs of life is
                PATIENCE_FACTOR times as long.
            now: The present time, in monotonic seconds.
            more: Seconds that are added to the limit of mere signs of life.
        """
        signs_suffice = PATIENCE_FACTOR * patience + more
        return now - max(since, self.heard) > patience or now - since > signs_suffice

    def _hear_the_end(self, hear: Callable[[bytes], None]) -> None:
        """Reads the last data of a remote that reads no more, then raises the error."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            self.hear(hear, left)
        raise self.lost()

    def _poll(self, writing: list[int], timeout: float, beside: Iterable[int]) -> None:
        reading = self._child.fds
        if pause := self._fetch.pause() if self._fetch is not None else 0.0:
            # Data that waits in the pipe is not silence.
            self.heard = time.monotonic()
            reading = [fd for fd in reading if fd != self._child.stdout_fd]
            timeout = min(timeout, pause)
        wait_for(reading=[*reading, *beside], writing=writing, timeout=timeout)
        self._child.drain_stderr()
        self.on_bytes(0)  # It waits, but it lives.

    def _write(self, chunk: memoryview) -> int:
        try:
            sent = write(self._child.stdin_fd, chunk) if chunk and self._reads else 0
        except BrokenPipeError:
            self._reads = False
            return 0
        if sent:
            self.on_bytes(sent)
            if self.pace is not None:
                self.pace.spend(sent)
        return sent

    def _read(self) -> bytes | None:
        share = READ_BYTES
        if self._fetch is not None and not (share := self._fetch.take_now(share)):
            return None
        data = self._child.read(share)
        if self._fetch is not None:
            self._fetch.give_back(share - len(data or b""))
        if data:
            self.heard = time.monotonic()
        return data

    # --- the end ----------------------------------------------------------------------------------

    @property
    def hint(self) -> str:
        """The hint of the transport."""
        return self._transport.hint

    @property
    def stderr(self) -> str:
        """The end of the error output of the local process."""
        return self._child.stderr.text

    def end_input(self) -> None:
        """Closes the input of the remote command."""
        self._child.close_stdin()

    def wait(self, timeout: float) -> int | None:
        """Returns the exit status of the local process; None if it runs after timeout seconds."""
        return self._child.wait(timeout)

    def lost(self, said: bytes = b"") -> BackupError:
        """Returns the error for a channel that has ended.

        said: the output instead of an answer; /usr/sbin/nologin, for example, prints to stdout.
        """
        status = self._child.wait(_LAST_WORDS_SECONDS)
        words = f"{said[-2000:].decode('utf-8', 'backslashreplace')}\n{self.stderr}".strip()
        if not self.greeted:
            return self._transport.explain(status, words)
        return RemoteUnreachable(
            "the connection to the remote was lost",
            detail=words.splitlines()[-1] if words else f"status {status}",
            hint=self.hint
            or "if it does not come back: check the link, and sshd's log on the remote",
        )

    def close(self, last_word: bytes = b"") -> None:
        """Ends the input, and waits a bounded time for the end in good order.

        ssh does not end before every process on the remote has closed the connection, and a
        process that a login has left behind may never do that. So after the last word, which the
        remote sends when its work is done, the wait is short (see `lingers`).
        """
        self.end_input()
        deadline = time.monotonic() + _CLOSE_SECONDS
        said, heard, ended = b"", False, self._child.stdout_fd < 0
        while not ended and (left := deadline - time.monotonic()) > 0:
            data = self.read(left)
            ended = data == b""
            if last_word and not heard:
                said = said[-len(last_word) :] + (data or b"")
                heard = last_word in said
                deadline = time.monotonic() + _LINGER_SECONDS if heard else deadline
        status = self._child.wait(max(0.0, deadline - time.monotonic()))
        self.lingers = heard and (status is None or not ended)
        self.abort()

    def abort(self) -> None:
        """Kills the local process. Never raises."""
        self.ended = True
        self._child.kill()
