"""A drill proves in scratch space that everything can be restored.

One call restores the catalog from the newest good dump into an empty database, and the blobs (all,
or those of a prefix) into an empty directory. Then a check that shares no code with the restore
reads every file back, hashes it, and compares the names with the rows of the restored catalog: what
that calls copied must be there. Nothing in production is touched.

Blobs that were sent after the dump are not copied in it, and those that were pending then may be
absent; both are counted, and neither is wrong.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ntt_backup.blobdir.layout import BY_HASH_LAYOUT
from ntt_backup.blobdir.walk import Tree
from ntt_backup.catalog import connection, history
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.range_locks import prefix_ranges
from ntt_backup.catalog.restore_role import logged_in
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.catalog.selection import any_copied_from, rows_in
from ntt_backup.config import RemoteConfig, application_name
from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.config.signing_key import Origin
from ntt_backup.dump.record import Stored
from ntt_backup.dump.restore import restore_catalog
from ntt_backup.errors import SOME_FAILED, BackupError, ConfigError
from ntt_backup.model import WHOLE, Blob, Failure, Failures, Reason, Shard
from ntt_backup.restore.blobs import Restored, Wanted, restore
from ntt_backup.source.store import Store


@dataclass(slots=True)
class Proof:
    """The results of reading back all restored blobs.

    Attributes:
        rows: Rows of the restored catalog; `copied` of them are marked as copied.
        right: Blobs that hash to their names, with so many `bytes` of content.
        lost: Blobs that are marked as copied, and were not restored.
        wrong: Blobs that were restored, and do not hash to their names.
        later: Restored blobs that the catalog does not have.
        unsent: Rows that are neither marked as copied nor restored.
        part: How much of the work is done, from 0 to 1.
        proof_s: The duration in seconds.
    """

    rows: int = 0
    copied: int = 0
    right: int = 0
    bytes: int = 0
    lost: int = 0
    wrong: int = 0
    later: int = 0
    unsent: int = 0
    part: float = 0.0
    proof_s: float = 0.0
    failures: Failures = field(default_factory=Failures)


@dataclass(frozen=True, slots=True)
class Drilled:
    """The result of a drill.

    Attributes:
        dump: The dump that the catalog was restored from, and its origin: who made the dump.
        bad_dumps: The problems of newer dumps.
        catalog_s: The duration of restoring the catalog, in seconds.
    """

    dump: Stored
    origin: Origin
    bad_dumps: tuple[str, ...]
    catalog_s: float
    restored: Restored
    proof: Proof

    @property
    def proved(self) -> bool:
        """Returns whether all is right. An empty restore proves nothing, nor an older dump, or
        one in which nothing was copied yet: it does not tell what should have come back.
        """
        proof = self.proof
        bad = self.bad_dumps or self.restored.wrong or proof.lost or proof.wrong
        return not bad and proof.right > 0 and proof.copied > 0

    @property
    def exit_code(self) -> int:
        return 0 if self.proved else SOME_FAILED


def drill(
    settings: RemoteConfig,
    scratch: Path,
    prefix: str,
    workers: int,
    *,
    on_dump: Callable[[Stored], None],
    on_restored: Callable[[Restored], None],
    on_proof: Callable[[Proof], None],
    on_outage: Callable[[BackupError, float], None],
    on_warning: Callable[[str], None],
    on_wait: Callable[[], None] = lambda: None,
    digits: int = 0,
    bwlimit: Timetable | None,
    trust_target: bool = False,
    allow_superuser: bool = False,
    lost: str = "",
    shard: Shard = WHOLE,
) -> Drilled:
    """Restores all blobs, or those of a prefix or shard, into scratch, and the catalog into the
    database of catalog.url, both empty; checks all of it. bwlimit: of all blobs that come.
    trust_target, allow_superuser: see `dump.restore`. lost: the name of the database in production.
    digits: in place of a prefix, restore the blobs that share so many digits with a random copied
    one. on_wait: is called while the catalog is restored, and may raise. Raises BackupError.
    """
    _require_empty(settings, scratch)
    application = application_name("drill")
    with connection.connect(settings.catalog.url, application, no_tables=True) as conn:
        history.require_empty(conn)
    started = time.monotonic()
    bad_dumps: list[str] = []

    def passed_over(text: str) -> None:
        bad_dumps.append(text)
        on_warning(text)

    recalled = restore_catalog(
        settings,
        passed_over,
        on_warning,
        trust_target=trust_target,
        allow_superuser=allow_superuser,
        database=lost,
        on_wait=on_wait,
    )

    @contextmanager
    def restored_catalog() -> Iterator[Connection]:
        with (
            logged_in(settings.catalog.url, application, recalled.user) as url,
            connection.connect(url, application) as conn,
        ):
            yield conn

    dump = recalled.dump
    catalog_s = time.monotonic() - started
    on_dump(dump)
    if digits:
        with restored_catalog() as conn:
            prefix = any_copied_from(conn, settings.target, secrets.token_hex(4))[:digits]
    restored = restore(
        settings,
        scratch,
        Wanted(prefix, shard=shard),
        workers=workers,
        trust_size=False,
        on_progress=on_restored,
        on_outage=on_outage,
        bwlimit=bwlimit,
    )
    with restored_catalog() as conn:
        verify_schema(conn, settings.target, "drill")
        layout = settings.source.path_layout if settings.source is not None else BY_HASH_LAYOUT
        scratch.mkdir(exist_ok=True)  # Where nothing is copied, the restore makes no directory.
        store = Store(scratch, layout=layout, hash=restored.names)
        proof = _prove(conn, settings.target, store, prefix, shard, on_proof)
    return Drilled(dump, recalled.origin, tuple(bad_dumps), catalog_s, restored, proof)


def _prove(
    conn: Connection,
    target: str,
    store: Store,
    prefix: str,
    shard: Shard,
    on_progress: Callable[[Proof], None],
) -> Proof:
    """Hashes what was restored, and compares it with the catalog, range by range."""
    proof = Proof()
    started = time.monotonic()
    ranges = [one for one in prefix_ranges() if f"{one.index:02x}".startswith(prefix[:2])]
    with store.tree() as tree:
        for number, one in enumerate(ranges, 1):
            # Rows without a blobid count too: what they call copied cannot have been restored.
            found = rows_in(conn, target, one)
            rows = {
                row.blobid: row
                for row in found
                if row.blobid.startswith(prefix) and shard.has(row.blobid)
            }
            proof.rows += len(rows)
            proof.copied += sum(row.copied for row in rows.values())
            for blobid in _names(tree, f"{one.index:02x}"):
                proof.later += rows.pop(blobid, None) is None
                examined = tree.examine(Blob(blobid), verify=True)
                if isinstance(examined, Failure):
                    proof.wrong += 1
                    proof.failures.add(examined)
                else:
                    proof.right += 1
                    proof.bytes += examined[0].size or 0
                proof.proof_s = time.monotonic() - started
                on_progress(proof)
            for row in rows.values():
                if row.copied:
                    proof.lost += 1
                    proof.failures.add(Failure(row.blobid, Reason.MISSING, "it was not restored"))
                else:
                    proof.unsent += 1
            proof.part = number / len(ranges)
    proof.proof_s = time.monotonic() - started
    return proof


def _names(tree: Tree, digits: str) -> Iterator[str]:
    for directory in tree.directories(first=digits, last=digits):
        if isinstance(directory, str):
            yield from (entry for entry in tree.entries(directory) if isinstance(entry, str))


def _require_empty(settings: RemoteConfig, scratch: Path) -> None:
    """Raises ConfigError unless scratch is absent or empty, and not within the store."""
    store = settings.source.root if settings.source is not None else None
    try:
        if store is not None and scratch.resolve().is_relative_to(store.resolve()):
            raise ConfigError(f"{scratch} lies in the store", hint="name a directory elsewhere")
        if not os.path.lexists(scratch):
            # If it cannot be made, that is better known before the catalog is restored.
            scratch.mkdir()
            scratch.rmdir()
        elif any(scratch.iterdir()):
            raise ConfigError(
                f"{scratch} is not empty",
                hint="a drill needs a directory of its own: name a new one",
            )
    except (OSError, RuntimeError) as error:  # A loop of links.
        said = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot use {scratch}",
            detail=said,
            hint="name a directory in which this user may write",
        ) from error
