"""Opens the bucket of the settings for commands that read it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ntt_backup.client.backoff import OutageClock
from ntt_backup.client.throttle import SharedPace
from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import HostKeys
from ntt_backup.config.sealing import Keyring, SealPolicy
from ntt_backup.errors import BackupError
from ntt_backup.objects.cache import cache_of
from ntt_backup.objects.patient import PatientBucket
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.objects.tables import Tables


def open_to_read(
    settings: RemoteConfig,
    on_outage: Callable[[BackupError, float], None],
    stop: threading.Event,
    *,
    cached: bool = True,
    fetch: SharedPace | None = None,
) -> tuple[PatientBucket, Tables]:
    """Returns the bucket, and its packs' tables. on_outage is told the error and for how many
    seconds it will be waited; stop ends the waiting. cached: tables that this machine keeps are
    believed. fetch: the pace of what is fetched. Raises ConfigError.
    """
    plain = open_bucket(settings.remote, fetch=fetch)
    bucket = PatientBucket(plain, OutageClock.of(settings.run), on_outage, stop)
    cache = cache_of(settings.remote) if cached else None
    keyring = Keyring(lambda: settings.pack.identity_file)
    keys = HostKeys.of(settings)
    return bucket, Tables(bucket, cache, keyring, SealPolicy.of(settings), keys)
