"""The `packs` strategy has these probes; see `probe.Probe`.

What a bucket allows is known by trying alone: policies, locks and tokens are a store's own affair,
and may not be read with the credentials of a sender. So a check sends a trial object the way of a
pack, and then tries everything with it that an append-only bucket refuses. A receiver removes no
pack, whatever its `--allow` lists, so there a check sends a trial file, has it summed where it
lies, and removes it. By SFTP the trial file is read back, and another one is renamed to its name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import md5, sha256
from importlib.metadata import version
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.errors import BackupError, RemoteCannotStore, RemoteDenied
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.by_receiver import FileStoreByReceiver
from ntt_backup.filestore.contract import checksum
from ntt_backup.filestore.open import PACK_AREA, connect_packs
from ntt_backup.name_hash import HashOfNames
from ntt_backup.objects.bucket import (
    ContentDamaged,
    ObjectArchived,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    Part,
    UploadGone,
    agree,
    composite,
    composite_etag,
    sweep,
)
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.pack.names import BLOBS, PACKS, TRIALS
from ntt_backup.packstore import marker
from ntt_backup.upload.strategies.probe import NOT_APPEND_ONLY, Facts, SessionProbe
from ntt_backup.upload.strategies.stream_probe import receiver_facts

if TYPE_CHECKING:
    from ntt_backup.filestore.by_sftp import FileStoreBySftp

_SIZE: Final = 4096


def probe_packs(spec: SessionSpec) -> SessionProbe:
    """Returns a look at the target; that of a run removes dead uploads from a bucket."""
    if spec.bucket is None:
        return PacksByConnectionProbe(spec)
    bucket = open_bucket(spec.bucket)
    if spec.dead_before is not None:
        sweep(bucket, (PACKS, BLOBS), spec.dead_before())
    store = FileStoreByBucket(bucket, spec.bucket.part_size, PACK_AREA)
    return BucketProbe(store, spec.owner, spec.names or "blake3")


class PacksByConnectionProbe:
    """See `probe.SessionProbe`."""

    strategy = "packs"
    lingers = False

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._opened: FileStoreByReceiver | FileStoreBySftp | None = None
        self._asked = (0.0, 0.0)

    def connect(self) -> None:
        before = time.time()
        self._opened = connect_packs(self._spec)
        self._asked = before, time.time()

    def facts(self) -> Facts:
        store = self._store
        if isinstance(store, FileStoreByReceiver):
            return receiver_facts(
                store.banner, store.ready, self._asked, packs=True, ours=self._spec.names
            )
        found = marker.find(store)
        with store.storing(store.root):
            free, inodes = store.free()
        return Facts(
            system="an account by sftp",
            program=f"paramiko {version('paramiko')}",
            free_bytes=free,
            skew_s=None,
            placed=found is not None,
            identity=store.identity,
            free_inodes=inodes,
            other_layout=store.has(f"{store.root}/by-hash"),
            names=found.hash if found is not None else "",
        )

    def try_out(self) -> str:
        store, name, content = self._store, TRIALS + self._spec.owner, os.urandom(_SIZE)
        store.remove([name])  # Of a check that was killed.
        file = store.write(name)
        try:
            file.add(content)
            file.finish()
            file.publish()
            if isinstance(store, FileStoreByReceiver):
                if store.prove(name) != checksum(sha256(content).digest()):
                    raise _damaged(name)
                return "a trial file was stored, summed where it lies, and removed"
            if store.fetch(name, 0, _SIZE + 1) != content:
                raise _damaged(name)
            return "; ".join(
                ["a trial file was stored, read back, and removed", *_weak(store, name)]
            )
        finally:
            file.discard()
            store.remove([name])

    def make_place(self) -> str:
        return marker.make(self._store, self._spec.names or "blake3").hex()

    def hand_over(self) -> FileStoreByReceiver | FileStoreBySftp | None:
        opened, self._opened = self._opened, None
        return None if opened is None or opened.channel.ended else opened

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(BackupError):
                opened.close()

    @property
    def _store(self) -> FileStoreByReceiver | FileStoreBySftp:
        """The store; another one where the connection was lost meanwhile."""
        if self._opened is None or self._opened.channel.ended:
            self.connect()
        assert self._opened is not None
        return self._opened


class BucketProbe:
    """See `probe.SessionProbe`. owner names this host and target. names: the hash of names.

    The trial object has one key and one content for each owner, so that where it cannot be removed,
    one stays, however many trials there are.
    """

    strategy = "packs"
    lingers = False

    def __init__(self, store: FileStoreByBucket, owner: str, names: HashOfNames = "blake3") -> None:
        self._store = store
        self._names = names
        self._bucket = store.bucket
        self._key = TRIALS + owner
        self._content = blake3(self._key.encode()).digest(_SIZE)
        self._sha256 = sha256(self._content).digest()

    def connect(self) -> None:
        """Does nothing: each request finds a connection."""

    def facts(self) -> Facts:
        found = self._bucket.facts()
        made = marker.find(self._store)
        return Facts(
            system=found.server,
            program="by botocore",
            free_bytes=None,
            skew_s=found.skew_s,
            placed=made is not None,
            identity=made.identity if made is not None else "",
            names=made.hash if made is not None else "",
        )

    def try_out(self) -> str:
        weak = self._store_trial()
        stored = f"a trial object in parts, checked and {self._read_back()}"
        weak += self._weaknesses()
        refused = [self._overwriting_is_refused(), self._deleting_is_refused()]
        told = self._bucket.protection()
        words = [stored, _append_only(*refused), *weak]
        words += [f"versioning is {told.versioning}"] if told.versioning else []
        words += [f"object lock is {told.lock}"] if told.lock else []
        if told.versioning == "on" and not all(refused):
            words.append("versioning keeps what was there before")
        if refused[1]:
            words.append(f"{self._key} stays")
        return "; ".join(words)

    def make_place(self) -> str:
        return marker.make(self._store, self._names).hex()

    def hand_over(self) -> None:
        self._store.close()

    def close(self) -> None:
        self._store.close()

    def _store_trial(self) -> list[str]:
        """Stores the trial object as a pack is stored; returns what is weak about that."""
        try:
            return self._store_part()
        except ObjectExists:
            if self._bucket.head(self._key) is not None:
                # One of an earlier trial, which could not be removed.
                return self._compared(None)
        # The bucket keeps versions, and has no room for an object where one was deleted.
        self._key = f"{self._key}-{token_hex(4)}"
        return self._store_part()

    def _store_part(self) -> list[str]:
        bucket, key = self._bucket, self._key
        upload_id = bucket.create_upload(key)
        info: ObjectInfo | None = None
        confirmed = False
        try:
            part = bucket.put_part(key, upload_id, 1, self._content, self._sha256)
            info = bucket.complete(key, upload_id, [part])
            confirmed = part.confirmed
        except UploadGone:  # An answer was lost.
            bucket.abort(key, upload_id)
        except BaseException:
            bucket.abort(key, upload_id)
            raise
        return self._compared(info, confirmed=confirmed)

    def _compared(self, info: ObjectInfo | None, *, confirmed: bool = False) -> list[str]:
        """Returns what is weak about what the bucket says of the trial object.

        info: What the bucket said when the object was stored. confirmed: See `Part`.
        """
        bucket, key = self._bucket, self._key
        part = Part(1, "", self._sha256, _SIZE, md5(self._content, usedforsecurity=False).digest())
        if info is None or not info.checksum:
            info = bucket.head(key)
        if info is None:
            raise _damaged(f"{key}: it is missing")
        same = agree(info.checksum, composite([part]))
        if same is False:
            raise _damaged(f"{key}: its SHA-256 is {info.checksum}, ours {composite([part])}")
        if same:
            return []
        if agree(info.etag, composite_etag([part])):
            return ["it keeps no SHA-256 of an object, so the MD5 sums in its ETag are compared"]
        if confirmed and agree(info.etag, composite_etag([part])) is None:
            return ["it keeps no SHA-256 of an object, so those of its parts are compared"]
        return [
            "it keeps no SHA-256 of an object, and its ETag is no MD5 sum (as with encryption by a"
            " KMS), so all that is sent is read back once, at the price of its traffic"
        ]

    def _read_back(self) -> str:
        try:
            content = self._bucket.get_range(self._key, 0, _SIZE + 1)
        except ObjectArchived:
            return "not read back: it lies in an archive class"
        except ObjectMissing as missing:
            raise _damaged(f"{self._key}: it is missing") from missing
        if content != self._content:
            raise _damaged(self._key)
        return "read back"

    def _weaknesses(self) -> list[str]:
        """Returns what a server does not do that it should."""
        found = []
        try:
            self._bucket.put(self._key, self._content, self._sha256)
            found.append("it ignores If-None-Match, so a key that is taken is not safe")
        except ObjectExists:
            pass
        wrong, key = sha256(b"another").digest(), f"{self._key}-damaged"
        try:
            self._bucket.put(key, b"damaged", wrong)
            found.append("it does not compare SHA-256 sums")
            self._bucket.delete(key)
        except (ContentDamaged, ObjectExists, RemoteDenied):
            pass
        return found

    def _overwriting_is_refused(self) -> bool:
        try:
            self._bucket.overwrite(self._key, self._content, self._sha256)
        except (RemoteDenied, ObjectExists):
            return True
        return False

    def _deleting_is_refused(self) -> bool:
        try:
            self._bucket.delete(self._key)
        except RemoteDenied:
            return True
        return False


def _weak(store: FileStoreBySftp, taken: str) -> Iterator[str]:
    """Yields what a server by SFTP does not do that it should. taken: a name that is taken."""
    yield f"{NOT_APPEND_ONLY}: who has the key can remove and overwrite all (docs/targets.md)"
    if not store.syncs:
        yield "the server has no fsync@openssh.com, so a power cut may take what was just stored"
    if store.overwrites(taken):
        yield "a rename overwrites a file, so a name that is taken is not safe"


def _damaged(detail: str) -> RemoteCannotStore:
    return RemoteCannotStore(
        "the target has stored something else than was sent",
        detail=detail,
        hint="something there damages content: do not rely on it",
    )


def _append_only(overwriting: bool, deleting: bool) -> str:
    """Returns in words which of the two are refused."""
    if overwriting and deleting:
        return "append-only: overwriting and deleting are refused"
    allowed = [
        name
        for name, refused in (("overwriting", overwriting), ("deleting", deleting))
        if not refused
    ]
    verb = "is" if len(allowed) == 1 else "are"
    return f"{NOT_APPEND_ONLY}: {' and '.join(allowed)} {verb} allowed (docs/object-stores.md)"
