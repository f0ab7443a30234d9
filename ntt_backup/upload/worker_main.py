"""A worker is a process of its own: it can be watched and killed by itself, and lost.

It gets its `WorkerSpec` when it is made. On stdin comes the word `go` once it is known that there
is work, and at most the word `stop` after it; its events go out as JSON lines on stdout. The first
worker probes the remote for the preflight before `go`: each of the words `probe` and `place` has an
answer. It sends over the same connection, so that a run waits for one ssh handshake only. When the
coordinator dies, the kernel ends the worker, and with it its tar and ssh.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from ntt_backup import events
from ntt_backup.client.compression_level import Effort
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.throttle import Limit
from ntt_backup.config import Settings
from ntt_backup.errors import BackupError
from ntt_backup.process.memory import SharedNumber, collect_often
from ntt_backup.process.messages import Done, Fatal, RemoteProbed
from ntt_backup.source.paths import Paths
from ntt_backup.source.read_ahead import ReadAhead
from ntt_backup.source.store import Store
from ntt_backup.upload.event_pipe import EventPipe
from ntt_backup.upload.strategies import open_probe, open_session
from ntt_backup.upload.strategies.probe import LINGERS, Ahead, SessionProbe
from ntt_backup.upload.strategies.session import Session
from ntt_backup.upload.worker import Worker

if TYPE_CHECKING:
    from ntt_backup.upload.catalog_session import CatalogSession

GO: Final = b"go\n"
STOP: Final = b"stop\n"
PROBE: Final = b"probe\n"
TRY_OUT: Final = b"try\n"
PLACE: Final = b"place\n"

_STDIN: Final = 0
_STDOUT: Final = 1
# A connection that has waited for longer may be gone without a sign.
_FRESH_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Holds what a worker is to do. worker: its number, counted from 0. limit: what all workers
    together may send. poll: how often they look for new work; None: as the settings say. effort:
    how hard all compress. turn: until when one of them reads ahead, see `read_ahead`. probes: the
    worker probes the remote before it works; its strategy may be `auto`. started: the time of the
    epoch when the run began.
    """

    settings: Settings
    worker: int
    run_id: str
    application: str
    strategy: str
    watch: bool
    limit: Limit | None = None
    poll: SharedNumber | None = None
    effort: Effort | None = None
    turn: SharedNumber | None = None
    probes: bool = False
    started: float = 0.0


class Remote:
    """Opens sessions; the first one over a connection that was made ahead, where there is one.

    lingers: whether another process on the remote held a connection open after its end.
    """

    def __init__(self, strategy: str, spec: SessionSpec, store: Store) -> None:
        self.strategy = strategy
        self._spec = spec
        self._store = store
        self._probe: SessionProbe | None = None
        # Whoever uses the session ends it. Its compressor or buffers take up to 64 MiB.
        self._session: Callable[[], Session | None] = lambda: None
        self._ahead: Ahead | None = None
        self._since = 0.0

    def expect(self, identity: str) -> None:
        """Has each further session require this identity of the target; "" for any."""
        self._spec = replace(self._spec, identity=identity)

    def begin_probe(self) -> None:
        """Connects, and chooses the strategy of all sessions. Raises as `Session` does."""
        # A slow limit would make the trial of a check last for longer than it may.
        self._probe = open_probe(self.strategy, replace(self._spec, pace=None))
        self.strategy = self._probe.strategy

    def answer(self, word: bytes) -> RemoteProbed | Done:
        """Carries out a word of the preflight, and returns the answer. Raises as `Session` does."""
        probe = self._probe
        assert probe is not None  # `begin_probe` comes first.
        said: RemoteProbed | Done
        if word == TRY_OUT:
            said = Done(text=probe.try_out())
        elif word == PLACE:
            said = Done(text=probe.make_place())
        else:
            said = RemoteProbed(strategy=probe.strategy, facts=asdict(probe.facts()))
        self._since = time.monotonic()
        return said

    def end_probe(self, *, go_on: bool) -> None:
        """Keeps the connection of the probe for the first session, or ends it in good order."""
        if self._probe is not None and go_on:
            self._ahead = self._probe.hand_over()
            if self._ahead is not None:
                self._ahead.channel.pace = self._spec.pace
        elif self._probe is not None:
            self._probe.close()

    @property
    def lingers(self) -> bool:
        ends = (self._probe, self._session())
        return any(end is not None and end.lingers for end in ends)

    def connect(self) -> Session:
        """Opens a session. Raises as `Session` does."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and time.monotonic() - self._since >= _FRESH_SECONDS:
            ahead.abort()
            ahead = None
        session = open_session(self.strategy, self._spec, self._store, ahead)
        self._session = weakref.ref(session)
        return session


def session_spec(spec: WorkerSpec, pipe: EventPipe) -> SessionSpec:
    """Returns what this worker's sessions are opened with."""
    return replace(
        SessionSpec.of(spec.settings, spec.run_id, str(spec.worker), sends=True),
        pace=spec.limit.sender(spec.worker) if spec.limit is not None else None,
        effort=spec.effort.sender(spec.worker) if spec.effort is not None else None,
        on_bytes=pipe.sent,
        on_content=pipe.carried,
        stopping=lambda: pipe.stopping,
        meanwhile=load,
        dead_before=None if spec.worker else lambda: _dead_before(spec),
    )


