"""The drill: would it come back? Proved in scratch space, and nothing in production is touched.

Most backups that failed on the worst day had said every night that all was well. Only bringing it
back proves it, and what takes four commands and a careful hand is not done. So one call does it:
the catalog from the newest good dump into an empty database, the blobs (all of them, or those of a
prefix) into an empty directory, and then a check that owes nothing to the restore. It reads every
file back from the disk, hashes it, and lays the names beside the rows of the catalog that came
back: what that calls copied must be there.

What was sent after the dump is there without being called copied, and what was pending then may not
be there; both are told of, and neither is wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ntt_backup import identity
from ntt_backup.blobdir.walk import Tree
from ntt_backup.catalog import Connection, connection, dump_history, verify_schema
from ntt_backup.catalog.selection import rows_in
from ntt_backup.config import RemoteConfig
from ntt_backup.dump.record import Stored
from ntt_backup.dump.restore import restore_catalog
from ntt_backup.errors import SOME_FAILED, BackupError, ConfigError
from ntt_backup.model import Blob, Failure, Failures, Reason
from ntt_backup.planner import prefix_ranges
from ntt_backup.restore.restore import Everything, Restored, restore
from ntt_backup.source.inspection import Store


@dataclass(slots=True)
class Proof:
    """What was found by reading back. rows: of the catalog, copied: of those.

    right: blobs that hash to their names, bytes: theirs. lost: copied by the catalog, but not come
    back; wrong: come back, but not right. later: right, but not in the catalog; unsent: neither
    copied nor there. part: of the work, from 0 to 1. failures: of lost and wrong.
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
    duration_s: float = 0.0
    failures: Failures = field(default_factory=Failures)


@dataclass(frozen=True, slots=True)
class Drilled:
    """What came of a drill. dump: where the catalog came from, in catalog_s seconds; bad_dumps:
    what is wrong with each that is newer.
    """

    dump: Stored
    bad_dumps: tuple[str, ...]
    catalog_s: float
    restored: Restored
    proof: Proof

    @property
    def proved(self) -> bool:
        """Whether all of it is right. Nothing at all proves nothing, and what is older than the
        newest dump is not what should have come back.
        """
        proof = self.proof
        bad = self.bad_dumps or self.restored.wrong or proof.lost or proof.wrong
        return not bad and proof.right > 0 and proof.rows > 0

    @property
    def exit_code(self) -> int:
        return 0 if self.proved else SOME_FAILED


@dataclass(frozen=True, slots=True)
class Progress:
    """Who is told how far it is."""

    dump: Callable[[Stored], None]
    restored: Callable[[Restored], None]
    proof: Callable[[Proof], None]
    outage: Callable[[BackupError, float], None]
    warning: Callable[[str], None]


def drill(
    settings: RemoteConfig, scratch: Path, prefix: str, workers: int, progress: Progress
) -> Drilled:
    """Bring everything, or the blobs of a prefix, back into scratch and the database of
    catalog.url, both empty, and check all of it. Raises BackupError.
    """
    _require_room(settings, scratch)
    application = identity.application("drill")
    with connection.connect(settings.catalog.url, application) as conn:
        dump_history.require_empty(conn)
    started = time.monotonic()
    bad_dumps: list[str] = []

    def passed_over(text: str) -> None:
        bad_dumps.append(text)
        progress.warning(text)

    dump = restore_catalog(settings, passed_over).dump
    catalog_s = time.monotonic() - started
    progress.dump(dump)
    restored = restore(
        settings,
        scratch,
        Everything(prefix),
        workers=workers,
        trust_size=False,
        on_progress=progress.restored,
        on_outage=progress.outage,
    )
    with connection.connect(settings.catalog.url, application) as conn:
        verify_schema(conn, settings.target, "drill")
        proof = prove(conn, settings.target, scratch, prefix, progress.proof)
    return Drilled(dump, tuple(bad_dumps), catalog_s, restored, proof)


def prove(
    conn: Connection, target: str, root: Path, prefix: str, on_progress: Callable[[Proof], None]
) -> Proof:
    """Hash what came back to root, and lay it beside the catalog. Memory is one range's."""
    proof = Proof()
    started = time.monotonic()
    store = Store(root)
    ranges = [one for one in prefix_ranges() if f"{one.index:02x}".startswith(prefix[:2])]
    with store.tree() as tree:
        for number, one in enumerate(ranges, 1):
            # Also those whose blobid is none: what they call copied cannot be there.
            found = rows_in(conn, target, one)
            rows = {row.blobid: row for row in found if row.blobid.startswith(prefix)}
            proof.rows += len(rows)
            proof.copied += sum(row.copied for row in rows.values())
            for blobid in _names(tree, f"{one.index:02x}"):
                proof.later += rows.pop(blobid, None) is None
                _judge(proof, store.examine(tree, Blob(blobid, None), verify=True))
                proof.duration_s = time.monotonic() - started
                on_progress(proof)
            for row in rows.values():
                if row.copied:
                    proof.lost += 1
                    proof.failures.add(Failure(row.blobid, Reason.MISSING, "it did not come back"))
                else:
                    proof.unsent += 1
            proof.part = number / len(ranges)
    proof.duration_s = time.monotonic() - started
    return proof


def _names(tree: Tree, digits: str) -> Iterator[str]:
    directories, _ = tree.subdirectories(digits)
    for directory in directories:
        yield from (entry for entry in tree.entries(directory) if isinstance(entry, str))


def _judge(proof: Proof, found: tuple[Blob, object] | Failure) -> None:
    if isinstance(found, Failure):
        proof.wrong += 1
        proof.failures.add(found)
    else:
        proof.right += 1
        proof.bytes += found[0].size or 0


def _require_room(settings: RemoteConfig, scratch: Path) -> None:
    """The scratch space is nobody's: absent or empty, and not within the store."""
    store = settings.source.root if settings.source is not None else None
    try:
        if store is not None and scratch.resolve().is_relative_to(store.resolve()):
            raise ConfigError(f"{scratch} lies in the store", hint="name a directory elsewhere")
        if not os.path.lexists(scratch):
            # That it cannot be made is better known now than when the catalog has come.
            scratch.mkdir()
            scratch.rmdir()
        elif any(scratch.iterdir()):
            raise ConfigError(
                f"{scratch} is not empty",
                hint="a drill works in a directory of its own: name a new one",
            )
    except (OSError, RuntimeError) as error:  # The latter is a loop of links.
        said = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot use {scratch}", detail=said) from error
