"""Verify checks a target pack by pack, those first that were checked longest ago.

A bucket hashes nothing. Asked for the size and the checksum of each object it tells what is missing
or was replaced, for little money; only reading the packs proves their contents, and costs what all
that is read costs. Another target sums each file where it is.

A blob that is wrong, and right in no other pack, becomes pending again. So do all blobs of a pack
that is lost, unless another pack of the ledger names them: which they are, the catalog knows and
the tables of these packs. Anybody may have put the other packs there, and no later check reads
them: a blob in one of them counts once this check has read it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from ntt_backup.audit.proof import Blobs, Hashing
from ntt_backup.audit.remote_names import PackNames
from ntt_backup.audit.verify import Check, Checked, Findings, Question
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.identities import identified
from ntt_backup.catalog.ledger import (
    forget_packs,
    iter_packs,
    mark_packs_checked,
    record_checks,
    record_pack,
)
from ntt_backup.catalog.range_locks import prefix_ranges, range_name
from ntt_backup.catalog.selection import Checks, PackChecks, rows_in
from ntt_backup.client.throttle import SharedPace
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import BackupError, ConfigError, Unsupported
from ntt_backup.filestore.contract import (
    FileArchived,
    FileMissing,
    FileUnreadable,
    StoredFile,
    checksum,
)
from ntt_backup.filestore.reconnecting import ReconnectingSharedStore
from ntt_backup.model import Blob, BlobRange, Failure, Reason, StoredPack
from ntt_backup.name_hash import HashOfNames
from ntt_backup.objects.bucket import still
from ntt_backup.pack.age_encryption import NotSealed, SealedForOthers
from ntt_backup.pack.format import PackError
from ntt_backup.pack.names import LARGE_BLOB, PackKey, blob_key
from ntt_backup.pack.reader import jobs
from ntt_backup.packstore import marker
from ntt_backup.packstore.contents import give_blobs, give_elsewhere, give_large
from ntt_backup.packstore.tables import PackObject, Tables, entries_of, open_to_read, pack_object
from ntt_backup.process.threads import Cancelled, WorkQueue, run_threads
from ntt_backup.wire.framing import FORMAT

_PAGE: Final = 100
_RECORD_BLOBS: Final = 1000

# A pack, or a blob that is a file of its own.
_Stored = StoredPack | Blob
_Checked = Checked[_Stored]


def verify_packs(
    conn: Connection,
    settings: RemoteConfig,
    question: Question,
    *,
    on_progress: Callable[[Findings], None],
    on_outage: Callable[[BackupError, float], None],
) -> Findings:
    """Checks what is copied to the target: reads it where the question's way is `download`, and
    else asks the target about it. Raises BackupError; what was found is recorded.
    """
    settings = identified(conn, settings)
    stop, news = threading.Event(), threading.Event()
    store, tables = open_to_read(
        settings, on_outage, stop, cached=False, fetch=SharedPace.of(question.bwlimit)
    )
    queue = WorkQueue[_Stored, _Checked](2 * question.workers, store.cancelled, news.set)
    check = _PackCheck(conn, settings.target, question, on_progress, queue, store, tables)
    with closing(store):
        # That it is not there must be noticed also where nothing is to be checked.
        next(store.list(FORMAT), None)
        found = check.run(lambda step: run_threads(question.workers, check.work, step, stop, news))
        found.strangers = len(tables.strangers)
        check.names().require_fit()
    return found


@dataclass
class _PackCheck(Check[_Stored]):
    empty = "the target has no packs"
    hint = "is remote.url right?"

    store: ReconnectingSharedStore
    tables: Tables

    def __post_init__(self) -> None:
        super().__post_init__()
        choice = self.question.choice
        self._reads = self.question.way == "download"
        # Whether what is checked is read, here or where it lies: a bucket reads nothing.
        self.hashes = self.store.hashes
        self._hashes = self._reads or self.hashes
        self._packs = PackChecks(self.conn, self.target, choice)
        self._large = Checks(self.conn, self.target, choice, least=LARGE_BLOB)
        self._ahead: deque[_Stored] = deque()
        self._read_packs: list[str] = []
        self._lost_packs: dict[str, tuple[StoredPack, Failure]] = {}
        self.found.total = self._packs.blobs + self._large.total

    @cached_property
    def _names(self) -> HashOfNames:
        return marker.names_in(self.store)

    # --- what is checked, and recorded ------------------------------------------------------------

    def next_job(self) -> _Stored | None:
        while not self.budget.is_spent(0.5 if self._lost_packs else 1.0):
            if not self._ahead:
                self._ahead.extend(self._packs.next(_PAGE) or self.next_blobs(self._large, _PAGE))
            if not self._ahead:
                return None
            what = self._ahead.popleft()
            size = self._size(what) if self._hashes else 0
            if self.budget.ever_allows(size):
                return what if self.budget.allows(size) else None
            self.found.left_out += _count(what)
        return None

    def _size(self, what: _Stored) -> int:
        """Returns the bytes to read of a file. The catalog may not know the size of a blob."""
        if what.size is None and isinstance(what, Blob) and self.question.max_bytes is not None:
            with suppress(FileUnreadable):
                info = self.store.stat(blob_key(what.blobid))
                return info.size if info is not None else 0
        return what.size or 0

    def blobs_of(self, job: _Stored) -> Blobs:
        return (job,) if isinstance(job, Blob) else ()

    def is_empty(self) -> bool:
        return self.names().is_empty()

    def names(self, on_wait: Callable[[], None] = lambda: None) -> PackNames:
        """Returns the names in all packs that are not lost."""

        def recorded() -> Iterator[StoredPack]:
            return iter_packs(self.conn, self.target)

        lost = self._lost_packs.keys()
        return PackNames(self.store, self.tables, recorded, lost, signed=True, on_wait=on_wait)

    def take_result(self, checked: _Checked) -> None:
        super().take_result(checked)
        pack = checked.job
        if self._hashes and checked.by_size:
            self._tried.append(_key(pack))
        if isinstance(pack, Blob):
            return
        self.found.total += checked.blobs - pack.blobs
        if checked.lost is not None:
            self.found.lost_packs += 1
            self._lost_packs[pack.key] = pack, checked.lost
            return
        self.has_blobs = True
        if checked.whole and self._hashes and not checked.by_size:
            self._read_packs.append(pack.pack_id)

    def record(self, right: list[str], lost: list[Failure], tried: list[str]) -> None:
        self.has_blobs = self.has_blobs or bool(right)
        super().record(right if self._hashes else [], lost, tried)
        packs, self._read_packs = self._read_packs, []
        if packs:
            mark_packs_checked(self.conn, self.target, packs)

    # --- one file ---------------------------------------------------------------------------------

    def work(self, _name: str) -> None:
        """Does the jobs of one thread."""
        while (what := self.jobs.take_job(wait=True)) is not None:
            self.jobs.add_result(self._check(what))

    def _check(self, what: _Stored) -> _Checked:
        """Checks a file. A blob that is wrong here and right in another pack is no failure."""
        sink = Hashing(self._names)
        if PackKey.read(_key(what)) is None and isinstance(what, StoredPack):
            text = f"the ledger names a pack that can be none, {what.key}"
            return _lost(what, Reason.REMOTE_MISSING, text)
        try:
            if self._reads:
                with suppress(FileMissing):
                    return self._read(what, sink)
            return self._look(what)
        except (FileArchived, FileUnreadable, SealedForOthers, NotSealed) as trouble:
            text = str(trouble)
            if isinstance(trouble, FileArchived):
                text = "it lies in an archive class: thaw it to read it"
            failure = Failure(_key(what), Reason.REMOTE_UNREADABLE, text)
            return Checked(what, _count(what), failures=(failure,), whole=False)
        except PackError as error:
            assert isinstance(what, StoredPack)
            text = f"the pack {what.key} is damaged: {error}"
            return _lost(what, Reason.REMOTE_CORRUPT, text, sink.bytes)

    def _look(self, what: _Stored) -> _Checked:
        """Checks a file by its size and its checksum: the one that a bucket keeps, or the one that
        the target makes of what lies there.
        """
        info = self.store.stat(_key(what))
        name = "its file" if isinstance(what, Blob) else f"the pack {what.key}"
        sent = "expected" if isinstance(what, Blob) else "were sent"
        if info is None:
            return _lost(what, Reason.REMOTE_MISSING, f"{name} is gone")
        if what.size is not None and info.size != what.size:
            text = f"{name} has {info.size} bytes, {what.size} {sent}"
            return _lost(what, Reason.REMOTE_CORRUPT, text)
        same, read = self._same(what, info)
        if same is False and self.hashes and isinstance(what, StoredPack):
            # Most of its blobs are right, and the others may be right in another pack by now. A key
            # that may not `get` cannot tell.
            with suppress(Unsupported):
                return self._read(what, Hashing(self._names))
        if same is False:
            text = f"{name} is another one than was sent, by its checksum"
            return _lost(what, Reason.REMOTE_CORRUPT, text)
        return Checked(what, _count(what), read, by_size=same is None)

    def _same(self, what: _Stored, file: StoredFile) -> tuple[bool | None, int]:
        """Returns whether a file has the content that was sent, None where that cannot be told; and
        how many bytes were read for that.
        """
        if not self.hashes:
            # The catalog has no checksum of a blob but its name, which no server knows.
            return None if isinstance(what, Blob) else still(file, what.checksum), 0
        if isinstance(what, StoredPack):
            file = file._replace(checksum=self.store.prove(file.name))
            return still(file, what.checksum), file.size
        theirs = self.store.prove(file.name, self._names)
        if not theirs:
            return None, 0
        return theirs == checksum(bytes.fromhex(what.blobid)), file.size

    def _read(self, what: _Stored, sink: Hashing) -> _Checked:
        """Reads and hashes a blob, or those of a pack that the question's prefix has."""
        if isinstance(what, Blob):
            give_large(self.store, bytes.fromhex(what.blobid), None, sink)
            give_elsewhere(self.store, self.tables, sink, None, ())
            return Checked(what, 1, sink.bytes, tuple(sink.failures))
        info = self.store.stat(what.key)
        if info is None or info.size != what.size:
            # Who restores looks for the table at the end that the target tells.
            return self._look(what)
        pack = pack_object(info)
        assert pack is not None
        reader = self.tables.open(pack)
        entries = list(entries_of(reader, self.question.prefix))
        for some in jobs(entries):
            give_blobs(pack.key, reader, some, sink)
        give_elsewhere(self.store, self.tables, sink, pack, None)
        whole = len(entries) == len(reader.table)
        return Checked(what, len(entries), sink.bytes, tuple(sink.failures), whole=whole)

    # --- what lost packs held ---------------------------------------------------------------------

    def finish(self) -> None:
        """Makes the blobs of lost packs pending. Finding out which these are takes long: where the
        time is up before, the next check begins with these packs, and goes on.
        """
        if not self._lost_packs:
            return
        self.require_blobs()
        try:
            self._requeue_ranges(self.names(self._require_time))
        except Cancelled:
            self.found.complete = False
            self._tell_lost("the next check continues to find out which blobs it had")
            return
        except ConfigError:  # Other packs are sealed, and no identity is given that opens them.
            self._tell_lost("which blobs it had is known by --identity alone")
            return
        except Unsupported as error:
            self._tell_lost(
                f"which blobs it had is known once all packs can be read: {error.detail}"
            )
            return
        # A run may have stored one again by now: the same blobs make the same pack.
        ids = [pack.pack_id for pack, _ in self._lost_packs.values()]
        forget_packs(self.conn, self.target, ids, self._packs.began)

    def _require_time(self) -> None:
        if self.budget.time_is_up:
            raise Cancelled

    def _tell_lost(self, more: str) -> None:
        """Reports the lost packs themselves. They stay in the ledger for the next check."""
        for _, failure in self._lost_packs.values():
            self.found.wrong.add(replace(failure, detail=f"{failure.detail}; {more}"))

    def _requeue_ranges(self, names: PackNames) -> None:
        for one in prefix_ranges():
            name = range_name(one.index)
            held = [
                (pack, failure)
                for pack, failure in self._lost_packs.values()
                if pack.low[:2] <= name <= pack.high[:2]
            ]
            if held:
                self._require_time()
                self._requeue_range(one, name, held, names)

    def _requeue_range(
        self, one: BlobRange, name: str, held: list[tuple[StoredPack, Failure]], names: PackNames
    ) -> None:
        """Makes pending what is nowhere else, of the blobids in one range that packs may have held.
        The catalog is read before the target: what is sent meanwhile is not missed.
        """
        missing: dict[str, Failure] = {}
        sizes: dict[str, int | None] = {}
        for row in rows_in(self.conn, self.target, one):
            if row.copied and is_blobid(row.blobid):
                large = row.size is not None and row.size >= LARGE_BLOB
                for pack, failure in held:
                    # A large blob is in a pack alone, or a file of its own.
                    if pack.low <= row.blobid <= pack.high and (not large or pack.low == pack.high):
                        missing[row.blobid] = Failure(row.blobid, failure.reason, failure.detail)
                        sizes[row.blobid] = row.size
                        break
        if not missing:
            return
        # Where a pack has one blob, its own key had something else.
        alone = {pack.low for pack, _ in held if pack.low == pack.high}
        for digest, size in names.below(name, lambda *_: None):
            blobid = digest.hex()
            if blobid not in alone and sizes.get(blobid) in (None, size):
                missing.pop(blobid, None)
        if names.closed:
            raise self.tables.keyring.foreign()
        gone = list(missing.values())
        if gone and self._reads:
            own = {bytes.fromhex(one) for one in missing if (sizes[one] or 0) >= LARGE_BLOB}
            gone = self._read_elsewhere(gone, names, own)
        for failure in gone:
            self.found.wrong.add(failure)
        for first in range(0, len(gone), _RECORD_BLOBS):
            some = gone[first : first + _RECORD_BLOBS]
            self.found.requeued += record_checks(self.conn, self.target, [], some)
        self.on_progress(self.found)

    def _read_elsewhere(
        self, lost: list[Failure], names: PackNames, own: Container[bytes]
    ) -> list[Failure]:
        """Reads blobs from packs that the ledger does not have, such as a run has left that died,
        and those in `own` from files of their own. Packs in which some are right the ledger has
        from now on, so that checks look at them.

        Returns what is right nowhere.
        """
        sink = Hashing(self._names)
        sink.failures = lost
        good: list[PackObject] = []
        for key in give_elsewhere(self.store, self.tables, sink, None, own):
            info = self.store.stat(key)
            if info is not None and (pack := pack_object(info)) is not None:
                good.append(pack)
        new = [pack for pack in good if not names.knows(pack)]
        for stored in names.learn(new, lambda *_: None):
            record_pack(self.conn, self.target, stored)
        self.found.bytes += sink.bytes
        return sink.failures


def _key(what: _Stored) -> str:
    return blob_key(what.blobid) if isinstance(what, Blob) else what.key


def _count(what: _Stored) -> int:
    return 1 if isinstance(what, Blob) else what.blobs


def _lost(what: _Stored, reason: Reason, text: str, size: int = 0) -> _Checked:
    """Returns the result for a blob whose file is not right, or for a pack that does not count
    any more.
    """
    if isinstance(what, Blob):
        return Checked(what, 1, failures=(Failure(what.blobid, reason, text),))
    return Checked(what, what.blobs, size, lost=Failure(what.key, reason, text))
