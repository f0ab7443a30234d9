"""What durability costs by the batch and by the file: the same code, the same blobs, a real disk.

The obvious way to make files durable is an fsync each; `stream` syncs a whole batch once. Both are
in the receiver (the second for file systems where one sync for all is not to be trusted), so the
comparison is one option apart: no link, no catalog, a session over two pipes.

Start it as `python -m tests.bench.durable DIRECTORY`, with a directory on the disk in question.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Local
from ntt_backup.config.sections import RunSettings
from ntt_backup.model import Batch, Blob, Receipt
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies import open_session
from tests.bench import stores

_WAYS = {"one sync a batch": "syncfs", "an fsync a file": "fsync"}
_BATCH = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Store small blobs with one sync a batch and with an fsync a file, in turns."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--blobs", type=int, default=10_000, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ntt-durable-", dir=options.directory) as place:
        store = stores.cached(stores.Recipe("small", options.blobs), Path(place))
        blobs = [Blob(path.name, path.stat().st_size) for path in sorted(store.root.glob("*/*/*"))]
        rates: dict[str, list[float]] = {way: [] for way in _WAYS}
        for number in range(1, options.rounds + 1):
            for way, sync in _WAYS.items():
                remote = Path(place) / f"remote-{number}-{sync}"
                seconds = _store(store.root, blobs, remote, sync)
                rates[way].append(len(blobs) / seconds)
                print(f"round {number}, {way}: {len(blobs) / seconds:,.0f} files/s", flush=True)
    batched, filed = (statistics.median(rates[way]) for way in _WAYS)
    print(
        f"{len(blobs)} blobs, medians: one sync a batch gives {batched / filed:.1f} times as many"
    )
    return 0


def _store(source: Path, blobs: list[Blob], remote: Path, sync: str) -> float:
    """Seconds until the last receipt. The remote directory is new, and stays: ext4 is slow to give
    out the inode of a file that was removed a moment ago.
    """
    (remote / "by-hash").mkdir(parents=True)
    spec = SessionSpec(
        transport=Local(),
        root=str(remote),
        owner="bench",
        run_id="bench",
        slot="0",
        run=RunSettings(),
        sync=sync,
    )
    session = open_session("stream", spec, Store(source))
    stored = 0
    try:
        began = time.monotonic()
        for begin in range(0, len(blobs), _BATCH):
            session.put(Batch(str(begin), tuple(blobs[begin : begin + _BATCH])))
        while session.in_flight:
            for outcome in session.collect(1.0):
                if not isinstance(outcome, Receipt):
                    raise outcome.error
                stored += len(outcome.stored)
        seconds = time.monotonic() - began
        session.close()
    finally:
        session.abort()
    if stored != len(blobs):
        raise RuntimeError(f"{stored} of {len(blobs)} blobs have a receipt")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
