"""The demo has a bucket, and tells of objects, requests, and a store that lost half.

The figures come from the server, by another client than ours.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ntt_backup.demo.processes import Interrupts
from ntt_backup.demo.screen import say, step, tabulate
from ntt_backup.demo.seaweedfs import ADMINISTER, WRITE, Account, SeaweedFS
from ntt_backup.demo.sshd import LOOPBACK
from ntt_backup.demo.store import Comparison, Listing, list_tree
from ntt_backup.formatting import many, size

_NAME: Final = "vault"
_PREFIX: Final = "backup"
_KINDS: Final = {"blobs": "large blobs", "pgdump": "dump of the catalog"}
_LOST: Final = tuple("01234567")


class Bucket:
    """A bucket of a SeaweedFS that works in directory.

    name: what it is, in words. settings: the table `remote`. Those that send are given no more
    rights than sending needs.
    """

    def __init__(self, directory: Path, interrupts: Interrupts) -> None:
        self._directory = directory
        self._sender = Account("sender")
        rights = {Account("owner"): ADMINISTER, self._sender: WRITE}
        self._server = SeaweedFS(directory, interrupts, rights)

    @property
    def name(self) -> str:
        credentials = credentials_file(self._directory)
        return f"object store: SeaweedFS, {self._server.endpoint}; credentials in {credentials}"

    @property
    def where(self) -> str:
        return f"s3://{_NAME}/{_PREFIX}"

    @property
    def settings(self) -> dict[str, object]:
        return {"url": self.where, "endpoint": self._server.endpoint, "addressing": "path"}

    def start(self) -> None:
        """Returns once the bucket is there. Raises ConfigError, RemoteUnreachable."""
        self._server.start()
        client = self._server.client()
        if _NAME not in [one["Name"] for one in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=_NAME)
        credentials_file(self._directory).write_text(
            f"[default]\naws_access_key_id = {self._sender.name}\n"
            f"aws_secret_access_key = {self._sender.secret}\n"
        )

    def stop(self) -> None:
        """Ends the server; does nothing where it does not run."""
        self._server.stop()

    def listing(self) -> Listing:
        """Returns the packs and large blobs, each with the checksum of what it holds."""
        found = self._objects()
        return {key: one[1] for key, one in found.items() if key.startswith(("packs/", "blobs/"))}

    def requests(self) -> dict[str, int]:
        """Returns how many requests of each kind were made of the bucket."""
        return self._server.requests(_NAME)

    def show(self, before: Mapping[str, int]) -> None:
        """Prints the number of objects of each kind, and the requests of the run.

        Args:
            before: The number of requests of each kind that were made before the run.
        """
        asked = {kind: count - before.get(kind, 0) for kind, count in self.requests().items()}
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(asked.items()) if count)
        kinds, sizes = Counter[str](), Counter[str]()
        for key, (length, _) in self._objects().items():
            top = key.partition("/")[0]
            kind = _KINDS.get(top, top)
            kinds[kind] += 1
            sizes[kind] += length
        rows = {
            kind: f"{many(count, 'object')}, {size(sizes[kind])}" for kind, count in kinds.items()
        }
        tabulate({**rows, "requests of the run": f"{sum(asked.values())}: {told}"})

    def _objects(self) -> dict[str, tuple[int, str]]:
        """Returns size and checksum by key, below the prefix."""
        pages = self._server.client().get_paginator("list_objects_v2")
        found = {}
        for page in pages.paginate(Bucket=_NAME, Prefix=f"{_PREFIX}/"):
            for one in page.get("Contents", ()):
                found[one["Key"].removeprefix(f"{_PREFIX}/")] = (one["Size"], one["ETag"])
        return found


def lose_half(store: Path, command: Callable[..., int]) -> tuple[Comparison, int]:
    """Removes about half of the store, and restores the store from the bucket.

    Returns:
        The comparison of the store with its former content, and the exit code of the command.
    """
    before = list_tree(store)
    step("Half of the store is lost")
    for directory in store.iterdir():
        if directory.name.startswith(_LOST):
            shutil.rmtree(directory)
    lost = len(before) - len(list_tree(store))
    say(f"lost: {lost:,} of {many(len(before), 'file')} in {store}")
    step("Back from the bucket")
    code = command("restore", "--to", str(store))
    return Comparison.of_listings(before, list_tree(store)), code


def credentials_file(directory: Path) -> Path:
    """Returns the file of the key that sends, as AWS programs read it."""
    return directory / "credentials"


def environment(directory: Path) -> dict[str, str]:
    """Returns the variables by which AWS programs use these credentials and no others.

    The variables also lead to this machine without a proxy.
    """
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(credentials_file(directory)),
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": LOOPBACK,
        "no_proxy": LOOPBACK,
    }
