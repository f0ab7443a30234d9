"""The control socket lets a daemon's own user, on its own host, ask it and tell it what to do.

A Unix socket that only its user can open, from its first instant. One request a connection, one
line of JSON, and one line as the answer. It is served between the other things that the coordinator
waits for, and never waited for itself: a peer that says nothing, too much or nonsense is cut off,
and the run goes on. Where the socket cannot be made, the run goes on without it. A command is the
other end (`ask`, `report`): it makes sure whose program listens.

What a run tells of itself (`RunReport`) is little: the last lines, the bytes of the last hour, and
which side is unreachable since when. All of it is bounded, for a daemon that runs for years.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from pydantic import TypeAdapter

from ntt_backup import events
from ntt_backup.config import CatalogConfig
from ntt_backup.daemon.listeners import Listener
from ntt_backup.daemon.progress import OpenOutages, RunProgress, RunState
from ntt_backup.errors import BackupError, ConfigError, NotRunning, WaitsToStart
from ntt_backup.formatting import printable, utc
from ntt_backup.snapshot.events import SnapshotProgress

# The kernel's field has 108 bytes, and the last one is 0.
_LONGEST_PATH: Final = 107
MOST_BYTES: Final = 4096
_MOST_PEERS: Final = 16
_BACKLOG: Final = 128
_PATIENCE_SECONDS: Final = 5.0
_ELSEWHERE: Final = "set control.socket (NTT_CONTROL_SOCKET) to another path, for this daemon alone"

Answer = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
# A daemon serves its socket between steps that may take a while, above all at its start.
_ANSWER_SECONDS: Final = 20.0
# What only shows how things are does not wait for long.
_SHORT_SECONDS: Final = 3.0
_LONGEST_ANSWER: Final = 1 << 22
_RECENT: Final = 20
_MINUTES: Final = 60
_LINE_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class Away:
    """A side (remote, catalog, source or preflight) that is unreachable.

    Attributes:
        worker: The number of the worker that misses the side; None before the workers start.
        since: The start of the outage, RFC 3339, UTC.
        reason: The reason of the last attempt.
    """

    what: str
    worker: int | None
    since: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DaemonReport:
    """The state of a running daemon at one moment.

    Attributes:
        strategy: The strategy of the uploads; `auto` until the daemon has found it.
        bwlimit: The bandwidth limit that holds now, in bytes a second; None for no limit.
        jobs: Whether each side job is at work, by its name.
        recent: The last lines, each with its time and level.
        minutes: The minutes of the last hour: seconds since the epoch, and the bytes of content
            that were sent in that minute.
    """

    target: str
    run_id: str
    pid: int
    started_at: str
    watch: bool
    strategy: str
    paused: bool
    bwlimit: int | None
    jobs: Mapping[str, bool]
    state: RunState
    outages: Sequence[Away]
    recent: Sequence[tuple[str, str, str]]
    minutes: Sequence[tuple[int, int]]

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def unreachable(self) -> dict[str, datetime]:
        """The sides that are unreachable, each since its first failure."""
        first: dict[str, datetime] = {}
        for one in self.outages:
            since = datetime.fromisoformat(one.since)
            first[one.what] = min(since, first.get(one.what, since))
        return first

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the report with these fields. Raises ValueError for those of another version."""
        return TypeAdapter(cls).validate_python(fields)


