"""A rollback of a target is detected: this host notes what is newest there, and misses it.

Whoever owns a target can show an older state of it: without the newest dump, versions or packs. All
that is left is whole, so no other check finds anything wrong. This host notes the newest dump, and
the newest version of each set, in files beside the log (the newest pack stands in the catalog), and
compares them whenever it lists the target anyway.

What retention removes is not missed: it always keeps the newest. What this host removes itself is
taken off the notes (`removed`). A restore on a new machine has no notes, and misses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter

from ntt_backup.config import CatalogConfig
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.formatting import moment
from ntt_backup.process.durable import write_durably

Kind = Literal["dump", "version", "pack"]
# Once something newer is there, what was missed is told for as long.
_TOLD_FOR: Final = timedelta(days=7)
_MOST_FILES: Final = 1000


@dataclass(frozen=True, slots=True)
class Newest:
    """What is newest of a kind on a target.

    Attributes:
        target: The target's name.
        place: Where the target was: what has moved starts anew.
        kind: What it is.
        of: The set of a version; "" for all else.
        name: Its name on the target. Later ones have greater names.
        at: When this host stored it.
        missed: The name of what was newest and was not there; "" where nothing is missed.
        missed_at: When that was first noticed.
        key: The name of the host key that signed it; "" for none.
    """

    target: str
    place: str
    kind: Kind
    of: str
    name: str
    at: datetime
    missed: str = ""
    missed_at: datetime | None = None
    key: str = ""

    def __str__(self) -> str:
        what = f"version {self.of}@{self.missed}" if self.of else f"{self.kind} {self.missed}"
        since = f" (noticed {moment(self.missed_at)})" if self.missed_at is not None else ""
        return (
            f"the target lacks the {what}, the newest that this host had stored there{since}: it"
            " was removed, or the target shows an older state of itself"
        )


_FORM: Final = TypeAdapter(Newest)


def recorded(settings: CatalogConfig) -> list[Newest]:
    """Returns what this host has noted of the target of the settings."""
    found = []
    for path in sorted(settings.log.notes.glob("newest-*.json"))[:_MOST_FILES]:
        with suppress(OSError, ValueError):
            found.append(_FORM.validate_json(path.read_bytes()))
    place = _place(settings)
    return [one for one in found if one.target == settings.target and one.place == place]


def missed(settings: CatalogConfig) -> list[Newest]:
    """Returns what the last comparisons have missed on the target, without asking it."""
    return [one for one in recorded(settings) if one.missed]


def record(settings: CatalogConfig, kind: Kind, name: str, of: str = "", key: str = "") -> None:
    """Notes that something was stored. What cannot be written is not noted. key: as in `Newest`."""
    now = datetime.now(UTC)
    new = Newest(settings.target, _place(settings), kind, of, name, now, key=key)
    for old in recorded(settings):
        if (old.kind, old.of) == (kind, of) and old.missed_at and now - old.missed_at < _TOLD_FOR:
            new = replace(new, missed=old.missed, missed_at=old.missed_at)
    _write(settings, new)


def removed(settings: CatalogConfig, kind: Kind, names: Container[str], of: str = "") -> None:
    """Takes what this host has removed off the notes."""
    for one in recorded(settings):
        if (one.kind, one.of) == (kind, of) and one.name in names:
            with suppress(OSError):
                _path(settings, one).unlink()


def lost_key(settings: CatalogConfig, keys: SigningKeys) -> str:
    """Returns a warning if this host has lost its key, else "".

    The key is lost if this host has none, although its settings name a key, a key that cannot be
    read is there, or a key has signed what is newest on the target.
    """
    signed = any(one.key for one in recorded(settings))
    return keys.missing_key if keys.expected or signed else ""


def compare(
    settings: CatalogConfig, there: Mapping[tuple[Kind, str], Collection[str]]
) -> list[Newest]:
    """Returns what is missed on the target, and notes the result for `missed`.

    An entry is missed if the entry is not on the target and nothing newer is there.

    Args:
        settings: Of the target.
        there: The names on the target that this host has made, by kind and set. What is not in it
            was not looked for.
    """
    found, now = [], datetime.now(UTC)
    for one in recorded(settings):
        if (names := there.get((one.kind, one.of))) is None:
            continue
        if one.name not in names and max(names, default="") < one.name:
            since = one.missed_at if one.missed == one.name else now
            new = replace(one, missed=one.name, missed_at=since)
        elif one.missed in names or (one.missed_at and now - one.missed_at > _TOLD_FOR):
            new = replace(one, missed="", missed_at=None)
        else:
            new = one
        if new != one:
            _write(settings, new)
        found += [new] if new.missed else []
    return found


def _write(settings: CatalogConfig, one: Newest) -> None:
    with suppress(OSError):
        write_durably(_path(settings, one), _FORM.dump_json(one))


def _path(settings: CatalogConfig, one: Newest) -> Path:
    of = f"-{one.of}" if one.of else ""
    return settings.log.notes / f"newest-{one.target}-{one.kind}{of}.json"


def _place(settings: CatalogConfig) -> str:
    remote = settings.remote
    return f"{remote.endpoint or ''} {remote.url}" if remote is not None else ""
