"""A probe of the remote that a worker makes for the preflight.

The worker sends over the same connection afterwards, so a run waits for only one ssh handshake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ntt_backup import events
from ntt_backup.daemon.workers.supervisor import SupervisedWorker
from ntt_backup.process.messages import Done, Fatal, Found, Message, ProcessEnded
from ntt_backup.upload.strategies.probe import Facts
from ntt_backup.upload.worker_main import PLACE, PROBE, PROBE_AND_TRY, TRY_OUT


class WorkerLost(Exception):
    """The worker died, or could not be started, before it answered."""

    def __init__(self, death: ProcessEnded) -> None:
        super().__init__(death.detail)
        self.death = death


class WorkerProbe:
    """Has a worker answer as `probe.Probe` does, and raises the errors of the worker. Raises
    WorkerLost where the worker dies or cannot be started. hear waits for messages of the worker,
    emit takes its events. meanwhile is called while the remote is asked for its facts.
    """

    lingers = False  # The worker says so itself, at its end.

    def __init__(
        self,
        worker: SupervisedWorker,
        hear: Callable[[], Iterable[Message]],
        emit: Callable[[events.Event], None],
        meanwhile: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._hear = hear
        self._emit = emit
        self._meanwhile = meanwhile
        self.strategy = ""
        worker.prepare()

    def facts(self, *, will_try_out: bool) -> Facts:
        found = self._ask(PROBE_AND_TRY if will_try_out else PROBE, self._meanwhile)
        assert isinstance(found, Found)
        self.strategy = found.strategy
        return Facts(**found.facts)

    def try_out(self) -> str:
        done = self._ask(TRY_OUT)
        assert isinstance(done, Done)
        return done.text

    def make_place(self) -> None:
        self._ask(PLACE)

    def close(self) -> None:
        """Does nothing: the connection is the worker's."""

    def _ask(self, word: bytes, meanwhile: Callable[[], None] = lambda: None) -> Found | Done:
        self._worker.ask(word, time.monotonic())
        meanwhile()
        answer: Found | Done | None = None
        while answer is None:
            for message in self._hear():
                match message:
                    case Found() | Done():
                        answer = message
                    case Fatal():
                        raise message.error
                    case ProcessEnded():
                        raise WorkerLost(message)
                    case events.Event():
                        self._emit(message)
        return answer
