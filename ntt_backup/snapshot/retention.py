"""A retention says which versions of a set go, and which stay because others need them.

A version needs all versions of its chain. So of a chain only increments at its end can go, and the
whole of it goes when none of its versions is kept. At every instant of a removal all versions that
exist can be restored: a manifest goes before all that it needs, and before its own files.

Whoever may add versions to a target must not be able to have others removed by that. So a version
counts by when it arrived, as the target knows it, and not by what it says; a doubtful version (see
`doubts`) takes no place among those that are kept, and does not go by itself. A version of this
host that expired may be put back as it was. The names of the versions of this host only rise, and
the newest one never expires. So a version was put back that arrived after one with a higher name.

A version that this host has pinned (`filestore.pins`) stays beside those that the rule keeps, and
takes the place of none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from ntt_backup.config.sections import SnapshotSettings
from ntt_backup.config.signing_key import Origin
from ntt_backup.dump.retention import Retention, kept, newest_before, replayed
from ntt_backup.errors import complete
from ntt_backup.filestore.contract import FileStore, ReadableStore
from ntt_backup.filestore.pins import pins_that_count, strange_pins
from ntt_backup.formatting import many
from ntt_backup.snapshot.names import MANIFEST, SNAPSHOTS
from ntt_backup.snapshot.origins import NO_KEYS, NOBODY, Origins
from ntt_backup.snapshot.versions import Version, VersionFacts, facts, versions
from ntt_backup.wire.stored_names import begun

# Nothing arrives for as long of a version that died.
DEAD_AFTER: Final = timedelta(days=1)
_HOUR: Final = timedelta(hours=1)
# Versions of unknown origin that may arrive within an hour, where no schedule is known.
_FEW: Final = 2


class ForgetPlan(NamedTuple):
    """Says which versions of a set stay, and which versions are removed.

    Attributes:
        kept: The versions that stay by the rule.
        needed: The versions that stay for another version, each with the name of that version.
        gone: The versions that are removed.
        dead: The versions that were never finished, or were removed in part.
        doubtful: The versions that stay and do not count, each with the reason.
        times: The time at which each whole version was begun, by name. The name of a version itself
            tells the time where it is missing here.
        pinned: The names of the versions that are pinned, and so are kept or doubtful.
    """

    kept: Sequence[Version]
    needed: Sequence[tuple[Version, str]]
    gone: Sequence[Version]
    dead: Sequence[Version]
    doubtful: Sequence[tuple[Version, str]]
    times: Mapping[str, datetime]
    pinned: frozenset[str] = frozenset()

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


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the whole versions of a set, by name.

    Attributes:
        chains: The versions that each one needs, itself last. One that cannot be read has none.
        times: When each was begun, as it says itself.
        arrived: By which time each counts.
        doubts: Why a version does not count.
        incomplete: Those that lack a pack, also of a version that they need, or their map.
        pinned: Those that never go.
    """

    chains: Mapping[str, Sequence[str]]
    times: Mapping[str, datetime]
    arrived: Mapping[str, datetime]
    ours: frozenset[str] = frozenset()
    doubts: Mapping[str, str] = field(default_factory=dict)
    incomplete: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()


def known(
    found: Sequence[VersionFacts], *, signed: bool, every: float | None = None, trust: bool = False
) -> Known:
    """Returns what facts say of versions.

    Args:
        found: The facts of all whole versions of a set.
        signed: Whether this host has a key: then only what it made counts.
        every: How often a version is taken, in seconds; None where that is not known.
        trust: Every version that can be read counts, by the time that it says itself.
    """
    read = {one.version.name: one.header for one in found if one.header is not None}
    times = {name: header.begun for name, header in read.items()}
    arrived = {one.version.name: one.version.arrived for one in found}
    doubtful = doubts(found, signed=signed, every=every)
    # A trailer that cannot be read names no packs; those of its version cannot be missed.
    proved = [(one.version, one.trailer) for one in found if one.trailer is not None]
    lacking = {version.name for version, trailer in proved if version.lacks(trailer)}
    torn = {version.name for version, trailer in proved if version.lacks(trailer, map=False)}
    return Known(
        {name: header.chain for name, header in read.items()},
        times,
        times if trust else arrived,
        frozenset(one.version.name for one in found if one.origin == Origin.OURS),
        {one.version.name: why for one, why in doubtful if not trust or one.header is None},
        frozenset(
            name
            for name, header in read.items()
            if name in lacking or not torn.isdisjoint(header.chain)
        ),
    )


