"""Blobs come from a receiver: its listing says what there is, several sessions bring it.

One session lists, page by page, as fast as batches are taken. On the others the next batch is asked
for before the last has come, so that no round trip is waited for.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from ntt_backup.blobdir.walk import StrayKind
from ntt_backup.client.read_session import ReadSession
from ntt_backup.client.session_pool import ReconnectingSession, SessionPool
from ntt_backup.config import RemoteConfig
from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.errors import BackupError
from ntt_backup.model import Failure, Reason
from ntt_backup.name_hash import HashOfNames
from ntt_backup.restore.blobs import Entry, Wanted, Work
from ntt_backup.restore.destination import Oversized, TargetWriter, destination
from ntt_backup.upload.batching import cut

_BATCH_BLOBS: Final = 1000
# Less than RESUMABLE: a blob that may be resumed is a batch alone.
_BATCH_BYTES: Final = 32 << 20
_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Blobs that are asked for at once. part: of all the work, from 0 to 1, or None if unknown."""

    entries: list[Entry]
    part: float | None


class FromReceiver(Work[Batch, ReconnectingSession]):
    """The restore from a directory on a machine."""

    def __init__(
        self,
        settings: RemoteConfig,
        wanted: Wanted,
        on_outage: Callable[[BackupError, float], None],
        bwlimit: Timetable | None,
    ) -> None:
        words = ("list", "get") if wanted.blobids is None else ("get",)
        self._pool = SessionPool(settings, "restore", words, on_outage, bwlimit)
        super().__init__(wanted, self._pool.cancelled)

    def run_threads(self, count: int, tick: Callable[[], None]) -> None:
        self._pool.run(count, self.work, tick)

    def hash_of_names(self, session: ReconnectingSession) -> HashOfNames:
        return session.do(lambda one: one.hash_of_names)

    def list_jobs(self, session: ReconnectingSession) -> Iterator[Batch]:
        if self.wanted.blobids is not None:
            blobids = filter(self.wanted.shard.has, self.wanted.blobids)
            while some := sorted(set(itertools.islice(blobids, _BATCH_BLOBS))):
                yield Batch([(bytes.fromhex(one), None) for one in some], None)
            return
        unlisted: set[str] = set()

        def stray(path: str, kind: StrayKind) -> None:
            if kind is StrayKind.UNREADABLE and path not in unlisted:
                unlisted.add(path)
                text = "the remote cannot list this directory: nobody knows which blobs are in it"
                self.fail(Failure(path, Reason.REMOTE_UNREADABLE, text))

        done, span = self.wanted.interval
        for names in session.names(self.wanted.prefix, stray, self.wanted.shard):
            while names:
                count = cut((size for _, size in names), _BATCH_BLOBS, _BATCH_BYTES)
                entries: list[Entry] = [*names[:count]]
                names = names[count:]
                last = int.from_bytes(entries[-1][0], "big")
                yield Batch(entries, (last - done) / span)
                done = last

    def fetch_jobs(self, writer: TargetWriter, session: ReconnectingSession) -> None:
        fetching = Fetching(self, writer)

        def work(session: ReadSession) -> None:
            with destination(self.target.root):
                fetching.work(session)

        while True:
            try:
                session.do(work)
                return
            except Oversized as error:  # What comes of it ended with the connection.
                self.fail(error.failure)
                fetching.too_large.add(bytes.fromhex(error.failure.blobid))


class Fetching:
    """The batches of one thread. Its state outlives a session: `work` continues with another."""

    def __init__(self, shared: FromReceiver, writer: TargetWriter) -> None:
        self._shared = shared
        self._writer = writer
        self._next: deque[Batch] = deque()
        self._under_way: deque[Batch] = deque()
        self._resumed = 0
        self.too_large: set[bytes] = set()

    def work(self, session: ReadSession) -> None:
        """Fetches the remaining batches."""
        writer, under_way = self._writer, self._under_way
        writer.forget()
        again = [part for batch in under_way for part in self._parted(batch)]
        self._next.extendleft(reversed(again))
        under_way.clear()
        while True:
            while len(under_way) < _AHEAD and self._ask(session):
                pass
            if under_way:
                session.contents(writer)
                self._shared.finish(writer, under_way.popleft().part)
                session.settled += 1
                wrong = writer.again()
                self._next.extendleft(Batch([(digest, None)], None) for digest in wrong)
            elif not self._refill(wait=True):
                return

    def _ask(self, session: ReadSession) -> bool:
        """Asks for another batch, if there is one now; returns whether it did. One that has come in
        part is asked for when nothing else is under way.
        """
        if not (self._next or self._refill(wait=False)):
            return False
        batch = self._next[0]
        digests = [digest for digest, _ in batch.entries]
        resumable = len(digests) == 1 and self._writer.has_part(digests[0])
        if resumable and self._under_way:
            return False
        offset = 0
        if resumable:
            offset = self._writer.resume(digests[0], session.show_life)
            session.settled += offset > self._resumed  # That part is not asked for again.
            self._resumed = offset
        listed = {digest: size for digest, size in batch.entries if size is not None}
        session.ask_contents(digests, offset, listed)
        self._under_way.append(self._next.popleft())
        return True

    def _refill(self, *, wait: bool) -> bool:
        """Takes a batch and leaves out what the destination has; returns whether there is work."""
        shared, writer = self._shared, self._writer
        while (batch := shared.queue.take_job(wait=wait)) is not None:
            lacking = [entry for entry in batch.entries if not shared.has(writer, entry)]
            if lacking:
                self._next.extend(self._parted(Batch(lacking, batch.part)))
                return True
            shared.finish(writer, batch.part)
        return False

    def _parted(self, batch: Batch) -> list[Batch]:
        """Returns the batch in parts, where a blob that can be resumed is alone. One whose size is
        known is alone already.
        """
        entries = [one for one in batch.entries if one[0] not in self.too_large]
        alone = [one for one in entries if one[1] is None and self._writer.has_part(one[0])]
        others = [one for one in entries if one not in alone]
        first = [Batch(others, batch.part)] if others else []
        return [*first, *(Batch([one], None) for one in alone)]
