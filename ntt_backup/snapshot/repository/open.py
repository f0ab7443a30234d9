"""Opens the repository of snapshots on the target of the settings.

What reaches one kind of target is loaded for that kind alone: it takes longer than to restore a few
files.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from ntt_backup.blobdir.open import Misplaced
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import Unsupported
from ntt_backup.snapshot.repository.by_directory import RepositoryByDirectory
from ntt_backup.snapshot.repository.contract import Repository, RepositoryToRead


def open_repository(settings: RemoteConfig) -> Repository:
    """Returns the repository; a bucket is asked nothing yet. Raises ConfigError and RemoteDenied
    where the target cannot have snapshots, and RemoteUnreachable.
    """
    if settings.remote.kind == "s3":
        return _by_objects(settings)
    try:
        return _by_receiver(settings)
    except Unsupported as error:
        raise Unsupported(
            "snapshots need Python 3.8 or newer on the remote",
            detail=str(error),
            hint="install python3 on the remote (all of its standard library, nothing else), or"
            " name another target (--target)",
        ) from error


def open_to_read(settings: RemoteConfig) -> RepositoryToRead:
    """Returns the repository, as `open_repository` does; a directory of this machine is read by
    this process, which spares the way of all content through another one.
    """
    if settings.remote.kind == "file":
        # What is wrong with the directory is told by the receiver.
        with suppress(OSError, Misplaced):
            return RepositoryByDirectory(settings.remote.path)
    return open_repository(settings)


def _by_objects(settings: RemoteConfig) -> Repository:
    from ntt_backup.client.throttle import process_pace
    from ntt_backup.config.sealing import Keyring, SealPolicy
    from ntt_backup.objects.s3 import open_bucket
    from ntt_backup.snapshot.repository.by_objects import RepositoryByObjects

    remote = settings.remote
    keyring = Keyring(lambda: settings.pack.identity_file)
    bucket = open_bucket(remote, process_pace(settings.run.bwlimit))
    policy = SealPolicy.of(settings)
    return RepositoryByObjects(bucket, remote.part_size, settings.recipients, keyring, policy)


def _by_receiver(settings: RemoteConfig) -> Repository:
    from ntt_backup.client.connection import SessionSpec
    from ntt_backup.client.throttle import process_pace
    from ntt_backup.snapshot.repository.by_receiver import RepositoryByReceiver

    spec = SessionSpec.of(settings, f"snapshot-{os.getpid()}", "snapshot")
    return RepositoryByReceiver(replace(spec, pace=process_pace(settings.run.bwlimit)))
