"""Opens the file store of an area on the target of the settings, for one of four purposes.

| files of the area                  | opened to write    | opened to read |
| ---------------------------------- | ------------------ | -------------- |
| dumps, snapshots: the store seals  | `open_store`       | `open_to_read` |
| packs: who makes a pack seals it   | `open_pack_target` | `open_packs`   |

Below them there is one function for each kind of target. The modules for a kind are loaded for that
kind alone, since loading takes longer than restoring a few files.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

from ntt_backup.blobdir.descriptors import Misplaced
from ntt_backup.config import RemoteConfig, RemoteSettings
from ntt_backup.config.sealing import Keyring, SealPolicy
from ntt_backup.errors import AnotherTarget, ConfigError, Unsupported
from ntt_backup.filestore.by_directory import FileStoreByDirectory
from ntt_backup.filestore.contract import Area, FileStore, PackTarget, ReadableStore, SharedStore
from ntt_backup.filestore.sealed import ReadableSealedStore, SealedStore
from ntt_backup.wire import stored_names

if TYPE_CHECKING:
    from ntt_backup.client.session_spec import SessionSpec
    from ntt_backup.client.throttle import SharedPace
    from ntt_backup.filestore.by_bucket import FileStoreByBucket
    from ntt_backup.filestore.by_receiver import FileStoreByReceiver
    from ntt_backup.filestore.by_sftp import FileStoreBySftp


class _WithIdentity(Protocol):
    @property
    def identity(self) -> str: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=_WithIdentity)
_NEVER_THERE: Final = f"{stored_names.PACKS}/trial-never-there"

PACK_AREA: Final = Area(
    name=stored_names.PACKS,
    word="packs",
    file="a pack",
    files="packs",
    most=10_000_000,
    replace=False,
)
# The same to whoever removes packs, and the blobs that are plain files.
_PRUNED_PACKS: Final = PACK_AREA._replace(word="prune", replace=True)
_PRUNED_BLOBS: Final = Area(
    name=stored_names.BY_HASH, word="prune", file="a blob", files="blobs", most=0
)


def open_store(settings: RemoteConfig, area: Area) -> FileStore:
    """Returns the store; a bucket is asked nothing yet.

    Raises:
        ConfigError, RemoteDenied: The target cannot have files of this area.
        RemoteUnreachable: The target does not answer.
    """
    within = _of_settings(settings, area)
    keyring = Keyring(lambda: settings.pack.identity_file)
    return SealedStore(within, area, settings.recipients, keyring, SealPolicy.of(settings))


def open_to_read(settings: RemoteConfig, area: Area) -> ReadableStore:
    """Returns the store, as `open_store` does; a directory of this machine is read by this process,
    which spares the way of all content through another one.
    """
    if settings.remote.kind == "file":
        # What is wrong with the directory is told by the receiver.
        with suppress(OSError, Misplaced):
            within = _by_directory(settings.remote, area)
            keyring = Keyring(lambda: settings.pack.identity_file)
            return ReadableSealedStore(within, area, keyring, SealPolicy.of(settings))
    return open_store(settings, area)


def open_pack_target(spec: SessionSpec) -> PackTarget:
    """Returns the store that a session sends packs to; a bucket is asked nothing yet. Raises as
    `open_store` does.
    """
    if spec.bucket is None:
        return connect_packs(spec)
    from ntt_backup.client.throttle import SharedPace

    return _by_bucket(spec.bucket, PACK_AREA, SharedPace(spec.pace))


def open_packs(settings: RemoteConfig, fetch: SharedPace | None = None) -> SharedStore:
    """Returns the store of packs for reading. fetch: the pace of what is fetched; None for no
    limit. Raises as `open_store` does.
    """
    remote = settings.remote
    if remote.kind == "s3":
        return _identified(_by_bucket(remote, PACK_AREA, fetch=fetch), remote.identity)
    if remote.kind == "file" and fetch is None:
        with suppress(OSError, Misplaced):
            return _by_directory(remote, PACK_AREA)
    from ntt_backup.client.session_spec import SessionSpec

    spec = SessionSpec.of(settings, f"packs-{os.getpid()}", "packs")
    return connect_packs(replace(spec, fetch=fetch))


def open_to_prune(settings: RemoteConfig) -> PackTarget:
    """Returns the store of a target's packs, or of its plain blobs, which can only be removed.

    Raises as `open_store` does; RemoteDenied also where the target is append-only, as far as it
    tells that before anything is removed.
    """
    store = _of_settings(settings, _PRUNED_PACKS if settings.remote.packs else _PRUNED_BLOBS)
    target = cast("PackTarget", store)
    try:
        # To remove what is not there needs the same rights, and changes nothing.
        store.remove([_NEVER_THERE] if settings.remote.kind == "s3" else [])
    except BaseException:
        target.close()
        raise
    return target


def connect_packs(spec: SessionSpec) -> FileStoreByReceiver | FileStoreBySftp:
    """Returns the store of packs of a target that is no bucket. Raises as `open_store` does."""
    return _by_sftp(spec, PACK_AREA) if _is_sftp(spec) else _by_receiver(spec, PACK_AREA)


def connect(spec: SessionSpec, area: Area) -> FileStore:
    """Returns the store on a target that is no bucket.

    The remote's sh has the files where the area allows that, and the strategy is `tar` or the
    remote has no Python that can run the receiver.
    """
    if _is_sftp(spec):
        return _by_sftp(spec, area)
    if not (area.by_shell and spec.run.strategy == "tar"):
        try:
            return _by_receiver(spec, area)
        except Unsupported:
            if not area.by_shell:
                raise
    from ntt_backup.filestore.by_shell import FileStoreByShell

    return FileStoreByShell(spec, area)


def _of_settings(settings: RemoteConfig, area: Area) -> FileStore:
    from ntt_backup.client.throttle import SharedPace, process_pace

    remote, pace = settings.remote, process_pace(settings.run.bwlimit)
    if remote.kind == "s3":
        return _identified(_by_bucket(remote, area, SharedPace(pace)), remote.identity)
    from ntt_backup.client.session_spec import SessionSpec

    spec = SessionSpec.of(settings, f"{area.word}-{os.getpid()}", area.word)
    return connect(replace(spec, pace=pace), area)


def _by_bucket(
    remote: RemoteSettings,
    area: Area,
    pace: SharedPace | None = None,
    fetch: SharedPace | None = None,
) -> FileStoreByBucket:
    from ntt_backup.filestore.by_bucket import FileStoreByBucket
    from ntt_backup.objects.s3 import open_bucket

    return FileStoreByBucket(open_bucket(remote, pace, fetch), remote.part_size, area, pace)


def _by_directory(remote: RemoteSettings, area: Area) -> FileStoreByDirectory:
    return _identified(FileStoreByDirectory(remote.path, area), remote.identity)


def _is_sftp(spec: SessionSpec) -> bool:
    from ntt_backup.client.transport import Sftp

    return isinstance(spec.transport, Sftp)


def _by_sftp(spec: SessionSpec, area: Area) -> FileStoreBySftp:
    """Raises ConfigError where paramiko is missing."""
    try:
        from ntt_backup.filestore.by_sftp import FileStoreBySftp
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the library for sftp (the extra `sftp`) is not installed",
            detail=str(error),
            hint="pip install 'ntt-backup[sftp]'",
        ) from error
    return _identified(FileStoreBySftp(spec, area), spec.identity)


def _by_receiver(spec: SessionSpec, area: Area) -> FileStoreByReceiver:
    """Raises Unsupported where the remote has no Python for the receiver."""
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
