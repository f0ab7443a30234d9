"""What is known about a dump: the small JSON file that lies beside it on the remote.

It stands there and not only in the catalog, because it is needed on the day when there is no
catalog: what it is a dump of, how many bytes it must have, and their SHA-256.

The time in the name is when the dump was begun, by the clock of the host that made it. Which of two
is newer is said by their numbers: a clock that was ahead once would have its dump taken for the
newest until that day comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Final

from ntt_backup.wire.dump_messages import STAMP, begun, read_record

FORMAT: Final = 1
_NUMBERS: Final = 1 << 53
_KINDS: Final[Mapping[str, type]] = {
    "format": int,
    "number": int,
    "bytes": int,
    "duration_s": float,
    "sealed": int,
}


@dataclass(frozen=True, slots=True)
class DumpRecord:
    """One dump. number: one more than the highest that was there. fingerprint: what the database's
    counters said just before, if it has any. bytes and sha256: of the dump itself; sealed: how many
    bytes it has once it is sealed, 0 where it is not.
    """

    format: int
    number: int
    target: str
    database: str
    server_version: str
    program: str
    host: str
    bytes: int
    sha256: str
    fingerprint: str
    duration_s: float
    sealed: int = 0

    def to_json(self) -> str:
        """Returns the record as one line."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Stored:
    """A dump as it stands on the remote. size: of its file; None where that is missing.

    record: None where it cannot be read, or was written by a newer program.
    """

    name: str
    size: int | None
    record: DumpRecord | None

    @property
    def begun(self) -> datetime:
        return begun(self.name)

    @property
    def number(self) -> int:
        """The number in its record; 0 where that cannot be read."""
        return self.record.number if self.record is not None else 0

    @property
    def age_key(self) -> tuple[int, str]:
        """Sorts dumps by age, oldest first."""
        return (self.number, self.name)

    @property
    def whole(self) -> bool:
        """Whether the dump is complete, by its size."""
        record = self.record
        return record is not None and (record.sealed or record.bytes) == self.size


@dataclass(frozen=True, slots=True)
class Contents:
    """The dumps in `pgdump/`, oldest first. placed: by-hash exists beside it."""

    dumps: tuple[Stored, ...]
    placed: bool

    @staticmethod
    def of(dumps: Iterable[Stored], *, placed: bool) -> Contents:
        return Contents(tuple(sorted(dumps, key=lambda one: one.age_key)), placed)


def name_of(moment: datetime, token: str) -> str:
    """Returns the name of a dump that is begun at moment; token: 8 hex digits, so that no two
    collide.
    """
    return f"{moment.astimezone(UTC).strftime(STAMP)}-{token}.dump"


def read(text: str) -> DumpRecord | None:
    """Returns the record in a JSON text; None for anything else."""
    values = read_record(text)
    if values.get("format") != FORMAT:
        return None
    values = {"number": 0, "sealed": 0, **values}  # Records had none at first.
    names = [field.name for field in fields(DumpRecord)]
    if any(not isinstance(values.get(name), _KINDS.get(name, str)) for name in names):
        return None
    if not 0 <= values["number"] < _NUMBERS:  # The next one must fit a record, too.
        return None
    return DumpRecord(**{name: values[name] for name in names})
