"""Bits that flip on the way, where ssh does not see it: never a wrong file, never a wrong receipt.

A batch is sent again whenever its session breaks or it is rejected, as a worker would.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from ntt_backup.client.transport import Local
from ntt_backup.errors import BackupError, BatchRejected, RemoteUnreachable
from ntt_backup.model import Batch, Receipt
from ntt_backup.upload.strategies.session import Rejection, Session
from tests.contract.harness import Harness
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.parametrize("strategy", ["stream"])

MIB = 1 << 20
PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Flipping:
    """Transport to a shell on this machine, through `tests/helpers/bit_flips.py`."""

    book: Path
    python: str
    connect_timeout: float = 3.0
    hint: str = ""

    def argv(self, remote_command: str) -> list[str]:
        command = remote_command.replace("exec python3", f"exec {self.python}")
        return [
            sys.executable,
            "-m",
            "tests.helpers.bit_flips",
            str(self.book),
            "/bin/sh",
            "-c",
            command,
        ]

    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "PYTHONPATH": str(PROJECT)}

    def explain(self, status: int | None, stderr: str) -> BackupError:
        return Local().explain(status, stderr)


def deliver(harness: Harness, batches: list[Batch], connect: Callable[[], Session]) -> int:
    """Send until every blob has a receipt that counts it; how often a batch had to go again."""
    todo, troubles = list(batches), 0
    session: Session | None = None
    stored: set[str] = set()
    while todo or (session is not None and session.in_flight):
        assert troubles < 50
        try:
            if session is None:
                session = connect()
            if todo and len(session.in_flight) < 3:
                session.put(todo[0])
                del todo[0]
            outcomes = session.collect(0.0 if todo else 1.0)
        except RemoteUnreachable:
            troubles += 1
            outcomes = []
            if session is not None:
                session.abort()
                outcomes = session.collect(0.0)
                todo += [batch for batch in session.in_flight if batch not in todo]
            session = None
        for outcome in outcomes:
            if isinstance(outcome, Rejection):
                assert isinstance(outcome.error, BatchRejected), outcome.error
                todo.append(outcome.batch)
                troubles += 1
            else:
                assert_is_true(harness, outcome)
                stored |= {blob.blobid for blob in outcome.stored}
    assert session is not None
    session.close()
    assert stored == {blob.blobid for batch in batches for blob in batch.blobs}
    return troubles


def assert_is_true(harness: Harness, receipt: Receipt) -> None:
    """What it says is stored is there and right; nothing is blamed on the source."""
    assert receipt.failed == ()
    for blob in receipt.stored:
        assert blake3(harness.final(blob).read_bytes()).hexdigest() == blob.blobid


def content(harness: Harness, chance: random.Random) -> list[Batch]:
    """Packs, compressed and not, and a blob that goes in pieces."""
    small = [chance.randbytes(chance.randrange(200)) for _ in range(200)]
    text = [b"%d " % n * 3000 for n in range(20)]
    return [
        harness.batch("small", *small),
        harness.batch("text", *text),
        harness.batch("mixed", chance.randbytes(900), chance.randbytes(MIB + 5), b"x"),
    ]


@pytest.mark.parametrize(
    ("hashed", "codec"),
    [
        ("sha256", "auto"),
        ("blake3", "none"),
        pytest.param("sha256", "none", marks=pytest.mark.long),
        pytest.param("blake3", "auto", marks=pytest.mark.long),
    ],
)
def test_what_arrives_is_right_whatever_flips(
    local: Harness, tmp_path: Path, hashed: str, codec: str
) -> None:
    chance = random.Random(f"{hashed} {codec}")
    batches = content(local, chance)
    book = tmp_path / "book"
    length = 1_100_000 if codec == "none" else 1_060_000
    flips = [("up", chance.randrange(length)) for _ in range(5)]
    # What is no content is a few bytes: HELLO, READY, receipts.
    flips += [("up", chance.randrange(250)) for _ in range(2)]
    flips += [("down", chance.randrange(250)) for _ in range(4)]
    chance.shuffle(flips)
    flips.insert(0, ("up", chance.randrange(200)))  # One that surely hits.
    book.write_text("".join(f"{way} {byte} {chance.randrange(8)}\n" for way, byte in flips))
    python = sys.executable if hashed == "blake3" else f"{sys.executable} -S"
    settings: dict[str, Any] = {"codec": codec, "receipt_timeout": 2, "stall_timeout": 2}
    transport = Flipping(book, python)

    troubles = deliver(local, batches, lambda: local.open(transport=transport, **settings))

    assert troubles >= 1
    assert local.on_remote() == local.expected(*batches)
    wait_until(
        lambda: [path.name for path in local.remote_dir.iterdir()] == ["by-hash"],
        "the end of the sessions that were given up",
    )