def doubts(
    found: Sequence[VersionFacts], *, signed: bool, every: float | None = None
) -> list[tuple[VersionFacts, str]]:
    """Returns the versions that do not count, each with the reason. Arguments as in `known`."""
    crowd = _crowd(found, 1 + -(-3600 // every) if every else _FEW)
    ours = [one.version for one in found if one.origin == Origin.OURS]
    after = replayed((one.name, one.arrived, one.name) for one in ours)
    said = []
    for one in found:
        if one.header is None:
            said.append((one, f"no manifest that can be read: {one.problem}"))
        elif one.origin in (Origin.FORGED, Origin.ELSEWHERE):
            said.append((one, one.origin.text))
        elif not one.version.could_begin(one.header.begun):
            at = f"{one.version.arrived:%Y-%m-%d}"
            said.append((one, f"it says {one.header.begun:%Y-%m-%d}, and has arrived on {at}"))
        elif signed and one.origin != Origin.OURS:
            said.append((one, one.origin.text))
        elif one.version.name in after:
            newer = after[one.version.name]
            said.append((one, f"it has arrived after {newer}, a newer one"))
        elif one.version.name in crowd:
            said.append((one, f"one of {crowd[one.version.name]} that arrived within an hour"))
    return said


def _crowd(found: Sequence[VersionFacts], most: float) -> dict[str, int]:
    """Returns the versions of unknown origin of which more than `most` arrived within an hour.

    The value is the number of versions that arrived within the hour.
    """
    foreign = sorted(
        (one.version for one in found if one.origin != Origin.OURS), key=lambda one: one.arrived
    )
    crowd: dict[str, int] = {}
    first = 0
    for last, version in enumerate(foreign):
        while version.arrived - foreign[first].arrived > _HOUR:
            first += 1
        if (count := last + 1 - first) > most:
            for one in foreign[first : last + 1]:
                crowd[one.name] = max(count, crowd.get(one.name, 0))
    return crowd


def plan(
    versions: Sequence[Version], known: Known, rule: Retention, now: datetime, *, drop: bool = False
) -> ForgetPlan:
    """Returns what becomes of all versions of a set, the oldest first, also of unfinished ones.

    With `drop` doubtful versions go, too, unless one that stays needs them.
    """
    chains, doubtful = known.chains, known.doubts
    whole = {one.name: one for one in versions if one.whole}
    count = [name for name in whole if name in chains and name not in doubtful]
    sound = [
        name for name in count if name not in known.incomplete and whole.keys() >= set(chains[name])
    ]
    # What lacks something that it needs stays as long as it would, but others are kept for it.
    # And what others have made keeps nothing of this host from its place.
    ours = [name for name in sound if name in known.ours]
    staying = {*_kept(count, known, rule), *_kept(sound, known, rule), *_kept(ours, known, rule)}
    staying |= known.pinned & {*count}
    unsure = [name for name in whole if name in doubtful and (not drop or name in known.pinned)]
    roots = [*(name for name in unsure if name in chains), *sorted(staying, reverse=True)]
    needed = {name: root for root in roots for name in chains[root]}
    # What was there before somebody began to plant versions stays. A version that cannot be read
    # may be one of a newer program, which builds on what was the newest.
    first = sorted(unsure, key=lambda name: (whole[name].arrived, name))[:1]
    for name in {*first, *(one for one in unsure if one not in chains)}:
        if before := _before(whole[name], sound, known):
            needed = dict.fromkeys(chains[before], name) | needed
    unfinished = [one for one in versions if not one.whole]
    # Remnants of a take or a removal: long ago the last file arrived, and a later version is whole.
    last = max((known.arrived[name] for name in count), default=datetime.min.replace(tzinfo=UTC))
    dead = [one for one in unfinished if one.arrived < min(last, now - DEAD_AFTER)]
    for one in unfinished:
        # Another host's take may build on what was the newest when it began.
        if one not in dead and (before := _before(one, [*chains], known)):
            needed = dict.fromkeys(chains[before], one.name) | needed
    gone = [name for name in whole if name not in needed and name not in unsure]
    return ForgetPlan(
        [one for name, one in whole.items() if name in staying],
        [
            (one, needed[name])
            for name, one in whole.items()
            if name in needed.keys() - staying and name not in unsure
        ],
        [whole[name] for name in gone],
        [one for one in dead if one.name not in needed],
        [(whole[name], doubtful[name]) for name in unsure],
        known.times,
        known.pinned & whole.keys(),
    )


def _kept(names: Iterable[str], known: Known, rule: Retention) -> frozenset[str]:
    found = sorted(names, key=lambda name: (known.arrived[name], name))
    return kept({name: known.arrived[name] for name in found}, rule) if found else frozenset()


def _before(one: Version, names: Iterable[str], known: Known) -> str:
    """Returns the newest of some versions that arrived before another one; "" where none did."""
    first = min((file.arrived for file in one.files), default=one.arrived)
    limit = first if first.year > 1970 else begun(one.name)
    return newest_before(limit, {name: known.arrived[name] for name in names})


def life(wanted: SnapshotSettings) -> timedelta:
    """Returns for how long a full version is needed at most, where a version is taken each day."""
    return timedelta(
        days=max(
            wanted.keep_last,
            wanted.keep_daily,
            7 * wanted.keep_weekly,
            31 * wanted.keep_monthly,
            366 * wanted.keep_yearly,
        ),
        seconds=wanted.full_every,
    )


def plan_of(
    repository: ReadableStore,
    set: str,
    rule: Retention,
    now: datetime,
    origins: Origins = NOBODY,
    *,
    every: float | None = None,
    trust: bool = False,
    drop: bool = False,
) -> ForgetPlan:
    """Returns what is to be removed of a set. Arguments as in `known` and `plan`."""
    found = versions(repository, set)
    said = list(facts(repository, found, origins))
    told = known(said, signed=origins.signed, every=every, trust=trust)
    keys = NO_KEYS if trust else origins.keys
    pinned = [one.name for one in found if pins_that_count(one.pins, SNAPSHOTS, keys)]
    return plan(found, replace(told, pinned=frozenset(pinned)), rule, now, drop=drop)


def expire(
    repository: FileStore,
    set: str,
    rule: Retention,
    now: datetime,
    origins: Origins = NOBODY,
    *,
    every: float | None = None,
    problem: Callable[[str, str], object] = lambda *_: None,
) -> ForgetPlan:
    """Removes the versions that retention does not keep, and returns the plan of the removal.

    The removal may be killed at any instant: all remaining versions can be restored. The caller
    must hold the lock of the set. `problem(what, why)` is called for doubtful versions.

    Raises:
        RemoteDenied: The target is append-only.
    """
    there = versions(repository, set)
    if len(there) <= rule.last and all(one.whole for one in there):
        return ForgetPlan(there, (), (), (), (), {})  # Nothing need be read.
    found = plan_of(repository, set, rule, now, origins, every=every)
    pins = [name for one in there for name in one.pins]
    if strange := [*strange_pins(pins, SNAPSHOTS, origins.keys)]:
        problem(
            many(len(strange), "pin"),
            f"this host has not signed them, so they keep nothing: {strange[-1]}",
        )
    if names := found.names:
        repository.remove(names)
    if found.doubtful:
        version, why = found.doubtful[-1]
        problem(
            many(len(found.doubtful), "doubtful version"),
            complete(
                f"they do not count, and stay: {version}, {why}; see ntt-backup-remote snapshot"
                f" forget {set}"
            ),
        )
    return found
