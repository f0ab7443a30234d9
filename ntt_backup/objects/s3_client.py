"""botocore's client for a bucket, as its settings want it.

It finds credentials (environment, profile, SSO, role), signs, and parses answers. It repeats
nothing: see `s3_bucket`. What is sent carries its SHA-256 in a signed header, so that it is not
hashed again to be signed, and no trailer is used, which some stores refuse.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError
from botocore.session import get_session
from botocore.utils import parse_timestamp

from ntt_backup import __version__
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import ConfigError
from ntt_backup.objects.s3_answers import BoundedSession

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
        # botocore would put its own together anew, twice for each request.
        user_agent=f"ntt-backup/{__version__}",
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
    session = get_session()
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_moment)
    try:
        client: Any = session.create_client(
            "s3", remote.region, endpoint_url=remote.endpoint, verify=ca_bundle, config=config
        )
    except (BotoCoreError, ValueError, OSError) as error:
        raise ConfigError(
            "the object store's settings cannot be used",
            detail=str(error),
            hint="look at remote.endpoint, remote.region, AWS_PROFILE and ~/.aws/config",
        ) from error
    endpoint = client._endpoint
    endpoint.http_session = BoundedSession(endpoint.http_session)
    # Some stores never answer it, and a second would be waited before each body. Whether we may
    # write is answered to `create_upload`.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    made: BaseClient = client
    return made


_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(9999, 1, 1, tzinfo=UTC)


def _moment(text: str) -> datetime:
    """Returns a time of an answer in UTC, which is also meant where it names no zone. A time before
    1970 counts as 1970, one of the year 9999 as its beginning: nobody who counts days from there
    may leave what a datetime can hold. Raises ResponseParserError.
    """
    # A listing has a thousand: botocore would spend three quarters of its work on them. The header
    # of each object has one, too.
    found: datetime | None = None
    with suppress(ValueError):
        if text[10:11] == "T":
            found = datetime.fromisoformat(text)
        elif text[3:5] == ", ":
            found = parsedate_to_datetime(text)
    try:
        found = found or parse_timestamp(text)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ResponseParserError(str(error)) from error
    known = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return min(max(known, _EARLIEST), _LATEST).astimezone(UTC)
