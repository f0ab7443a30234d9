"""What is wrong with the settings, in the operator's words: one sentence a problem.

A sentence names the value's origin, shows it, and says what is needed; pydantic's wording never
comes through. Whatever may hold a password is not shown: not `catalog.url`, and nothing elsewhere
that looks like a database URL, since one ends up under a wrong name easily.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pydantic_core import ErrorDetails

from ntt_backup.config.models import TABLES, needed
from ntt_backup.config.sources import ENVIRONMENT, Layer
from ntt_backup.errors import ConfigError

_SHOWN_LENGTH = 80
_MAY_HOLD_A_PASSWORD = re.compile(r"://|passw|:[^:@]+@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Problem:
    """text: what is wrong with which value. hint: what to do, where the text does not say it."""

    text: str
    hint: str = ""


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """All problems in one error of one line: a log and a terminal cut at the line's end."""
    texts = dict.fromkeys(problem.text for problem in problems)
    hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
    return ConfigError("; ".join(texts), hint="; ".join(hints))


def explain(errors: Iterable[ErrorDetails], layers: Sequence[Layer], place: str) -> list[Problem]:
    """Each error of pydantic as a problem.

    layers: where the values came from, the strongest first. place: the table that says where the
    target is. An error's loc is the table's name, then the key.
    """
    return [problem for error in errors for problem in _explain(error, layers, place)]


def _explain(error: ErrorDetails, layers: Sequence[Layer], place: str) -> Iterator[Problem]:
    section, name = str(error["loc"][0]), str((*error["loc"], "")[1])
    fields = TABLES[section].model_fields
    origin = _origin(f"{section}.{name}", layers)
    if error["type"] == "missing":
        required = [known for known, field in fields.items() if field.is_required()]
        for one in [name] if name else required:
            yield _missing(f"{section}.{one}", place if section == "remote" else section, one)
    elif error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, fields, n=1)
        guess = f": did you mean {near[0]}?" if near else ""
        yield Problem(f"{origin} is not a setting{guess}", f"{section} has {', '.join(fields)}")
    elif error["type"] == "contradiction":
        low, high = (_origin(f"{section}.{error['ctx'][end]}", layers) for end in ("low", "high"))
        yield Problem(f"{low} is above {high}", "set both, the first not above the second")
    else:
        shown = _shown(f"{section}.{name}", error["input"])
        yield Problem(f"{origin} is {shown}: {needed(fields[name])} is needed")


def _origin(key: str, layers: Sequence[Layer]) -> str:
    """What the operator calls a key: where it was set, or else its own name."""
    return next((layer.origins[key] for layer in layers if key in layer.origins), key)


def _missing(key: str, table: str, name: str) -> Problem:
    variables = [variable for variable, known in ENVIRONMENT.items() if known == key]
    ways = [*variables, f"{name} under [{table}] in the configuration file"]
    return Problem(f"{key} is not set", "set " + " or ".join(ways))


def _shown(key: str, value: object) -> str:
    text = repr(value)
    if key == "catalog.url" or _MAY_HOLD_A_PASSWORD.search(text):
        return "(not shown, it may hold a password)"
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
