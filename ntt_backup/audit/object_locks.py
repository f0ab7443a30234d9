"""The object locks of a bucket are renewed, and one that ends soon is an alert.

A lock keeps an object until a time, and no longer: what is stored once and never again, as packs
are, loses the lock of its first day while the backup still needs it. `protect` locks all objects
anew, the marker of the store last. So the lock of the marker ends first, or with the others: one
request tells how long the store is protected, also to another host. That is noted on this host
for `status` and the metrics, which ask no bucket.

What arrives later has the bucket's default lock, or none. Where that is shorter, the first of these
ends before the marker's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from ntt_backup.config import CatalogConfig, RemoteConfig
from ntt_backup.errors import ConfigError, RemoteDenied
from ntt_backup.objects.bucket import Bucket, ObjectMissing
from ntt_backup.pack.names import BLOBS, PACKS, TRIALS
from ntt_backup.process.durable import write_durably
from ntt_backup.wire.framing import FORMAT
from ntt_backup.wire.stored_names import DUMPS, SNAPSHOTS

_THREADS: Final = 16
_AT_ONCE: Final = 1000
_SOON: Final = timedelta(days=14)
# A server may keep whole seconds.
_SAME: Final = timedelta(seconds=2)
_DEFAULT_MODE: Final = "GOVERNANCE"


@dataclass(slots=True)
class Protected:
    """What `protect` has done.

    Attributes:
        until: The end of the locks.
        objects: The number of objects that are locked until then, or longer.
        renewed: The number of those whose lock was made longer.
        bytes: The size of the objects.
        default_days: For how many days the bucket locks what arrives; 0 where it does not.
    """

    until: datetime
    objects: int = 0
    renewed: int = 0
    bytes: int = 0
    default_days: int = 0
    duration_s: float = 0.0

    def count(self, size: int, renewed: int) -> None:
        """Counts an object. size: in bytes. renewed: 1 where its lock was made longer, else 0."""
        self.objects += 1
        self.bytes += size
        self.renewed += renewed


@dataclass(frozen=True, slots=True)
class TargetLock:
    """What this host knows of the object locks of a target.

    Attributes:
        url: Of the target, as it was then.
        since: When the locks began, for all that is known (UTC).
        until: When the first of them ends (UTC).
        marker_until: When the lock of the marker ends (UTC).
        renewed: Whether this host has renewed the locks.
    """

    url: str
    since: datetime
    until: datetime
    marker_until: datetime
    renewed: bool = False

    def ends_soon(self, now: datetime) -> bool:
        """Returns whether a lock has ended, or ends within 14 days or a quarter of its term."""
        return self.until - now <= min(_SOON, (self.until - self.since) / 4)


_FORM: Final = TypeAdapter(TargetLock)


def protect(
    settings: RemoteConfig,
    bucket: Bucket,
    until: datetime,
    on_progress: Callable[[Protected], object] = lambda _: None,
) -> Protected:
    """Locks all objects of a store until a time; locks that are longer stay as they are.

    A killed call has locked a part of the objects, and not the marker: call it again.

    Args:
        settings: Of the target, whose lock is noted.
        bucket: The bucket.
        until: The end of the locks (UTC).
        on_progress: Receives what is done so far.

    Raises:
        ConfigError: The bucket has no object lock.
        RemoteDenied: The credentials may not lock objects.
    """
    begun, clock = datetime.now(UTC), time.monotonic()
    told = bucket.protection()
    if told.lock == "off":
        raise ConfigError(
            "the bucket has no object lock",
            hint="enable it by the tools of the store; many stores can do so only when a bucket is"
            " made (docs/object-stores.md)",
        )
    mode = told.lock_mode or _DEFAULT_MODE
    done = Protected(until, default_days=told.lock_days)

    def lock(key: str) -> tuple[int, int] | None:
        """Returns the size of an object, and whether its lock was renewed; None if it is gone."""
        with suppress(ObjectMissing):
            if (info := bucket.head(key)) is None:
                return None
            if info.locked_until is not None and info.locked_until >= until - _SAME:
                return info.size, 0
            bucket.lock(key, info.lock or mode, until)
            return info.size, 1
        return None

    keys = _keys(bucket)
    with ThreadPoolExecutor(_THREADS, "lock") as threads:
        while some := list(islice(keys, _AT_ONCE)):
            for found in filter(None, threads.map(lock, some)):
                done.count(*found)
            done.duration_s = time.monotonic() - clock
            on_progress(done)
    if (marker := lock(FORMAT)) is None:
        raise RemoteDenied(
            "the bucket has no store", detail=f"{FORMAT} is missing", hint="look at remote.url"
        )
    done.count(*marker)
    first = begun + timedelta(days=told.lock_days) if told.lock_days else until
    _note(settings, TargetLock(settings.remote.url, begun, min(first, until), until, renewed=True))
    done.duration_s = time.monotonic() - clock
    return done


def look_at_lock(settings: RemoteConfig, bucket: Bucket) -> TargetLock | None:
    """Returns what the lock of the marker tells, and notes that; None where no lock is seen."""
    before, info = known_lock(settings), bucket.head(FORMAT)
    if info is None or info.locked_until is None:
        return before
    if before is not None and abs(before.marker_until - info.locked_until) <= _SAME:
        return before
    until, since = info.locked_until, min(info.modified or datetime.now(UTC), info.locked_until)
    found = TargetLock(settings.remote.url, since, until, until)
    _note(settings, found)
    return found


def known_lock(settings: CatalogConfig) -> TargetLock | None:
    """Returns what this host has noted of the locks of the target of the settings."""
    with suppress(OSError, ValueError):
        found = _FORM.validate_json(_path(settings).read_bytes())
        if settings.remote is not None and found.url == settings.remote.url:
            return found
    return None


def _keys(bucket: Bucket) -> Iterator[str]:
    below = (PACKS, BLOBS, f"{DUMPS}/", f"{SNAPSHOTS}/")
    found = chain.from_iterable(map(bucket.list, below))
    return (one.key for one in found if not one.key.startswith(TRIALS))


def _note(settings: CatalogConfig, lock: TargetLock) -> None:
    with suppress(OSError):
        write_durably(_path(settings), _FORM.dump_json(lock))


def _path(settings: CatalogConfig) -> Path:
    return settings.log.notes / f"locks-{settings.target}.json"