class RunReport(Listener):
    """Collects the report of a run. clock: returns seconds since the epoch."""

    def __init__(self, run_id: str, workers: int, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._run_id = run_id
        self._started_at = _utc(clock())
        self._watch = False
        self._strategy = "auto"
        self._state = RunProgress(0.0, workers).state(0.0)
        self._outages = OpenOutages()
        self._recent: deque[tuple[str, str, str]] = deque(maxlen=_RECENT)
        self._minutes: deque[list[int]] = deque(maxlen=_MINUTES)
        self._sent = 0

    def take(self, what: events.Event | RunState) -> None:
        if isinstance(what, RunState):
            self.refresh(what)
        else:
            self.event(what)

    def event(self, event: events.Event) -> None:
        now = self._clock()
        line = event.line
        if line is not None and not isinstance(event, events.Progress | SnapshotProgress):
            self._recent.append((_utc(now), event.level, line[:_LINE_CHARS]))
        self._outages.take(event, now)
        match event:
            case events.RunStart():
                self._watch, self._strategy = event.watch, event.strategy
            case events.WorkerStart():
                self._strategy = event.strategy

    def connect(self, side: str) -> None:
        """Notes that a side accepts connections again."""
        self._outages.connect(side, self._clock())

    def refresh(self, state: RunState) -> None:
        minute = int(self._clock()) // 60 * 60
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append([minute, 0])
        # Less than before was sent, where a batch has to be sent again.
        self._minutes[-1][1] += max(0, state.sent - self._sent)
        self._sent = state.sent
        self._state = state

    def report(
        self,
        target: str,
        *,
        paused: bool | None = None,
        bwlimit: int | None = None,
        jobs: Mapping[str, bool] = {},
    ) -> DaemonReport:
        """Returns the report of this moment. paused: None: as the last state of the run says."""
        return DaemonReport(
            target=target,
            run_id=self._run_id,
            pid=os.getpid(),
            started_at=self._started_at,
            watch=self._watch,
            strategy=self._strategy,
            paused=self._state.paused if paused is None else paused,
            bwlimit=bwlimit,
            jobs=jobs,
            state=self._state,
            outages=[
                Away(event.what, event.worker, _utc(since), event.why[:_LINE_CHARS])
                for since, event in self._outages.all
            ],
            recent=list(self._recent),
            minutes=[(minute, sent) for minute, sent in self._minutes],
        )


def _utc(seconds: float) -> str:
    return utc(datetime.fromtimestamp(int(seconds), UTC))


@contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Yields an address of the socket, or of the same place, that is short enough for the kernel.

    Raises:
        OSError: The directory of the socket is missing.
    """
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def peer_uid(connection: socket.socket) -> int:
    """Returns the id of the user whose process has made the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", found)[1]
    return uid


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)


class ControlSocket:
    """Listens for requests at a Unix socket, and removes the socket at the end.

    The process holds the PID lock, so a socket that a dead daemon left at the path is replaced.
    answer: gets a request and the id of the user, and returns the answer, or raises BackupError.

    Raises:
        ConfigError: No socket can be created at the path.
    """

    def __init__(self, path: Path, answer: Answer) -> None:
        self._path = path
        self._answer = answer
        self._peers: list[_Peer] = []
        try:
            _remove_stale(path)
            self._listening = _listen(path)
            self._ours = path.lstat()
        except OSError as error:
            raise ConfigError(
                f"the control socket {path} cannot be created",
                detail=error.strerror or str(error),
                hint=_ELSEWHERE,
            ) from error

    @property
    def fds(self) -> list[int]:
        """The descriptors that become readable when there is something to serve."""
        return [self._listening.fileno(), *(one.connection.fileno() for one in self._peers)]

    def serve(self) -> None:
        """Answers the requests that have arrived, without waiting, and drops slow clients."""
        now = time.monotonic()
        with suppress(OSError):  # Nobody waits any more, or who did has gone.
            while True:
                connection, _ = self._listening.accept()
                connection.setblocking(False)
                self._peers.append(_Peer(connection, now + _PATIENCE_SECONDS))
        for peer in self._peers[:]:
            if self._is_done(peer) or now >= peer.until:
                self._drop(peer)
        for peer in self._peers[:-_MOST_PEERS]:
            self._drop(peer)

    @property
    def stands(self) -> bool:
        """Whether the path still names this socket."""
        with suppress(OSError):
            return os.path.samestat(self._path.lstat(), self._ours)
        return False

    def close(self) -> None:
        """Ends all connections, and removes the socket if the path still names it."""
        for peer in self._peers[:]:
            self._drop(peer)
        self._listening.close()
        if self.stands:
            with suppress(OSError):
                self._path.unlink()

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        peer.connection.close()

    def _is_done(self, peer: _Peer) -> bool:
        """Reads from a peer. Returns whether the peer was answered or has gone."""
        try:
            data = peer.connection.recv(MOST_BYTES)
            peer.said += data
            if data and b"\n" not in peer.said and len(peer.said) < MOST_BYTES:
                return False
            # An answer fits into the empty buffer of a connection; who takes less gets less.
            peer.connection.send(json.dumps(self._reply(peer)).encode() + b"\n")
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _reply(self, peer: _Peer) -> Mapping[str, Any]:
        try:
            uid = peer_uid(peer.connection)
            if uid not in (os.geteuid(), 0):
                raise ConfigError("the daemon takes requests of its own user and of root alone")
            return {"ok": True, **self._answer(_request(bytes(peer.said)), uid)}
        except BackupError as error:
            return {"ok": False, **error.fields}


