"""What the contract suite needs: a store, a remote to send to, and remotes that misbehave.

`Machine` is a remote on this machine whose tools can be replaced and whose startup files can say
or do anything, which no real server would let a test do.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.client.receiver_connection import ReceiverConnection
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.throttle import process_pace
from ntt_backup.client.transport import Local, Transport
from ntt_backup.config.bandwidth_timetable import parse_timetable
from ntt_backup.config.sections import RunSettings
from ntt_backup.errors import BackupError
from ntt_backup.model import Batch, Blob, Failure, Receipt
from ntt_backup.source.store import Inspection, Store
from ntt_backup.upload.strategies import open_session
from ntt_backup.upload.strategies.session import Outcome, Session
from ntt_backup.wire import messages
from tests.helpers.waiting import PATIENCE

# Waits of the product, of which no test shall see the end unless it says so.
PATIENT: dict[str, Any] = {"stall_timeout": PATIENCE, "receipt_timeout": PATIENCE}


@dataclass(frozen=True)
class Machine:
    """Transport to a shell on this machine, with tools of ours before all others in its PATH.

    startup: shell text that runs before our command, as the startup files of an account do.
    script: what an `Imposter` runs instead of our command.
    recording: where to keep a copy of every byte that is sent.
    """

    tools: Path
    startup: str = ":"
    script: str = ""
    recording: Path | None = None
    connect_timeout: float = PATIENCE
    hint: str = ""

    def argv(self, remote_command: str) -> list[str]:
        script = f"{self.startup}\n{remote_command}"
        if self.recording is not None:
            script = f"tee {shlex.quote(str(self.recording))} | {{ {script}\n}}"
        return ["/bin/sh", "-c", script]

    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}"}

    def explain(self, status: int | None, stderr: str) -> BackupError:
        return Local().explain(status, stderr)

    def tool(self, name: str, script: str) -> None:
        """Replace a program by a shell script."""
        self._write(name, f"#!/bin/sh\n{script}\n")

    def python_tool(self, name: str, program: str) -> None:
        """Replace a program by a Python program."""
        self._write(name, f"#!{sys.executable} -IS\n{program}\n")

    def only(self, *names: str) -> dict[str, str]:
        """An environment in which the PATH holds these programs of this machine and no others."""
        for name in names:
            (self.tools / name).symlink_to(_which(name))
        return {**os.environ, "PATH": str(self.tools)}

    def _write(self, name: str, text: str) -> None:
        path = self.tools / name
        path.write_text(text)
        path.chmod(0o755)


def _which(name: str) -> str:
    for directory in os.environ["PATH"].split(":"):
        if os.access(f"{directory}/{name}", os.X_OK):
            return f"{directory}/{name}"
    pytest.fail(f"{name} is not installed", pytrace=False)


class Imposter(Machine):
    """A remote that runs a script of ours instead of the strategy's, once it has been sent that."""

    def argv(self, remote_command: str) -> list[str]:
        (length,) = re.findall(r"head -c (\d+)", remote_command)
        return super().argv(f"head -c {length} >/dev/null\n{self.script}")


class Tampered(Store):
    """A store in which something happens once, right after a batch was inspected: `then`."""

    then: Callable[[], object] | None = None

    def inspect(self, blobs: Sequence[Blob], *, verify: bool) -> Inspection:
        checked = super().inspect(blobs, verify=verify)
        if self.then is not None:
            self.then()
            self.then = None
        return checked


