"""A worker's connection to the catalog: its claims and its ledger.

Claims vanish with their connection, so what was claimed and where it is recorded must never be on
two connections.
"""

from __future__ import annotations

from collections.abc import Sequence

from ntt_backup.catalog.connection import connect
from ntt_backup.catalog.ledger import Ledger
from ntt_backup.catalog.range_locks import Claims


class CatalogSession:
    """An open connection with `claims` and `ledger` on it. Raises as `connect` and they do.

    order lists range indexes, those to try first in front. listen: inserts wake `claims.fileno`.
    """

    def __init__(
        self, url: str, application: str, target: str, order: Sequence[int], *, listen: bool
    ) -> None:
        self._conn = connect(url, application)
        try:
            self.claims = Claims(self._conn, target, order)
            self.ledger = Ledger(self._conn, target)
            if listen:
                self.claims.listen()
        except BaseException:
            self._conn.close()
            raise

    def close(self) -> None:
        """Ends the connection, and with it every claim."""
        self._conn.close()
