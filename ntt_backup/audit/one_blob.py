"""The store tells what it has of one blob, and a bucket where it keeps it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ntt_backup.config import RemoteConfig
from ntt_backup.errors import BackupError, SourceError
from ntt_backup.model import Blob, Failure
from ntt_backup.objects.contents import places
from ntt_backup.objects.keys import blob_key
from ntt_backup.objects.open import open_to_read
from ntt_backup.source.store import Store


@dataclass(frozen=True, slots=True)
class InStore:
    """Holds what the store has. verified: its content was hashed, and is right. problem: why it
    cannot be sent, a reason or that the store is away; detail says more.
    """

    size: int | None = None
    verified: bool = False
    problem: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """An object of a bucket that has a blob: a pack, from offset on so many bytes, or one of its
    own. size: of the object.
    """

    key: str
    size: int
    pack: bool
    offset: int
    stored: int


def look_in_store(root: Path, blob: Blob, *, verify: bool) -> InStore:
    """Returns what the store has of a blob; verify: its content is hashed."""
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
    found = [
        Place(pack.key, pack.size, True, entry.offset, entry.stored)
        for pack, _, entry in places(bucket, tables, bytes.fromhex(blobid))
    ]
    info = bucket.head(blob_key(blobid))
    if info is not None:
        found.append(Place(blob_key(blobid), info.size, False, 0, info.size))
    if not found:
        tables.keyring.require_fit()
    return found


def _do_not_wait(error: BackupError, _seconds: float) -> NoReturn:
    raise error
