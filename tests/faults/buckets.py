"""What a fault may touch where the target is a bucket: SeaweedFS, and the proxy before it.

The program reaches the store through the link and the proxy, the campaign goes to it directly, and
reads with means of its own. What the campaign damages itself is remembered: all else that is
visible must be right.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyrage
from blake3 import blake3

from ntt_backup.objects.bucket import MD5
from ntt_backup.process.pipeline import die_with_parent
from tests.faults.environment import FaultEnvironment
from tests.faults.plain_packs import Damaged, members, opened, read_pack
from tests.helpers.blobs import Person
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.s3_proxy import Exchange, S3Proxy, Trouble, spoil
from tests.helpers.s3_servers import S3Server
from tests.helpers.waiting import wait_until

_PACKS, _BLOBS, _DUMPS, _TRIALS = "packs/", "blobs/", "pgdump/", "packs/trial-"
_SEALED = ".age"
_SEALED_SHARE = 0.8
# Far ahead: rounds without recipients leave what is not sealed for the others to read.
_LAST_DAY = "9000-01-01"
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
class BucketFaults(FaultEnvironment):
    """spoiled: keys of objects that the campaign has damaged. packs: of each pack the blobs in it
    that are right, as `on_remote` has seen them last. owner: who can open what is sealed.
    """

    env: BucketEnvironment
    store: Store
    proxy: S3Proxy
    owner: Person
    spoiled: set[str] = field(default_factory=set)
    packs: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sizes: tuple[int, ...] = _SIZES
    target = "bucket"
    _seen: int = 0

    @cached_property
    def client(self) -> Any:
        """Goes to the store directly; to make one takes as long as fifty requests."""
        return self.env.server.client()

    def begin_era(self) -> None:
        """A bucket of its own; it gets its format by a run."""
        self.disk.free()
        self.begin_source()
        self.env.query("truncate ntt_backup.packs")
        self.client.delete_bucket(Bucket=self.env.place.bucket)
        self.spoiled.clear()
        self.env.move(self.env.server.bucket())
        self.env.through_endpoint(f"http://127.0.0.1:{self.link.port}")
        self.add(2)
        first = self.env.run("run")
        assert first.returncode == 0, first.stdout + first.stderr

    def begin_round(self) -> None:
        self._seen = len(self.proxy.seen)
        if self.strategy == "sealed":
            # What some runs have sealed and others have not is for all to go on with.
            sealing = self.chance.random() < _SEALED_SHARE
            pack = {"recipients": [self.owner.public] * sealing, "unsealed_until": _LAST_DAY}
            self.env.write_config(pack=pack)

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

    def _listed(self, below: str) -> list[str]:
        """The keys below the target's prefix."""
        bucket, prefix = self.env.place.bucket, f"{self.env.place.prefix}/"
        pages = self.client.get_paginator("list_objects_v2")
        return [
            one["Key"].removeprefix(prefix)
            for page in pages.paginate(Bucket=bucket, Prefix=prefix + below)
            for one in page.get("Contents", [])
        ]

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.env.place.bucket, "Key": f"{self.env.place.prefix}/{key}"}

    def _read(self, key: str) -> bytes:
        content: bytes = self.client.get_object(**self._at(key))["Body"].read()
        return content

    def on_remote(self) -> dict[str, bytes]:
        """All blobs; under a key what is wrong and was not damaged by the campaign."""
        found: dict[str, bytes] = {}
        self.packs = {}
        for key in self._listed(_PACKS):
            if key.startswith(_TRIALS):
                continue
            content, bad = self._read(key), key in self.spoiled
            try:
                content = opened(content, self.owner.secret)
                blobs, entries = read_pack(content)
                whole = bad or (len(blobs) == entries and members(content).items() <= blobs.items())
            except Damaged:
                blobs, whole = {}, bad
            if not whole:
                found[key] = b"damaged"
            self.packs[key] = blobs
            found |= {_name(blobid): content for blobid, content in blobs.items()}
        for key in self._listed(_BLOBS):
            content = self._read(key)
            if key not in self.spoiled or blake3(content).hexdigest() == key.rpartition("/")[2]:
                found[key.removeprefix(_BLOBS)] = content
        return found

    def ledger_violations(self) -> list[str]:
        """The ledger's packs are those of the bucket, and hold all that is copied."""
        found = list[str]()
        held = {key.rpartition("/")[2] for key in self._listed(_BLOBS)}
        for key, low, high, count, size, checksum in self.env.query(
            "select key, low, high, blobs, size, checksum from ntt_backup.packs"
        ):
            if not (blobs := self.packs.get(key)):
                found.append(f"the ledger has {key}, which is not right in the bucket")
                continue
            held |= blobs.keys()
            info = self.client.head_object(**self._at(key), ChecksumMode="ENABLED")
            kept = info.get("ChecksumSHA256", checksum)  # A weak store keeps none.
            if checksum.startswith(MD5):  # It said none when the pack was sent.
                kept = MD5 + info["ETag"].strip('"')
            there = (min(blobs), max(blobs), len(blobs), info["ContentLength"], kept)
            if there != (low, high, count, size, checksum):
                found.append(f"the ledger has another {key}: {(low, high, count, size, checksum)}")
        if nowhere := self.env.copied() - held:
            found.append(
                f"{len(nowhere)} marked blobs are in no pack of the ledger: {min(nowhere)}"
            )
        return found

    def dumps(self) -> dict[str, bytes]:
        identity, found = pyrage.x25519.Identity.from_str(self.owner.secret), {}
        for key in self._listed(_DUMPS):
            content, name = self._read(key), key.removeprefix(_DUMPS)
            if name.endswith(_SEALED):
                content = pyrage.decrypt(content, [identity])
            found[name.removesuffix(_SEALED)] = content
        return found

    # --- what the campaign damages

    def alter_remote(self, count: int) -> set[str]:
        """Alters packs, or takes them away; returns the marked blobs that are right nowhere."""
        keys = sorted(row[0] for row in self.env.query("select key from ntt_backup.packs"))
        for key in self.chance.sample(keys, min(count, len(keys))):
            content = bytearray(self._read(key))
            way = self.chance.choice(("flip", "flip", "table", "cut", "remove"))
            self.spoiled.add(key)
            if way == "remove":
                self.client.delete_object(**self._at(key))
                continue
            if way == "cut":
                del content[self.chance.randrange(len(content)) :]
            else:
                at = len(content) - 1100 if way == "table" else self.chance.randrange(len(content))
                content[max(0, at)] ^= 1 << self.chance.randrange(8)
            self.client.put_object(**self._at(key), Body=bytes(content))
        return self.env.copied() - {Path(name).name for name in self.on_remote()}

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
    content = f"/{_PACKS}" in key and f"/{_TRIALS}" not in key
    return content or f"/{_BLOBS}" in key


def _name(blobid: str) -> str:
    return f"{blobid[:2]}/{blobid[2:4]}/{blobid}"
