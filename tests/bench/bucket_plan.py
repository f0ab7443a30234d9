"""A restore from a bucket of millions of blobs: how soon the first one is there, and what it takes.

The packs have 627 blobs each, as a store of 42 million has 67,000 of them, in the order in which a
run claims blobs: few packs are of two first bytes. A blob has eight bytes, so that nearly all of a
pack is its table. The bucket is a SeaweedFS's. With --wide, so many packs more have 100 blobs each
of all over the store, as later runs send what has come since.

Each case begins without a catalog and with an empty cache, and runs the real command. A blob is
there when it has its name. `planned` is the same command over a destination that has all blobs of
the prefix: it asks the bucket for all that it needs to know, and fetches nothing. Start it as
`python -m tests.bench.bucket_plan`.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.config.sections import RemoteSettings
from ntt_backup.demo import seaweedfs as demo
from ntt_backup.demo.processes import Interrupts
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.open import PACK_AREA
from ntt_backup.objects.bucket import Bucket
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.pack.format import DIGEST_BYTES, pack_id
from ntt_backup.pack.names import PackKey
from ntt_backup.pack.writer import PackWriter
from ntt_backup.packstore import marker
from ntt_backup.packstore.tables import ahead
from tests.bench.contender import PROJECT
from tests.bench.memory import Memory
from tests.bench.slots import slot
from tests.helpers.s3_servers import Account

_A_PACK: Final = 627
_A_WIDE_PACK: Final = 100
_BLOB: Final = 8
_RECORD: Final = DIGEST_BYTES + _BLOB
_BUCKET: Final = "plan"
_PREFIX: Final = "aa"


def main() -> int:
    """Fills a bucket, and restores from it."""
    options = _parse()
    interrupts = Interrupts()
    with interrupts.installed(), slot(options.disk) as workspace:
        account = Account("owner")
        os.environ |= account.environment
        server = demo.SeaweedFS(workspace.home, interrupts, {account: demo.ADMINISTER})
        server.start()
        try:
            server.client().create_bucket(Bucket=_BUCKET)
            remote = RemoteSettings.model_validate(
                {"url": f"s3://{_BUCKET}/backup", "endpoint": server.endpoint, "addressing": "path"}
            )
            started = time.monotonic()
            packs = _fill(open_bucket(remote), options.entries, options.wide)
            print(f"{packs} packs were made in {time.monotonic() - started:.0f} s", flush=True)
            _restore(server, remote, workspace.home)
        finally:
            print(server.ended, end="", file=sys.stderr)
            server.stop()
    return 0


# --- the bucket -----------------------------------------------------------------------------------


def _fill(bucket: Bucket, entries: int, wide: int) -> int:
    """Puts the packs into the bucket, and returns how many there are."""
    store_id = marker.make(FileStoreByBucket(bucket, 5 << 20, PACK_AREA))

    def put(records: Sequence[bytes]) -> None:
        file = io.BytesIO()
        digests = [record[:DIGEST_BYTES] for record in records]
        identity = pack_id(store_id, digests)
        writer = PackWriter(file.write, store_id, identity, compress=False)
        for record in records:
            writer.add(record[:DIGEST_BYTES], record[DIGEST_BYTES:])
        writer.close()
        data = file.getvalue()
        bucket.put(PackKey.of(digests[0], digests[-1], identity).key, data, sha256(data).digest())

    with ThreadPoolExecutor(4) as threads:
        return sum(1 for _ in ahead(threads, put, _packs(entries, wide), 16))


def _packs(entries: int, wide: int) -> Iterator[list[bytes]]:
    """Yields the blobs of each pack with their digests before them, in order."""
    later = wide * _A_WIDE_PACK
    yield from _cut(map(_record, range(entries, entries + later)), _A_WIDE_PACK)
    # Sorted by their first byte first: as objects of Python they would take five times the memory.
    of_byte = [bytearray() for _ in range(256)]
    for number in range(entries):
        record = _record(number)
        of_byte[record[0]] += record
    yield from _cut(_sorted(of_byte), _A_PACK)


def _record(number: int) -> bytes:
    content = number.to_bytes(_BLOB)
    return blake3(content).digest() + content


def _sorted(of_byte: list[bytearray]) -> Iterator[bytes]:
    for some in of_byte:
        yield from sorted(bytes(some[at : at + _RECORD]) for at in range(0, len(some), _RECORD))
        some.clear()


def _cut(records: Iterator[bytes], each: int) -> Iterator[list[bytes]]:
    while some := list(islice(records, each)):
        yield sorted(some)


# --- what comes back ------------------------------------------------------------------------------


def _restore(server: demo.SeaweedFS, remote: RemoteSettings, home: Path) -> None:
    """Prints what each case takes."""
    some = home / "some"
    cases = {
        f"prefix {_PREFIX}": [str(some), "--prefix", _PREFIX],
        "planned": [str(some), "--prefix", _PREFIX, "--trust-size"],
        "all, until the first blob": [str(home / "all")],
    }
    environ = {
        **os.environ,
        "NTT_CONFIG": os.devnull,
        "NTT_REMOTE_URL": remote.url,
        "NTT_S3_ENDPOINT": str(remote.endpoint),
        "NTT_BACKUP_LOG": str(home / "events"),
        "XDG_CACHE_HOME": str(home / "cache"),
    }
    for case, options in cases.items():
        destination, before, memory = Path(options[0]), server.requests(_BUCKET), Memory()
        started = time.monotonic()
        argv = [sys.executable, "-m", "ntt_backup", "restore", "--quiet", "--to", *options]
        process = subprocess.Popen(argv, env=environ, cwd=PROJECT)
        with process, memory.watching(process.pid):
            said = ""
            if not destination.exists():
                _wait_for_blob(destination, process)
                said = f"first blob {time.monotonic() - started:.2f} s, "
            if "--prefix" not in options:
                process.kill()
            process.wait()
        said += f"all {time.monotonic() - started:.2f} s, {memory}"
        asked = Counter(server.requests(_BUCKET))
        asked.subtract(before)
        requests = ", ".join(f"{count} {kind}" for kind, count in sorted((+asked).items()))
        print(f"{case}: {said}; {requests}", flush=True)
        shutil.rmtree(home / "cache")


def _wait_for_blob(destination: Path, process: subprocess.Popen[bytes]) -> None:
    """Returns once a blob has its name, or the process has ended."""
    while process.poll() is None and not any(destination.glob("??/??/*")):
        time.sleep(0.005)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.bucket_plan", description=main.__doc__
    )
    add = parser.add_argument
    add("--entries", type=int, default=10_000_000, metavar="N", help="blobs; 10,000,000 by default")
    add("--wide", type=int, default=0, metavar="N", help="packs of later runs beside them")
    add("--disk", type=Path, default=Path("/dev/shm"), metavar="DIR", help="work there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
