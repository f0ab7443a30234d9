"""A bucket keeps snapshots, each file as an object below `snapshots/`; see `contract.Repository`.

Where there are recipients, files are sealed on their way, and their objects end with `.sealed`. One
that is not sealed is read only where the policy allows it. Of two objects of one file that may be
read the one counts that arrived first: somebody has put the other one beside it. So a file is
stored only where none stands beside it once it has its name.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from threading import Lock
from typing import Final, NamedTuple

from ntt_backup.config.sealing import NOT_SEALED, Keyring, SealPolicy
from ntt_backup.errors import NameTaken, ProtocolViolation, RemoteCannotStore, RemoteDenied
from ntt_backup.objects.bucket import (
    DEAD_SECONDS,
    Bucket,
    ObjectArchived,
    ObjectMissing,
    sweep,
)
from ntt_backup.objects.keys import SNAPSHOTS
from ntt_backup.objects.upload import ObjectUpload
from ntt_backup.pack.format import PackError
from ntt_backup.pack.seal import Unsealed
from ntt_backup.snapshot.repository.ahead import ask_ahead
from ntt_backup.snapshot.repository.contract import (
    A_FILE,
    Buffer,
    FileDamaged,
    FileMissing,
    NewFile,
    Range,
    SnapshotDamaged,
    StoredFile,
)
from ntt_backup.snapshot.repository.names import MANIFEST, FileName
from ntt_backup.snapshot.repository.sealed import SUFFIX, SealedFile, opened, plain_size

_REQUESTS: Final = 8
# Keys of sealed files that are kept.
_KEPT_OPEN: Final = 1024
# Of manifests, to find one that the identities open.
_MOST_TRIED: Final = 256
# Ten thousand versions of a hundred sets; each takes 400 bytes of memory.
_MOST_FILES: Final = 1_000_000
_UNKNOWN: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Two parts are in memory; one of this size is on a slow link for a second.
_LARGEST_PART: Final = 16 << 20


class _Object(NamedTuple):
    """Holds what has a file's content. size: of the object. twice: another one is beside it."""

    key: str
    size: int
    arrived: datetime | None
    twice: bool = False

    @property
    def sealed(self) -> bool:
        return self.key.endswith(SUFFIX)

    def beside(self, other: _Object | None, policy: SealPolicy) -> _Object:
        """Returns the one of two objects of a file that counts."""
        if other is None:
            return self
        plain, sealed = sorted((self, other), key=lambda one: one.sealed)
        plain_at, sealed_at = plain.arrived, sealed.arrived
        first = sealed if policy.required else plain
        # A server tells whole seconds.
        if plain_at and sealed_at and plain_at != sealed_at and not policy.refuses(plain_at):
            first = plain if plain_at < sealed_at else sealed
        return first._replace(twice=True)


