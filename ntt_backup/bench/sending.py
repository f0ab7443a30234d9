"""Blobs to the remote by one way or another, and back: what one worker does of a measurement.

A strategy of the registry is driven through its `Session`, as the daemon drives it, with the same
window and the same checks; only the catalog is left out. Everything else is a plain tar.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ntt_backup.bench import tar_pipe
from ntt_backup.bench.remote import transport, wire_bytes
from ntt_backup.bench.tasks import Answer, Fetch, Item, Send
from ntt_backup.client.connection import SessionSpec
from ntt_backup.errors import RemoteUnreachable, SourceError
from ntt_backup.model import Batch, Blob, Receipt
from ntt_backup.source.inspection import Store
from ntt_backup.upload.strategies import open_session
from ntt_backup.upload.strategies.session import Outcome, Session


class SendJob:
    """See `tasks.Send` and `helper.Job`. It connects when told to go: that is part of the work."""

    def __init__(self, task: Send) -> None:
        self._task = task
        self._scratch = Path(tempfile.mkdtemp(prefix="ntt-bench-"))
        self._journal = self._scratch / "journal"
        self._transport = transport(task.reach, self._journal)

    def run(self) -> Answer:
        task = self._task
        began = time.monotonic()
        if task.strategy is not None:
            self._by_session(task.strategy)
        elif task.reconnect:
            for items in task.batches:
                self._by_tar(items)
        else:
            self._by_tar([item for items in task.batches for item in items])
        ended = time.monotonic()
        journal = self._journal.read_text(errors="replace") if self._journal.exists() else ""
        size = sum(item.size for items in task.batches for item in items)
        return Answer(began=began, ended=ended, size=size, wire_bytes=wire_bytes(journal))

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _by_tar(self, items: Sequence[Item]) -> None:
        task = self._task
        if task.stored:
            file = self._scratch / "archive"
            data = tar_pipe.archive_on_disk(task.store, items, task.codec, file)
        else:
            data = tar_pipe.archive(task.store, items, task.codec)
        tar_pipe.deliver(self._transport, task.root, task.codec, data, task.run.receipt_timeout)

    def _by_session(self, strategy: str) -> None:
        task = self._task
        spec = SessionSpec(
            transport=self._transport,
            root=task.root,
            owner="bench",
            run_id="bench",
            slot=task.slot,
            run=task.run.model_copy(update={"codec": task.codec}) if task.codec else task.run,
        )
        session = open_session(strategy, spec, Store(task.store))
        try:
            for number, items in enumerate(task.batches):
                blobs = tuple(Blob(item.blobid, item.size) for item in items)
                _settle(session, task.run.window - 1, task.run.receipt_timeout)
                session.put(Batch(f"{task.slot}-{number}", blobs))
            _settle(session, 0, task.run.receipt_timeout)
        except BaseException:
            session.abort()
            raise
        session.close()


class FetchJob:
    """See `tasks.Fetch` and `helper.Job`: a plain tar back."""

    def __init__(self, task: Fetch) -> None:
        self._task = task
        self._transport = transport(task.reach)

    def run(self) -> Answer:
        task = self._task
        began = time.monotonic()
        got = tar_pipe.fetch(
            self._transport, task.root, task.prefixes, task.into, task.reach.patience
        )
        return Answer(began=began, ended=time.monotonic(), size=got)

    def close(self) -> None:
        """Nothing is left of it."""


def _settle(session: Session, left: int, patience: float) -> None:
    """Return when no more than left batches are under way. patience: seconds without an answer."""
    deadline = time.monotonic() + patience
    while len(session.in_flight) > left:
        if outcomes := session.collect(1.0):
            deadline = time.monotonic() + patience
        elif time.monotonic() > deadline:
            raise RemoteUnreachable("the remote does not answer", detail="for a batch")
        _require(outcomes)
    _require(session.collect(0.0))


def _require(outcomes: Sequence[Outcome]) -> None:
    """Raise where a batch was refused, or a blob of it: the sample was sound when it was drawn."""
    for outcome in outcomes:
        if not isinstance(outcome, Receipt):
            raise outcome.error
        if outcome.failed:
            first = outcome.failed[0]
            raise SourceError(
                "a blob of the sample cannot be sent any more",
                detail=f"{first.blobid}, {first.reason}: {first.detail}",
                hint="run the benchmark again; it draws another sample",
            )
