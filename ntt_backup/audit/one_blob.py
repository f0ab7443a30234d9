"""Looks for one blob in the store and in the packs of a target."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass
from typing import NoReturn

from ntt_backup.config import RemoteConfig
from ntt_backup.errors import BackupError, SourceError
from ntt_backup.model import Blob, Failure
from ntt_backup.pack.names import blob_key
from ntt_backup.packstore.tables import open_to_read, packs_for
from ntt_backup.source.store import Store


@dataclass(frozen=True, slots=True)
class InStore:
    """The state of a blob in the store.

    Attributes:
        size: In bytes, or None where there is a problem.
        verified: Whether the content was hashed, and is right.
        problem: Why the blob cannot be sent: a reason, or that the store is away. detail says more.
    """

    size: int | None = None
    verified: bool = False
    problem: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A file on a target that has a blob.

    Attributes:
        key: The name of the file.
        size: The size of the file in bytes.
        pack: Whether the file is a pack; else the file is the blob alone.
        offset: Where the blob begins in the file, in bytes.
        stored: The length of the stored blob in bytes.
    """

    key: str
    size: int
    pack: bool
    offset: int
    stored: int


def look_in_store(store: Store, blob: Blob, *, verify: bool) -> InStore:
    """Returns the state of a blob in the store. verify: hash its content."""
    try:
        with store.ready_for([blob]).tree() as tree:
            found = tree.examine(blob, verify=verify)
    except SourceError as error:
        return InStore(problem="store-away", detail=str(error))
    if isinstance(found, Failure):
        return InStore(problem=found.reason, detail=found.detail)
    return InStore(found[0].size, verified=verify)


def look_in_packs(settings: RemoteConfig, blobid: str) -> list[Place]:
    """Returns the files of a target that have a blob, by the packs' own tables. Waits for no
    outage. Raises BackupError.
    """
    store, tables = open_to_read(settings, _do_not_wait, threading.Event())
    digest = bytes.fromhex(blobid)
    with closing(store):
        found = [
            Place(pack.key, pack.size, True, entry.offset, entry.stored)
            for pack, reader in tables.readable(packs_for(store, [digest]))
            if (entry := reader.table.find(digest)) is not None
        ]
        info = store.stat(blob_key(blobid))
    if info is not None:
        found.append(Place(blob_key(blobid), info.size, False, 0, info.size))
    if not found:
        tables.keyring.require_fit()
    return found


def _do_not_wait(error: BackupError, _seconds: float) -> NoReturn:
    raise error
