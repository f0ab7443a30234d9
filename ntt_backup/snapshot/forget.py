"""Removes versions of a set that its retention does not keep, and what removals have left."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from ntt_backup.dump.retention import Retention
from ntt_backup.errors import complete
from ntt_backup.filestore.contract import FileStore, ReadableStore
from ntt_backup.format import many
from ntt_backup.snapshot.origins import NOBODY, Origins
from ntt_backup.snapshot.retention import Plan, known, plan
from ntt_backup.snapshot.versions import facts, versions


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
) -> Plan:
    """Returns what is to be removed.

    Args:
        repository: Where the versions lie.
        set: The set.
        rule: How many versions are kept.
        now: By the clock of this host.
        origins: Who made versions.
        every: How often a version is taken, in seconds; None where that is not known.
        trust: Every version counts, by the time that it says itself.
        drop: Doubtful versions go, too.
    """
    found = versions(repository, set)
    said = list(facts(repository, found, origins))
    told = known(said, signed=origins.signed, every=every, trust=trust)
    return plan(found, told, rule, now, drop=drop)


def expire(
    repository: FileStore,
    set: str,
    rule: Retention,
    now: datetime,
    origins: Origins = NOBODY,
    *,
    every: float | None = None,
    problem: Callable[[str, str], object] = lambda *_: None,
) -> Plan:
    """Removes what retention does not keep; returns what that was. It may be killed at any instant:
    what stays can be restored. The lock of the set is held meanwhile. Arguments as in `plan_of`.
    problem(what, why) hears of doubtful versions. Raises RemoteDenied where the target is
    append-only.
    """
    there = versions(repository, set)
    if len(there) <= rule.last and all(one.whole for one in there):
        return Plan(there, (), (), (), (), {})  # Nothing need be read.
    found = plan_of(repository, set, rule, now, origins, every=every)
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
