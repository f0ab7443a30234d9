"""A worker is a process of its own: it can be watched and killed by itself, and lost.

It gets its `WorkerSpec` when it is made. On stdin comes the word `go` once it is known that there
is work, and at most the word `stop` after it; its events go out as JSON lines on stdout. Before
`go` it only connects to the remote. The first worker probes the remote for the preflight meanwhile:
each of the words `probe`, `try` and `place` has an answer, and afterwards it sends over the same
connection. If the word is `probe and try`, and comes before the remote has answered, the worker
claims its first blobs and sends them right behind its question to the remote; `go` commits them.
When the coordinator dies, the kernel ends the worker, and with it its tar and ssh.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from ntt_backup import events
from ntt_backup.catalog.ranges import claim_order
from ntt_backup.client.connection import Connection, SessionSpec
from ntt_backup.client.effort import Effort
from ntt_backup.client.throttle import Limit
from ntt_backup.config import Settings
from ntt_backup.errors import BackupError
from ntt_backup.model import Batch
from ntt_backup.process.messages import Done, Fatal, Found
from ntt_backup.process.pipeline import wait_for
from ntt_backup.process.shared import SharedNumber
from ntt_backup.source.inspection import Store
from ntt_backup.source.read_ahead import ReadAhead
from ntt_backup.upload.event_pipe import EventPipe
from ntt_backup.upload.strategies import connect_ahead, open_probe, open_session
from ntt_backup.upload.strategies.probe import LINGERS, SessionProbe
from ntt_backup.upload.strategies.session import Session
from ntt_backup.upload.strategies.stream import StreamSession
from ntt_backup.upload.worker import Worker

if TYPE_CHECKING:
    from ntt_backup.upload.catalog_session import CatalogSession

GO: Final = b"go\n"
STOP: Final = b"stop\n"
PROBE: Final = b"probe\n"
# A probe before trial blobs, for which some strategies prepare.
PROBE_AND_TRY: Final = b"probe and try\n"
TRY_OUT: Final = b"try\n"
PLACE: Final = b"place\n"

_STDIN: Final = 0
_STDOUT: Final = 1
# A connection that has waited for longer may be gone without a sign.
_FRESH_SECONDS: Final = 30.0
# How long the remote's answer may have to wait for the coordinator's first word.
_WORD_SECONDS: Final = 1.0


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
        self._session: Session | None = None
        self._ahead: Connection | StreamSession | None = None
        self._since = 0.0

    def begin_probe(self, meanwhile: Callable[[Sequence[int]], Batch | None]) -> None:
        """Connects, and chooses the strategy of all sessions. meanwhile is called while the remote
        answers, with the descriptors on which it will be heard, and returns what to send first.
        Raises as `Session` does.
        """
        first: list[Batch | None] = []
        # A slow limit would make the trial last for longer than it may.
        spec = replace(self._spec, pace=None, meanwhile=lambda fds: first.append(meanwhile(fds)))
        self._probe = open_probe(self.strategy, spec)
        self.strategy = self._probe.strategy
        if first and (batch := first[0]) is not None:
            self._probe.send_ahead(self._store, batch)

    def answer(self, word: bytes) -> Found | Done:
        """Carries out a word of the preflight, and returns the answer. Raises as `Session` does."""
        probe = self._probe
        assert probe is not None  # `begin_probe` comes first.
        said: Found | Done
        if word == TRY_OUT:
            said = Done(text=probe.try_out())
        elif word == PLACE:
            probe.make_place()
            said = Done(text="")
        else:
            facts = probe.facts(will_try_out=word == PROBE_AND_TRY)
            said = Found(strategy=probe.strategy, facts=asdict(facts))
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
        ends = (self._probe, self._session)
        return any(end is not None and end.lingers for end in ends)

    def connect_ahead(self) -> None:
        """Connects; an error will show again when a session is wanted."""
        with suppress(BackupError):
            self._ahead = connect_ahead(self.strategy, self._spec)
        self._since = time.monotonic()

    def connect(self) -> Session:
        """Opens a session. Raises as `Session` does."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and time.monotonic() - self._since >= _FRESH_SECONDS:
            ahead.abort()
            ahead = None
        self._session = open_session(self.strategy, self._spec, self._store, ahead)
        return self._session


