"""botocore's client for a bucket, as its settings want it.

It finds credentials (environment, profile, SSO, role), signs, and parses answers. It repeats
nothing: see `s3_bucket`. What is sent carries its SHA-256 in a signed header, so that it is not
hashed again to be signed, and no trailer is used, which some stores refuse.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

from botocore import UNSIGNED
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.handlers import add_expect_header
from botocore.loaders import Loader
from botocore.session import Session, get_session

from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import ConfigError

_CONNECTIONS: Final = 64
# An answer may take so long; a store that joins parts may need a while for it.
_ANSWER_SECONDS: Final = 120


def make_client(remote: RemoteSettings) -> BaseClient:
    """Returns botocore's client for the settings; asks nothing yet. Raises ConfigError where the
    settings, or AWS's own files, cannot be used.
    """
    config = Config(
        signature_version="s3v4",
        retries={"total_max_attempts": 1},
        connect_timeout=remote.connect_timeout,
        read_timeout=_ANSWER_SECONDS,
        tcp_keepalive=True,
        max_pool_connections=_CONNECTIONS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="ntt-backup",
        s3={
            "addressing_style": remote.addressing,
            # The checksum is signed, and it is one of the content.
            "payload_signing_enabled": False,
        },
    )
    ca_bundle = None if remote.ca_bundle is None else str(remote.ca_bundle)
    if ca_bundle is not None and not os.access(ca_bundle, os.R_OK):
        raise ConfigError(
            "remote.ca_bundle cannot be read",
            detail=ca_bundle,
            hint="name a file with the certificate of the store's authority that this user may"
            " read; without the setting the system's authorities are trusted",
        )
    try:
        client = _session().create_client(
            "s3", remote.region, endpoint_url=remote.endpoint, verify=ca_bundle, config=config
        )
    except (BotoCoreError, ValueError, OSError) as error:
        raise ConfigError(
            "the object store's settings cannot be used",
            detail=str(error),
            hint="look at remote.endpoint, remote.region, AWS_PROFILE and ~/.aws/config",
        ) from error
    # Some stores never answer it, and a second would be waited before each body. Whether we may
    # write is answered to `create_upload`.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return client


def read_models() -> None:
    """Reads what botocore's own files say of S3, for this process and its copies: it takes longer
    than all else of a client.
    """
    _session().create_client("s3", "us-east-1", config=Config(signature_version=UNSIGNED))


def _session() -> Session:
    session = get_session()
    session.register_component("data_loader", _models())
    return session


@cache
def _models() -> Loader:
    loader: Loader = get_session().get_component("data_loader")
    return loader
