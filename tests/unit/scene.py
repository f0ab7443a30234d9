"""A worker among fakes of all that it meets, which fail as a test wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ntt_backup.config.sections import RunSettings
from ntt_backup.model import Blob
from ntt_backup.source.read_ahead import ReadAhead
from ntt_backup.source.store import Store
from ntt_backup.upload.worker import Worker
from tests.unit.fakes import FakeCatalog, FakeDisk, FakePipe, FakeRemote, FakeStore, Script, blobs

QUICK: dict[str, Any] = {"backoff_base": 0.01, "backoff_cap": 0.01, "batch_size": 10, "window": 3}


@dataclass
class Scene:
    """One worker and all that it meets."""

    catalog: FakeCatalog
    remote: FakeRemote
    pipe: FakePipe
    store: FakeStore
    all: list[Blob]

    def worker(self, *, watch: bool = False, ahead: FakeDisk | None = None, **run: Any) -> Worker:
        return Worker(
            "0",
            RunSettings(**{**QUICK, **run}),
            cast(Any, self.store),
            cast(Any, ahead or ReadAhead(Store(Path("/nowhere")), "hash")),
            self.remote.connect,
            cast(Any, self.catalog.connect),
            cast(Any, self.pipe),
            watch=watch,
        )

    def assert_done(self, failed: Sequence[str] = ()) -> None:
        """Every blob is settled, as it should be, told of once, and no claim is left."""
        assert self.catalog.failed.keys() == set(failed)
        assert self.catalog.copied == {blob.blobid for blob in self.all} - set(failed)
        assert self.catalog.pending == {}
        assert self.catalog.locks == {}
        told = self.pipe.of("batch_complete")
        assert sum(one["copied"] for one in told) == len(self.all) - len(failed)
        assert sorted(one["blobid"] for one in self.pipe.of("blob_failed")) == sorted(failed)


def scene(
    count: int,
    remote: Sequence[str] = (),
    catalog: Sequence[str] = (),
    poison: Sequence[int] = (),
) -> Scene:
    everything = blobs(count)
    table = FakeCatalog(everything, Script(catalog))
    far = FakeRemote(table, Script(remote), [everything[number].blobid for number in poison])
    return Scene(table, far, FakePipe(table), FakeStore(), everything)
