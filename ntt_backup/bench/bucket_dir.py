"""A bench fills a prefix in a bucket, tells the speed of the way there, and leaves it empty.

It lies below the target's own prefix, as `bench/<owner>-<pid>/`. What a killed bench leaves is
removed by the next one a day later. An append-only bucket removes nothing: then a bench runs only
where the operator has accepted that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from itertools import cycle
from typing import Final, TypeVar

from ntt_backup.bench.helpers import Answer, Ready
from ntt_backup.config import Settings
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import BackupError, ConfigError, RemoteDenied
from ntt_backup.formatting import many, size
from ntt_backup.objects.bucket import DEAD_SECONDS, Bucket, ObjectExists, ObjectInfo, sweep
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.packstore.tables import ahead

T = TypeVar("T")
BENCH: Final = "bench/"
_DELETES_AT_ONCE: Final = 16
_AT_ONCE: Final = 2
_MOST_PARTS: Final = 10_000
_REFUSED: Final = "it refuses to delete"


@dataclass(slots=True)
class BucketDir:
    """The prefix. keeps: why what is sent stays, in words; "" where all of it is removed."""

    _target: RemoteSettings
    _path: str
    keeps: str = ""

    def at(self, place: str = "") -> RemoteSettings:
        """Returns the settings of a place below the prefix.

        The settings have no storage class: archived objects cannot be read back, and are paid for
        by the month.
        """
        names = self._target.model_fields_set - {"url", "storage_class"}
        url = "/".join(filter(None, (self._target.url, self._path, place)))
        values = {name: getattr(self._target, name) for name in names}
        return RemoteSettings.model_validate({**values, "url": url})

    def objects(self, place: str = "") -> list[ObjectInfo]:
        """Returns the objects of a place."""
        return list(open_bucket(self.at(place)).list(""))

    def clear(self, place: str = "") -> None:
        """Removes the objects of a place and the unfinished uploads to this place.

        The objects remain if the bucket refuses to remove objects.
        """
        bucket = open_bucket(self.at(place))
        sweep(bucket, ("",), time.time() + DEAD_SECONDS)
        if self.keeps != _REFUSED:
            _delete(bucket, [one.key for one in bucket.list("")])

    def left(self) -> str:
        """Returns in words what stays in the bucket; "" for nothing."""
        if not self.keeps:
            return ""
        sizes = [one.size for one in self.objects()]
        stays = f"{many(len(sizes), 'object')}, {size(sum(sizes))}" if sizes else "old versions"
        return f"Left in the bucket, because {self.keeps}: {stays} below {self.at().url}"


@contextmanager
def bucket_dir(
    settings: Settings, *, accepted: bool, most: int, warn: Callable[[str], None]
) -> Iterator[BucketDir]:
    """Yields the prefix in the bucket, and empties the prefix at the end.

    Args:
        settings: The settings with the bucket.
        accepted: Whether the objects that are sent may stay in the bucket.
        most: The largest number of bytes that may stay, for the message.
        warn: Receives a warning if the prefix cannot be emptied.

    Raises:
        ConfigError: The objects would stay in the bucket, and that is not accepted.
    """
    remote, owner = settings.remote, settings.owner
    made = BucketDir(remote, f"{BENCH}{owner}-{os.getpid()}", _keeps(open_bucket(remote), owner))
    if made.keeps and not accepted:
        raise ConfigError(
            "what a bench sends would stay in this bucket",
            detail=f"{made.keeps}; up to {size(most)} below {remote.url}/{BENCH}",
            hint="--yes accepts that, --sample and --only make it less; or measure with a bucket of"
            " the same store that may be emptied (--target)",
        )
    try:
        yield made
    finally:
        try:
            made.clear()
        except BackupError as error:
            warn(f"{made.at().url} may not be empty ({error.message}); a bench in a day removes it")


def _keeps(bucket: Bucket, owner: str) -> str:
    """Returns why the bucket would keep what is sent; "" where it would not.

    Removes what a bench of this owner left more than a day ago.
    """
    trial, content = f"{BENCH}trial-{owner}", b"a trial"
    with suppress(ObjectExists):
        bucket.put(trial, content, sha256(content).digest())
    before = time.time() - DEAD_SECONDS
    sweep(bucket, (f"{BENCH}{owner}-",), before)
    try:
        bucket.delete(trial)
    except RemoteDenied:
        return _REFUSED
    _delete(
        bucket,
        [
            one.key
            for one in bucket.list(f"{BENCH}{owner}-")
            if one.modified is not None and one.modified < datetime.fromtimestamp(before, UTC)
        ],
    )
    return "it keeps old versions" if bucket.protection().versioning == "on" else ""


def _delete(bucket: Bucket, keys: Iterable[str]) -> None:
    with ThreadPoolExecutor(_DELETES_AT_ONCE) as threads:
        for _ in threads.map(bucket.delete, keys):
            pass


def push(remote: RemoteSettings, part: int, seconds: float, ready: Ready) -> Answer:
    """Sends random parts of an upload for so many seconds after the first, and drops them."""
    bucket = open_bucket(remote)
    data = os.urandom(part)
    digest, key = sha256(data).digest(), f"ceiling-{os.getpid()}"
    upload_id = bucket.create_upload(key)
    try:
        return _stream(
            lambda number: bucket.put_part(key, upload_id, number, data, digest).size,
            cycle(range(1, _MOST_PARTS + 1)),
            seconds,
            ready,
        )
    finally:
        bucket.abort(key, upload_id)


def pull(remote: RemoteSettings, part: int, seconds: float, ready: Ready) -> Answer:
    """Receives what lies at a place for so many seconds after the first answer, again and again."""
    bucket = open_bucket(remote)
    ranges = [
        (one.key, at, min(part, one.size - at))
        for one in bucket.list("")
        for at in range(0, one.size, part)
    ]
    return _stream(lambda wanted: len(bucket.get_range(*wanted)), cycle(ranges), seconds, ready)


def _stream(move: Callable[[T], int], items: Iterable[T], seconds: float, ready: Ready) -> Answer:
    """Moves one item after the other, two at once."""
    began = moved = 0.0
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        ready()
        for _, some in ahead(threads, move, items, _AT_ONCE):
            now = time.monotonic()
            if not began:
                began = now
                continue
            moved += some
            if now - began >= seconds:
                break
    return Answer(began=began, ended=now, size=int(moved))
