"""A remote of any kind lists the names and sizes that it has, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, Protocol

from ntt_backup.blobdir.layout import StrayKind
from ntt_backup.client.pool import SessionPool
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import BackupError, RemoteUnreachable, Unsupported
from ntt_backup.model import StoredPack
from ntt_backup.objects.bucket import ObjectArchived, ObjectUnreadable
from ntt_backup.objects.keys import BLOBS, PACKS, TRIALS
from ntt_backup.objects.open import open_to_read
from ntt_backup.objects.patient import PatientBucket
from ntt_backup.objects.tables import PackObject, Tables, Trouble, names_of, packs_of
from ntt_backup.pack.seal import SealedForOthers

_STRAYS: Final = dict(enumerate(StrayKind))
_DIGITS: Final = 64


class OnStray(Protocol):
    """Is told path and kind of what is no blob, and what is known of it besides."""

    def __call__(self, path: str, kind: StrayKind, detail: str = "", /) -> None: ...


class ReceiverNames:
    """Lists what a receiver has. Methods raise BackupError."""

    def __init__(
        self, settings: RemoteConfig, on_outage: Callable[[BackupError, float], None]
    ) -> None:
        self._pool = SessionPool(settings, "reconcile", ("list",), on_outage)
        self._session = self._pool.session("0")

    def below(self, prefix: str, on_stray: OnStray) -> Iterator[tuple[bytes, int]]:
        """Yields the blobs with a prefix, with their sizes, in order. on_stray is told path and
        kind of what is no blob; of what is UNREADABLE blobs may exist that are not told of.
        """
        low = int(prefix.ljust(_DIGITS, "0"), 16)
        high = low + (1 << 4 * (_DIGITS - len(prefix)))

        def stray(number: int, path: str) -> None:
            on_stray(path, _STRAYS.get(number, StrayKind.UNREADABLE))

        for page in self._session.names(low, high, on_stray=stray):
            yield from page

    def is_empty(self) -> bool:
        """Returns whether there is no blob at all."""
        return self._pool.is_empty()

    def close(self) -> None:
        self._session.close()


class BucketNames:
    """Lists what the tables of packs name, and the blobs that are objects of their own. Has the
    methods of `ReceiverNames`.

    Whoever may write to the bucket can put a pack there that is sealed for others. Such a pack is
    told and passed over; `closed` has those that this host has stored: which blobs they hold is not
    known.

    Args:
        bucket: The bucket.
        tables: Open its packs.
        recorded: Returns the packs that the ledger knows.
        but: Keys of packs that count as if they were not there.
    """

    def __init__(
        self,
        bucket: PatientBucket,
        tables: Tables,
        recorded: Callable[[], Iterable[StoredPack]],
        but: Collection[str] = frozenset(),
    ) -> None:
        self.bucket = bucket
        self.tables = tables
        self.closed: list[PackObject] = []
        self._recorded = recorded
        self._but = but
        self._told: set[str] = set()

    @staticmethod
    def of(
        settings: RemoteConfig,
        on_outage: Callable[[BackupError, float], None],
        recorded: Callable[[], Iterable[StoredPack]],
    ) -> BucketNames:
        """Returns those of the settings' bucket."""
        return BucketNames(*open_to_read(settings, on_outage, threading.Event()), recorded)

    def below(self, prefix: str, on_stray: OnStray) -> Iterator[tuple[bytes, int]]:
        foreign: list[PackObject] = []

        def trouble(pack: PackObject, what: Trouble) -> None:
            if isinstance(what, ObjectArchived):
                raise Unsupported(
                    "the bucket's packs cannot be read where they lie",
                    detail=f"{pack.key} is in an archive class",
                    hint="thaw the packs first; `ntt-backup-remote verify` needs no thawing",
                )
            if isinstance(what, ObjectUnreadable):
                raise RemoteUnreachable(
                    "the object store does not give the table of a pack",
                    detail=str(what),
                    hint="nothing is known of the blobs in it: look at the object store's log",
                )
            if pack.key not in self._told:
                self._told.add(pack.key)
                if isinstance(what, SealedForOthers):
                    foreign.append(pack)
                on_stray(pack.key, StrayKind.UNREADABLE, str(what))

        names = names_of(self.bucket, self.tables, prefix, trouble, self._but)
        first = next(names, None)  # All packs with the prefix have been opened by now.
        if foreign:
            sizes = self.require_fit()
            self.closed += [one for one in foreign if sizes.get(one.key) == one.size]
        if first is not None:
            yield first
            yield from names

    def hides(self, blobid: str) -> bool:
        """Returns whether a blob may be in one of the closed packs."""
        return any(one.name.may_have(blobid) for one in self.closed)

    def require_fit(self) -> dict[str, int]:
        """Returns the keys of the packs that the ledger knows, with their sizes.

        Raises:
            ConfigError: Packs are sealed for others, and so are all packs of this host, of which at
                least one is there; where it never stored any, all packs of the bucket.
        """
        sizes = {one.key: one.size for one in self._recorded()}
        keyring = self.tables.keyring
        if not keyring.fits:
            any_pack = not (sizes or self._but)
            ours = (
                one
                for one in packs_of(self.bucket)
                if any_pack or (one.key not in self._but and sizes.get(one.key) == one.size)
            )
            refused = False
            for _, what in self.tables.open_all(ours):
                if keyring.fits:
                    return sizes
                refused = refused or isinstance(what, SealedForOthers)
            if refused:
                raise keyring.foreign()
        return sizes

    def is_empty(self) -> bool:
        return not any(
            not one.key.startswith(TRIALS)
            for below in (PACKS, BLOBS)
            for one in self.bucket.list(below)
        )

    def close(self) -> None: ...


RemoteNames = ReceiverNames | BucketNames
