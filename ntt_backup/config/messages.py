"""Problems of settings are told in the operator's words, one sentence each.

A sentence names the value's origin, shows the value, and says what is needed. What may hold a
password is not shown: neither `catalog.url` nor anything that looks like a database URL, since that
is easily put under a wrong name. A target's URL is shown if it can hold none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic_core import ErrorDetails

from ntt_backup.config.models import ENVIRONMENT, TABLES
from ntt_backup.config.sections import SnapshotSettings
from ntt_backup.config.sources import Layer, Problem
from ntt_backup.config.target_url import FORMS
from ntt_backup.config.values import needed

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
    """Yields the problems of an error of pydantic. table: names the target. file: would have it."""

    def origin_of(key: str) -> str:
        origin = layer[key].origin if key in layer else key
        return origin if origin.isprintable() else ascii(origin)[1:-1]

    section, name, *more = (*map(str, error["loc"]), "")
    fields = TABLES[section].model_fields if section in TABLES else SnapshotSettings.model_fields
    if section == "snapshots":
        section, name = f"snapshots.{name}", more[0]
    key = f"{section}.{name}"
    origin = origin_of(key)
    if error["type"] == "missing":
        if section == "remote":
            yield _no_place(layer, table, file)
        else:
            required = [known for known, field in fields.items() if field.is_required()]
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
    elif error["type"] == "places":
        other = origin_of(f"remote.{error['ctx']['name']}")
        text = f"{origin_of('remote.url')} and {other} name different places"
        yield Problem(text, "keep one of them")
    elif error["type"] == "strategy":
        text = f"{origin_of('run.strategy')} is not for this target ({table.rpartition('.')[2]})"
        yield Problem(text, "leave it out: a bucket takes objects, any other target stream or tar")
    elif error["type"] == "contradiction":
        low, high = (f"{section}.{error['ctx'][end]}" for end in ("low", "high"))
        text = f"{origin_of(low)} is above {origin_of(high)}"
        yield Problem(text, "set both, the first not above the second")
    else:
        own = error.get("ctx", {}).get("reason")
        needs = own or f"{needed(fields[name])} is needed"
        shown = "(not shown, it may hold a secret)"
        if fields[name].repr or key == "catalog.url":
            shown = _shown(key, error["input"])
        yield Problem(f"{origin} is {shown}: {needs}")


def may_be_secret(text: str) -> bool:
    """Returns whether a text looks as if it held a password or a key."""
    return bool(_MAY_HOLD_A_PASSWORD.search(text) or _SECRET.search(text))


def _no_place(layer: Layer, table: str, file: Path) -> Problem:
    """Returns the problem of a target without a place, or with half of one."""
    given = {name for name in ("host", "path") if f"remote.{name}" in layer}
    if len(given) == 1:
        (absent,) = {"host", "path"} - given
        problem = _missing(f"remote.{absent}", table, file)
        return problem._replace(hint=f"{problem.hint}, or name the whole place by url")
    problem = _missing("remote.url", table, file)
    return problem._replace(hint=f"{problem.hint}: {FORMS}")


def _missing(key: str, table: str, file: Path) -> Problem:
    name = key.partition(".")[2]
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
