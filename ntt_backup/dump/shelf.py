"""Which dumps of a catalog stay is decided by when they arrived, by the target's clock. Pure.

The time in the name of a dump is a word of whoever made it. Dumps with made-up times, planted
beside the good ones, would take all places that a rule of days and weeks has, and a rule that
believes them removes every good dump. So only dumps count that are of this host; of these, none
whose name and arrival are more than a day apart: such a dump neither takes the place of another one
nor is removed, whatever the reason, a clock that was wrong or a target that was copied.

The record of a dump that had expired may be put back, with anything of its size behind it. Numbers
only go up, and the newest dump never expires: so what is put back arrives after a dump with a
higher number, and does not count either. Nothing but a key proves the number in a record; a dump
that is known by the ledger alone is judged by its name, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from ntt_backup.config.host_key import HostKeys, Origin
from ntt_backup.dump.record import Stored
from ntt_backup.dump.retention import Retention, could_begin, kept, newest_before, replayed
from ntt_backup.dump.store import restorable

# A dump gets its name when it is complete: one over a slow link takes days.
_LONGEST: Final = timedelta(days=7)


def of_host(
    dumps: Iterable[Stored], keys: HostKeys, ledger: Collection[tuple[str, str]]
) -> list[Stored]:
    """Returns the dumps that this host knows by its key or by the ledger of the catalog.

    Args:
        dumps: All dumps on the target, of which any may have been planted.
        keys: The keys of this host, which have signed its dumps.
        ledger: The name and the SHA-256 of each dump that the catalog has noted.
    """
    return [
        one
        for one in dumps
        if one.origin(keys) is Origin.OURS
        or (one.record is not None and (one.name, one.record.sha256) in ledger)
    ]


def signed(dumps: Iterable[Stored], keys: HostKeys) -> list[Stored]:
    """Returns the dumps that this host's key has signed, which are restored without being named.

    A host without a key cannot tell its own dumps from others, so all dumps are returned.
    """
    return [one for one in dumps if not keys or one.origin(keys) is Origin.OURS]


def doubts(ours: Iterable[Stored], keys: HostKeys) -> dict[str, str]:
    """Returns the dumps that take no place of another one, each with the reason.

    Args:
        ours: the dumps of the catalog that this host knows.
        keys: of this host.
    """
    dumps = list(ours)
    said = {
        one.name: "the time in its name is more than a day off its arrival"
        for one in dumps
        if _off_clock(one)
    }
    # What the target does not tell when it came cannot have come late.
    told = [(one, at) for one in dumps if one.name not in said and (at := one.arrived) is not None]
    by_name = replayed((one.name, at, one.begun) for one, at in told)
    known = {one.name for one, _ in told if one.origin(keys) is not Origin.OURS}
    after = {name: newer for name, newer in by_name.items() if name in known}
    told = [(one, at) for one, at in told if one.name not in after]
    after |= replayed((one.name, at, one.number) for one, at in told)
    return said | {name: f"it has arrived after {after[name]}, a newer one" for name in after}


def staying(
    ours: Sequence[Stored], name: str, now: datetime, rule: Retention, keys: HostKeys
) -> frozenset[str]:
    """Returns the dumps that the retention rule itself keeps.

    The dumps that they need must be kept, too. An unreadable dump is kept as long as a readable one
    would be, but other dumps are kept in its place as well. Neither is true of a record without a
    dump.

    Args:
        ours: The dumps of the catalog that this host knows.
        name: The name of the new dump, which arrived now.
        now: The current time, by the target's clock or by ours.
        rule: The number of dumps that are kept.
        keys: The keys of this host.
    """
    doubtful = doubts(ours, keys)
    in_order = sorted(ours, key=lambda one: (_arrival(one), one.age))
    count = [one for one in in_order if one.name not in doubtful and one.size is not None]
    good = {one.name for one in restorable(ours)}
    arrived = {one.name: _arrival(one) for one in count}
    sound = {name: at for name, at in arrived.items() if name in good}
    stay = {*kept({**arrived, name: now}, rule), *kept({**sound, name: now}, rule), *doubtful}
    # What was there before the first of them: nobody who came later can have a hand in it.
    for first in [one for one in in_order if one.name in doubtful][:1]:
        stay.add(newest_before(_arrival(first), sound))
    return frozenset(stay - {""})


def _arrival(one: Stored) -> datetime:
    """Returns when a dump arrived, as far as that is known."""
    return one.arrived or one.begun


def _off_clock(one: Stored) -> bool:
    """Returns whether the clock of a dump's maker and that of the target do not agree about it."""
    took = timedelta(seconds=one.record.duration_s) if one.record is not None else timedelta()
    took = min(max(took, timedelta()), _LONGEST)
    return not could_begin(one.begun, _arrival(one) - took, _arrival(one))
