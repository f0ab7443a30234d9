"""A remote of any kind lists the names and sizes that it has, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Final

from ntt_backup.blobdir.layout import StrayKind
from ntt_backup.client.pool import SessionPool
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import BackupError, RemoteUnreachable, Unsupported
from ntt_backup.objects.bucket import ObjectArchived, ObjectUnreadable
from ntt_backup.objects.keys import BLOBS, PACKS, TRIALS
from ntt_backup.objects.open import open_to_read
from ntt_backup.objects.patient import PatientBucket
from ntt_backup.objects.tables import PackObject, Tables, Trouble, names_of
from ntt_backup.pack.seal import SealedForOthers

_STRAYS: Final = dict(enumerate(StrayKind))
_DIGITS: Final = 64
OnStray = Callable[[str, StrayKind], None]


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
    """Lists what the tables of packs name, and the blobs that are objects of their own. but: keys
    of packs that count as if they were not there. Has the methods of `ReceiverNames`.
    """

    def __init__(
        self, bucket: PatientBucket, tables: Tables, but: Collection[str] = frozenset()
    ) -> None:
        self.bucket = bucket
        self.tables = tables
        self._but = but
        self._told: set[str] = set()

    @staticmethod
    def of(settings: RemoteConfig, on_outage: Callable[[BackupError, float], None]) -> BucketNames:
        """Returns those of the settings' bucket."""
        return BucketNames(*open_to_read(settings, on_outage, threading.Event()))

    def below(self, prefix: str, on_stray: OnStray) -> Iterator[tuple[bytes, int]]:
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
            if isinstance(what, SealedForOthers):
                raise self.tables.keyring.foreign()
            if pack.key not in self._told:
                self._told.add(pack.key)
                on_stray(pack.key, StrayKind.UNREADABLE)

        return names_of(self.bucket, self.tables, prefix, trouble, self._but)

    def is_empty(self) -> bool:
        return not any(
            not one.key.startswith(TRIALS)
            for below in (PACKS, BLOBS)
            for one in self.bucket.list(below)
        )

    def close(self) -> None: ...


RemoteNames = ReceiverNames | BucketNames
