"""Files that go by their paths are read for the first time by a worker that has nothing to send.

So they are read shortly before they are sent, and mostly once from the disk: hashed content is
still in the page cache when it is sent. One worker at a time reads for some seconds and registers
the blobs; the others meanwhile claim and send blobs that were registered before.
"""

from __future__ import annotations

import time
from typing import Final, Literal

from ntt_backup import events
from ntt_backup.catalog.listed_files import shown_path
from ntt_backup.catalog.unread_files import Unread, UnreadFiles
from ntt_backup.config import RunSettings
from ntt_backup.errors import SourceError, StoreSuspect
from ntt_backup.formatting import many
from ntt_backup.model import BadFile, FileReason, ReadFile
from ntt_backup.source.by_path import FirstReader
from ntt_backup.source.store import Store
from ntt_backup.upload.batch_outcomes import Suspicion
from ntt_backup.upload.event_pipe import EventPipe

# The most and the least files that are asked for at once, and for how many seconds they are read.
_MOST_FILES: Final = 40_000
_LEAST_FILES: Final = 1000
_SECONDS: Final = 2.0
# Reading continues up to _MOST_SECONDS until it has that many files or bytes: to claim and send a
# few files costs as much as to claim and send thousands, and the other workers wait meanwhile.
_ENOUGH_FILES: Final = 4000
_ENOUGH_BYTES: Final = 64 * 1024**2
_MOST_SECONDS: Final = 20.0
# From one sign of life, and look whether the worker is to end, to the next: both cost as much as a
# tenth of a small file.
_LOOK_SECONDS: Final = 0.1
# The shortest and the longest wait for a file that may still be being written, in seconds.
_LEAST_WAIT: Final = 2.0
_MOST_WAIT: Final = 120.0
_OF_THE_STORE: Final = frozenset(
    {FileReason.MISSING, FileReason.UNREADABLE, FileReason.NOT_A_FILE, FileReason.WRONG_SIZE}
)
# Whether any files were read, or another worker has the turn.
Looked = Literal["some", "none", "others"]


class _Stopped(Exception):
    """A file was not read to its end, since the worker is to end."""


class FirstReads:
    """Reads files for the first time.

    Args:
        store: The store.
        run: The settings of the run.
        pipe: Receives events, and signs of life.
        watch: Whether the run waits for a store that cannot be read for the most part.
    """

    def __init__(self, store: Store, run: RunSettings, pipe: EventPipe, *, watch: bool) -> None:
        self._store = store
        self._run = run
        self._pipe = pipe
        self._watch = watch
        self._suspicion = Suspicion(run.max_failed_share)
        self._most = _MOST_FILES
        self._look_at = 0.0

    def read_some(self, unread: UnreadFiles) -> Looked:
        """Reads the next files, if there are any, and registers them.

        Raises:
            SourceError: The store, or most of it, cannot be read. Then nothing is noted.
            CatalogError: The catalog refuses, or is unreachable.
        """
        with unread.turn() as ours:
            if not ours:
                return "others"
            files = unread.next(self._most)
            if not files:
                return "none"
            found, bad = self._read(files)
            # A slow disk gives few in that time: the others are asked for again each time.
            self._most = min(max(_LEAST_FILES, 2 * (len(found) + len(bad))), _MOST_FILES)
            self._judge(len(found), bad)
            wait_s = min(max(self._store.grace / 4, _LEAST_WAIT), _MOST_WAIT)
            unread.record(found, [(one.id, what) for one, what in bad], wait_s)
        for one, what in bad:
            if not what.young:
                reason, detail = what.reason.value, what.detail
                path = shown_path(one.path)
                self._pipe.emit(events.FileFailed(path=path, reason=reason, detail=detail))
        return "some"

    def _read(
        self, files: list[Unread]
    ) -> tuple[list[tuple[int, ReadFile]], list[tuple[Unread, BadFile]]]:
        found: list[tuple[int, ReadFile]] = []
        bad: list[tuple[Unread, BadFile]] = []
        began, size = time.monotonic(), 0
        with self._store.tree() as tree:
            reader = FirstReader(tree, self._store, self._end_if_asked)
            for one in files:
                try:
                    what = reader.read(one.path, one.size, one.checksum)
                except _Stopped:
                    break
                if isinstance(what, BadFile):
                    bad.append((one, what))
                else:
                    found.append((one.id, what))
                    size += what.blob.expected
                enough = len(found) + len(bad) >= _ENOUGH_FILES or size >= _ENOUGH_BYTES
                limit = _SECONDS if enough else _MOST_SECONDS
                now = time.monotonic()
                if now - began >= limit or self._is_to_end(now):
                    break
            if not found and any(what.reason in _OF_THE_STORE for _, what in bad):
                tree.sign_of_life()
        return found, bad

    def _is_to_end(self, now: float) -> bool:
        """Says now and then that the worker is alive, and returns whether the worker is to end."""
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_SECONDS
        self._pipe.state("reading")
        return self._pipe.stopping

    def _end_if_asked(self) -> None:
        if self._is_to_end(time.monotonic()):
            raise _Stopped

    def _judge(self, found: int, bad: list[tuple[Unread, BadFile]]) -> None:
        ours = [one for one in bad if one[1].reason in _OF_THE_STORE and not one[1].young]
        if self._suspicion.falls(found + len(bad), len(ours)):
            first, what = ours[0]
            path = shown_path(first.path)
            raise (SourceError if self._watch else StoreSuspect)(
                "most of the listed files cannot be read",
                detail=f"{len(ours):,} of the last {many(found + len(bad), 'file')}, such as"
                f" {path}: {what.detail}",
                hint="none of these is marked as failed: mount what is missing, correct source.root"
                " or the query; where they are really gone, run.max_failed_share = 1 marks them",
            )
