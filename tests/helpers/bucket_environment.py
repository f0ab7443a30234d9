"""An environment whose target is a bucket: see `tests.helpers.environment`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.objects.bucket import Bucket
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.pack.names import BLOBS, blobid_of
from ntt_backup.packstore.tables import large_blobs_of, packs_of
from tests.helpers.blobs import reader
from tests.helpers.bucket_packs import packs_in
from tests.helpers.environment import Environment
from tests.helpers.s3_servers import S3Server


@dataclass(kw_only=True)
class BucketEnvironment(Environment):
    """One source host with its catalog, and a bucket of a server."""

    server: S3Server
    place: RemoteSettings

    @property
    def bucket(self) -> Bucket:
        return open_bucket(self.place)

    def move(self, place: RemoteSettings) -> None:
        """Has the target be that place, or reach it by another endpoint."""
        self.place = place
        self.write_config(
            remote={"url": place.url, "endpoint": place.endpoint, "addressing": "path"}
        )

    def through_endpoint(self, endpoint: str) -> None:
        """Has the program reach the same bucket by a proxy; the test goes on directly."""
        self.write_config(remote={"endpoint": endpoint})

    def packs(self) -> dict[str, dict[str, bytes]]:
        """Key to the blobs of each pack in the bucket, each of them checked."""
        bucket, found = self.bucket, dict[str, dict[str, bytes]]()
        for one in packs_of(packs_in(bucket)):
            pack = reader(bucket.get_range(one.key, 0, one.size))
            found[one.key] = {entry.digest.hex(): pack.read_blob(entry) for entry in pack.table}
        return found

    def on_remote(self) -> dict[str, bytes]:
        bucket = self.bucket
        found = {
            relative_path(blobid): content
            for blobs in self.packs().values()
            for blobid, content in blobs.items()
        }
        for one in large_blobs_of(packs_in(bucket)):
            found[relative_path(one.digest.hex())] = bucket.get_range(one.key, 0, one.size)
        return found

    def litter(self) -> list[str]:
        """The uploads that were begun and not ended."""
        return [one.key for one in self.bucket.uploads("")]

    def assert_ledger(self) -> None:
        """The ledger's packs are those of the bucket, and all that is copied is stored once."""
        rows = self.query(
            "select key, pack_id, low, high, blobs, size, checksum from ntt_backup.packs"
        )
        packs = self.packs()
        assert {row[0] for row in rows} <= packs.keys()
        listed: list[str] = []
        for key, pack_id, low, high, count, size, checksum in rows:
            info = self.bucket.head(key)
            assert info is not None
            assert (info.size, info.checksum) == (size, checksum)
            assert pack_id in key
            assert (min(packs[key]), max(packs[key]), len(packs[key])) == (low, high, count)
            listed += packs[key]
        alone = [blobid_of(one.key) for one in self.bucket.list(BLOBS)]
        assert len(listed) == len(set(listed))
        assert self.copied() <= {*listed, *alone}

    def assert_complete(self) -> None:
        assert self.on_remote() == self.in_store()
        assert self.copied() == {Path(name).name for name in self.in_store()}
        assert self.litter() == []
        self.assert_ledger()

    def assert_nothing_half(self) -> None:
        super().assert_nothing_half()
        self.assert_ledger()


@contextmanager
def environment(
    root: Path, url: str, server: S3Server, **run: object
) -> Iterator[BucketEnvironment]:
    """An environment with an empty store, a fresh catalog and a new bucket of the server."""
    nothing, place = cast(Any, None), server.bucket()
    made = BucketEnvironment(root, url, nothing, nothing, server=server, place=place)
    made.begin()
    made.write_config(run=dict(run))
    made.move(place)
    yield made


@pytest.fixture
def bucket_env(tmp_path: Path, catalog_url: str, s3: S3Server) -> Iterator[BucketEnvironment]:
    with environment(tmp_path, catalog_url, s3) as made:
        yield made


def as_reader(env: BucketEnvironment) -> None:
    """Gives the program credentials that may only read."""
    env.environ = {**env.environ, **env.server.reader.environment}
