"""Prune removes from a target the blobs whose files are gone, where files go by their paths.

A blob is removed only if each of its files is gone, or was replaced, for long enough. Whether they
are gone the last pass over their origins has said: so nothing is removed where that is old, or has
not read all. A query that gives nothing any more makes all files gone: so nothing is removed where
that is a large part of the target. What a pinned dump lists stays.

A blob is marked as not copied, durably, before the target is asked to remove it; see
`catalog.pruning` for what becomes of files that come back, and of a process that is killed. A pack
is made anew without these blobs where they are more than half of it; the new one is stored and in
the ledger before the old one is removed. In other packs they stay, and count as copied. What the
catalog does not know, and what it calls failed, is no reason to remove anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from operator import attrgetter
from tempfile import gettempdir
from typing import Final

from ntt_backup.audit.directory_walk import Walk
from ntt_backup.audit.proof import Hashing
from ntt_backup.audit.register import QUERY
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.foreign_query import open_query
from ntt_backup.catalog.history import lock_work
from ntt_backup.catalog.identities import identified
from ntt_backup.catalog.ledger import iter_packs, record_pack
from ntt_backup.catalog.listed_files import shown_path
from ntt_backup.catalog.pruning import Prunable, doubtful_origins
from ntt_backup.catalog.stats import quick_totals
from ntt_backup.config import Settings, application_name
from ntt_backup.config.sealing import Keyring, SealPolicy, seal_writer
from ntt_backup.config.signing_key import OF_PACKS, SigningKeys
from ntt_backup.dump.places_file import open_places, read_places
from ntt_backup.dump.store import DUMPS, list_dumps, open_dumps
from ntt_backup.errors import SOME_FAILED, ConfigError, LockHeld, SourceError, StoreSuspect
from ntt_backup.filestore.contract import PackTarget, SharedStore
from ntt_backup.filestore.local_cache import cache_of
from ntt_backup.filestore.open import open_packs, open_to_prune
from ntt_backup.filestore.pins import pins_that_count
from ntt_backup.formatting import many
from ntt_backup.model import StoredPack
from ntt_backup.pack.format import ID_BYTES, Entry, pack_id, unsigned
from ntt_backup.pack.names import LARGE_BLOB, PackKey, blob_key
from ntt_backup.pack.reader import PackReader
from ntt_backup.pack.writer import PackWriter
from ntt_backup.packstore.contents import give_blobs
from ntt_backup.packstore.tables import PackObject, Tables, packs_of
from ntt_backup.wire.messages import MAX_FILE_NAMES, Large

_TURN_S: Final = 0.2
_PAGE: Final = 5000


@dataclass(slots=True)
class Pruned:
    """What may be removed from a target, and what was removed.

    Attributes:
        blobs: The blobs whose files are gone for long enough.
        bytes: The bytes of these blobs.
        paths: The first paths where they were.
        share: The part of the target that may be removed, by blobs or by bytes, from 0 to 1,
            without what an earlier call has begun to remove.
        pinned: The blobs that stay because a pinned dump lists their files.
        old_dumps: The dumps that are older: as of these not all files can be restored any more.
        packs: The packs to be made anew or removed.
        in_packs: The blobs that stay in packs of which at least half is needed.
        removed: The blobs that were removed.
        removed_bytes: The bytes of these.
        elsewhere: The removed blobs that another target still has.
        back: The blobs of which a file came back meanwhile: they are pending.
        left: The blobs that another session has held: they are left to the next call.
        damaged: The packs that were not made anew, since not all of them can be read.
    """

    blobs: int = 0
    bytes: int = 0
    paths: list[str] = field(default_factory=list)
    share: float = 0.0
    pinned: int = 0
    old_dumps: int = 0
    packs: int = 0
    in_packs: int = 0
    removed: int = 0
    removed_bytes: int = 0
    elsewhere: int = 0
    back: int = 0
    left: int = 0
    damaged: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.left or self.damaged else 0


def prune(
    conn: Connection,
    settings: Settings,
    gone_for: float,
    *,
    max_share: float,
    apply: bool,
    on_progress: Callable[[Pruned], None],
    warn: Callable[[str], None],
) -> Pruned:
    """Removes the blobs whose files are gone from the target of the settings. Raises BackupError.

    Args:
        conn: The catalog, a session of its own.
        settings: The settings.
        gone_for: The seconds for which all files of a blob must be gone.
        max_share: The largest part of the target that is removed, from 0 to 1.
        apply: Whether anything is removed, or only counted.
        on_progress: Receives the counts, after each step.
        warn: Is told what cannot be used, in words.
    """
    _require_known(conn, settings)
    started, done = time.monotonic(), Pruned()
    for work in ("checks", "prune") if apply else ():
        if not lock_work(conn, work, settings.target):
            raise LockHeld(
                f"checks of the target {settings.target}, another prune, or a command that marks"
                " blobs is running",
                hint="wait for its end; a dead process holds no lock",
            )
    settings = identified(conn, settings)
    listed = Prunable(conn, settings.target, gone_for, settings.origins)
    _keep_pinned(settings, listed, done, gone_for, warn)
    done.blobs, done.bytes, new, new_bytes, paths = listed.look()
    done.paths = [shown_path(path) for path in paths]
    totals = quick_totals(conn, settings.target)
    parts = (new, totals.copied), (new_bytes, totals.copied_bytes)
    done.share = max(some / max(some, whole, 1) for some, whole in parts)
    if apply and done.share > max_share:
        raise StoreSuspect(
            f"{done.share:.1%} of the target would be removed, and --max-share is {max_share:.1%}",
            detail=f"{new:,} of {many(totals.copied, 'blob')}",
            hint="does the query, or the directory, still give what it should? Nothing was removed."
            " If so many files are really gone, raise --max-share",
        )
    work_ = _Work(conn, settings, listed, done, lambda: on_progress(done))
    if apply:
        with closing(open_to_prune(settings)) as target:
            work_.prune(target)
    elif settings.remote.packs and done.blobs:
        with closing(open_packs(settings)) as store:
            work_.choose_packs(store)
    done.duration_s = time.monotonic() - started
    return done


def require_by_path(settings: Settings) -> None:
    """Raises ConfigError where the names of blobs are hashes."""
    if not settings.by_path:
        raise ConfigError(
            "prune is for a store whose files go by their paths",
            detail="neither [catalog.from] nor [files.NAME] is set",
            hint="blobs that the store has lost are no reason to remove their copies: see `heal`",
        )


def _require_known(conn: Connection, settings: Settings) -> None:
    """Raises SourceError where it is not known which files are gone."""
    query = settings.catalog.from_
    wanted = [
        (name, Walk(name, settings.source.root, one).definition, one.every, one.whole_every)
        for name, one in settings.files.items()
    ]
    if query is not None:
        with open_query(query, application_name("prune")) as opened:
            wanted.append((QUERY, opened.definition, query.every, query.whole_every))
    for name, why in doubtful_origins(conn, wanted):
        raise SourceError(
            f"it is not known which files of {f'files.{name}' if name else 'the query'} are gone",
            detail=why,
            hint="`ntt-backup-remote scan --restart` reads all of it; then call prune again",
        )


def _keep_pinned(
    settings: Settings, listed: Prunable, done: Pruned, gone_for: float, warn: Callable[[str], None]
) -> None:
    """Takes off the list what pinned dumps list; counts the dumps that are older than that."""
    keys, before = SigningKeys.of(settings), datetime.now(UTC) - timedelta(seconds=gone_for)
    with closing(open_dumps(settings)) as store:
        dumps = list_dumps(store)
    blobs, *_ = listed.look()
    for one in dumps:
        if one.record is None or one.record.target != settings.target:
            continue
        if not pins_that_count(one.pins, DUMPS, keys):
            done.old_dumps += one.begun < before
        elif blobs and one.record.places_bytes:
            with open_places(settings, one.name, gettempdir(), warn, trust_target=True) as file:
                files = read_places(file, one.name)
                names = (each.blobid for each in files if each.blobid and not each.gone)
                while some := list(islice(names, _PAGE)):
                    listed.keep(some)
    done.pinned = blobs - listed.look()[0]


@dataclass
class _Work:
    conn: Connection
    settings: Settings
    listed: Prunable
    done: Pruned
    tell: Callable[[], None]

    def prune(self, target: PackTarget) -> None:
        packs, name = self.settings.remote.packs, relative_path
        if packs:
            self._prune_packs(target)
            name = blob_key
        for blobids in self.listed.pages(MAX_FILE_NAMES, least=LARGE_BLOB if packs else 0):
            # Only a blob that is a file of its own.
            alone = [one for one in blobids if not packs or target.stat(blob_key(one))]
            marked = self.listed.mark(alone)
            target.remove([name(blobid) for blobid in marked])
            self._settle(marked)
        # What another session held, and what a call that was killed has left.
        for blobids in self.listed.pages(MAX_FILE_NAMES, begun=True):
            self.done.left += self._settle(blobids)

    def _settle(self, blobids: Sequence[str], packs: Sequence[str] = ()) -> int:
        settled, done = self.listed.settle(blobids, packs), self.done
        done.removed += settled.deleted + settled.elsewhere
        done.removed_bytes += settled.bytes
        done.elsewhere += settled.elsewhere
        done.back += settled.back
        self.tell()
        return settled.left

    def choose_packs(self, store: SharedStore) -> tuple[list[PackObject], Tables]:
        """Returns the packs of which less than half is needed, and the tables of all."""
        settings, chosen = self.settings, list[PackObject]()
        keyring = Keyring(lambda: settings.pack.identity_file)
        policy, keys = SealPolicy.of(settings), SigningKeys.of(settings)
        tables = Tables(store, cache_of(settings.remote), keyring, policy, keys)
        known = {one.key: one.size for one in iter_packs(self.conn, settings.target)}
        ours = (one for one in packs_of(store) if known.get(one.key) == one.size)
        for pack, reader in tables.readable(ours):
            sizes = {entry.digest.hex(): entry.stored for entry in reader.table}
            gone = self.listed.which(list(sizes))
            most = 2 * sum(sizes[blobid] for blobid in gone) > sum(sizes.values())
            # Whoever has made a strange one may have put anything into it, which we would sign.
            strange = pack.name.pack_id in tables.strangers
            if gone and not strange and (most or any(gone.values())):
                chosen.append(pack)
            else:
                self.done.in_packs += len(gone)
                self.listed.keep(list(gone))
            self.tell()
        keyring.require_fit()
        self.done.packs = len(chosen)
        return chosen, tables

    def _prune_packs(self, target: PackTarget) -> None:
        chosen, tables = self.choose_packs(target)
        for pack in chosen:
            reader = tables.open(pack)
            if reader.sealed and not self.settings.recipients:
                raise ConfigError(
                    "a sealed pack cannot be rewritten, since pack.recipients is not set",
                    detail=pack.key,
                    hint="set pack.recipients to the public keys that it was sealed for",
                )
            gone = list(self.listed.which([entry.digest.hex() for entry in reader.table]))
            marked = set(self.listed.mark(gone))
            needed = [entry for entry in reader.table if entry.digest.hex() not in marked]
            if marked and (not needed or self._make_anew(target, pack, reader, needed)):
                target.remove([pack.key])
                # Its blobs follow in the end: others of these packs may have them, too.
                self._settle([], [pack.name.pack_id])

    def _make_anew(
        self, target: PackTarget, pack: PackObject, reader: PackReader, needed: Sequence[Entry]
    ) -> bool:
        """Stores a pack with what is needed of another one, and notes it in the ledger.

        Returns:
            False where not all that is needed can be read, or is right: the old pack stays.
        """
        digests = [entry.digest for entry in needed]
        low, high, store_id = digests[0], digests[-1], reader.trailer.store_id
        recipients, sign = self.settings.recipients, SigningKeys.of(self.settings).sign
        name = PackKey.of(low, high, pack_id(store_id, digests))
        if recipients:
            name = PackKey.of_sealed(low, high, os.urandom(ID_BYTES))
        # A call that was killed may have stored it.
        file = target.write(name.key, pack.size, look=not recipients)
        try:
            seal = seal_writer(file.add, recipients) if recipients else None
            writer = PackWriter(
                file.add if seal is None else seal.write,
                store_id,
                bytes.fromhex(name.pack_id),
                compress=self.settings.run.codec != "none",
                sign=unsigned if seal is None else partial(sign, OF_PACKS),
                names=reader.names,
            )
            sink = _IntoPack(writer, reader)
            give_blobs(pack.key, reader, sorted(needed, key=attrgetter("offset")), sink)
            if sink.failures:
                self.done.damaged.append(pack.key)
                return False
            writer.close()
            if seal is not None:
                seal.close()
            file.commit()
            while not file.settled:
                target.wait(_TURN_S)
            stored, ends = file.result(), (low.hex(), high.hex())
        finally:
            file.discard()
        checksum, size = stored.checksum, stored.size
        noted = StoredPack(name.pack_id, name.key, *ends, len(digests), size, checksum)
        record_pack(self.conn, self.settings.target, noted)
        return True


class _IntoPack(Hashing):
    """Copies blobs of one pack into another pack; `failures` lists the blobs that are damaged."""

    def __init__(self, writer: PackWriter, reader: PackReader) -> None:
        super().__init__(reader.names)
        self._writer = writer

    def whole(self, digest: bytes, content: memoryview) -> None:
        super().whole(digest, content)
        if not self.failures:
            self._writer.add(digest, content)

    def begin(self, large: Large) -> None:
        super().begin(large)
        if not self.failures:
            self._writer.begin(large.digest, large.size)

    def piece(self, data: memoryview) -> None:
        super().piece(data)
        if not self.failures:
            self._writer.more(data)
