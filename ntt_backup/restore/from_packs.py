"""Blobs come from packs: the packs' own tables say what there is, ranges of packs bring it.

One thread lists packs and reads their tables. Packs may overlap, and a blob may be in several: what
one of them has not right is looked for in the others.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ntt_backup.client.throttle import SharedPace
from ntt_backup.config import RemoteConfig
from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.errors import BackupError
from ntt_backup.filestore.contract import FileArchived, FileMissing, FileUnreadable, SharedStore
from ntt_backup.model import Failure, Reason, Shard
from ntt_backup.name_hash import HashOfNames
from ntt_backup.pack.age_encryption import NotSealed, SealedForOthers
from ntt_backup.pack.format import (
    BLOCK,
    DIGEST_BYTES,
    ENTRY_BYTES,
    INDEX_MEMBER,
    MAX_ENTRIES,
    Entry,
    pack_id,
    read_header,
)
from ntt_backup.pack.names import blob_key
from ntt_backup.pack.reader import PackReader, jobs
from ntt_backup.packstore import marker
from ntt_backup.packstore.contents import give_blobs, give_elsewhere, give_large
from ntt_backup.packstore.tables import (
    PackObject,
    Tables,
    Trouble,
    entries_of,
    large_blobs_of,
    open_to_read,
    packs_for,
    packs_of,
)
from ntt_backup.process.threads import run_threads
from ntt_backup.restore.blobs import Thaw, Wanted, Work
from ntt_backup.restore.destination import Oversized, TargetWriter, destination
from ntt_backup.wire.framing import FORMAT

# Of a list, looked up at once.
_CHUNK: Final = 65_536
# One thread at a time writes blobs of fewer bytes, while others fetch.
_SMALL: Final = 65_536
# The bits of a blobid that the name of a pack leaves out.
_NAMED: Final = 192
# The largest table, with a header before it and the trailer and the archive's end behind it.
_LARGEST_END: Final = (MAX_ENTRIES * ENTRY_BYTES // BLOCK + 5) * BLOCK


@dataclass(frozen=True, slots=True)
class OfPack:
    """Blobs of one pack, in the order of their offsets. part: of all the work, None: not known."""

    pack: PackObject
    reader: PackReader
    entries: list[Entry]
    part: float | None


@dataclass(frozen=True, slots=True)
class OfItsOwn:
    """A blob that is a file of its own. size: None where it is not known whether it is one."""

    digest: bytes
    size: int | None
    part: float | None


@dataclass(frozen=True, slots=True)
class Frozen:
    """A pack that cannot be read before it is thawed."""

    pack: PackObject
    part: float | None = None


Job = OfPack | OfItsOwn | Frozen


class FromPacks(Work[Job, str]):
    """The restore from packs. on_archived is told the name of each file that must be thawed
    first; thaw: a bucket is asked for that.
    """

    def __init__(
        self,
        settings: RemoteConfig,
        wanted: Wanted,
        on_outage: Callable[[BackupError, float], None],
        on_archived: Callable[[str], None],
        thaw: Thaw | None,
        bwlimit: Timetable | None,
    ) -> None:
        self._thaw = thaw
        self._marker = settings.remote.blobs
        self._on_archived = on_archived
        self._archived: set[str] = set()
        # The blobs that are files of their own; None: the target is asked for each.
        self._alone: Container[bytes] | None = None
        self._stop = threading.Event()
        self._store, self._tables = open_to_read(
            settings, on_outage, self._stop, fetch=SharedPace.of(bwlimit)
        )
        super().__init__(wanted, self._store.cancelled)

    def run_threads(self, count: int, tick: Callable[[], None]) -> None:
        with closing(self._store):
            run_threads(count, self.work, tick, self._stop, threading.Event())
        self._tables.keyring.require_fit()
        self.done.strangers = len(self._tables.strangers)

    def hash_of_names(self, _name: str) -> HashOfNames:
        return self._names

    @cached_property
    def _names(self) -> HashOfNames:
        return marker.names_in(self._store)

    # --- what there is ----------------------------------------------------------------------------

    def list_jobs(self, _name: str) -> Iterator[Job]:
        if self.wanted.blobids is None:
            yield from self._all(self.wanted.prefix, self.wanted.shard)
            return
        blobids = filter(self.wanted.shard.has, self.wanted.blobids)
        while some := sorted(set(itertools.islice(blobids, _CHUNK))):
            yield from self._chosen([bytes.fromhex(one) for one in some])

    def _all(self, prefix: str, shard: Shard) -> Iterator[Job]:
        weights = ((pack, self._weight(pack)) for pack in packs_of(self._store, prefix))
        packs = [(pack, weight) for pack, weight in weights if weight > 0]
        large = {blob.digest: blob.size for blob in large_blobs_of(self._store, prefix)}
        if not (packs or large) and self._store.stat(FORMAT) is None:
            raise marker.gone(self._marker)
        large = {digest: size for digest, size in large.items() if shard.has(digest.hex())}
        self._alone, named = large.keys(), set[bytes]()
        total = sum(weight for _, weight in packs) + sum(large.values()) or 1
        opened = self._tables.open_all(pack for pack, _ in packs)
        for (pack, reader), (_, weight) in zip(opened, packs, strict=True):
            part = weight / total
            if isinstance(reader, PackReader):
                entries = list(entries_of(reader, prefix))
                if shard.count > 1:
                    entries = [one for one in entries if shard.has(one.digest.hex())]
                stored = sum(entry.stored for entry in entries) or 1
                # One whose key was taken by something else is in a pack.
                named.update(entry.digest for entry in entries if entry.digest in large)
                for some in jobs(entries):
                    share = part * sum(entry.stored for entry in some) / stored
                    yield OfPack(pack, reader, some, share)
            else:
                yield from self._trouble(pack, reader)
        for digest, size in large.items():
            if digest not in named:
                yield OfItsOwn(digest, size, size / total)

    def _chosen(self, digests: list[bytes]) -> Iterator[Job]:
        left = set(digests)
        troubles: list[tuple[PackObject, Trouble]] = []
        for pack, reader in self._tables.open_all(packs_for(self._store, digests)):
            if not isinstance(reader, PackReader):
                troubles.append((pack, reader))
                continue
            entries = [entry for one in left if (entry := reader.table.find(one)) is not None]
            left.difference_update(entry.digest for entry in entries)
            for some in jobs(entries):
                yield OfPack(pack, reader, some, None)
            if not left:
                return
        for pack, trouble in troubles:
            yield from self._trouble(pack, trouble)
        for digest in sorted(left):
            yield OfItsOwn(digest, None, None)

    def _trouble(self, pack: PackObject, trouble: Trouble) -> Iterator[Job]:
        """Notes that a pack cannot be read; yields what is to be done about that."""
        if isinstance(trouble, FileArchived):
            yield Frozen(pack)
        elif isinstance(trouble, SealedForOthers | NotSealed):
            self.fail(Failure(pack.key, Reason.REMOTE_UNREADABLE, f"a pack of blobs: {trouble}"))
        elif _is_superseded(self._store, self._tables, pack):
            with self.lock:
                self.done.not_needed.append(pack.key)
        elif isinstance(trouble, FileMissing):
            self.fail(Failure(pack.key, Reason.REMOTE_MISSING, "it is gone since it was listed"))
        elif isinstance(trouble, FileUnreadable):
            self.fail(Failure(pack.key, Reason.REMOTE_UNREADABLE, str(trouble)))
        else:
            self.fail(Failure(pack.key, Reason.REMOTE_CORRUPT, f"a pack of blobs: {trouble}"))

    def _frozen(self, key: str, size: int | None = None) -> None:
        with self.lock:
            known = key in self._archived
            self._archived.add(key)
        if not known:
            if size is None:
                with suppress(FileUnreadable):
                    info = self._store.stat(key)
                    size = info.size if info is not None else None
            thawing = self._asked_for(key)
            with self.lock:
                self.done.archived += 1
                self.done.archived_bytes += size or 0
                self.done.thawing += thawing
            self._on_archived(key)

    def _asked_for(self, key: str) -> bool:
        """Asks the object store to thaw an object, if wanted. Returns whether the object thaws."""
        if (thaw := self._thaw) is None:
            return False
        from ntt_backup.filestore.by_bucket import thaw_file

        try:
            self._store.do(lambda store: thaw_file(store, key, thaw.days, thaw.tier))
        except (FileMissing, FileArchived):  # Gone meanwhile, or of no class that thaws.
            return False
        return True

    def _weight(self, pack: PackObject) -> float:
        """Returns an estimate of the bytes of a pack that are wanted; 0 where none is."""
        first, count = self.wanted.interval
        low, high = int(pack.name.low, 16) << _NAMED, (int(pack.name.high, 16) + 1) << _NAMED
        return max(0, pack.size * (min(high, first + count) - max(low, first)) / (high - low))

    # --- what is fetched --------------------------------------------------------------------------

    def fetch_jobs(self, writer: TargetWriter, _name: str) -> None:
        with destination(self.target.root):
            while (job := self.queue.take_job(wait=True)) is not None:
                if isinstance(job, Frozen):
                    self._frozen(job.pack.key, job.pack.size)
                else:
                    try:
                        if isinstance(job, OfPack):
                            self._fetch_blobs(writer, job)
                        else:
                            self._fetch_large(writer, job)
                    except Oversized as error:
                        self.fail(error.failure)
                self.finish(writer, job.part)

    def _fetch_blobs(self, writer: TargetWriter, job: OfPack) -> None:
        small = sum(one.raw for one in job.entries) < _SMALL * len(job.entries)
        turn = self.target.turn if small else nullcontext()
        with turn:
            lacking = [one for one in job.entries if not self.has(writer, (one.digest, one.raw))]
        try:
            give_blobs(job.pack.key, job.reader, lacking, writer, turn)
        except FileArchived:
            self._frozen(job.pack.key, job.pack.size)
        if writer.failures:
            give_elsewhere(self._store, self._tables, writer, job.pack, self._alone, self._frozen)
        for failure in writer.failures:
            # A blob that a pack names is read from its beginning by each call.
            writer.discard_part(bytes.fromhex(failure.blobid))

    def _fetch_large(self, writer: TargetWriter, job: OfItsOwn) -> None:
        if self.has(writer, (job.digest, job.size)):
            return
        again = True
        while again:
            offset = writer.resume(job.digest) if writer.has_part(job.digest) else 0
            try:
                give_large(self._store, job.digest, job.size, writer, offset)
            except FileArchived:
                self._frozen(blob_key(job.digest.hex()), job.size)
            # A part that an earlier call has left may have been wrong.
            again = bool(writer.again())


def _is_superseded(store: SharedStore, tables: Tables, pack: PackObject) -> bool:
    """Returns whether it is proved that other packs name all blobs of a damaged one.

    Only its table says which blobs it has. But its name is a hash of them, so it can be told
    whether what is still read of a damaged table names all of them. Where it does not, nobody
    knows.
    """
    digests = _damaged_table(store, pack)
    left, proved = set(digests), False
    others = [one for one in packs_for(store, digests) if one.key != pack.key] if digests else []
    for _, reader in tables.readable(others):
        # Each pack has the id of the store, which is a part of the hash.
        proved = proved or pack_id(reader.trailer.store_id, digests).hex() == pack.name.pack_id
        left = {digest for digest in left if reader.table.find(digest) is None}
        if proved and not left:
            return True
    return False


def _damaged_table(store: SharedStore, pack: PackObject) -> list[bytes]:
    """Returns the digests at the place of the table, up to the first one out of order."""
    begin = max(0, pack.size - _LARGEST_END) // BLOCK * BLOCK
    try:
        end = store.fetch(pack.key, begin, pack.size - begin)
    except (FileMissing, FileUnreadable):
        return []
    for at in range(len(end) - BLOCK, -1, -BLOCK):
        member = read_header(end[at : at + BLOCK])
        if member is not None and member.name == INDEX_MEMBER:
            table = end[at + BLOCK : at + member.size]
            break
    else:
        return []
    digests: list[bytes] = []
    for start in range(0, len(table) - ENTRY_BYTES + 1, ENTRY_BYTES):
        digest = table[start : start + DIGEST_BYTES]
        if digests and digest <= digests[-1]:
            break  # What fills the last block.
        digests.append(digest)
    return digests
