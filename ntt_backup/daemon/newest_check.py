"""Compares the newest dump, versions and pack on a target with the notes of this host.

For `check` and `verify`.
"""

from __future__ import annotations

from contextlib import closing, suppress
from datetime import datetime
from typing import Final

from ntt_backup import newest
from ntt_backup.catalog import connection, packs
from ntt_backup.catalog.dump_history import noted_dumps
from ntt_backup.config import RemoteConfig, application_name
from ntt_backup.config.host_key import HostKeys
from ntt_backup.daemon.preflight import CheckStep
from ntt_backup.dump.shelf import of_host
from ntt_backup.dump.store import open_dumps, read_contents
from ntt_backup.errors import BackupError, CatalogError
from ntt_backup.filestore.contract import ReadableStore
from ntt_backup.filestore.open import open_store
from ntt_backup.format import moment
from ntt_backup.model import StoredPack
from ntt_backup.newest import Kind, Newest
from ntt_backup.objects.bucket import still
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.versions import names_of_host
from ntt_backup.wire.stored_names import MAX_DUMPS

NOT_LOOKED: Final = (
    "could not check whether the newest dump, versions and pack are on the target: {}"
)


def look(settings: RemoteConfig) -> list[Newest]:
    """Returns what the target lacks of the newest dump, versions and pack that this host knows, and
    notes it for `status`.

    Raises:
        BackupError: The target cannot be listed.
    """
    known = newest.recorded(settings)
    away: list[Newest] = []
    if any(one.kind == "dump" for one in known):
        with closing(open_dumps(settings)) as store:
            found = read_contents(store).dumps
        keys, ledger = HostKeys.of(settings), _ledger(settings)
        # Without both, nothing tells which dumps are of this host.
        dumps = found if ledger is None and not keys else of_host(found, keys, ledger or ())
        names = [one.name for one in dumps if one.whole]
        away += newest.compare(settings, {("dump", ""): names})
    if any(one.kind == "version" for one in known):
        with closing(open_store(settings, SNAPSHOTS)) as repository:
            away += missed_versions(settings, repository)
    if settings.remote.kind == "s3" and (lost := _lost_pack(settings)) is not None:
        pack, at = lost
        place = settings.remote.url
        away.append(Newest(settings.target, place, "pack", "", pack.key, at, missed=pack.key))
    return away


def missed_versions(
    settings: RemoteConfig, repository: ReadableStore, of_set: str = ""
) -> list[Newest]:
    """Returns what the target lacks of the newest versions that this host knows, and notes it for
    `status`. of_set: the only set that is looked for; "" for all.
    """
    origins = Origins.of(settings)
    known = [one.of for one in newest.recorded(settings) if one.kind == "version"]
    there: dict[tuple[Kind, str], list[str]] = {
        ("version", of): names_of_host(repository, of, origins)
        for of in known
        if of_set in ("", of)
    }
    return newest.compare(settings, there)


def _ledger(settings: RemoteConfig) -> frozenset[tuple[str, str]] | None:
    """Returns the dumps that the catalog has noted; None where it cannot be asked."""
    application = application_name("check")
    with suppress(CatalogError), connection.connect(settings.catalog.url, application) as conn:
        return noted_dumps(conn, settings.target, MAX_DUMPS)
    return None


def _lost_pack(settings: RemoteConfig) -> tuple[StoredPack, datetime] | None:
    """Returns the pack that the catalog knows as the newest, and when it was sealed, where the
    bucket lacks it or has another object in its place; None also where the catalog cannot be asked.
    """
    from ntt_backup.objects.s3 import open_bucket

    with suppress(CatalogError):
        with connection.connect(settings.catalog.url, application_name("check")) as conn:
            last = packs.newest_pack(conn, settings.target)
        if last is None:
            return None
        there = open_bucket(settings.remote).head(last[0].key)
        same = there is not None and there.size == last[0].size
        if there is None or not same or still(there, last[0].checksum) is False:
            return last
    return None


def newest_known(settings: RemoteConfig) -> CheckStep:
    """Says whether the target has the newest dump, versions and pack of this host."""
    try:
        found = look(settings)
    except BackupError as error:
        return CheckStep(warning=NOT_LOOKED.format(error))
    if found:
        return CheckStep(warning="; ".join(map(str, found)))
    known = newest.recorded(settings)
    if not known:
        return CheckStep("this host has noted no dump and no version yet")
    last = max(known, key=lambda one: one.at)
    return CheckStep(f"nothing is missing; the last {last.kind} was stored {moment(last.at)}")
