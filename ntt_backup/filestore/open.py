"""Opens the file store of an area on the target of the settings.

What reaches one kind of target is loaded for that kind alone: it takes longer than to restore a few
files.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ntt_backup.blobdir.descriptors import Misplaced
from ntt_backup.config import RemoteConfig
from ntt_backup.config.sealing import Keyring, SealPolicy
from ntt_backup.errors import AnotherTarget, ConfigError, Unsupported
from ntt_backup.filestore.by_directory import FileStoreByDirectory
from ntt_backup.filestore.contract import (
    Area,
    FileStore,
    PackTarget,
    ReadableStore,
    SharedStore,
)
from ntt_backup.filestore.sealed import ReadableSealedStore, SealedStore
from ntt_backup.wire import stored_names

if TYPE_CHECKING:
    from ntt_backup.client.connection import SessionSpec
    from ntt_backup.client.throttle import SharedPace
    from ntt_backup.filestore.by_receiver import FileStoreByReceiver
    from ntt_backup.filestore.by_sftp import FileStoreBySftp


class _WithIdentity(Protocol):
    @property
    def identity(self) -> str: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=_WithIdentity)

PACKS: Final = Area(
    name=stored_names.PACKS,
    word="packs",
    file="a pack",
    files="packs",
    most=10_000_000,
    replace=False,
)


def open_store(settings: RemoteConfig, area: Area) -> FileStore:
    """Returns the store; a bucket is asked nothing yet.

    Raises:
        ConfigError, RemoteDenied: The target cannot have files of this area.
        RemoteUnreachable: The target does not answer.
    """
    within = _in_bucket(settings, area) if settings.remote.kind == "s3" else _remote(settings, area)
    keyring = Keyring(lambda: settings.pack.identity_file)
    return SealedStore(within, area, settings.recipients, keyring, SealPolicy.of(settings))


def open_to_read(settings: RemoteConfig, area: Area) -> ReadableStore:
    """Returns the store, as `open_store` does; a directory of this machine is read by this process,
    which spares the way of all content through another one.
    """
    if settings.remote.kind == "file":
        # What is wrong with the directory is told by the receiver.
        with suppress(OSError, Misplaced):
            within = _identified(
                FileStoreByDirectory(settings.remote.path, area), settings.remote.identity
            )
            keyring = Keyring(lambda: settings.pack.identity_file)
            return ReadableSealedStore(within, area, keyring, SealPolicy.of(settings))
    return open_store(settings, area)


def open_pack_target(spec: SessionSpec) -> PackTarget:
    """Returns the store that a session sends packs to; a bucket is asked nothing yet. Raises as
    `open_store` does.
    """
    if spec.bucket is None:
        return by_connection(spec, PACKS)
    from ntt_backup.client.throttle import SharedPace
    from ntt_backup.filestore.by_bucket import FileStoreByBucket
    from ntt_backup.objects.s3 import open_bucket

    pace = SharedPace(spec.pace)
    bucket = open_bucket(spec.bucket, pace)
    return FileStoreByBucket(bucket, spec.bucket.part_size, PACKS, pace)


def open_packs(settings: RemoteConfig, fetch: SharedPace | None = None) -> SharedStore:
    """Returns the store of packs for reading. fetch: the pace of what is fetched; None for no
    limit. Raises as `open_store` does.
    """
    remote = settings.remote
    if remote.kind == "s3":
        from ntt_backup.filestore.by_bucket import FileStoreByBucket
        from ntt_backup.objects.s3 import open_bucket

        bucket = FileStoreByBucket(open_bucket(remote, fetch=fetch), remote.part_size, PACKS)
        return _identified(bucket, remote.identity)
    if remote.kind == "file" and fetch is None:
        with suppress(OSError, Misplaced):
            return _identified(FileStoreByDirectory(remote.path, PACKS), remote.identity)
    from ntt_backup.client.connection import SessionSpec

    spec = SessionSpec.of(settings, f"packs-{os.getpid()}", "packs")
    return by_connection(replace(spec, fetch=fetch), PACKS)


def by_connection(spec: SessionSpec, area: Area) -> FileStoreByReceiver | FileStoreBySftp:
    """Returns the store by a receiver, or by SFTP where the transport is for that."""
    from ntt_backup.client.transport import Sftp

    return by_sftp(spec, area) if isinstance(spec.transport, Sftp) else by_receiver(spec, area)


def by_sftp(spec: SessionSpec, area: Area) -> FileStoreBySftp:
    """Returns the store by SFTP. Raises ConfigError where paramiko is missing."""
    try:
        from ntt_backup.filestore.by_sftp import FileStoreBySftp
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the library for sftp (the extra `sftp`) is not installed",
            detail=str(error),
            hint="pip install 'ntt-backup[sftp]'",
        ) from error
    return _identified(FileStoreBySftp(spec, area), spec.identity)


def _identified(store: S, expected: str) -> S:
    """Returns a store. Raises AnotherTarget where it is not that of the identity, if one is
    expected.
    """
    try:
        if expected and (found := store.identity) != expected:
            raise AnotherTarget(expected, found)
    except BaseException:
        store.close()
        raise
    return store


def connect(spec: SessionSpec, area: Area) -> FileStore:
    """Returns the store by a receiver; by the remote's sh where the area allows that, and the
    strategy is `tar` or the remote has no Python that can run the receiver.
    """
    if not (area.by_shell and spec.run.strategy == "tar"):
        try:
            return by_receiver(spec, area)
        except Unsupported:
            if not area.by_shell:
                raise
    from ntt_backup.filestore.by_shell import FileStoreByShell

    return FileStoreByShell(spec, area)


def by_receiver(spec: SessionSpec, area: Area) -> FileStoreByReceiver:
    """Returns the store by a receiver. Raises Unsupported where the remote has no Python for it."""
    from ntt_backup.filestore.by_receiver import FileStoreByReceiver

    try:
        return FileStoreByReceiver(spec, area)
    except Unsupported as error:
        raise Unsupported(
            f"{area.files} need Python 3.8 or newer on the remote",
            detail=str(error),
            hint="install python3 on the remote (all of its standard library, nothing else), or"
            " name another target (--target)",
        ) from error


def _in_bucket(settings: RemoteConfig, area: Area) -> FileStore:
    from ntt_backup.client.throttle import SharedPace, process_pace
    from ntt_backup.filestore.by_bucket import FileStoreByBucket
    from ntt_backup.objects.s3 import open_bucket

    bucket = open_bucket(settings.remote, SharedPace(process_pace(settings.run.bwlimit)))
    store = FileStoreByBucket(bucket, settings.remote.part_size, area)
    return _identified(store, settings.remote.identity)


def _remote(settings: RemoteConfig, area: Area) -> FileStore:
    from ntt_backup.client.connection import SessionSpec
    from ntt_backup.client.throttle import process_pace

    spec = SessionSpec.of(settings, f"{area.word}-{os.getpid()}", area.word)
    spec = replace(spec, pace=process_pace(settings.run.bwlimit))
    return by_sftp(spec, area) if settings.remote.kind == "sftp" else connect(spec, area)
