"""A record says what is known about a dump: a small JSON file beside it on the remote.

It stands there and not only in the catalog, because it is needed on the day when there is no
catalog: what it is a dump of, how many bytes it must have, and their SHA-256.

The time in the name is when the dump was begun, by the clock of the host that made it. Which of two
is newer is said by their numbers: a clock that was ahead once would have its dump taken for the
newest until that day comes.

Whoever may write to the target can plant a dump with any record. So the record is signed by the
host that made the dump (see `config.signing_key`), and this host decides by its own records
only: which dump is the newest, what the next one is an increment on, and which may go.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ntt_backup.config.signing_key import Origin, SigningKeys
from ntt_backup.wire.stored_names import STAMP, dump_begun

# A dump as pg_dump wrote it; one of a series. Those of the format 2, increments on increments, are
# not read any more.
PLAIN: Final[Literal[1]] = 1
SERIES: Final[Literal[3]] = 3
_NUMBERS: Final = 1 << 53
_PURPOSE: Final = "dump"
_MOST_EXCLUDED: Final = 64
_Number = Annotated[int, Field(ge=0, lt=_NUMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRecord:
    """What is known of one dump.

    Attributes:
        number: One more than the highest that was there; the first records had none.
        bytes: The size of the dump itself.
        sha256: Of the dump itself.
        fingerprint: What the database's counters said just before, if it has any.
        base: In a series, the whole dump that this one is an increment on; "" where it is whole.
        text_bytes: In a series, the size of what pg_dump wrote.
        text_sha256: In a series, the SHA-256 of what pg_dump wrote.
        copied: Whether any blob was copied to the target when the dump was begun.
        head_bytes: The size of the beginning of what pg_dump wrote that has the table of contents.
        head_sha256: Of that beginning: it is proved before any statement of the dump is executed.
        step: Of an increment, one more than that of the last one on the same base; else 0.
        excluded: The patterns for tables of which no row is in the dump.
        places_bytes: The size of the places file beside the dump; 0 where there is none.
        places_sha256: The SHA-256 of the places file.
        signature: By the key of the host that made the dump; "" where it has none.
    """

    format: Literal[1, 3]
    number: _Number = 0
    target: str
    database: str
    server_version: str
    program: str
    host: str
    bytes: int
    sha256: str
    fingerprint: str
    duration_s: Annotated[float, Field(allow_inf_nan=False)]
    base: str = ""
    text_bytes: int = 0
    text_sha256: str = ""
    copied: bool = False
    head_bytes: int = 0
    head_sha256: str = ""
    step: _Number = 0
    excluded: Annotated[tuple[str, ...], Field(max_length=_MOST_EXCLUDED)] = ()
    places_bytes: _Number = 0
    places_sha256: str = ""
    signature: str = ""

    @property
    def lacks(self) -> str:
        """Says of which tables no row is in the dump; "" where all are."""
        patterns = ", ".join(self.excluded)
        return f"the dump has no rows of tables that match {patterns}" if patterns else ""

    @property
    def series(self) -> bool:
        """Whether it is one of a series."""
        return self.format == SERIES

    @property
    def text(self) -> tuple[int, str]:
        """Size and SHA-256 of what pg_dump wrote."""
        return (self.text_bytes, self.text_sha256) if self.series else (self.bytes, self.sha256)

    def to_json(self) -> str:
        """Returns the record as one line of JSON.

        What the first records did not have is left out where it is empty: their signatures must
        remain valid.
        """
        values = asdict(self)
        for name in ("step", "excluded", "places_bytes", "places_sha256"):
            if not values[name]:
                del values[name]
        return json.dumps(values, sort_keys=True)

    def signed(self, name: str, keys: SigningKeys) -> DumpRecord:
        """Returns the record of a dump with the signature of this host.

        The signature covers the name of the dump. It also covers the content, by the SHA-256 in the
        record.
        """
        return replace(self, signature=keys.sign(_PURPOSE, _signed_data(self, name)))

    def origin(self, name: str, keys: SigningKeys) -> Origin:
        """Returns who made the record, if it lies beside the dump of that name."""
        return keys.origin(_PURPOSE, _signed_data(self, name), self.signature)


@dataclass(frozen=True, slots=True)
class Stored:
    """Describes a dump on the remote.

    Attributes:
        size: The size of the dump's file in bytes; None where the file is missing.
        record: The record; None where it cannot be read, or was written by a newer program.
        arrived: The time (UTC) at which the dump got its name, by the target's own clock; None
            where the target does not tell that time.
        refused: The reason why the dump must not be read, in words that follow the dump's name; ""
            where the dump may be read.
        sealed: Whether the dump is sealed.
        pins: The names of its pins, see `filestore.pins`.
    """

    name: str
    size: int | None
    record: DumpRecord | None
    arrived: datetime | None = None
    refused: str = ""
    sealed: bool = False
    pins: tuple[str, ...] = ()

    @property
    def begun(self) -> datetime:
        return dump_begun(self.name)

    @property
    def number(self) -> int:
        """The number in its record; 0 where that cannot be read."""
        return self.record.number if self.record is not None else 0

    @property
    def age(self) -> tuple[int, str]:
        """Returns what is higher for a newer dump, where its maker saw the older one."""
        return self.number, self.name

    @property
    def text(self) -> tuple[int, str]:
        """Size and SHA-256 of what pg_dump wrote; nothing where the record cannot be read."""
        return self.record.text if self.record is not None else (0, "")

    @property
    def base(self) -> str:
        """The whole dump that it is an increment on; "" where it needs none."""
        return self.record.base if self.record is not None else ""

    @property
    def whole(self) -> bool:
        """Whether the dump is complete, by its size, and may be read."""
        record = self.record
        return record is not None and not self.refused and record.bytes == self.size

    def origin(self, keys: SigningKeys) -> Origin:
        """Returns who made the dump. Where its record cannot be read, nobody knows."""
        return Origin.UNKNOWN if self.record is None else self.record.origin(self.name, keys)

    @property
    def torn(self) -> str:
        """Says what is wrong with one that is not whole."""
        if self.refused:
            return self.refused
        has = "nothing but its record" if self.size is None else f"{self.size} bytes"
        return f"is not complete: it has {has}"


def _signed_data(record: DumpRecord, name: str) -> bytes:
    return f"{name}\n{replace(record, signature='').to_json()}".encode()


def by_age(dumps: Iterable[Stored]) -> list[Stored]:
    """Returns dumps in the order in which they were made: by number, then by name."""
    return sorted(dumps, key=lambda one: one.age)


def next_number(dumps: Iterable[Stored]) -> int:
    """Returns the number of a new dump: above all others, or the largest, which hostile ones reach.

    Of those with that number the names tell which is newer.
    """
    return min(1 + max((one.number for one in dumps), default=0), _NUMBERS - 1)


def of_catalog(dumps: Iterable[Stored], target: str, database: str) -> list[Stored]:
    """Returns the dumps of one catalog: others may lie beside them."""
    return [
        one
        for one in dumps
        if one.record is not None and (one.record.target, one.record.database) == (target, database)
    ]


def name_of(moment: datetime, token: str) -> str:
    """Returns the name of a dump that was begun then. token: 8 hex digits of its own."""
    return f"{moment.astimezone(UTC).strftime(STAMP)}-{token}.dump"


_RECORD: Final = TypeAdapter(DumpRecord)


def read(text: str) -> DumpRecord | None:
    """Returns the record in a JSON text; None for anything else."""
    try:
        return _RECORD.validate_json(text, strict=True)
    except ValidationError:
        return None
