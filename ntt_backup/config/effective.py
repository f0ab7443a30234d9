"""People see the settings that hold, each with the origin of its value, without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from ntt_backup.config.messages import may_be_secret
from ntt_backup.config.models import TABLES, CatalogConfig
from ntt_backup.config.sources import PLACE, Layer
from ntt_backup.config.timetable import Timetable

HIDDEN: Final = "(hidden)"
DEFAULT: Final = "default"

# The parameters of libpq that are no secrets. Newer versions of libpq add names, some for secrets.
_PUBLIC: Final = """
    application_name channel_binding client_encoding connect_timeout dbname
    fallback_application_name gssdelegation gssencmode gsslib host hostaddr keepalives
    keepalives_count keepalives_idle keepalives_interval krbsrvname load_balance_hosts
    max_protocol_version min_protocol_version oauth_client_id oauth_issuer oauth_scope options
    passfile port require_auth requirepeer service servicefile sslcert sslcertmode
    sslcompression sslcrl sslcrldir sslkey sslmode sslnegotiation sslrootcert sslsni
    ssl_max_protocol_version ssl_min_protocol_version target_session_attrs tcp_user_timeout
    user
"""
PUBLIC_PARAMETERS: Final = frozenset(_PUBLIC.split())

# What begins a URL may be missing, and a password may have an unescaped @, / or space.
_IN_A_URL: Final = re.compile(r"((?:://|^(?!\w+://))[^:]*:).*@", re.DOTALL)
_NAME: Final = re.compile(r"([\w%.-]+)\s*=\s*")
_VALUE: Final = re.compile(r"'(?:[^'\\]|\\.)*'(?=[\s&]|$)|[^\s&']*(?=[\s&]|$)")


class Effective(NamedTuple):
    """A setting; value: as JSON has it."""

    key: str
    value: Any
    origin: str


def effective(settings: CatalogConfig, layer: Layer) -> Iterator[Effective]:
    """Yields every setting of every table that is there. layer: what was set."""
    tables = {name: getattr(settings, name) for name in TABLES}
    tables |= {f"snapshots.{name}": one for name, one in settings.snapshots.items()}
    for table, section in tables.items():
        if section is not None:
            yield from _of_table(table, section, layer)


def _of_table(table: str, section: BaseModel, layer: Layer) -> Iterator[Effective]:
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        key, value = f"{table}.{name}", values[name]
        origin = layer[key].origin if key in layer else DEFAULT
        if key not in layer and key in PLACE and value:
            origin = next((layer[one].origin for one in PLACE if one in layer), DEFAULT)
        if key == "catalog.url":
            value = without_password(value)
        elif value is not None and not field.repr:
            value = HIDDEN
        elif isinstance(rates := getattr(section, name), Timetable):
            value = rates.text
        elif isinstance(value, list):
            value = [HIDDEN if may_be_secret(str(one)) else one for one in value]
        yield Effective(key, value, origin)


def without_password(url: str) -> str:
    """Returns a connection string of PostgreSQL with *** for what may be a secret.

    Only the values of `PUBLIC_PARAMETERS` are shown. What follows any other parameter is hidden up
    to the end of the string, since the secret may hold spaces.
    """
    shown = _IN_A_URL.sub(r"\1***@", url)
    end = 0
    while (name := _NAME.search(shown, end)) is not None:
        value = _VALUE.match(shown, name.end())
        if name[1] not in PUBLIC_PARAMETERS or value is None:
            return shown[: name.end()] + "***"
        end = value.end()
    return shown