def session_spec(spec: WorkerSpec, pipe: EventPipe) -> SessionSpec:
    """Returns what this worker's sessions are opened with."""
    return replace(
        SessionSpec.of(spec.settings, spec.run_id, str(spec.worker), sends=True),
        pace=spec.limit.sender(spec.worker) if spec.limit is not None else None,
        effort=spec.effort.sender(spec.worker) if spec.effort is not None else None,
        on_bytes=pipe.sent,
        on_content=pipe.carried,
        stopping=lambda: pipe.stopping,
        meanwhile=lambda _: load(),
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
        from ntt_backup.upload.catalog_session import CatalogSession

        return CatalogSession(
            settings.catalog.url,
            f"{spec.application}/{spec.worker}",
            settings.target,
            claim_order(spec.worker, settings.run.workers),
            # Inserts come one by one, and each would make a pack.
            listen=spec.watch and settings.remote.kind != "s3",
        )

    ahead = ReadAhead(store.root, settings.source.read_order, lambda: pipe.sent(0), spec.turn)
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
    )


def work(spec: WorkerSpec) -> int:
    """Does all that a worker does, on its stdin and stdout. Returns the exit status: 0, or that of
    the error that ended it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    pipe = EventPipe(_STDIN, _STDOUT)
    store = Store(spec.settings.source.root, lambda: pipe.sent(0))
    try:
        remote = Remote(spec.strategy, session_spec(spec, pipe), store)
        worker = make_worker(spec, store, remote, pipe)
        goes = _prepare(spec, remote, worker, pipe)
        if goes:
            gc.freeze()  # What is loaded stays: no collection need look at it.
            pipe.emit(events.WorkerStart(strategy=remote.strategy))
            worker.run()
        else:
            worker.let_go()
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


def _prepare(spec: WorkerSpec, remote: Remote, worker: Worker, pipe: EventPipe) -> bool:
    """Connects to the remote, or probes it; returns whether to work."""
    words = _Words(_STDIN)

    def meanwhile(fds: Sequence[int]) -> Batch | None:
        # Nothing is loaded before: ssh and the coordinator have the processors first.
        if words.await_first(fds) != PROBE_AND_TRY:
            return None
        load()
        worker.claim_ahead()
        return None if spec.settings.run.bwlimit else worker.first_batch()

    if not spec.probes:
        remote.connect_ahead()
        worker.claim_ahead()
        return words.next() == GO
    # Its end takes the trial blobs along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    remote.begin_probe(meanwhile)
    while (word := words.next()) in (PROBE, PROBE_AND_TRY, TRY_OUT, PLACE):
        pipe.emit(remote.answer(word))
        if word == PROBE_AND_TRY and remote.strategy == "objects":
            worker.claim_ahead()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    remote.end_probe(go_on=word == GO)
    return word == GO


class _Words:
    """Reads what the coordinator says before the work; what follows is left to `EventPipe`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._first = b""

    def await_first(self, beside: Sequence[int]) -> bytes:
        """Waits a moment for the first word, which stays the next one; returns nothing where a
        descriptor of beside can be read before it.
        """
        ready = wait_for(reading=[self._fd, *beside], timeout=_WORD_SECONDS)
        if ready == {self._fd} and not self._first:
            self._first = self.next()
        return self._first

    def next(self) -> bytes:
        """Returns one line, read byte by byte."""
        data, self._first = self._first, b""
        while not data.endswith(b"\n"):
            piece = os.read(self._fd, 1)
            if not piece:
                break
            data += piece
        return data
