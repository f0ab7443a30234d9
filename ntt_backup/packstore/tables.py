"""The packs of a target and their tables: which packs may hold a blob, and which do.

Each pack says itself what is in it, at its end. A listing tells which packs to ask, so nothing
about the whole target has to be kept, neither there nor locally.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from ntt_backup.client.throttle import SharedPace
from ntt_backup.config import RemoteConfig
from ntt_backup.config.sealing import NOT_SEALED, Keyring, SealPolicy
from ntt_backup.config.signing_key import OF_PACKS, Origin, SigningKeys
from ntt_backup.errors import BackupError
from ntt_backup.filestore.contract import UNKNOWN_ARRIVAL, FileMissing, FileUnreadable, StoredFile
from ntt_backup.filestore.local_cache import Cache, cache_of
from ntt_backup.filestore.open import open_packs
from ntt_backup.filestore.reconnecting import ReconnectingSharedStore
from ntt_backup.pack.age_encryption import NotSealed
from ntt_backup.pack.format import Entry, PackError
from ntt_backup.pack.names import PackKey, blob_directory, blob_key, blobid_of, pack_directories
from ntt_backup.pack.reader import PackReader

_AT_ONCE: Final = 16
_KEPT_BYTES: Final = 64 << 20
_MANY_PREFIXES: Final = 16
T = TypeVar("T")
R = TypeVar("R")
# What comes of opening a pack that cannot be read.
Trouble = PackError | FileMissing | FileUnreadable
TROUBLES: Final = (PackError, FileMissing, FileUnreadable)


class Listing(Protocol):
    """A store whose files can be listed; see `SharedStore`."""

    def list(self, below: str = "") -> Iterator[StoredFile]: ...


class Fetching(Protocol):
    """A store from which ranges are fetched; see `SharedStore`."""

    def fetch(self, name: str, start: int, length: int) -> bytes: ...


class PackObject(NamedTuple):
    """A pack as it is listed.

    Attributes:
        name: The name of the pack, taken apart.
        size: The size in bytes.
        arrived: When the pack arrived, as the target knows it; None where it does not say.
    """

    name: PackKey
    size: int
    arrived: datetime | None = None

    @property
    def key(self) -> str:
        return self.name.key


class LargeBlob(NamedTuple):
    """A blob that is a file of its own, as it is listed; see `PackObject`."""

    digest: bytes
    size: int
    arrived: datetime | None = None

    @property
    def key(self) -> str:
        return blob_key(self.digest.hex())


def packs_of(store: Listing, prefix: str = "") -> Iterator[PackObject]:
    """Yields the packs that may hold blobids with a prefix."""
    for below in pack_directories(prefix):
        for one in store.list(below):
            pack = pack_object(one)
            if pack is not None and pack.name.may_have(prefix):
                yield pack


def pack_object(file: StoredFile) -> PackObject | None:
    """Returns a file as a pack; None where its name is no pack's."""
    name = PackKey.read(file.name)
    return None if name is None else PackObject(name, file.size, _arrived(file))


def large_blobs_of(store: Listing, prefix: str = "") -> Iterator[LargeBlob]:
    """Yields the blobs with a prefix that are files of their own, in order."""
    for one in store.list(blob_directory(prefix)):
        blobid = blobid_of(one.name)
        if blobid is not None and blobid.startswith(prefix):
            yield LargeBlob(bytes.fromhex(blobid), one.size, _arrived(one))


def _arrived(file: StoredFile) -> datetime | None:
    return None if file.arrived == UNKNOWN_ARRIVAL else file.arrived


def packs_for(store: Listing, digests: Sequence[bytes]) -> list[PackObject]:
    """Returns the packs that may hold any of these blobs, which come in order."""
    ids = [digest[:8].hex() for digest in digests]
    prefixes = sorted({one[:2] for one in ids})
    if len(prefixes) > _MANY_PREFIXES:
        prefixes = [""]
    found = {pack.key: pack for prefix in prefixes for pack in packs_of(store, prefix)}
    return [
        pack
        for pack in found.values()
        if bisect_left(ids, pack.name.low) < bisect_right(ids, pack.name.high)
    ]


def open_to_read(
    settings: RemoteConfig,
    on_outage: Callable[[BackupError, float], None],
    stop: threading.Event,
    *,
    cached: bool = True,
    fetch: SharedPace | None = None,
) -> tuple[ReconnectingSharedStore, Tables]:
    """Returns the store of a target's packs, and their tables. Raises as `open_packs` does.

    on_outage, stop: see `ReconnectingStore`. cached: whether tables that this machine keeps are
    believed. fetch: the pace of what is fetched.
    """
    opened = partial(open_packs, settings, fetch)
    store = ReconnectingSharedStore(opened, settings.run, on_outage, stop)
    cache = cache_of(settings.remote) if cached else None
    keyring = Keyring(lambda: settings.pack.identity_file)
    return store, Tables(store, cache, keyring, SealPolicy.of(settings), SigningKeys.of(settings))


