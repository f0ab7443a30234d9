"""The identity of a target tells the place of its blobs from any other place.

The marks of a target are about one place: a directory, a disk, a bucket. Another disk under the
same mount point has other blobs, or none. So each place has a marker with a random id, the catalog
knows the id of each target, and no session records anything about a place with another id. Two
targets never have one id: a disk that is mounted in the place of another one is found out.

Where nothing is marked as copied, nothing can be said of the wrong place, and a run takes the place
that it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from psycopg import errors

from ntt_backup.catalog.connection import Connection, connect, translated
from ntt_backup.config import RemoteConfig, application_name
from ntt_backup.errors import AnotherTarget, BackupError

SettingsT = TypeVar("SettingsT", bound=RemoteConfig)

_READ = "read the identity of the target"


def known_identity(conn: Connection, target: str) -> str:
    """Returns the identity of a target; "" where the catalog knows none."""
    return identities(conn).get(target, "")


def identities(conn: Connection) -> dict[str, str]:
    """Returns the known identities by target."""
    return dict(conn.ask(_READ, "identities"))


@dataclass(frozen=True, slots=True)
class Place:
    """The identity of a target, and when a run last found its place."""

    id: str
    seen_at: datetime


def place_of(conn: Connection, target: str) -> Place | None:
    """Returns the place of a target; None where none is known, or this role may not read it."""
    with translated(_READ):
        try:
            with conn.transaction():
                rows = conn.rows("place_of", {"target": target})
        except (errors.UndefinedTable, errors.InsufficientPrivilege):
            return None
    return Place(*rows[0]) if rows else None


def identified(conn: Connection, settings: SettingsT) -> SettingsT:
    """Returns the settings, of which each session requires the identity that the catalog knows."""
    remote = settings.remote.expecting(known_identity(conn, settings.target))
    return settings.model_copy(update={"remote": remote})


def identified_if_known(settings: SettingsT, application: str) -> SettingsT:
    """Returns the same, where a catalog is there to know an identity.

    What reads a target needs no catalog, and may be called on the day on which that is lost.
    """
    if settings.remote.identity:
        return settings
    with suppress(BackupError), connect(settings.catalog.url, application_name(application)) as one:
        return identified(one, settings)
    return settings


def require_own(
    conn: Connection, target: str, found: str, *, empty: bool, copied: Callable[[], bool]
) -> None:
    """Raises AnotherTarget where a run may not take the place that it found for that of the target.

    Args:
        conn: The catalog.
        target: The name of the target.
        found: The identity that was found; "" for none.
        empty: Whether there is no blob in the place.
        copied: Returns whether any blob is marked as copied to the target.
    """
    known = identities(conn)
    own = known.get(target, "")
    if found and found == own:
        return
    whose = next((name for name, one in known.items() if found and one == found), "")
    if whose or ((own or empty) and copied()):
        raise AnotherTarget(own, found, whose)


def note_identity(conn: Connection, target: str, found: str) -> None:
    """Notes the identity of a target, and that its place was seen at this moment.

    Raises AnotherTarget where another target has got the identity meanwhile.
    """
    with translated("note the identity of the target"):
        try:
            conn.rows("note_identity", {"target": target, "id": found})
        except errors.UniqueViolation:
            known = identities(conn)
            whose = next((name for name, one in known.items() if one == found), "")
            raise AnotherTarget(known.get(target, ""), found, whose) from None
