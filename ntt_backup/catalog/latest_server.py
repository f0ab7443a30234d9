"""The latest server of the catalog that a run has used: an old primary that is back is refused.

A standby that is promoted begins a new timeline, and nothing tells the old primary. If the old
primary is back, it still accepts writes, and it may be the first host of `catalog.url`: marks would
be made in a history that ends, and a dump of it would count as the newest. So all processes of a
run share what the workers have seen, and each session of the program is compared with that.

Whoever starts a run anew decides anew: the run takes the server that it finds. No module of the
driver is needed here, since the first worker is forked before that is loaded.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ntt_backup.errors import CatalogUnavailable
from ntt_backup.process.memory import SharedNumber

# The most clusters that a float can tell apart.
_CLUSTERS: Final = 2**52


class Move(NamedTuple):
    """The catalog is served by another primary than before.

    Attributes:
        timeline: The timeline before.
        same_cluster: Whether a standby was promoted; else it is another cluster, such as a restored
            one.
    """

    timeline: int
    same_cluster: bool


class LatestServer:
    """The cluster and timeline that the processes of a run have used last."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets what was used. Processes that are forked later share what is used from now on."""
        self._cluster, self._timeline = SharedNumber(0.0), SharedNumber(0.0)

    def note(self, system: str, timeline: int) -> Move | None:
        """Notes the server of a session that records what was copied.

        Args:
            system: The identifier of the cluster, a decimal number.
            timeline: The timeline; 0 where it is not known.

        Returns:
            What was used before, if the catalog has moved to another primary.

        Raises:
            CatalogUnavailable: The server is an old primary.
        """
        if not timeline:
            return None
        self.require(system, timeline)
        cluster, before = float(int(system) % _CLUSTERS), int(self._timeline.value)
        same = cluster == self._cluster.value
        self._cluster.value, self._timeline.value = cluster, float(timeline)
        return Move(before, same) if before and not (same and timeline == before) else None

    def require(self, system: str, timeline: int) -> None:
        """Raises CatalogUnavailable if the server of a session is an old primary."""
        latest = int(self._timeline.value)
        if 0 < timeline < latest and int(system) % _CLUSTERS == self._cluster.value:
            raise CatalogUnavailable(
                "catalog.url (NTT_DB_URL) leads to an old primary",
                detail=f"two servers accept writes: this one is on timeline {timeline}, and the run"
                f" has used timeline {latest}",
                hint="stop the old primary, and make it a standby of the new one (pg_rewind); if it"
                " is the right one, restart the run",
            )


LATEST: Final = LatestServer()
