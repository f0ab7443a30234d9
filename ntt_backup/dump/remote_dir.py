"""The directory `pgdump/` on the remote has dumps, and takes new ones.

In a bucket it is a prefix, see `by_objects`. Otherwise:

The receiver does all of it over one connection, with a shell behind it or as a forced command. A
remote without a Python for it has its own sh: the strategy `tar` needs no more.

A dump's length is not known before its end, and the remote cannot tell that end from a link that
was cut; so what it has written gets no name yet. It answers with size and SHA-256 of what is on its
disk, and only the side that has seen pg_dump end well asks for the name. When the connection ends
before that, the remote removes what it got.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from ntt_backup.client.connection import SessionSpec
from ntt_backup.client.throttle import process_pace
from ntt_backup.config import RemoteConfig
from ntt_backup.config.sealing import Keyring, SealPolicy
from ntt_backup.dump.by_objects import DumpsByObjects, UploadByObjects
from ntt_backup.dump.by_receiver import DumpsByReceiver
from ntt_backup.dump.by_shell import DumpsByShell, UploadByShell
from ntt_backup.errors import Unsupported
from ntt_backup.objects.s3 import open_bucket

# All have the same methods.
RemoteDir = DumpsByReceiver | DumpsByShell | DumpsByObjects
Upload = DumpsByReceiver | UploadByShell | UploadByObjects


def open_remote_dir(settings: RemoteConfig) -> RemoteDir:
    """Connects to the remote of the settings; see `connect`. Where that is a bucket, it is asked
    nothing yet.
    """
    remote, pace = settings.remote, process_pace(settings.run.bwlimit)
    if remote.kind == "s3":
        keyring = Keyring(lambda: settings.pack.identity_file)
        bucket = open_bucket(remote, pace)
        policy = SealPolicy.of(settings)
        return DumpsByObjects(bucket, remote.part_size, settings.recipients, keyring, policy)
    spec = SessionSpec.of(settings, f"dump-{os.getpid()}", "dump")
    return connect(replace(spec, pace=pace))


def connect(spec: SessionSpec) -> RemoteDir:
    """Returns pgdump/ by the receiver; by sh where the strategy is `tar`, or the remote has no
    Python that can run the receiver.

    Raises DumpImpossible where a forced command takes no dumps.
    """
    if spec.run.strategy != "tar":
        with suppress(Unsupported):
            return DumpsByReceiver(spec)
    return DumpsByShell(spec)
