"""A large blob of which a part is there: what is offered, and what the client makes of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ntt_backup.receiver import large_blob, write_session
from ntt_backup.receiver.large_blob import PARTIAL, ResumeOffers
from ntt_backup.wire import framing, messages
from tests.helpers.receivers import ScriptedSession, commit, digest_of, place_of

PREFIX, REST = b"what was there, ", b"and the rest"
DIGEST = digest_of(PREFIX + REST)
SIZE = len(PREFIX + REST)


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_blob, "RESUMABLE", 8)
    monkeypatch.setattr(write_session, "RESUMABLE", 8)


def leave(incoming: Path, part: bytes, noted: int) -> Path:
    """A part of the blob, as a session has left it."""
    partial = incoming / PARTIAL / DIGEST.hex()
    partial.parent.mkdir(parents=True)
    partial.write_bytes(part)
    partial.with_name(f"{DIGEST.hex()}.mark").write_text(f"{noted:020}\n")
    return partial


@pytest.mark.parametrize("offset", [0, len(PREFIX)])
def test_the_blob_is_whole_whether_or_not_the_client_takes_the_offer(
    tmp_path: Path, offset: int
) -> None:
    (tmp_path / "by-hash").mkdir()
    leave(tmp_path / ".ntt-incoming", PREFIX + b"what was not synced", len(PREFIX))
    client = ScriptedSession(tmp_path)
    client.say(
        messages.BATCH.frame(1, 1, SIZE),
        messages.ASK_OFFSET.frame(DIGEST, SIZE),
        client.large(PREFIX + REST, offset),
        commit(1),
    )
    assert messages.OFFSET.frame(len(PREFIX), hashlib.sha256(DIGEST + PREFIX).digest()) in [
        framing.frame(*answer) for answer in client.answers
    ]
    assert [receipt.stored for receipt in client.receipts()] == [1]
    assert place_of(tmp_path, DIGEST).read_bytes() == PREFIX + REST
    assert not (tmp_path / ".ntt-incoming").exists()


def test_a_part_that_is_cut_while_it_is_hashed_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_blob, "_READ_CHUNK", 4)
    partial = leave(tmp_path, PREFIX, len(PREFIX))
    chunks: list[int] = []

    def alive() -> None:
        chunks.append(4)
        assert len(chunks) <= len(PREFIX), "it reads on after the end"
        os.truncate(partial, 6)

    incoming = os.open(tmp_path, os.O_RDONLY)
    staging: Any = SimpleNamespace(incoming=incoming, await_predecessors=lambda: None)
    offers = ResumeOffers(staging, lambda digest: [hashlib.sha256(digest)], alive)
    assert offers.make(DIGEST, SIZE) == (0, hashlib.sha256(DIGEST).digest())
    assert len(chunks) == 2
    assert not partial.exists()
    os.close(incoming)