class RepositoryByObjects:
    """See the module. part_size: of the parts in which files are sent, if not too large.
    recipients: whom files are sealed for. keyring opens those that are sealed. policy: which need
    not be.
    """

    def __init__(
        self,
        bucket: Bucket,
        part_size: int,
        recipients: Sequence[str] = (),
        keyring: Keyring | None = None,
        policy: SealPolicy | None = None,
    ) -> None:
        self._bucket = bucket
        self._part_size = min(part_size, _LARGEST_PART)
        self._recipients = recipients
        self._keyring = keyring or Keyring()
        self._policy = policy or SealPolicy()
        self._threads = ThreadPoolExecutor(_REQUESTS, "read")
        self._lock = Lock()
        self._known: dict[str, _Object] = {}
        self._opened: OrderedDict[str, Unsealed] = OrderedDict()
        self._swept = False

    def list(self, below: str = "") -> Iterator[StoredFile]:
        listed: dict[str, _Object] = {}
        for info in self._bucket.list(SNAPSHOTS + below):
            name = info.key.removeprefix(SNAPSHOTS).removesuffix(SUFFIX)
            with suppress(ValueError):
                FileName.read(name)
                one = _Object(info.key, info.size, info.modified)
                listed[name] = one.beside(listed.get(name), self._policy)
            if len(listed) > _MOST_FILES:
                raise ProtocolViolation(
                    "the bucket lists more files of snapshots than there can be",
                    detail=f"{_MOST_FILES:,} below {SNAPSHOTS}{below}",
                    hint="somebody else has written there; look at the bucket",
                )
        self._known.update(listed)
        for name, found in sorted(listed.items()):
            size = plain_size(found.size) if found.sealed else found.size
            yield StoredFile(name, size, found.arrived or _UNKNOWN)

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        return ask_ahead(ranges, _REQUESTS, self._ask, Future.result)

    def write(self, name: str) -> NewFile:
        endings = (SUFFIX, "") if self._recipients else ("", SUFFIX)
        key, beside = (_key(name) + one for one in endings)
        if not self._swept:
            sweep(self._bucket, (SNAPSHOTS,), time.time() - DEAD_SECONDS)
            self._swept = True
        # A weak server would let it be overwritten.
        if self._bucket.head(key) is not None:
            raise NameTaken(key, A_FILE)
        file = NewObject(self._bucket, name, key, beside, self._part_size)
        return SealedFile(file, self._recipients) if self._recipients else file

    def remove(self, names: Sequence[str]) -> int:
        for name in names:
            plain, known = _key(name), self._known.pop(name, None)
            self._opened.pop(name, None)
            one = [known.key] if known is not None and not known.twice else [plain, plain + SUFFIX]
            for key in one:
                self._bucket.delete(key)
        return len(names)

    def close(self) -> None:
        # A process with threads could not be copied, as a restore is into its jobs.
        self._threads.shutdown(cancel_futures=True)

    def _ask(self, one: Range) -> Future[bytes]:
        return self._threads.submit(self._get, one)

    def _get(self, one: Range) -> bytes:
        name, start, length = one
        try:
            found = self._find(name)
            if not found.sealed:
                if self._policy.refuses(found.arrived):
                    raise FileDamaged(f"{name} {NOT_SEALED}")
                return self._bucket.get_range(found.key, start, length)
            return self._open(name, found).read(start, length)
        except PackError as error:
            raise SnapshotDamaged(f"{name}: {error}") from error
        except ObjectMissing as error:
            raise FileMissing(name) from error
        except ObjectArchived as error:
            raise RemoteDenied(
                "a file of a snapshot lies in an archive class",
                detail=_key(name),
                hint="thaw it, and let the bucket's rules archive packs/ and blobs/ alone",
            ) from error

    def _find(self, name: str) -> _Object:
        """Returns where a file's content is. Raises ObjectMissing."""
        found = self._known.get(name)
        for suffix in ("", SUFFIX) if found is None else ():
            info = self._bucket.head(_key(name) + suffix)
            if info is not None:
                one = _Object(info.key, info.size, info.modified)
                found = one.beside(found, self._policy)
                self._known[name] = found
        if found is None:
            raise ObjectMissing(name)
        return found

    def _open(self, name: str, found: _Object) -> Unsealed:
        """Returns what is within a sealed file; a key is fetched and opened once."""
        with self._lock:
            content = self._opened.get(name)
            if content is None:
                read = partial(self._bucket.get_range, found.key)
                try:
                    content = opened(read, found.size, self._keyring)
                except PackError as error:
                    self._require_fit()
                    raise FileDamaged(f"{name}: {error}") from error
                self._opened[name] = content
                if len(self._opened) > _KEPT_OPEN:
                    self._opened.popitem(last=False)
        return content

    def _require_fit(self) -> None:
        """Raises ConfigError where nothing was opened yet, and no manifest can be: of all sets the
        first ones that arrived are tried, since nobody can put others there before them.
        """
        if self._keyring.fits:
            return
        manifests = [one for one in self.list() if one.name.endswith(f"/{MANIFEST}")]
        for one in sorted(manifests, key=lambda one: one.arrived)[:_MOST_TRIED]:
            found = self._known[one.name]
            if found.sealed:
                with suppress(PackError, ObjectMissing, ObjectArchived):
                    opened(partial(self._bucket.get_range, found.key), found.size, self._keyring)
                if self._keyring.fits:
                    return
        raise self._keyring.foreign()


class NewObject:
    """An object on its way; see `contract.NewFile`."""

    def __init__(self, bucket: Bucket, name: str, key: str, beside: str, part_size: int) -> None:
        self._upload = ObjectUpload(bucket, key, part_size, A_FILE)
        self._bucket = bucket
        self._name = name
        self._beside = beside
        self._digest = sha256()

    def add(self, data: Buffer) -> None:
        self._digest.update(data)
        self._upload.add(data)

    def finish(self) -> bytes:
        self._upload.finish()
        if self._bucket.head(self._beside) is not None:
            raise RemoteCannotStore(
                "somebody else has put an object beside a file of a snapshot",
                detail=f"{self._beside}, while {self._name} was sent",
                hint="look who may write to the bucket; then take a version again",
            )
        return self._digest.digest()

    def give_up(self) -> None:
        self._upload.give_up()


def _key(name: str) -> str:
    """Returns the key of a file. Raises ValueError for what is none of a snapshot."""
    return SNAPSHOTS + str(FileName.read(name))
