"""What operators see of settings and of problems in settings: text without secrets.

A problem is one sentence, which names the origin of the value, shows the value, and says which
values are valid. A value that may hold a password is not shown: neither `catalog.url` nor anything
that looks like a database URL, since that is easily put under a wrong name. A target's URL is shown
if it can hold no password. The settings in effect are shown with the origin of each value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.config.command_settings import ENVIRONMENT, NAMED_TABLES, TABLES, CatalogConfig
from ntt_backup.config.sources import PLACE, Layer, Problem
from ntt_backup.config.values import FORMS, needed

HIDDEN: Final = "(hidden)"
DEFAULT: Final = "default"

# The parameters of libpq that are no secrets. New versions of libpq add secret ones.
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

# The scheme of a URL may be missing, and a password may have an unescaped @, / or space.
_IN_A_URL: Final = re.compile(r"((?:://|^(?!\w+://))[^:]*:).*@", re.DOTALL)
_NAME: Final = re.compile(r"([\w%.-]+)\s*=\s*")
_VALUE: Final = re.compile(r"'(?:[^'\\]|\\.)*'(?=[\s&]|$)|[^\s&']*(?=[\s&]|$)")

_SHOWN_LENGTH = 80
_MAY_HOLD_A_PASSWORD = re.compile(r"://|passw|:[^:@]+@", re.IGNORECASE)
_TARGET_URL = re.compile(
    r"'(ssh://([\w.-]+@)?|file://|s3://)[\w.-]*(:\d{1,5})?(/[^@:?&=]*)?'", re.IGNORECASE
)
_SECRET = re.compile(r"access_?key|secret|token|credential|passw", re.IGNORECASE)
_CHAIN = (
    "give them as AWS programs take them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE,"
    " ~/.aws/credentials, or the role of the machine"
)


def explain(error: ErrorDetails, layer: Layer, table: str, file: Path) -> Iterator[Problem]:
    """Yields the problems that an error of pydantic stands for.

    Args:
        error: The error.
        layer: The values that were set.
        table: The table of the target in the file.
        file: The configuration file, which need not exist.
    """

    def origin_of(key: str) -> str:
        origin = layer[key].origin if key in layer else key
        return origin if origin.isprintable() else ascii(origin)[1:-1]

    section, name, *more = (*map(str, error["loc"]), "", "")
    fields = _fields(TABLES[section] if section in TABLES else NAMED_TABLES[section])
    if section in NAMED_TABLES:
        section, name = f"{section}.{name}", more[0]
    key = f"{section}.{name}"
    origin = origin_of(key)
    inner = fields[name].annotation if name in fields else None
    inner = next(iter(get_args(inner)), inner)  # Of one that may be missing.
    if any(more) and isinstance(inner, type) and issubclass(inner, BaseModel):
        section, name, fields = key, more[0], _fields(inner)
        key, origin = f"{section}.{name}", f"{ascii(name)[1:-1]} of {origin}"
    if error["type"] == "missing":
        if section == "remote":
            yield _no_place(layer, table, file)
        else:
            absent = [known for known, field in fields.items() if field.is_required()]
            required = [name] if name in fields else absent
            yield from (_missing(f"{section}.{one}", section, file) for one in required)
    elif error["type"] == "extra_forbidden" and _SECRET.search(name):
        yield Problem(f"{origin} is not a setting: credentials stand in no file of ours", _CHAIN)
    elif error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, fields, n=1)
        guess = f": did you mean {near[0]}?" if near else ""
        if elsewhere := [one for one in TABLES if not near and name in TABLES[one].model_fields]:
            guess = f": did you mean {name} under [{elsewhere[0]}]?"
        whose = "a target" if section == "remote" else section
        yield Problem(f"{origin} is not a setting{guess}", f"{whose} has {', '.join(fields)}")
    elif error["type"] == "conflict":
        found = error["ctx"]
        yield Problem(found["text"].format(*map(origin_of, found["keys"])), found["hint"])
    else:
        own = error.get("ctx", {}).get("reason")
        needs = own or f"{needed(fields[name])} is needed"
        shown = "(not shown, it may hold a secret)"
        if fields[name].repr or key == "catalog.url":
            shown = _shown(key, error["input"])
        yield Problem(f"{origin} is {shown}: {needs}")


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the settings of a table by the names that stand in the file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def may_be_secret(text: str) -> bool:
    """Returns whether a text may hold a password or a key."""
    return bool(_MAY_HOLD_A_PASSWORD.search(text) or _SECRET.search(text))


def _no_place(layer: Layer, table: str, file: Path) -> Problem:
    """Returns the problem of a target whose place is missing or incomplete."""
    given = {name for name in ("host", "path") if f"remote.{name}" in layer}
    if len(given) == 1:
        (absent,) = {"host", "path"} - given
        problem = _missing(f"remote.{absent}", table, file)
        return problem._replace(hint=f"{problem.hint}, or name the whole place by url")
    problem = _missing("remote.url", table, file)
    return problem._replace(hint=f"{problem.hint}: {FORMS}")


def _missing(key: str, table: str, file: Path) -> Problem:
    name = key.removeprefix(f"{key.rpartition('.')[0]}.")
    # A variable is for the target `remote`, where the file has others.
    variables = [one for one, known in ENVIRONMENT.items() if known == f"{table}.{name}"]
    ways = [*variables, f"{name} under [{table}] in {file}"]
    return Problem(f"{table}.{name} is not set", "set " + " or ".join(ways))


def _shown(key: str, value: object) -> str:
    text = repr(value)
    if key == "remote.url" and _TARGET_URL.fullmatch(text):
        return text
    if key == "catalog.url" or _MAY_HOLD_A_PASSWORD.search(text):
        return "(not shown, it may hold a password)"
    if "SECRET-KEY" in text.upper():
        return "(not shown, it is a secret key)"
    if key == "notify.command" and may_be_secret(text):
        return "(not shown, it may hold a secret)"
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."


class SettingInEffect(NamedTuple):
    """A setting in effect. value: a value of JSON."""

    key: str
    value: Any
    origin: str


def settings_in_effect(settings: CatalogConfig, layer: Layer) -> Iterator[SettingInEffect]:
    """Yields the settings of all tables. layer: the values that were set."""
    if settings.media:
        yield SettingInEffect("media", list(settings.media), "the media of a target")
    tables = {name: getattr(settings, name) for name in TABLES}
    for of in NAMED_TABLES:
        tables |= {f"{of}.{name}": one for name, one in getattr(settings, of).items()}
    for table, section in tables.items():
        if section is not None:
            yield from _of_table(table, section, layer)


def _of_table(table: str, section: BaseModel, layer: Layer) -> Iterator[SettingInEffect]:
    values = section.model_dump(mode="json", by_alias=True)
    for name, field in type(section).model_fields.items():
        written = field.alias or name
        key, value = f"{table}.{written}", values[written]
        origin = layer[key].origin if key in layer else DEFAULT
        if key not in layer and key in PLACE and value:
            origin = next((layer[one].origin for one in PLACE if one in layer), DEFAULT)
        if key == "catalog.url":
            value = without_password(value)
        elif value is not None and not field.repr:
            value = HIDDEN
        elif isinstance(inner := getattr(section, name), BaseModel):
            value = {one.key.rpartition(".")[2]: one.value for one in _of_table(key, inner, {})}
        elif isinstance(rates := getattr(section, name), Timetable):
            value = rates.text
        elif isinstance(value, list):
            value = [HIDDEN if may_be_secret(str(one)) else one for one in value]
        yield SettingInEffect(key, value, origin)


def without_password(url: str) -> str:
    """Returns a connection string of PostgreSQL in which *** replaces possible secrets.

    Only values of `PUBLIC_PARAMETERS` are shown. The value of any other parameter is hidden with
    the rest of the string, since a secret may contain spaces.
    """
    shown = _IN_A_URL.sub(r"\1***@", url)
    end = 0
    while (name := _NAME.search(shown, end)) is not None:
        value = _VALUE.match(shown, name.end())
        if name[1] not in PUBLIC_PARAMETERS or value is None:
            return shown[: name.end()] + "***"
        end = value.end()
    return shown
