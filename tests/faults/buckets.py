"""What a fault may touch where the target is a bucket: SeaweedFS, and the proxy before it.

The program reaches the store through the link and the proxy, the campaign goes to it directly.
What the campaign damages itself is remembered: all else that is visible must be right.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.objects.bucket import Bucket, sweep
from ntt_backup.objects.keys import BLOBS, DUMPS, PACKS, TRIALS, blobid_of
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.pack.format import PackError
from ntt_backup.pack.reader import PackReader
from ntt_backup.process.pipeline import die_with_parent
from tests.bucket_environment import BucketEnvironment
from tests.environment import wait_until
from tests.faults.environment import FaultEnvironment
from tests.s3_proxy import Exchange, S3Proxy, damage
from tests.s3_servers import S3Server

_SIZES = (0, 1, 600, 5_000, 30_000, 90_000, 400_000, 3_000_000)


class Store:
    """A SeaweedFS that can be killed, and started again on its ports and its data."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.pid = server.pid
        self._again: subprocess.Popen[bytes] | None = None
        self._argv = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")[:-1]
        self._cwd = Path(f"/proc/{server.pid}/cwd").readlink()

    def kill(self) -> None:
        """Ends it at once; what it has answered for must be there after `start`."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if self._again is not None:
            self._again.wait()

    def start(self) -> None:
        """Returns once it takes content."""
        self._again = subprocess.Popen(
            self._argv,
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        self.pid = self._again.pid
        wait_until(self._takes_content, "the object store")

    def _takes_content(self) -> bool:
        with suppress(Exception):
            self.server.client().put_object(Bucket="first", Key="first", Body=b"content")
            return True
        return False

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)


@dataclass(repr=False, kw_only=True)
class BucketFaults(FaultEnvironment):
    """spoiled: keys of objects that the campaign has damaged; left: uploads of what was killed."""

    env: BucketEnvironment
    store: Store
    proxy: S3Proxy
    spoiled: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    sizes: tuple[int, ...] = _SIZES
    target = "bucket"

    @property
    def bucket(self) -> Bucket:
        return open_bucket(self.env.place)

    def begin_era(self) -> None:
        """A bucket of its own; it gets its format by a run."""
        self.begin_source()
        self.env.query("truncate ntt_backup.packs")
        self._remove_bucket()
        self.spoiled.clear()
        self.env.move(self.env.server.bucket())
        self.env.through_endpoint(f"http://127.0.0.1:{self.link.port}")
        self.add(2)
        first = self.env.run("run")
        assert first.returncode == 0, first.stdout + first.stderr

    def _remove_bucket(self) -> None:
        client, name = self.env.server.client(), self.env.place.bucket
        for one in client.list_objects_v2(Bucket=name).get("Contents", []):
            client.delete_object(Bucket=name, Key=one["Key"])
        for upload in self.bucket.uploads(""):
            self.bucket.abort(upload.key, upload.upload_id)
        client.delete_bucket(Bucket=name)

    def peace(self) -> None:
        super().peace()
        self.proxy.peace()

    def await_quiet(self) -> None:
        self.await_end()

    def put_right(self) -> None:
        super().put_right()
        self.left = self._uploads()

    def litter(self) -> list[str]:
        """The uploads that a clean run has left; those of what was killed a sweep removes."""
        found = sorted(self._uploads() - self.left)
        sweep(self.bucket, ("",), time.time() + 1)
        return [*found, *self._uploads()]

    def _uploads(self) -> set[str]:
        return {f"{one.key} {one.upload_id}" for one in self.bucket.uploads("")}

    # --- what the bucket has, by its own bytes

    def _packs(self) -> Iterator[tuple[str, dict[str, bytes] | None]]:
        """Each pack's key, and the blobs in it that are right; None where one is wrong that the
        campaign has not damaged.
        """
        bucket = self.bucket
        for one in bucket.list(PACKS):
            if one.key.startswith(TRIALS):
                continue
            blobs: dict[str, bytes] = {}
            try:
                reader = PackReader(partial(bucket.get_range, one.key), one.size)
            except PackError:
                yield one.key, {} if one.key in self.spoiled else None
                continue
            wrong = False
            for entry in reader.table:
                try:
                    blobs[entry.digest.hex()] = reader.read_blob(entry)
                except PackError:
                    wrong = True
            yield one.key, None if wrong and one.key not in self.spoiled else blobs

    def on_remote(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for key, blobs in self._packs():
            if blobs is None:
                found[key] = b"damaged"
            for blobid, content in (blobs or {}).items():
                found[relative_path(blobid)] = content
        for one in self.bucket.list(BLOBS):
            if one.key not in self.spoiled:
                name = relative_path(blobid_of(one.key) or one.key)
                found[name] = self.bucket.get_range(one.key, 0, one.size)
        return found

    def ledger_violations(self) -> list[str]:
        """The ledger's packs are those of the bucket, and hold all that is copied."""
        packs, found = dict(self._packs()), list[str]()
        held = {blobid_of(one.key) or "" for one in self.bucket.list(BLOBS)}
        for key, low, high, count, size, checksum in self.env.query(
            "select key, low, high, blobs, size, checksum from ntt_backup.packs"
        ):
            blobs, info = packs.get(key), self.bucket.head(key)
            if not blobs or info is None:
                found.append(f"the ledger has {key}, which is not right in the bucket")
                continue
            held |= blobs.keys()
            there = (min(blobs), max(blobs), len(blobs), info.size, info.checksum)
            if there != (low, high, count, size, checksum):
                found.append(f"the ledger has another {key}: {(low, high, count, size, checksum)}")
        if nowhere := self.env.copied() - held:
            found.append(
                f"{len(nowhere)} marked blobs are in no pack of the ledger: {min(nowhere)}"
            )
        return found

    def dumps(self) -> dict[str, bytes]:
        bucket = self.bucket
        return {
            one.key.removeprefix(DUMPS): bucket.get_range(one.key, 0, one.size)
            for one in bucket.list(DUMPS)
        }

    # --- what the campaign damages

    def alter_remote(self, count: int) -> set[str]:
        """Alters objects, or takes them away; returns the marked blobs that are right nowhere."""
        bucket, client, place = self.bucket, self.env.server.client(), self.env.place
        keys = sorted(row[0] for row in self.env.query("select key from ntt_backup.packs"))
        for key in self.chance.sample(keys, min(count, len(keys))):
            name, info = f"{place.prefix}/{key}", bucket.head(key)
            assert info is not None
            content = bytearray(bucket.get_range(key, 0, info.size))
            way = self.chance.choice(("flip", "flip", "table", "cut", "remove"))
            self.spoiled.add(key)
            if way == "remove":
                client.delete_object(Bucket=place.bucket, Key=name)
                continue
            if way == "cut":
                del content[self.chance.randrange(len(content)) :]
            else:
                at = len(content) - 1100 if way == "table" else self.chance.randrange(len(content))
                content[max(0, at)] ^= 1 << self.chance.randrange(8)
            client.put_object(Bucket=place.bucket, Key=name, Body=bytes(content))
        return self.env.copied() - {Path(name).name for name in self.on_remote()}

    def damage(self, exchange: Exchange) -> None:
        """The store takes what was altered on the way, with the sum of what it has."""
        if exchange.body:
            self.spoiled.add(exchange.key.partition("/")[2])
            damage(exchange)
        else:
            exchange.answer(exchange.forward())
