"""Which dumps of a catalog stay is decided by when they arrived, by the target's clock. Pure.

The time in the name of a dump is a word of whoever made it. Dumps with made-up times, planted
beside the good ones, would take all places that a rule of days and weeks has, and a rule that
believes them removes every good dump. So only dumps count that are of this host; of these, none
whose name and arrival are more than a day apart: such a dump neither takes the place of another one
nor is removed, whatever the reason, a clock that was wrong or a target that was copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from ntt_backup.config.host_key import HostKeys, Origin
from ntt_backup.dump.record import Stored
from ntt_backup.dump.retention import Retention, kept

_DAY: Final = timedelta(days=1)
# A dump gets its name when it is complete: one over a slow link takes days.
_LONGEST: Final = timedelta(days=7)


def of_host(
    dumps: Iterable[Stored], keys: HostKeys, ledger: Collection[tuple[str, str]]
) -> list[Stored]:
    """Returns the dumps that this host knows: those that its key has signed, and those that are in
    the ledger of the catalog.

    Args:
        dumps: all dumps on the target, of which any may have been planted.
        keys: of this host.
        ledger: name and SHA-256 of each dump that the catalog has noted.
    """
    return [
        one
        for one in dumps
        if one.origin(keys) is Origin.OURS
        or (one.record is not None and (one.name, one.record.sha256) in ledger)
    ]


def signed(dumps: Iterable[Stored], keys: HostKeys) -> list[Stored]:
    """Returns the dumps that come back unasked: those that this host's key has signed. Where there
    is no key, none of them is told from the others, and all are returned.
    """
    return [one for one in dumps if not keys or one.origin(keys) is Origin.OURS]


def arrival(one: Stored) -> datetime:
    """Returns when a dump arrived, as far as that is known."""
    return one.arrived or one.begun


def off_clock(one: Stored) -> bool:
    """Returns whether the clock of a dump's maker and that of the target do not agree about it."""
    took = timedelta(seconds=one.record.duration_s) if one.record is not None else timedelta()
    apart = arrival(one) - one.begun
    return not -_DAY <= apart <= _DAY + min(max(took, timedelta()), _LONGEST)


def staying(good: Sequence[Stored], name: str, now: datetime, rule: Retention) -> frozenset[str]:
    """Returns the dumps that stay by themselves; what they need stays, too.

    Args:
        good: the dumps of the catalog that can come back.
        name: of the new one, which arrived now.
        now: by the target's clock or ours.
        rule: how many stay.
    """
    in_order = sorted(good, key=lambda one: (arrival(one), one.age))
    sound = {one.name: arrival(one) for one in in_order if not off_clock(one)}
    odd = [one for one in in_order if off_clock(one)]
    stay = {*kept({**sound, name: now}, rule), *(one.name for one in odd)}
    # What was there before the first odd one: nobody who came later can have a hand in it.
    before = [one.name for one in in_order if odd and arrival(one) < arrival(odd[0])]
    return frozenset([*stay, *before[-1:]])