def _request(said: bytes) -> dict[str, Any]:
    line, end, rest = said.partition(b"\n")
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if end and not rest and isinstance(found, dict) and isinstance(found.get("do"), str):
            return found
    raise ConfigError(f"a request is one line of JSON with `do`, of at most {MOST_BYTES} bytes")


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        wrong = "belongs to another user" if stat.S_ISSOCK(found.st_mode) else "is no socket"
        raise ConfigError(f"what stands at {path} {wrong}", hint=_ELSEWHERE)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            with short_address(path) as address:
                probe.connect(address)
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise ConfigError(f"another daemon listens at {path}", hint=_ELSEWHERE)


def _listen(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listening.setblocking(False)
        with short_address(path) as address:
            listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


def report(settings: CatalogConfig) -> DaemonReport:
    """Returns the report of the target's daemon. Raises as `ask` does."""
    said = _answer(settings, {"do": "state"}, _SHORT_SECONDS)
    try:
        return DaemonReport.of(said)
    except ValueError as error:
        raise _of_another_version(settings, repr(error)) from error


def ask(settings: CatalogConfig, do: str, **values: str) -> dict[str, Any]:
    """Returns the answer of the daemon of this target.

    The field `done` of the answer says what the daemon has done.

    Raises:
        NotRunning: No daemon answers.
        BackupError: The daemon refuses the request.
    """
    said = _answer(settings, {"do": do, **values}, _ANSWER_SECONDS)
    if not isinstance(said.get("done"), str):
        raise _of_another_version(settings, "it does not say what it has done")
    return said


def _answer(settings: CatalogConfig, request: Mapping[str, str], patience: float) -> dict[str, Any]:
    path = settings.control.socket
    assert path is not None  # The settings have a default that depends on others.
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(patience)
            with short_address(path) as address:
                connection.connect(address)
            if (uid := peer_uid(connection)) not in believed(path):
                raise ConfigError(
                    f"what listens at {path} is a program of the user {uid}, and may not be the"
                    " daemon",
                    hint="call it as the daemon's user, or set lock.file to a directory of the"
                    " daemon's own, such as /run/ntt-backup",
                )
            connection.sendall(json.dumps(request).encode() + b"\n")
            said = json.loads(_all_of(connection, patience))
            if not isinstance(said, dict):
                raise ValueError("it is no JSON object")
        except PermissionError as error:
            raise ConfigError(
                f"this user may not ask the daemon of target {settings.target}",
                detail=f"{path}: {error.strerror}",
                hint="call it as the daemon's user, or as root",
            ) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotRunning(
                f"no daemon runs for target {settings.target} on this host",
                detail=f"nobody listens at {path}",
                hint="`ntt-backup-remote run --watch` starts one",
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise NotRunning(
                f"the daemon of target {settings.target} does not answer",
                detail=f"{path}: {error}",
                hint="its log says what it does; run the command again",
            ) from error
    if said.pop("ok", False):
        return said
    # Whoever listens there may not be ours: only what an error has is taken, as text.
    message, detail, hint = (
        printable(str(said.get(name, ""))) for name in ("message", "detail", "hint")
    )
    if not message:
        raise _of_another_version(settings, "it refuses, and does not say why")
    code = said.get("exit_code")
    exit_code = code if isinstance(code, int) and 0 < code < 256 else None
    if exit_code == WaitsToStart.exit_code:
        raise WaitsToStart(message, detail=detail, hint=hint)
    raise BackupError(message, detail=detail, hint=hint, exit_code=exit_code)


def _of_another_version(settings: CatalogConfig, detail: str) -> NotRunning:
    text = f"the daemon of target {settings.target} is of another version"
    return NotRunning(text, detail=detail, hint="start it again")


def believed(path: Path) -> set[int]:
    """Returns the ids of the users whose program at the socket's path is trusted as the daemon.

    These are root, the user of this process, and the owner of the socket's directory if nobody else
    can have put the directory there. Raises OSError if a directory cannot be inspected.
    """
    users, directory = {0, os.geteuid()}, path.absolute().parent
    owner = directory.stat().st_uid
    above = [place.stat() for place in {*directory.parents, *directory.resolve().parents}]
    if all(one.st_uid in (0, owner) and not one.st_mode & 0o022 for one in above):
        users.add(owner)
    return users


def _all_of(connection: socket.socket, patience: float) -> bytes:
    deadline = time.monotonic() + patience
    said = bytearray()
    while len(said) < _LONGEST_ANSWER and (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        data = connection.recv(1 << 16)
        if not data:
            break
        said += data
    return bytes(said)