def load() -> None:
    """Loads what speaks to the catalog: the first worker is forked before that is loaded."""
    import ntt_backup.upload.catalog_session  # noqa: F401


def _dead_before(spec: WorkerSpec) -> float:
    """Returns before which time an upload was begun that has no sender any more. This host has one
    run for a target, so where no other host sends to it, that is the time when the run began.
    """
    from ntt_backup.catalog.connection import connect
    from ntt_backup.catalog.range_locks import holders
    from ntt_backup.objects.bucket import DEAD_SECONDS

    latest = time.time() - DEAD_SECONDS
    with suppress(BackupError), connect(spec.settings.catalog.url, spec.application) as conn:
        names = [one.application_name for one in holders(conn, spec.settings.target)]
        if all(name.startswith(f"{spec.application}/") for name in names):
            latest = max(latest, spec.started)
    return latest


def make_worker(spec: WorkerSpec, store: Store, remote: Remote, pipe: EventPipe) -> Worker:
    """Returns what does the work."""
    settings = spec.settings

    def connect_catalog() -> CatalogSession:
        from ntt_backup.catalog.range_locks import claim_order
        from ntt_backup.upload.catalog_session import CatalogSession

        session = CatalogSession(
            settings.catalog.url,
            f"{spec.application}/{spec.worker}",
            settings.target,
            claim_order(spec.worker, settings.run.workers, settings.part),
            # Inserts come one by one, and each would make a pack.
            listen=spec.watch and not settings.remote.packs,
        )
        remote.expect(session.identity)
        return session

    ahead = ReadAhead(store, settings.source.read_order, spec.turn)
    reads = None
    if settings.by_path:
        from ntt_backup.upload.first_reads import FirstReads

        reads = FirstReads(store, settings.run, pipe, watch=spec.watch)
    return Worker(
        str(spec.worker),
        settings.run,
        store,
        ahead,
        remote.connect,
        connect_catalog,
        pipe,
        watch=spec.watch,
        interval=spec.poll,
        first_reads=reads,
        takes_turns=spec.watch and bool(settings.media),
    )


def work(spec: WorkerSpec) -> int:
    """Does all that a worker does, on its stdin and stdout. Returns the exit status: 0, or that of
    the error that ended it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    pipe = EventPipe(_STDIN, _STDOUT)
    paths = Paths() if spec.settings.by_path else None
    store = Store.of(spec.settings.source, lambda: pipe.sent(0), paths)
    try:
        remote = Remote(spec.strategy, session_spec(spec, pipe), store)
        worker = make_worker(spec, store, remote, pipe)
        goes = _prepare(spec, remote, pipe)
        if goes:
            collect_often()
            pipe.emit(events.WorkerStart(strategy=remote.strategy))
            worker.run()
        if spec.probes and remote.lingers:
            pipe.emit(events.Warning(reason=f"login: {LINGERS}"))
        if goes:
            pipe.emit(events.WorkerStop())
    except BackupError as error:
        pipe.emit(Fatal.of(error))
        return error.exit_code
    except SystemExit:  # By SIGTERM, during the probe.
        return 1
    return 0


def _prepare(spec: WorkerSpec, remote: Remote, pipe: EventPipe) -> bool:
    """Probes the remote, where this worker is the one to do that; returns whether to work."""
    if not spec.probes:
        return _next_word() == GO
    # Its end takes the trial blobs along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    remote.begin_probe()
    while (word := _next_word()) in (PROBE, TRY_OUT, PLACE):
        pipe.emit(remote.answer(word))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    remote.end_probe(go_on=word == GO)
    return word == GO


def _next_word() -> bytes:
    """Returns what the coordinator says next, read byte by byte: what follows `go` is left to
    `EventPipe`.
    """
    data = b""
    while not data.endswith(b"\n") and (piece := os.read(_STDIN, 1)):
        data += piece
    return data
