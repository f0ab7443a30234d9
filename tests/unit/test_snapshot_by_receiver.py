"""An answer of a receiver about snapshots is bounded, and is that of the question."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from ntt_backup.snapshot.repository.by_receiver import _Question
from ntt_backup.snapshot.repository.contract import StoredFile
from ntt_backup.wire import file_messages, framing, read_messages, write_messages
from ntt_backup.wire.framing import Inbox, ProtocolError

VERSION = "db/20260304T120000Z-0badcafe"
FIRST, LAST = f"{VERSION}/manifest", f"{VERSION}/map"
DONE = framing.DONE


def heard(kind: int, most: int, frames: Sequence[bytes]) -> _Question:
    """Returns a question after these frames of an answer."""
    question = _Question(kind, most)
    inbox = Inbox(file_messages.TO_CLIENT)
    for frame in frames:
        assert question.end is None
        inbox.space()[: len(frame)] = frame
        inbox.filled(len(frame))
        found = inbox.next()
        assert found is not None
        question.hear(*found)
    return question


def names(*files: str) -> bytes:
    return file_messages.names([(name, 5, 0) for name in files])


def count(number: int) -> bytes:
    return write_messages.numbered(DONE, number)


def piece(size: int) -> bytes:
    return read_messages.piece(bytes(size))


def test_names_are_heard_up_to_their_number() -> None:
    files = [StoredFile(one, 5, datetime.fromtimestamp(0, UTC)) for one in (FIRST, LAST)]
    for frames in ([names(FIRST, LAST)], [names(FIRST), names(LAST)]):
        question = heard(framing.FILES, 2, [*frames, count(2)])
        assert question.files == files
        assert question.end == (DONE, 2, "")
    assert heard(framing.FILES, 2, [count(0)]).files == []
    assert heard(framing.FILES, 2, [names(FIRST, LAST)]).end is None


def test_content_is_heard_up_to_what_was_asked_for() -> None:
    for end in (0, 1):
        question = heard(framing.READ, 9, [piece(4), piece(5), read_messages.blob_end(end, "x")])
        assert b"".join(question.pieces) == bytes(9)
        assert question.end == (framing.BLOB_END, end, "x")
    missing = file_messages.said(file_messages.MISSING, "gone")
    question = heard(framing.READ, 9, [piece(4), missing])
    assert question.end == (framing.FILE_SAID, file_messages.MISSING, "gone")
    given = file_messages.said(file_messages.GIVEN)
    assert heard(framing.FILE_END, 0, [given]).end == (framing.FILE_SAID, 0, "")
    assert heard(framing.REMOVE, 0, [count(7)]).end == (DONE, 7, "")


@pytest.mark.parametrize(
    ("kind", "most", "frames", "why"),
    [
        (framing.FILES, 2, [names(FIRST), count(2)], "another number"),
        (framing.FILES, 2, [names(FIRST), count(0)], "another number"),
        (framing.FILES, 2, [names(FIRST, FIRST)], "out of order"),
        (framing.FILES, 2, [names(LAST), names(FIRST)], "out of order"),
        (framing.FILES, 1, [names(FIRST, LAST)], "more than was asked for"),
        (framing.FILES, 2, [piece(1)], "in another answer"),
        (framing.FILES, 2, [file_messages.said(0)], "in another answer"),
        (framing.READ, 9, [piece(4), piece(6)], "more than was asked for"),
        (framing.READ, 9, [count(0)], "in another answer"),
        (framing.READ, 9, [names(FIRST)], "in another answer"),
        (framing.FILE_END, 0, [count(0)], "in another answer"),
        (framing.FILE_END, 0, [read_messages.blob_end(0)], "in another answer"),
        (framing.REMOVE, 0, [file_messages.said(0)], "in another answer"),
    ],
)
def test_an_answer_to_another_question_or_a_longer_one_is_refused(
    kind: int, most: int, frames: list[bytes], why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        heard(kind, most, frames)
