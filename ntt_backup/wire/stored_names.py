"""A file that a target stores beside blobs has a name of one form, which leads nowhere else.

Files lie in areas. Two areas are directories below the root of the target, to which their names are
relative:

- `snapshots`: `<set>/<version>/<file>`, the files of snapshots;
- `pgdump`: `<dump>` and `<dump>.json`, the dumps of the catalog and their records;
  `<dump>.places.jsonl.zst`, the files that go by their paths.

Beside a version or a dump its pins may lie: `<set>/<version>/pin-<key>-<mac>`, and
`<dump>.pin-<key>-<mac>`.

The names in the area `packs`, which has blobs in packs, are relative to the root:

- `format.json`: the marker of the layout, with the identity of the store;
- `packs/<aa>/<low>-<high>-<id>.tar`: a pack. low and high are the first 8 bytes of its smallest and
  its largest blobid. Where the first bytes of these differ, `<aa>` is `wide`;
- `blobs/<aa>/<bb>/<blobid>`: a large blob that is in no pack;
- `packs/trial-<name>`: a file that a check stores and removes.

The area `by-hash` has the blobs that are plain files, `<aa>/<bb>/<blobid>`, to be removed alone.

A sealed file has `.age` behind its name. Records and pins are never sealed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from ntt_backup.wire.framing import FORMAT

SNAPSHOTS = "snapshots"
DUMPS = "pgdump"
PACKS = "packs"
BY_HASH = "by-hash"
SEALED = ".age"
RECORD = ".json"
PLACES = ".places.jsonl.zst"
STAMP = "%Y%m%dT%H%M%SZ"

# The number of dumps in an area, and the size of a record in bytes.
MAX_DUMPS = 10_000
MAX_RECORD = 4096
# The number of pins of a version, or of all dumps. A pin has the bytes of a record at most.
MAX_PINS = 1000

_SET = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}")
_VERSION = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{8}", re.ASCII)
_PIN = "pin-([0-9a-f]{16})-([0-9a-f]{64})"
_FILE = re.compile(rf"(pack-\d{{5}}|map|manifest)(\.age)?|{_PIN}", re.ASCII)
_PINNED = re.compile(rf"(.+)[/.]{_PIN}")
_DUMP = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{8}\.dump", re.ASCII)

_PACK = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{32})\.(tar|tar\.age)")
_BLOB = re.compile(r"(?:blobs/)?([0-9a-f]{2})/([0-9a-f]{2})/\1\2[0-9a-f]{60}")
_TRIAL = re.compile(r"packs/trial-[0-9a-z-]{1,64}")
_PACK_DIRECTORY = re.compile(r"packs/(([0-9a-f]{2}|wide)/)?|blobs/([0-9a-f]{2}/([0-9a-f]{2}/)?)?")

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LAST_US = (datetime.max.replace(tzinfo=timezone.utc) - _EPOCH) // timedelta(microseconds=1)


def is_set(name: str) -> bool:
    """Returns whether name is the name of a snapshot set, and so harmless in a path."""
    return _SET.fullmatch(name) is not None


def has_form(require: Callable[..., object], *names: str) -> bool:
    """Returns whether a function that raises ValueError for a wrong name takes these."""
    try:
        require(*names)
    except ValueError:
        return False
    return True


def moment_of(stamp: str) -> datetime:
    """Returns the time that a name begins with. Raises ValueError for any other text."""
    return datetime.strptime(stamp, STAMP).replace(tzinfo=timezone.utc)


def begun(version: str) -> datetime:
    """Returns when a version of a snapshot was begun. Raises ValueError for any other name."""
    return _begun(_VERSION, version, "a version")


def _begun(pattern: re.Pattern[str], name: str, called: str) -> datetime:
    match = pattern.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not {called}")
    return moment_of(match[1])


def is_version(name: str) -> bool:
    """Returns whether name is the name of a version of a snapshot."""
    return has_form(begun, name)


def snapshot_parts(name: str) -> tuple[str, str, str]:
    """Returns the set, the version and the file of a name in `snapshots`. Raises ValueError."""
    parts = name.split("/")
    fits = len(parts) == 3 and is_set(parts[0]) and is_version(parts[1])
    if not fits or not _FILE.fullmatch(parts[2]):
        raise ValueError(f"{name!r} is not a file of a snapshot")
    return parts[0], parts[1], parts[2]


def dump_begun(dump: str) -> datetime:
    """Returns when a dump was begun. Raises ValueError for any other name."""
    return _begun(_DUMP, dump, "the name of a dump")


def dump_of(name: str) -> str:
    """Returns the dump to which a name in `pgdump` belongs. Raises ValueError."""
    pin = pin_parts(name)
    if pin is not None:
        dump_begun(pin[0])
        return pin[0]
    for end in (RECORD,) if name.endswith(RECORD) else (SEALED, PLACES):
        if name.endswith(end):
            name = name[: -len(end)]
    dump_begun(name)
    return name


def pin_parts(name: str) -> tuple[str, str] | None:
    """Returns what a pin keeps, `<set>/<version>` or `<dump>`, and its signature, `KEY:MAC` in hex;
    None for a name that is not a pin's.
    """
    found = _PINNED.fullmatch(name)
    return None if found is None else (found[1], f"{found[2]}:{found[3]}")


def is_pin(name: str) -> bool:
    """Returns whether a file in `snapshots` or `pgdump` is a pin."""
    return _PINNED.fullmatch(name) is not None


def pin_name(area: str, of: str, signature: str) -> str:
    """Returns the name of the pin that keeps a version or a dump. Arguments as in `pin_parts`."""
    between = "/" if area == SNAPSHOTS else "."
    return require_name(area, f"{of}{between}pin-{signature.replace(':', '-')}")


def pack_parts(name: str) -> tuple[str, str, str, str] | None:
    """Returns low, high, id and ending of the last part of a pack's name; None for another text."""
    found = _PACK.fullmatch(name)
    if found is None or found[1] > found[2]:
        return None
    return found[1], found[2], found[3], found[4]