class Tables:
    """Opens packs; for several threads. The packs that were opened last are kept in memory.

    Methods also raise what the keyring raises.

    Args:
        store: The store of the packs.
        cache: Tables that this machine keeps; None where only the target's own word counts.
        keyring: Opens sealed packs.
        policy: Which packs need not be sealed.
        keys: The keys of this host, by which its sealed packs are told from those of others.

    Attributes:
        strangers: The ids of the sealed packs that were opened and that this host has not signed;
            none where this host has no key.
    """

    def __init__(
        self,
        store: Fetching,
        cache: Cache | None,
        keyring: Keyring | None = None,
        policy: SealPolicy | None = None,
        keys: SigningKeys | None = None,
    ) -> None:
        self.keyring = keyring or Keyring()
        self.strangers: set[str] = set()
        self._keys = keys
        self.policy = policy or SealPolicy()
        self._store = store
        self._cache = cache
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, PackReader] = OrderedDict()
        self._bytes = 0

    def open(self, pack: PackObject) -> PackReader:
        """Returns a pack whose table is whole. Raises one of TROUBLES."""
        with self._lock:
            reader = self._kept.get(pack.key)
            if reader is not None:
                self._kept.move_to_end(pack.key)
                return reader
        reader = self._open(pack)
        reader.end = b""  # The table has what is needed of it.
        with self._lock:
            if pack.key not in self._kept:
                self._kept[pack.key] = reader
                self._bytes += reader.trailer.table_bytes
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.trailer.table_bytes
        return reader

    def open_all(
        self, packs: Iterable[PackObject]
    ) -> Iterator[tuple[PackObject, PackReader | Trouble]]:
        """Yields packs with their tables, or the reason why these cannot be read, in order.

        Several tables are fetched at once.
        """
        threads = ThreadPoolExecutor(_AT_ONCE)
        try:
            yield from ahead(threads, self._try, packs, _AT_ONCE)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def readable(self, packs: Iterable[PackObject]) -> Iterator[tuple[PackObject, PackReader]]:
        """Yields those of the packs that can be read, with their tables."""
        for pack, reader in self.open_all(packs):
            if isinstance(reader, PackReader):
                yield pack, reader

    def _try(self, pack: PackObject) -> PackReader | Trouble:
        try:
            return self.open(pack)
        except TROUBLES as trouble:
            return trouble

    def _open(self, pack: PackObject) -> PackReader:
        if not pack.name.sealed and self.policy.refuses(pack.arrived):
            raise NotSealed(f"it {NOT_SEALED}")
        name = f"{pack.name.pack_id}-{pack.size}"
        cache = self._cache
        if cache is not None and (kept := cache.load(name)):
            with suppress(PackError):
                return self._read(pack, kept)
            cache.forget(name)
        reader = self._read(pack, b"")
        if cache is not None:
            cache.store(name, reader.end)
        return reader

    def _read(self, pack: PackObject, kept: bytes) -> PackReader:
        read = partial(self._store.fetch, pack.key)
        unseal = self.keyring.unseal if pack.name.sealed else None
        reader = PackReader(read, pack.size, unseal, kept)
        if reader.trailer.pack_id.hex() != pack.name.pack_id:
            raise PackError("its id is not that in its name")
        if len(reader.table):
            # Who looks for a blob goes by the names of packs.
            of = PackKey.of_sealed if reader.sealed else PackKey.of
            low, high = reader.table[0].digest, reader.table[len(reader.table) - 1].digest
            if of(low, high, reader.trailer.pack_id)[:2] != pack.name[:2]:
                raise PackError("its blobs are not those in its name")
        if reader.sealed and (keys := self._keys):
            by = keys.origin(OF_PACKS, reader.trailer.signed, reader.trailer.signature)
            if by is not Origin.OURS:
                with self._lock:
                    self.strangers.add(pack.name.pack_id)
        return reader


def ahead(
    threads: Executor, function: Callable[[T], R], items: Iterable[T], most: int
) -> Iterator[tuple[T, R]]:
    """Yields each item with the function's result, in order; at most so many are under way."""
    waiting: deque[tuple[T, Future[R]]] = deque()
    for item in items:
        waiting.append((item, threads.submit(function, item)))
        if len(waiting) >= most:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def entries_of(reader: PackReader, prefix: str) -> Iterator[Entry]:
    """Yields the entries of a pack whose blobids have a prefix, in order."""
    table = reader.table
    last = bytes.fromhex(prefix.ljust(64, "f"))
    for number in range(table.position(bytes.fromhex(prefix.ljust(64, "0"))), len(table)):
        entry = table[number]
        if entry.digest > last:
            return
        yield entry
