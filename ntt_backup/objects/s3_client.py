"""botocore's client for a bucket, as its settings want it.

It finds credentials (environment, profile, SSO, role), signs, and parses answers. It repeats
nothing: see `s3_bucket`. What is sent carries its SHA-256 in a signed header, so that it is not
hashed again to be signed, and no trailer is used, which some stores refuse.

To make a client looks at most of what botocore knows of S3, and so takes time, and in a copy of a
process memory of its own: 10 MiB. So one can be made ready before a process is copied. Only the
credentials are looked for by each copy.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, Final

from botocore.client import BaseClient
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, NoCredentialsError
from botocore.handlers import add_expect_header
from botocore.loaders import JSONFileLoader, Loader
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


class _Found:
    """Credentials that are not looked for before `find`; what botocore asks of its own ones."""

    method = "found"

    def __init__(self) -> None:
        self._credentials: Credentials | None = None

    def find(self) -> None:
        self._credentials = get_session().get_credentials()

    def load_credentials(self) -> _Found:
        return self

    def get_frozen_credentials(self) -> ReadOnlyCredentials | None:
        found = self._credentials
        return None if found is None else found.get_frozen_credentials()

    def get_deferred_property(self, property_name: str) -> Callable[[], object]:
        return lambda: getattr(self.get_frozen_credentials(), property_name, None)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A client, and what it was made of."""

    remote: RemoteSettings
    environment: dict[str, str]
    client: BaseClient
    credentials: _Found


_ready: list[_Ready] = []


def make_ready(remote: RemoteSettings) -> None:
    """Makes the client for the settings, for this process and its copies. Raises as `make_client`.

    Their credentials are not looked for yet.
    """
    if _ready_for(remote) is None:
        made = _make(remote)
        # For want of credentials it is not sent, and all that it needs is there.
        with suppress(NoCredentialsError):
            made.client.head_object(Bucket=remote.bucket, Key="a")  # type: ignore[attr-defined]
        _ready.append(made)


def make_client(remote: RemoteSettings) -> BaseClient:
    """Returns botocore's client for the settings; asks nothing yet. Raises ConfigError where the
    settings, or AWS's own files, cannot be used.
    """
    made = _ready_for(remote) or _make(remote)
    with _explained():
        made.credentials.find()
    return made.client


def _ready_for(remote: RemoteSettings) -> _Ready | None:
    same = (one for one in _ready if (one.remote, one.environment) == (remote, _environment()))
    return next(same, None)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def _make(remote: RemoteSettings) -> _Ready:
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
    credentials = _Found()
    session = get_session()
    session.register_component("data_loader", _models())
    session.register_component("credential_provider", credentials)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_moment)
    with _explained():
        client: Any = session.create_client(
            "s3", remote.region, endpoint_url=remote.endpoint, verify=ca_bundle, config=config
        )
    endpoint = client._endpoint
    endpoint.http_session = BoundedSession(endpoint.http_session)
    # Some stores never answer it, and a second would be waited before each body. Whether we may
    # write is answered to `create_upload`.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return _Ready(remote, _environment(), client, credentials)


_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(9999, 1, 1, tzinfo=UTC)


@contextmanager
def _explained() -> Iterator[None]:
    """Raises ConfigError for what botocore cannot make a client of."""
    try:
        yield
    except (BotoCoreError, ValueError, OSError) as error:
        raise ConfigError(
            "the object store's settings cannot be used",
            detail=str(error),
            hint="look at remote.endpoint, remote.region, AWS_PROFILE and ~/.aws/config",
        ) from error


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


class _Files(JSONFileLoader):
    """Loads botocore's data as plain dicts, in a third of the time that ordered ones take."""

    def load_file(self, file_path: str) -> dict[str, Any] | None:
        for suffix, opened in ((".json", open), (".json.gz", gzip.open)):
            with suppress(FileNotFoundError), opened(f"{file_path}{suffix}", "rb") as file:
                found: dict[str, Any] = json.loads(file.read())
                return found
        return None


class _Models(Loader):
    """Loads botocore's model of S3 without a search through those of 400 services."""

    FILE_LOADER_CLASS = _Files

    def list_available_services(self, type_name: str) -> list[str]:
        return ["s3"]


@cache
def _models() -> Loader:
    return _Models()
