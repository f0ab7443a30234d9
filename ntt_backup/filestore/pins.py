"""A pin keeps a version of a snapshot set, or a dump: no retention removes what is pinned.

A pin is a small file beside what it keeps, so it outlives this host. Whoever may only add files to
a target must not fill it by pins, nor end them. So the name of a pin is signed: it has the
signature of the path that it keeps, by the signing key of this host. A listing alone tells the pins
of this host from others, which do not count, and a pin whose content is overwritten counts as
before. A pin that was removed may be put back: that keeps no more than was pinned once. Whoever may
remove a pin may remove what it keeps, too.

A host without a key cannot tell pins apart: then all of them count, so that a key that is lost
costs no version.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from ntt_backup.config.signing_key import Origin, SigningKeys
from ntt_backup.errors import ConfigError, NameTaken, RemoteDenied
from ntt_backup.filestore.contract import (
    Area,
    FileMissing,
    FileStore,
    FileUnreadable,
    Range,
    ReadableStore,
    StoredFileDamaged,
)
from ntt_backup.formatting import many
from ntt_backup.wire.stored_names import MAX_RECORD, is_pin, pin_name, pin_parts

# Of a reason, in characters: a character takes 12 bytes of a record at most.
MOST_REASON: Final = 300
_NAME: Final = "pin"
_TEXT: Final = "reason of a pin"
_FIELDS: Final = ("host", "reason", "signature")


def pins_that_count(names: Iterable[str], area: Area, keys: SigningKeys) -> list[str]:
    """Returns the pins among the names of files in an area that keep what they stand beside."""
    found = [(name, parts) for name in names if (parts := pin_parts(name)) is not None]
    return [
        name
        for name, (of, signature) in found
        if not keys or keys.origin(_NAME, _signed(area, of), signature) is Origin.OURS
    ]


def put_pin(store: FileStore, area: Area, of: str, keys: SigningKeys, reason: str) -> bool:
    """Stores a pin, which is durable when this returns.

    Args:
        store: The store of the area.
        area: The area.
        of: The path in the area of what is pinned: `SET/VERSION`, or the name of a dump.
        keys: The keys of this host.
        reason: Why it is kept, for people; it is not sealed.

    Returns:
        Whether the pin is new; False where this host has pinned it before.

    Raises:
        ConfigError: This host has no key, or the reason is too long.
    """
    if not keys:
        raise ConfigError(
            "a pin is signed by the host key, and there is none",
            detail=keys.problem,
            hint="`ntt-backup-remote init-db` makes one",
        )
    if len(reason) > MOST_REASON:
        raise ConfigError(
            f"the reason is too long: {len(reason)} characters",
            hint=f"{MOST_REASON} characters are allowed",
        )
    name = pin_name(area.name, of, keys.sign(_NAME, _signed(area, of)))
    if any(one.name == name for one in store.list(name)):
        return False
    host = socket.gethostname()[:MOST_REASON]
    signature = keys.sign(_TEXT, _signed_text(name, host, reason))
    said = dict(zip(_FIELDS, (host, reason, signature), strict=True))
    file = store.write(name)
    try:
        file.add(json.dumps(said).encode() + b"\n")
        file.finish()
        file.publish()
    except NameTaken:
        return False
    finally:
        file.discard()
    return True


def remove_pins(store: FileStore, names: Sequence[str]) -> int:
    """Removes all pins among the names of files; returns how many there were.

    Raises:
        RemoteDenied: The target is append-only, or keeps pins.
    """
    pins = [name for name in names if is_pin(name)]
    removed = store.remove(pins) if pins else 0
    if removed < len(pins):
        raise RemoteDenied(
            f"the remote has kept {many(len(pins) - removed, 'pin')}",
            detail="its forced command removes no pin",
            hint="remove pins by a key that may replace, or there",
        )
    return removed


def read_pins(
    store: ReadableStore, area: Area, names: Iterable[str], keys: SigningKeys
) -> Mapping[str, str]:
    """Returns the reason of each pin among the names of files that counts, by what it keeps.

    A reason is "" where there is none, or where this host has not signed it.
    """
    found: dict[str, str] = {}
    for name in pins_that_count(names, area, keys):
        reason = ""
        with suppress(FileMissing, FileUnreadable, StoredFileDamaged, ValueError, RecursionError):
            (text,) = store.read([Range(name, 0, MAX_RECORD)])
            reason = _reason(name, json.loads(text), keys)
        found[_of(name)] = found.get(_of(name)) or reason
    return found


def pin_words(reason: str | None) -> str:
    """Returns what stands behind a version or a dump in a list. reason: None where none is pinned.

    The reason is not yet printable.
    """
    if reason is None:
        return ""
    return f", pinned: {reason}" if reason else ", pinned"


def strange_pins(names: Iterable[str], area: Area, keys: SigningKeys) -> Iterator[str]:
    """Yields the pins that keep nothing: this host has not signed them."""
    pins = [name for name in names if is_pin(name)]
    good = {*pins_that_count(pins, area, keys)}
    return (name for name in pins if name not in good)


def _reason(name: str, said: object, keys: SigningKeys) -> str:
    """Returns the reason in the content of a pin; "" where this host has not signed it."""
    host, reason, signature = map(said.get, _FIELDS) if isinstance(said, dict) else [None] * 3
    if not (isinstance(host, str) and isinstance(reason, str) and isinstance(signature, str)):
        return ""
    signed = keys.origin(_TEXT, _signed_text(name, host, reason), signature) is Origin.OURS
    return reason if signed or not keys else ""


def _of(pin: str) -> str:
    parts = pin_parts(pin)
    assert parts is not None
    return parts[0]


def _signed(area: Area, of: str) -> bytes:
    return f"{area.name}/{of}".encode()


def _signed_text(name: str, host: str, reason: str) -> bytes:
    return f"{name}\n{host}\n{reason}".encode("utf-8", "surrogatepass")
