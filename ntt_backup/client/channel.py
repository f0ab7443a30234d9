"""A channel is a remote command: bytes go out, bytes come back, and silence has an end.

Each step is one poll(2): write what the pipe takes, read what has come, keep the end of stderr. So
two pipes that are both full do not block each other, and what the remote said before its end is
still heard. The words of ssh explain a failure until the greeting has come; later the end of the
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
from ntt_backup.process.pipeline import READ_BYTES, Child, start, wait_for, write

NOISE_LIMIT: Final = 256 * 1024
# Signs of life are waited for so many times as long as silence: a sync that hangs shows them, too.
PATIENCE_FACTOR: Final = 10
# The remote gives up a client that sends nothing for too long, also one that is paused.
_SIGN_SECONDS: Final = 15.0
_CLOSE_SECONDS: Final = 10.0
_LINGER_SECONDS: Final = 2.0
_LAST_WORDS_SECONDS: Final = 1.0
_RECEIVER: Final = re.compile(rb"^NTT-RECEIVE \d")


class Channel:
    """A running remote command. Raises SourceError where its local process cannot be started.

    pace limits what is sent, fetch what is read; on_bytes is told how many bytes were sent. heard:
    when something last came back, in monotonic seconds. lingers: whether, after `close`, another
    process on the remote held the connection open.
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
        self._greeted = False
        self._ahead = b""
        self.heard = self._wrote = time.monotonic()
        self.lingers = False
        self.ended = False

    # --- before the greeting ----------------------------------------------------------------------

    def greet(
        self, script: bytes, greeting: re.Pattern[bytes], timeout: float, *, doing: str
    ) -> re.Match[bytes]:
        """Sends script, and returns the match of the first line that is a greeting. What comes
        before it is skipped. doing names what was wanted, for the errors.

        Raises RemoteUnreachable when no greeting has come after timeout seconds, RemoteDenied for
        noise without end or a receiver that nobody asked for, and what `Transport.explain` returns
        when the command ends instead.
        """
        deadline = time.monotonic() + timeout
        pending = memoryview(script)
        seen = self._ahead
        while True:
            *lines, self._ahead = seen.split(b"\n")
            for number, line in enumerate(lines):
                if match := greeting.match(line):
                    self._ahead = b"\n".join((*lines[number + 1 :], self._ahead))
                    self._greeted = True
                    return match
                if _RECEIVER.match(line):
                    raise RemoteDenied(
                        f"the key leads to a forced command, which runs nothing else: {doing}",
                        hint="use a key with a shell for this (remote.identity_file)",
                    )
            if max(len(seen), self._child.stderr.size) > NOISE_LIMIT:
                raise RemoteDenied(
                    f"the remote says too much: {doing}",
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
        """Sends all of data; what comes back meanwhile goes to hear. A wait ends early when one of
        the descriptors beside is readable.

        patience: see `is_silent`. Raises RemoteUnreachable for a stall or the end of the channel,
        after all that came was heard.
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
        """Returns whether so little was sent lately that the remote needs a sign of life."""
        return time.monotonic() - self._wrote >= _SIGN_SECONDS

    def hear(
        self, hear: Callable[[bytes], None], timeout: float, *, beside: Iterable[int] = ()
    ) -> None:
        """Waits up to timeout seconds for data, which goes to hear, or for one of beside.

        Raises RemoteUnreachable at the end of the channel.
        """
        data = self.read(timeout, beside)
        if data == b"":
            raise self.lost()
        if data:
            hear(data)

    def read(self, timeout: float, beside: Iterable[int] = ()) -> bytes | None:
        """Returns what has come within timeout seconds: b"" at the end, None for nothing."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        self._poll([], timeout, beside)
        return self._read()

    def is_silent(self, since: float, patience: float, now: float, more: float = 0.0) -> bool:
        """Returns whether, counted from since, nothing has come for patience seconds, or nothing
        but signs of life for ten times as long, and `more` seconds.
        """
        signs_suffice = PATIENCE_FACTOR * patience + more
        return now - max(since, self.heard) > patience or now - since > signs_suffice

    def _hear_the_end(self, hear: Callable[[bytes], None]) -> None:
        """Hears the last words of a remote that reads no more, then raises what became of it."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            self.hear(hear, left)
        raise self.lost()

    def _poll(self, writing: list[int], timeout: float, beside: Iterable[int]) -> None:
        reading = self._child.fds
        if pause := self._fetch.pause() if self._fetch is not None else 0.0:
            # What has come waits in the pipe: that is not silence.
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
    def fds(self) -> list[int]:
        """Returns the descriptors that can be read once the remote, or the local process, has said
        something.
        """
        return self._child.fds

    @property
    def hint(self) -> str:
        """See `Transport`."""
        return self._transport.hint

    @property
    def stderr(self) -> str:
        """The last words of the local process."""
        return self._child.stderr.text

    def end_input(self) -> None:
        """Tells the remote that nothing more will be sent."""
        self._child.close_stdin()

    def wait(self, timeout: float) -> int | None:
        """Returns the local process's exit status; None if it still runs after timeout seconds."""
        return self._child.wait(timeout)

    def lost(self, said: bytes = b"") -> BackupError:
        """Returns the error for a channel that has ended. said: what came instead of an answer;
        /usr/sbin/nologin, for one, speaks on stdout.
        """
        status = self._child.wait(_LAST_WORDS_SECONDS)
        words = f"{said[-2000:].decode('utf-8', 'backslashreplace')}\n{self.stderr}".strip()
        if not self._greeted:
            return self._transport.explain(status, words)
        return RemoteUnreachable(
            "the connection to the remote was lost",
            detail=words.splitlines()[-1] if words else f"status {status}",
            hint=self.hint
            or "if it does not come back: check the link, and sshd's log on the remote",
        )

    def close(self, last_word: bytes = b"") -> None:
        """Ends the input, and waits a bounded time for the end in good order.

        last_word is what the remote says when its work is done. ssh does not end before every
        process on the remote has let go of the connection, and one that a login has left behind may
        never do that: after the last word it is not waited for (see `lingers`).
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
        """Ends the channel now. Never raises."""
        self.ended = True
        self._child.kill()
