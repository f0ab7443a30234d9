"""A worker has a connection to the catalog, for its claims and its ledger.

Claims vanish with their connection, so what was claimed and where it is recorded must never be on
two connections.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from ntt_backup.catalog.connection import connect, end_when_idle, show_life
from ntt_backup.catalog.identities import known_identity
from ntt_backup.catalog.latest_server import LATEST
from ntt_backup.catalog.ledger import Ledger
from ntt_backup.catalog.listed_files import places_of
from ntt_backup.catalog.range_locks import Claims
from ntt_backup.catalog.unread_files import UnreadFiles
from ntt_backup.model import Blob

# A stopped host still answers the server's keepalives: only statements show that a session lives.
_SPEAK_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 45


class CatalogSession:
    """An open connection, and `claims`, `ledger`, `unread` on it. Raises as `connect` and they do.

    identity: of the target, as the catalog knows it.

    moved: what the run has used before, if the catalog has moved.

    order lists range indexes, those to try first in front. listen: inserts wake `claims.fileno`.

    The server ends the session, and frees what it has claimed, when nothing was said in it for 45
    s, from PostgreSQL 14 on; so `keep` has to be called every few seconds.
    """

    def __init__(
        self, url: str, application: str, target: str, order: Sequence[int], *, listen: bool
    ) -> None:
        self._conn = connect(url, application)
        self._kept = time.monotonic()
        self.server = self._conn.server
        try:
            end_when_idle(self._conn, _IDLE_SECONDS)
            self.claims = Claims(self._conn, target, order)
            self.ledger = Ledger(self._conn, target)
            self.unread = UnreadFiles(self._conn, target)
            # Of the target whose copies the ledger marks.
            self.identity = known_identity(self._conn, target)
            if listen:
                self.claims.listen()
            self.moved = LATEST.note(self.server.system, self.server.timeline)
        except BaseException:
            self._conn.close()
            raise

    def paths_of(self, claimed: Sequence[tuple[Blob, int]]) -> Mapping[str, list[bytes]]:
        """Returns the paths where claimed blobs lie that go by their paths. Raises CatalogError."""
        return places_of(self._conn, [blob.blobid for blob, _ in claimed])

    @property
    def host(self) -> str:
        """The host and port of the server, as this host reaches it."""
        return f"{self._conn.info.host}:{self._conn.info.port}"

    def require_latest(self) -> None:
        """Raises CatalogUnavailable where another process of the run uses a newer primary."""
        LATEST.require(self.server.system, self.server.timeline)

    def keep(self) -> None:
        """Keeps the session alive, and with it the claims. Never raises: a lost connection shows at
        the next statement.
        """
        now = time.monotonic()
        if now - self._kept >= _SPEAK_SECONDS:
            self._kept = now
            show_life(self._conn)

    def close(self) -> None:
        """Ends the connection, and with it every claim."""
        self._conn.close()
