"""Looks for one blob in the store and in a bucket."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ntt_backup.config import RemoteConfig
from ntt_backup.errors import BackupError, SourceError
from ntt_backup.model import Blob, Failure
from ntt_backup.objects.keys import blob_key
from ntt_backup.objects.open import open_to_read
from ntt_backup.objects.tables import packs_for
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
    """An object of a bucket that has a blob.

    Attributes:
        key: The key of the object.
        size: The size of the object in bytes.
        pack: Whether the object is a pack; else the object is the blob alone.
        offset: Where the blob begins in the object, in bytes.
        stored: The length of the stored blob in bytes.
    """

    key: str
    size: int
    pack: bool
    offset: int
    stored: int


def look_in_store(root: Path, blob: Blob, *, verify: bool) -> InStore:
    """Returns the state of a blob in the store. verify: hash its content."""
    try:
        with Store(root).tree() as tree:
            found = tree.examine(blob, verify=verify)
    except SourceError as error:
        return InStore(problem="store-away", detail=str(error))
    if isinstance(found, Failure):
        return InStore(problem=found.reason, detail=found.detail)
    return InStore(found[0].size, verified=verify)


def look_in_bucket(settings: RemoteConfig, blobid: str) -> list[Place]:
    """Returns the objects of a bucket that have a blob, by the packs' own tables. Waits for no
    outage. Raises BackupError.
    """
    bucket, tables = open_to_read(settings, _do_not_wait, threading.Event())
    digest = bytes.fromhex(blobid)
    found = [
        Place(pack.key, pack.size, True, entry.offset, entry.stored)
        for pack, reader in tables.readable(packs_for(bucket, [digest]))
        if (entry := reader.table.find(digest)) is not None
    ]
    info = bucket.head(blob_key(blobid))
    if info is not None:
        found.append(Place(blob_key(blobid), info.size, False, 0, info.size))
    if not found:
        tables.keyring.require_fit()
    return found


def _do_not_wait(error: BackupError, _seconds: float) -> NoReturn:
    raise error
