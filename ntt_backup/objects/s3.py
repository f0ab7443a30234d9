"""Opens the bucket of the settings. botocore, which takes long to load, is loaded only then."""

from __future__ import annotations

from contextlib import suppress

from ntt_backup.client.throttle import SharedPace
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import ConfigError
from ntt_backup.objects.bucket import Bucket


def load() -> None:
    """Loads the modules for buckets, so that copies of this process need not. `open_bucket` reports
    a missing library.
    """
    with suppress(ImportError):
        from ntt_backup.objects import s3_bucket  # noqa: F401


def open_bucket(
    remote: RemoteSettings, pace: SharedPace | None = None, fetch: SharedPace | None = None
) -> Bucket:
    """Returns the bucket of the settings; asks it nothing yet. pace: of all that is sent; fetch: of
    the content that is fetched.

    Raises ConfigError where botocore is missing, or the settings or AWS's own files cannot be used.
    """
    try:
        from ntt_backup.objects.s3_bucket import S3Bucket, make_client
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the libraries for buckets (the extra `s3`) are not installed",
            detail=str(error),
            hint="pip install 'ntt-backup[s3]'",
        ) from error
    return S3Bucket(make_client(remote), remote, pace, fetch)