def pack_directory(low: str, high: str) -> str:
    """Returns the directory of a pack, with a slash at its end."""
    return f"packs/{low[:2] if low[:2] == high[:2] else 'wide'}/"


def is_trial(name: str) -> bool:
    """Returns whether a file in `packs` is one that a check has stored."""
    return _TRIAL.fullmatch(name) is not None


def is_large_blob(name: str) -> bool:
    """Returns whether a file in `packs` is a large blob that is in no pack."""
    return name.startswith("blobs/") and _BLOB.fullmatch(name) is not None


def _is_in_packs(name: str) -> bool:
    above, _, last = name.rpartition("/")
    parts = pack_parts(last)
    if parts is not None:
        return pack_directory(*parts[:2]) == f"{above}/"
    return name == FORMAT or is_large_blob(name) or is_trial(name)


def require_name(area: str, name: str) -> str:
    """Returns a name of a file in an area. Raises ValueError for any other text."""
    if area == SNAPSHOTS:
        snapshot_parts(name)
    elif area == PACKS:
        if not _is_in_packs(name):
            raise ValueError(f"{name!r} is no file of packs")
    elif area == BY_HASH:
        if name.startswith("blobs/") or not _BLOB.fullmatch(name):
            raise ValueError(f"{name!r} is no blob")
    else:
        dump_of(name)
    return name


def is_told(area: str, name: str) -> bool:
    """Returns whether a file may be read by whoever may list the area: the record of a dump, a pin,
    and the marker of the layout.
    """
    if area == PACKS:
        return name == FORMAT
    return is_pin(name) or (area == DUMPS and name.endswith(RECORD))


def require_below(area: str, below: str) -> str:
    """Returns what is listed in an area: "" for all of it, the name of one file, or a directory of
    `snapshots` or `packs` with a slash at its end. Raises ValueError for any other text.
    """
    if below and not below.endswith("/"):
        return require_name(area, below)
    if area == PACKS and _PACK_DIRECTORY.fullmatch(below):
        return below
    of_set, _, version = below[:-1].partition("/")
    whole = area == SNAPSHOTS and below.endswith("/") and is_set(of_set)
    if below and not (whole and (is_version(version) or below == f"{of_set}/")):
        raise ValueError(f"{below!r} is no directory of {area}")
    return below


def arrival_us(mtime_ns: int) -> int:
    """Returns when a file got its name, in microseconds since 1970.

    Args:
        mtime_ns: The modification time of the file in nanoseconds. A time before 1970 counts as
            1970, one after the year 9999 as the end of that year.
    """
    return min(max(mtime_ns // 1000, 0), _LAST_US)


def read_arrival(arrived_us: int) -> datetime:
    """Returns a time of arrival that a peer has sent. Raises ValueError where the time lies before
    1970 or after the year 9999.
    """
    if not 0 <= arrived_us <= _LAST_US:
        raise ValueError("a time of arrival that no clock has shown")
    return _EPOCH + timedelta(microseconds=arrived_us)
