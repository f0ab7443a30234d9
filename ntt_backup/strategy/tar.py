"""The `tar` strategy: batches as tar archives, back to back over one ssh connection.

The obvious `tar | ssh | tar` pays ssh's handshake for every batch; at 28 ms that is most of the
time for small blobs. Here the connection is set up once. A small loop in the remote's shell
(`tar_loop.sh`) takes one archive after the other from its stdin; it can tell where each ends
because we say its length first. The length is known before tar has run: with the GNU format and
names under 100 characters an archive is a 512-byte header a file, the content padded to 512, two
empty blocks, and padding to 10 KiB records.

The next batch is sent while the remote still extracts and syncs the last one. After the archive
comes one more line: `commit`, once the local tar has ended well, its length was as announced, and
every blob is still the file that was inspected; else `abort`. Only then does the remote put
anything in place. So a blob that changes under tar's hands never arrives. The length alone would
not do: what tar pads hides a file that became shorter, or a link.

Needs sh and tar on the remote, and nothing of ours installed there. It does not hash on the far
side; the source is hashed before it is sent instead (`run.verify_source`), and ssh guards the bytes
on the way. Called by the strategy registry.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import BinaryIO, Final

from ntt_backup.errors import (
    BackupError,
    BatchRejected,
    RemoteDenied,
    RemoteUnreachable,
    SourceError,
)
from ntt_backup.model import Batch, Blob, Failure, Receipt, relative_path
from ntt_backup.planner import Throttle
from ntt_backup.process import Child, Tail, wait_for, write
from ntt_backup.store import Inspection
from ntt_backup.strategy.archive import archive_length, tar_argv, tar_environment
from ntt_backup.strategy.session import Rejection, SessionPlan
from ntt_backup.transport.shell import login_words, shell_script
from ntt_backup.transport.storage import explain_batch, explain_root

_NOISE_LIMIT: Final = 256 * 1024
_CLOSE_SECONDS: Final = 10.0
_GREETING: Final = re.compile(rb"^NTT-TAR 1 (ready|fatal) (.*)$")


def bootstrap(root: str, owner: str, run_id: str, slot: str) -> tuple[str, bytes]:
    """The remote command that runs the loop, and the script to be written to its stdin first."""
    loop = resources.files("ntt_backup.strategy").joinpath("tar_loop.sh").read_text("utf-8")
    values = {"root": root, "owner": owner, "run": run_id, "slot": slot}
    return shell_script(loop, values)


@dataclass(slots=True)
class _Flight:
    """A batch that was put: what of it travels, and what was failed before it left."""

    number: int
    batch: Batch
    ready: tuple[Blob, ...]
    failed: tuple[Failure, ...]
    wire_bytes: int
    started: float
    handed_over: float = 0.0
    extracted: bool = False
    aborted: bool = False


class TarSession:
    """See `ntt_backup.strategy.Session`."""

    def __init__(self, plan: SessionPlan) -> None:
        self._plan = plan
        self._flights: deque[_Flight] = deque()
        self._outcomes: list[Receipt | Rejection] = []
        self._number = 0
        self._lines = b""
        self._usable = True
        now = time.monotonic()
        self._heard = now
        limit = plan.bytes_per_second
        self._throttle = Throttle(limit, now) if limit is not None else None
        command, script = bootstrap(plan.root, plan.owner, plan.run_id, plan.slot)
        self._ssh = _start(plan.transport.argv(command), plan.transport.environment())
        try:
            self._lockstep = self._greet(script)
        except BaseException:
            self.abort()
            raise

    @property
    def usable(self) -> bool:
        return self._usable

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        return tuple(flight.batch for flight in self._flights if not flight.aborted)

    def put(self, batch: Batch) -> None:
        started = time.monotonic()
        checked = self._plan.store.inspect(batch.blobs, verify=self._plan.run.verify_source)
        ready, failed = tuple(checked.ready), tuple(checked.failed)
        if not ready:
            duration = time.monotonic() - started
            self._outcomes.append(Receipt(batch, (), failed, 0, duration))
            return
        self._number += 1
        length = archive_length(blob.size or 0 for blob in ready)
        flight = _Flight(self._number, batch, ready, failed, length, started)
        self._flights.append(flight)
        self._send(memoryview(f"{flight.number} {length}\n".encode()))
        try:
            problem = self._send_archive(ready, length) or self._alteration(checked)
        except SourceError:
            self.abort()
            raise
        if problem is not None and not self._usable:
            self._flights.remove(flight)
            raise problem
        if self._lockstep:
            self._await_extraction(flight)
        self._send(memoryview(b"commit\n" if problem is None else b"abort\n"))
        flight.handed_over = time.monotonic()
        if problem is not None:
            flight.aborted = True
            raise problem

    def collect(self, timeout: float) -> list[Receipt | Rejection]:
        deadline = time.monotonic() + timeout
        while self._usable and not self._outcomes and self._flights:
            now = time.monotonic()
            self._check_overdue(now)
            self._hear(wait_for(reading=self._listening(), timeout=max(0.0, deadline - now)))
            if now >= deadline:
                break
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        self._usable = False
        self._ssh.close_stdin()
        self._ssh.wait(_CLOSE_SECONDS)
        self._ssh.kill()

    def abort(self) -> None:
        self._usable = False
        self._ssh.kill()

    def _greet(self, script: bytes) -> bool:
        """Start the remote loop; whether the two sides must take turns (lockstep)."""
        deadline = time.monotonic() + self._plan.transport.connect_timeout
        pending = memoryview(script)
        seen = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RemoteUnreachable(
                    "the remote did not start our loop in time",
                    detail=f"waited {self._plan.transport.connect_timeout:.0f} s;"
                    f" it said {_last_words(seen, self._ssh.stderr)}",
                    hint="log in with the same options and see what its startup files do (do they"
                    " read from stdin, or start another program?)",
                )
            ready = wait_for(
                reading=self._listening(),
                writing=[self._ssh.stdin_fd] if pending else [],
                timeout=left,
            )
            self._ssh.drain_stderr()
            if pending and self._ssh.stdin_fd in ready:
                try:
                    pending = pending[self._write(pending) :]
                except BrokenPipeError:
                    pending = memoryview(b"")  # It has ended: its last words are on stdout.
            if self._ssh.stdout_fd not in ready:
                continue
            data = self._ssh.read()
            if data == b"":
                raise self._lost(seen)
            seen += data or b""
            if len(seen) > _NOISE_LIMIT:
                raise RemoteDenied(
                    "the remote prints without end before our loop starts",
                    detail=_last_words(seen, self._ssh.stderr),
                    hint="make its startup files silent for shells that are not interactive",
                )
            *lines, rest = seen.split(b"\n")
            for line in lines:
                if match := _GREETING.match(line):
                    self._lines = rest
                    verdict, text = match[1].decode(), match[2].decode("utf-8", "backslashreplace")
                    if verdict == "ready":
                        return text == "lockstep"
                    raise explain_root(text)

    def _send_archive(self, ready: Sequence[Blob], length: int) -> BatchRejected | None:
        """Run tar over the blobs into the connection; what went wrong with tar, if anything.

        When tar wrote another length than announced, the far side no longer knows where it stands:
        the session is aborted.
        """
        root = self._plan.store.root
        with _name_list(ready) as names:
            tar = _start(tar_argv(root), tar_environment(os.environ), stdin=names.fileno())
        try:
            sent = self._pump(tar, length)
            status = tar.wait(self._plan.run.stall_timeout)
        finally:
            tar.kill()
        detail = tar.stderr.text or f"tar ended with status {status}"
        if sent != length:
            self.abort()
            return BatchRejected(
                "tar did not write what was announced",
                detail=f"{sent} of {length} bytes; {detail}",
                hint="a blob changed while it was read; it is looked at again",
            )
        return BatchRejected("tar failed on a batch", detail=detail) if status != 0 else None

    def _alteration(self, checked: Inspection) -> BatchRejected | None:
        """What was sent was not what was inspected, if so."""
        altered = self._plan.store.altered(checked)
        if not altered:
            return None
        return BatchRejected(
            "a blob changed while it was sent",
            detail=f"{relative_path(altered[0].blobid)}, and {len(altered) - 1} more",
            hint="it is looked at again",
        )

    def _pump(self, tar: Child, length: int) -> int:
        """Copy tar's output to the connection until it ends; bytes sent, at most length."""
        sent = 0
        while data := self._next_chunk(tar):
            if sent + len(data) > length:
                return sent + len(data)
            self._send(memoryview(data), tar)
            sent += len(data)
        return sent

    def _next_chunk(self, tar: Child) -> bytes:
        while (data := tar.read()) is None:
            fds = [tar.stdout_fd, *_error_fd(tar), *self._listening()]
            self._hear(wait_for(reading=fds, timeout=None))
            tar.drain_stderr()
        return data

    def _send(self, data: memoryview, tar: Child | None = None) -> None:
        """Hand all of data to ssh; hears answers meanwhile. Raises when the link stalls or
        breaks.
        """
        moved = time.monotonic()
        while data:
            chunk, pause = data, 0.0
            if self._throttle is not None:
                chunk = data[: self._throttle.allowance(time.monotonic())]
                pause = self._throttle.delay() if not chunk else 0.0
            try:
                sent = self._write(chunk)
            except BrokenPipeError:
                raise self._lost() from None
            now = time.monotonic()
            if sent:
                moved = now
                data = data[sent:]
                continue
            if pause:
                moved = now
            elif now - max(moved, self._heard) > self._patience:
                raise self._broken(
                    RemoteUnreachable(
                        "the link has stalled",
                        detail=f"no byte went out for {self._patience:.0f} s",
                    )
                )
            fds = self._listening() + (_error_fd(tar) if tar else [])
            writing = [] if pause else [self._ssh.stdin_fd]
            self._hear(wait_for(reading=fds, writing=writing, timeout=pause or 1.0))
            if tar is not None:
                tar.drain_stderr()

    @property
    def _patience(self) -> float:
        """Seconds for which nothing may move. A remote with earlier batches to settle may be busy
        syncing them; that the link lives meanwhile is what ssh's ServerAlive tells.
        """
        run = self._plan.run
        return run.receipt_timeout if len(self._flights) > 1 else run.stall_timeout

    def _write(self, chunk: memoryview) -> int:
        """Hand over what ssh takes now, and count it; how many bytes that was. Raises
        BrokenPipeError.
        """
        sent = write(self._ssh.stdin_fd, chunk) if chunk else 0
        if sent:
            self._plan.on_bytes(sent)
            if self._throttle is not None:
                self._throttle.spend(sent)
        return sent

    def _await_extraction(self, flight: _Flight) -> None:
        deadline = time.monotonic() + self._plan.run.receipt_timeout
        while not flight.extracted:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._overdue(flight)
            self._hear(wait_for(reading=self._listening(), timeout=left))

    def _check_overdue(self, now: float) -> None:
        oldest = self._flights[0]
        if now - max(oldest.handed_over, self._heard) > self._plan.run.receipt_timeout:
            raise self._overdue(oldest)

    def _overdue(self, flight: _Flight) -> BackupError:
        return self._broken(
            RemoteUnreachable(
                "the remote does not answer for a batch",
                detail=f"batch {flight.batch.name}, {self._plan.run.receipt_timeout:.0f} s",
                hint="its disk may be very slow: see run.receipt_timeout",
            )
        )

    def _listening(self) -> list[int]:
        return [self._ssh.stdout_fd, *_error_fd(self._ssh)]

    def _hear(self, ready: frozenset[int]) -> None:
        """Take the answers that have arrived."""
        if self._ssh.stderr_fd in ready:
            self._ssh.drain_stderr()
        if self._ssh.stdout_fd not in ready:
            return
        data = self._ssh.read()
        if data is None:
            return
        if data == b"":
            raise self._lost()
        self._heard = time.monotonic()
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            self._answer(line.decode("utf-8", "backslashreplace"))
        if len(self._lines) > _NOISE_LIMIT:
            raise self._broken(
                RemoteUnreachable("the remote answers nonsense", detail="no line end")
            )

    def _answer(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        number, _, text = rest.partition(" ")
        if word == "got":
            for flight in self._flights:
                flight.extracted |= number == str(flight.number)
            return
        if not self._flights or number != str(self._flights[0].number):
            raise self._broken(RemoteUnreachable("the remote answers nonsense", detail=line[:200]))
        flight = self._flights.popleft()
        if word == "ok" and not flight.aborted:
            duration = time.monotonic() - flight.started
            self._outcomes.append(
                Receipt(flight.batch, flight.ready, flight.failed, flight.wire_bytes, duration)
            )
        elif word == "err" and not flight.aborted:
            self._outcomes.append(Rejection(flight.batch, explain_batch(text)))
        elif not flight.aborted:
            raise self._broken(RemoteUnreachable("the remote answers nonsense", detail=line[:200]))

    def _lost(self, said: bytes = b"") -> BackupError:
        """ssh has ended, or closed its side: why. said: what came instead of our greeting."""
        status = self._ssh.wait(1.0)
        words = login_words(said, self._ssh.stderr.text)
        return self._broken(self._plan.transport.explain(status, words))

    def _broken(self, error: BackupError) -> BackupError:
        self.abort()
        return error


def _start(argv: Sequence[str], env: Mapping[str, str], stdin: int | None = None) -> Child:
    try:
        return Child(argv, stdin=stdin, env=env)
    except FileNotFoundError as error:
        raise SourceError(
            f"{argv[0]} is not installed on this machine",
            hint=f"apt-get install {'openssh-client' if argv[0] == 'ssh' else argv[0]}",
        ) from error


def _name_list(blobs: Sequence[Blob]) -> BinaryIO:
    """The names for tar, NUL-separated, in an anonymous file: no path, nothing to clean up."""
    names = os.fdopen(os.memfd_create("ntt-names", os.MFD_CLOEXEC), "wb")
    names.write(b"".join(relative_path(blob.blobid).encode() + b"\0" for blob in blobs))
    names.flush()
    names.seek(0)
    return names


def _error_fd(child: Child) -> list[int]:
    return [child.stderr_fd] if child.stderr_fd >= 0 else []


def _last_words(stdout: bytes, stderr: Tail) -> str:
    words = stderr.text or stdout[-200:].decode("utf-8", "backslashreplace").strip()
    return repr(words[-200:]) if words else "nothing"
