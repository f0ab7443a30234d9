"""What a fault may touch where the target is a bucket: SeaweedFS, and the proxy before it.

The program reaches the store through the link and the proxy, the campaign goes to it directly.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ntt_backup.objects.bucket import MD5
from ntt_backup.process.spawn import die_with_parent
from tests.faults.packs import BLOBS, PACKS, TRIALS, PackFaults
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.s3_proxy import Exchange, S3Proxy, Trouble, spoil
from tests.helpers.s3_servers import S3Server
from tests.helpers.waiting import wait_until

# A blob of so many bytes is an object of its own, one of the largest has two parts.
LARGE_BLOB = 4_500_000
_SMALL = (0, 1, 600, 5_000, 30_000, 30_000, 90_000, 90_000, 400_000, 400_000, 900_000, 900_000)
_SIZES = (*_SMALL, *_SMALL, 2_000_000, 4_600_000, 6_000_000)


class Store:
    """A SeaweedFS that can be killed, and started again on its ports and its data."""

    def __init__(self, server: S3Server) -> None:
        self.pid = server.pid
        self._client = server.client()
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
            self._client.put_object(Bucket="first", Key="first", Body=b"content")
            return True
        return False


@dataclass(repr=False, kw_only=True)
class BucketFaults(PackFaults):
    """See `packs.PackFaults`."""

    env: BucketEnvironment
    store: Store
    proxy: S3Proxy
    sizes: tuple[int, ...] = _SIZES
    target: str = "bucket"
    _seen: int = 0

    @cached_property
    def client(self) -> Any:
        """Goes to the store directly; to make one takes as long as fifty requests."""
        return self.env.server.client()

    def begin_era(self) -> None:
        """A bucket of its own."""
        self.disk.free()
        self.client.delete_bucket(Bucket=self.env.place.bucket)
        self.env.move(self.env.server.bucket(own=True))
        self.env.through_endpoint(f"http://127.0.0.1:{self.link.port}")
        self.begin_packs()

    def begin_round(self) -> None:
        super().begin_round()
        self._seen = len(self.proxy.seen)

    def flowing(self) -> bool:
        """Whether the first part of a pack or of a blob has been begun."""
        news = self.proxy.seen[self._seen :]
        return any(kind in ("part", "put") and is_content(key) for kind, key in news)

    def peace(self) -> None:
        super().peace()
        self.proxy.peace()

    def await_quiet(self) -> None:
        self.await_end()

    def litter(self) -> list[str]:
        """The uploads that are left: each clean run removes those of the dead."""
        found = self.client.list_multipart_uploads(Bucket=self.env.place.bucket)
        return [one["Key"] for one in found.get("Uploads", [])]

    # --- what the bucket has

    def listed(self, below: str) -> list[str]:
        """The keys below the target's prefix."""
        bucket, prefix = self.env.place.bucket, f"{self.env.place.prefix}/"
        pages = self.client.get_paginator("list_objects_v2")
        return [
            one["Key"].removeprefix(prefix)
            for page in pages.paginate(Bucket=bucket, Prefix=prefix + below)
            for one in page.get("Contents", [])
        ]

    def read(self, name: str) -> bytes:
        content: bytes = self.client.get_object(**self._at(name))["Body"].read()
        return content

    def put(self, name: str, content: bytes | None) -> None:
        if content is None:
            self.client.delete_object(**self._at(name))
        else:
            self.client.put_object(**self._at(name), Body=content)

    def kept(self, name: str, checksum: str) -> tuple[int, str]:
        info = self.client.head_object(**self._at(name), ChecksumMode="ENABLED")
        kept = info.get("ChecksumSHA256", checksum)  # A weak store keeps none.
        if checksum.startswith(MD5):  # It said none when the pack was sent.
            kept = MD5 + info["ETag"].strip('"')
        return info["ContentLength"], kept

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.env.place.bucket, "Key": f"{self.env.place.prefix}/{key}"}

    def damaging(self, answer: Trouble) -> Trouble:
        """The store takes what was altered on the way, and answers in its own way."""

        def damage(exchange: Exchange) -> None:
            if exchange.body:
                self.spoiled.add(exchange.key.partition("/")[2])
                spoil(exchange)
            answer(exchange)

        return damage


def is_content(key: str) -> bool:
    """Whether a request is for a pack or a blob, and not for the trial of a check."""
    content = f"/{PACKS}" in key and f"/{TRIALS}" not in key
    return content or f"/{BLOBS}" in key
