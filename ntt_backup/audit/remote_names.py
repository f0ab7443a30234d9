"""Lists the names and sizes of the blobs on a remote, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Protocol

from ntt_backup.blobdir.walk import StrayKind
from ntt_backup.client.read_session import ReadSession
from ntt_backup.client.session_pool import SessionPool
from ntt_backup.config import RemoteConfig
from ntt_backup.config.sealing import NOT_SEALED
from ntt_backup.errors import BackupError, RemoteUnreachable, Unsupported
from ntt_backup.filestore.contract import FileArchived, FileUnreadable, SharedStore
from ntt_backup.model import StoredPack
from ntt_backup.objects.bucket import proof_of
from ntt_backup.pack.age_encryption import SealedForOthers
from ntt_backup.pack.names import BLOBS, LARGE_BLOB, PACKS, TRIALS
from ntt_backup.pack.reader import PackReader
from ntt_backup.packstore.tables import (
    PackObject,
    Tables,
    Trouble,
    entries_of,
    large_blobs_of,
    packs_of,
)


class OnStray(Protocol):
    """Is told the path and the kind of an entry that is no blob, and more about the entry."""

    def __call__(self, path: str, kind: StrayKind, detail: str = "", /) -> None: ...


class ReceiverNames:
    """Lists the blobs of a receiver. Methods raise BackupError."""

    def __init__(
        self, settings: RemoteConfig, on_outage: Callable[[BackupError, float], None]
    ) -> None:
        pool = SessionPool(settings, "reconcile", ("list",), on_outage)
        self._session = pool.session("0")

    def below(self, prefix: str, on_stray: OnStray) -> Iterator[tuple[bytes, int]]:
        """Yields the blobs with a prefix, with their sizes, in order. on_stray is told path and
        kind of what is no blob; of what is UNREADABLE blobs may exist that are not told of.
        """
        for page in self._session.names(prefix, on_stray):
            yield from page

    def is_empty(self) -> bool:
        """Returns whether there is no blob at all."""
        return self._session.do(ReadSession.is_empty)

    def close(self) -> None:
        self._session.close()


class PackNames:
    """Lists what the tables of known packs name, and the blobs that are files of their own, as
    runs store them. Has the methods of `ReceiverNames`.

    Whoever may write to the target can put a pack there that names any blob, or one that is sealed
    for others. So only packs that the ledger has tell which blobs are stored: checks look at these.
    `closed` has those of them that are sealed for others: which blobs they hold is not known.

    Args:
        store: The store of the packs.
        tables: Open the packs.
        recorded: Returns the packs that the ledger has.
        but: Keys of packs that count as if they were not there.
        signed: Sealed packs that this host has not signed do not count either, where it has a key.
        on_wait: Is called with each pack whose table is read, and may raise.
    """

    def __init__(
        self,
        store: SharedStore,
        tables: Tables,
        recorded: Callable[[], Iterable[StoredPack]],
        but: Container[str] = frozenset(),
        *,
        signed: bool = False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.tables = tables
        self.closed: list[PackObject] = []
        self._recorded = recorded
        self._but = but
        self._signed = signed
        self._on_wait = on_wait
        self._told: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._asked_ledger = False

    def knows(self, pack: PackObject) -> bool:
        """Returns whether the ledger has a pack, in this size. It is asked once for each listing
        that meets another pack: a run may have added that.
        """
        if self._sizes.get(pack.key) != pack.size and not self._asked_ledger:
            self._asked_ledger = True
            self._sizes.update((one.key, one.size) for one in self._recorded())
        return self._sizes.get(pack.key) == pack.size and pack.key not in self._but

    def learn(self, packs: Iterable[PackObject], on_stray: OnStray) -> Iterator[StoredPack]:
        """Yields packs as the ledger may have them, and knows them from then on. on_stray is told
        of those that cannot be read.
        """
        foreign = False
        for pack, opened in self.tables.open_all(packs):
            self._on_wait()
            if not isinstance(opened, PackReader):
                foreign = foreign or isinstance(opened, SealedForOthers)
                self._tell(pack, opened, on_stray)
            elif (stored := self._describe(pack, opened)) is not None:
                yield stored
                self._sizes[pack.key] = pack.size
        if foreign:
            self.require_fit()

    def _describe(self, pack: PackObject, reader: PackReader) -> StoredPack | None:
        """Returns a pack as the ledger has it, or None for a pack that is empty or gone."""
        table = reader.table
        try:
            info = self.store.stat(pack.key)
        except FileUnreadable:
            info = None
        if info is None or not len(table):
            return None
        low, high = table[0].digest.hex(), table[len(table) - 1].digest.hex()
        pack_id, proof = pack.name.pack_id, proof_of(info)
        return StoredPack(pack_id, pack.key, low, high, len(table), pack.size, proof)

    def below(self, prefix: str, on_stray: OnStray) -> Iterator[tuple[bytes, int]]:
        """Yields the blobs with a prefix in order; one that is in several places comes for each of
        these, with its size there.
        """
        self._asked_ledger, known = False, len(self.closed)
        lists = [self._large(prefix, on_stray)]
        packs = (pack for pack in packs_of(self.store, prefix) if self.knows(pack))
        for pack, opened in self.tables.open_all(packs):
            self._on_wait()
            if isinstance(opened, PackReader):
                if not (self._signed and pack.name.pack_id in self.tables.strangers):
                    lists.append((entry.digest, entry.raw) for entry in entries_of(opened, prefix))
            else:
                if isinstance(opened, SealedForOthers) and pack not in self.closed:
                    self.closed.append(pack)
                self._tell(pack, opened, on_stray)
        if len(self.closed) > known:
            self.require_fit()
        return heapq.merge(*lists)

    def _large(self, prefix: str, on_stray: OnStray) -> Iterator[tuple[bytes, int]]:
        """Yields the blobs with a prefix that are files of their own. on_stray is told of files
        that no run stores so: no check looks at them.
        """
        for blob in large_blobs_of(self.store, prefix):
            if self.tables.policy.refuses(blob.arrived):
                on_stray(blob.key, StrayKind.WRONG_DIRECTORY, f"it {NOT_SEALED}")
            elif blob.size < LARGE_BLOB:
                said = f"{blob.size} bytes: it is no large blob"
                on_stray(blob.key, StrayKind.WRONG_DIRECTORY, said)
            else:
                yield blob.digest, blob.size

    def _tell(self, pack: PackObject, what: Trouble, on_stray: OnStray) -> None:
        """Tells on_stray of a pack that cannot be read, once. Raises BackupError where it may be
        read later.
        """
        if isinstance(what, FileArchived):
            raise Unsupported(
                "the target's packs cannot be read where they lie",
                detail=f"{pack.key} is in an archive class",
                hint="thaw the packs first; `ntt-backup-remote verify` needs no thawing",
            )
        if isinstance(what, FileUnreadable):
            raise RemoteUnreachable(
                "the target does not give the table of a pack",
                detail=str(what),
                hint="nothing is known of the blobs in it: look at the target's log",
            )
        if pack.key not in self._told:
            self._told.add(pack.key)
            on_stray(pack.key, StrayKind.UNREADABLE, str(what))

    def hides(self, blobid: str) -> bool:
        """Returns whether a blob may be in one of the closed packs."""
        return any(one.name.may_have(blobid) for one in self.closed)

    def require_fit(self) -> None:
        """Raises ConfigError where packs are sealed for others, and so are all packs of this host,
        of which at least one is there; where it never stored any, all packs of the target.
        """
        keyring = self.tables.keyring
        if keyring.fits:
            return
        any_pack = not ({one.key for one in self._recorded()} or self._but)
        ours = (one for one in packs_of(self.store) if any_pack or self.knows(one))
        refused = False
        for _, what in self.tables.open_all(ours):
            if keyring.fits:
                return
            refused = refused or isinstance(what, SealedForOthers)
        if refused:
            raise keyring.foreign()

    def is_empty(self) -> bool:
        return not any(
            not one.name.startswith(TRIALS)
            for below in (PACKS, BLOBS)
            for one in self.store.list(below)
        )

    def close(self) -> None:
        self.store.close()


RemoteNames = ReceiverNames | PackNames
