"""Problems of settings in the operator's words, one sentence each.

A sentence names the value's origin, shows the value, and says what is needed. What may hold a
password is not shown: neither `catalog.url` nor anything that looks like a database URL, since that
is easily put under a wrong name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

from pydantic_core import ErrorDetails

from ntt_backup.config.models import ENVIRONMENT, TABLES
from ntt_backup.config.sources import Layer
from ntt_backup.config.values import needed

_SHOWN_LENGTH = 80
_MAY_HOLD_A_PASSWORD = re.compile(r"://|passw|:[^:@]+@", re.IGNORECASE)


class Problem(NamedTuple):
    """text: what is wrong with which value. hint: what to do, where the text does not say it."""

    text: str
    hint: str = ""


def explain(error: ErrorDetails, layer: Layer, table: str) -> Iterator[Problem]:
    """Yields the problems of an error of pydantic. table: has the target's host and path."""

    def origin_of(key: str) -> str:
        origin = layer[key].origin if key in layer else key
        return origin if origin.isprintable() else ascii(origin)[1:-1]

    section, name = str(error["loc"][0]), str((*error["loc"], "")[1])
    fields = TABLES[section].model_fields
    key = f"{section}.{name}"
    origin = origin_of(key)
    if error["type"] == "missing":
        required = [known for known, field in fields.items() if field.is_required()]
        for one in [name] if name else required:
            yield _missing(f"{section}.{one}", table if section == "remote" else section, one)
    elif error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, fields, n=1)
        guess = f": did you mean {near[0]}?" if near else ""
        yield Problem(f"{origin} is not a setting{guess}", f"{section} has {', '.join(fields)}")
    elif error["type"] == "contradiction":
        low, high = (f"{section}.{error['ctx'][end]}" for end in ("low", "high"))
        text = f"{origin_of(low)} is above {origin_of(high)}"
        yield Problem(text, "set both, the first not above the second")
    else:
        yield Problem(
            f"{origin} is {_shown(key, error['input'])}: {needed(fields[name])} is needed"
        )


def _missing(key: str, table: str, name: str) -> Problem:
    variables = [variable for variable, known in ENVIRONMENT.items() if known == key]
    ways = [*variables, f"{name} under [{table}] in the configuration file"]
    return Problem(f"{key} is not set", "set " + " or ".join(ways))


def _shown(key: str, value: object) -> str:
    text = repr(value)
    if key == "catalog.url" or _MAY_HOLD_A_PASSWORD.search(text):
        return "(not shown, it may hold a password)"
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
