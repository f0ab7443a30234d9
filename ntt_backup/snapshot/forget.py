"""Removes versions of a set that its retention does not keep, and what removals have left."""

from __future__ import annotations

from datetime import datetime

from ntt_backup.dump.retention import Retention
from ntt_backup.errors import RemoteError
from ntt_backup.snapshot.repository.contract import Repository, RepositoryToRead
from ntt_backup.snapshot.retention import Plan, plan
from ntt_backup.snapshot.versions import facts, versions


def plan_of(repository: RepositoryToRead, set: str, rule: Retention, now: datetime) -> Plan:
    """Returns what is to be removed. Raises RemoteError where a version does not tell which others
    it needs.
    """
    found = versions(repository, set)
    if len(found) <= rule.last and all(one.whole for one in found):
        return Plan(found, (), (), (), {})  # Nothing need be read.
    chains, times = {}, {}
    for version, header, _, problem in facts(repository, found):
        if header is None:
            raise RemoteError(
                f"it is not known which versions {version} needs, so nothing is removed",
                detail=problem,
                hint="a newer program may have written it; if not, remove the file manifest of this"
                " version below snapshots/ on the target, and nothing else: others may need its"
                " packs; then call this again",
            )
        chains[version.name], times[version.name] = header.chain, header.begun
    return plan(found, chains, times, rule, now)


def expire(repository: Repository, set: str, rule: Retention, now: datetime) -> Plan:
    """Removes what retention does not keep; returns what that was. It may be killed at any instant:
    what stays can be restored. The lock of the set is held meanwhile. Raises RemoteDenied where the
    target is append-only.
    """
    found = plan_of(repository, set, rule, now)
    if names := found.names:
        repository.remove(names)
    return found