@dataclass
class Harness:
    """A local store, a remote directory, and the sessions between them.

    path is the remote directory as the remote names it; remote_dir is its path on this machine.
    """

    strategy: str
    store: Path
    transport: Transport
    path: str
    remote_dir: Path
    sent: int = 0
    carried: list[int] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)

    # --- local

    def put(self, content: bytes) -> Blob:
        """A blob in the store."""
        blob = Blob(blake3(content).hexdigest(), len(content))
        path = self.source_path(blob)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        # Long ago, so that a change to it shows in its time.
        os.utime(path, (1_000_000_000, 1_000_000_000))
        return blob

    def batch(self, name: str, *contents: bytes) -> Batch:
        """A batch of new blobs."""
        return Batch(name, tuple(self.put(content) for content in contents))

    def source_path(self, blob: Blob) -> Path:
        return self.store / relative_path(blob.blobid)

    # --- remote

    def on_remote(self) -> dict[str, bytes | str]:
        """What stands below by-hash: path to content, or to what it is where it is no file."""
        top = self.remote_dir / "by-hash"
        found: dict[str, bytes | str] = {}
        for path in top.rglob("*"):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                found[str(path.relative_to(top))] = path.read_bytes()
            elif not stat.S_ISDIR(mode):
                found[str(path.relative_to(top))] = stat.filemode(mode)
        return found

    def final(self, blob: Blob) -> Path:
        """The path of a blob on the remote, as this machine sees it."""
        return self.remote_dir / "by-hash" / relative_path(blob.blobid)

    def expected(self, *batches: Batch) -> dict[str, bytes]:
        """What on_remote returns when the remote has these batches and nothing else."""
        blobs = [blob for batch in batches for blob in batch.blobs]
        return {relative_path(blob.blobid): self.source_path(blob).read_bytes() for blob in blobs}

    # --- between

    def open(
        self,
        *,
        transport: Transport | None = None,
        store: Store | None = None,
        root: str | None = None,
        bytes_per_second: float | None = None,
        **run: Any,
    ) -> Session:
        """A session; what is not given is as it should be."""
        session = open_session(
            self.strategy,
            SessionSpec(
                transport=transport or self.transport,
                root=root or self.path,
                owner="0123456789ab",
                run_id="run",
                slot=str(len(self.sessions)),
                run=RunSettings(**{**PATIENT, **run}),
                pace=process_pace(parse_timetable(bytes_per_second)) if bytes_per_second else None,
                on_bytes=self._count,
                on_content=self._carry,
            ),
            store or Store(self.store),
        )
        self.sessions.append(session)
        return session

    def deliver(self, batch: Batch, **how: Any) -> Receipt:
        """What one batch over a session of its own comes to."""
        session = self.open(**how)
        session.put(batch)
        (outcome,) = settle(session)
        return receipt_of(outcome)

    def assert_arrives(self, batch: Batch, **how: Any) -> None:
        """All of the batch is stored, and nothing else is on the remote."""
        assert self.deliver(batch, **how).stored == batch.blobs
        assert self.on_remote() == self.expected(batch)

    def _count(self, count: int) -> None:
        self.sent += count

    def _carry(self, count: int) -> None:
        self.carried.append(self.content + count)

    @property
    def content(self) -> int:
        """Content that was stored or is under way, as the sessions tell it."""
        return self.carried[-1] if self.carried else 0

    def close(self) -> None:
        for session in self.sessions:
            session.abort()


def settle(session: Session) -> list[Outcome]:
    """Every outcome that the session still owes."""
    outcomes = session.collect(0.0)
    deadline = time.monotonic() + PATIENCE
    while session.in_flight:
        assert time.monotonic() < deadline, f"no outcome for {session.in_flight}"
        outcomes += session.collect(1.0)
    return outcomes


def takes(patched: pytest.MonkeyPatch, seconds: float) -> None:
    """From now on each piece that comes from a remote takes so long, by a clock that jumps."""
    frames, clock, jumped = ReceiverConnection.frames, time.monotonic, 0.0

    def jumping(connection: ReceiverConnection, data: bytes) -> Iterator[tuple[int, memoryview]]:
        nonlocal jumped
        jumped += seconds
        return frames(connection, data)

    patched.setattr(ReceiverConnection, "frames", jumping)
    patched.setattr(time, "monotonic", lambda: clock() + jumped)


def receipt_of(outcome: Outcome) -> Receipt:
    assert isinstance(outcome, Receipt), outcome
    return outcome


def reasons(failed: Sequence[Failure]) -> dict[str, str]:
    return {failure.blobid: failure.reason.value for failure in failed}


class Taken:
    """Takes contents, and keeps what was taken."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def whole(self, digest: bytes, content: memoryview) -> None:
        self.digests.append(digest)

    def begin(self, large: messages.Large) -> None:
        self.digests.append(large.digest)

    def piece(self, data: memoryview) -> None: ...
    def end(self, problem: str) -> None: ...
    def not_given(self, digest: bytes, verdict: int, text: str) -> None: ...
