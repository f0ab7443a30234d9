"""A retention says which versions of a set go, and which stay because others need them. Pure.

A version needs all versions of its chain. So of a chain only increments at its end can go, and the
whole of it goes when none of its versions is kept. At every instant of a removal all versions that
exist can be restored: a manifest goes before all that it needs, and before its own files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from ntt_backup.config.sections import SnapshotSettings
from ntt_backup.dump.retention import Retention, kept
from ntt_backup.snapshot.repository.names import MANIFEST
from ntt_backup.snapshot.versions import Version
from ntt_backup.wire.snapshot_names import begun

# A take may last as long before its version is taken for one that died.
DEAD_AFTER: Final = timedelta(days=1)


class Plan(NamedTuple):
    """Says which versions of a set stay, and which go. kept: by the rule. needed: stays, and for
    which version. gone: versions that are removed. dead: what was never finished, or not wholly
    removed. times: when whole versions were begun; their names tell of those that are not in it.
    """

    kept: Sequence[Version]
    needed: Sequence[tuple[Version, str]]
    gone: Sequence[Version]
    dead: Sequence[Version]
    times: Mapping[str, datetime]

    def begun(self, one: Version) -> datetime:
        """Returns when a version was begun, as `snapshot list` tells it."""
        return self.times.get(one.name) or begun(one.name)

    @property
    def size(self) -> int:
        """Returns how many bytes the repository gets back."""
        return sum(one.size for one in (*self.gone, *self.dead))

    @property
    def names(self) -> list[str]:
        """Returns the files to remove, in this order."""
        manifests = [one.manifest.name for one in reversed(self.gone) if one.manifest is not None]
        rest = [file.name for one in (*self.gone, *self.dead) for file in one.files]
        return [*manifests, *(one for one in rest if not one.endswith(f"/{MANIFEST}"))]


def plan(
    versions: Sequence[Version],
    chains: Mapping[str, Sequence[str]],
    times: Mapping[str, datetime],
    rule: Retention,
    now: datetime,
) -> Plan:
    """Returns what becomes of versions, all of one set, the oldest first. chains: of the whole
    ones, by name; times: when those were begun.
    """
    whole = {one.name: one for one in versions if one.whole}
    sound = [name for name in whole if whole.keys() >= set(chains[name])]
    # What has lost a version that it needs stays as long as it would, but others are kept for it.
    staying = _kept(whole, times, rule) | _kept(sound, times, rule)
    unfinished = [one for one in versions if not one.whole]
    dead = [one for one in unfinished if _is_dead(one, times, now)]
    needed = {name: root for root in sorted(staying, reverse=True) for name in chains[root]}
    for one in unfinished:
        # Another host's take may build on what was the newest when it began.
        before = [name for name in whole if name < one.name]
        if one not in dead and before:
            needed = dict.fromkeys(chains[before[-1]], one.name) | needed
    return Plan(
        [one for name, one in whole.items() if name in staying],
        [(one, needed[name]) for name, one in whole.items() if name in needed.keys() - staying],
        [one for name, one in whole.items() if name not in needed],
        [one for one in dead if one.name not in needed],
        times,
    )


def _kept(names: Iterable[str], times: Mapping[str, datetime], rule: Retention) -> frozenset[str]:
    found = {name: times[name] for name in names}
    return kept(found, rule) if found else frozenset()


def _is_dead(one: Version, times: Mapping[str, datetime], now: datetime) -> bool:
    """Returns whether a version without manifest is what a take or a removal has left: a later
    version is whole, and no take lasts so long. times: when the whole ones were begun.
    """
    named = begun(one.name)
    later = {name: time for name, time in times.items() if one.name < name}
    if named > now:  # A clock was ahead once. It was begun before the whole ones behind it.
        return any(now - time > DEAD_AFTER for name, time in later.items() if begun(name) > named)
    return bool(later) and now - named > DEAD_AFTER


def life(wanted: SnapshotSettings) -> timedelta:
    """Returns for how long a full version is needed at most, where a version is taken each day."""
    return timedelta(
        days=max(wanted.keep_last, wanted.keep_daily, 7 * wanted.keep_weekly),
        seconds=wanted.full_every,
    )
