"""Far sides that lie to whoever reads them: no wrong answer is taken for a right one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ntt_backup.client.read_session import Reach, ReadingSession
from ntt_backup.config.models import RunSettings
from ntt_backup.errors import BackupError, RemoteUnreachable, Unsupported
from ntt_backup.wire import read_messages
from tests.contract.harness import Machine
from tests.lying_receiver import LYING_RECEIVER
from tests.patience import PATIENCE

A, B, C = bytes(32), b"\x01" * 32, b"\x02" * 32


class Taken:
    """Takes contents, and keeps what was taken."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def whole(self, digest: bytes, content: memoryview) -> None:
        self.digests.append(digest)

    def begin(self, large: read_messages.Large) -> None:
        self.digests.append(large.digest)

    def piece(self, data: memoryview) -> None: ...
    def end(self, problem: str) -> None: ...
    def not_given(self, digest: bytes, verdict: int, text: str) -> None: ...


@pytest.fixture
def lying_receiver(tmp_path: Path) -> Callable[..., ReadingSession]:
    def make(answer: str, stall_timeout: float = PATIENCE) -> ReadingSession:
        machine = Machine(tmp_path)
        program = tmp_path / "lying.py"
        program.write_text(LYING_RECEIVER.replace("{answer}", answer))
        project = Path(__file__).resolve().parents[2]
        machine.tool("python3", f"PYTHONPATH={project} exec {sys.executable} {program}")
        run = RunSettings(stall_timeout=stall_timeout)
        return ReadingSession(Reach(machine, "/x", "0" * 12, "test", "0", run, lambda: None))

    return make


@pytest.mark.parametrize(
    "answer",
    [
        "say(asking.names([(B, 1), (A, 1)]))",
        "say(asking.names([(A, 1), (A, 1)]))",
        "say(asking.names([(A, 1)])); say(asking.names([(A, 1)]))",
        "say(asking.names([(C, 1)]))",
        "say(asking.names([(A, 1), (B, 1)]))",
        "say(asking.given(1))",
        "say(frames.head(asking.NAMES, 1 << 30))",
        "say(frames.frame(asking.NAMES, bytes(39)))",
        "say(asking.names([(A, 1)])[:-1] + b'x')",
        "say(frames.error('internal', 'a defect'))",
        "os._exit(0)",
    ],
)
def test_names_that_cannot_be_end_a_listing_session(
    lying_receiver: Callable[[str], ReadingSession], answer: str
) -> None:
    session = lying_receiver(answer)
    with pytest.raises(RemoteUnreachable):
        list(session.names(A, B, most=1))


@pytest.mark.parametrize(
    "answer",
    [
        "say(asking.verdicts(asking.Verdicts(1, 1, 0, [])))",
        "say(asking.verdicts(asking.Verdicts(2, 1, 0, [])))",
        "say(asking.verdicts(asking.Verdicts(2, 1, 0, [asking.Exceptional(2, 1, 0, A, '')])))",
        "say(asking.verdicts(asking.Verdicts(2, 1, 0, [asking.Exceptional(0, 0, 0, A, '')])))",
        "say(asking.verdicts(asking.Verdicts(2, 0, 0, [asking.Exceptional(0, 1, 0, A, '')] * 2)))",
        "say(asking.given(2))",
    ],
)
def test_verdicts_that_cannot_be_end_a_hashing_session(
    lying_receiver: Callable[[str], ReadingSession], answer: str
) -> None:
    session = lying_receiver(answer)
    session.ask_verdicts([A, B])
    with pytest.raises(RemoteUnreachable):
        session.verdicts()


@pytest.mark.parametrize(
    "answer",
    [
        "say(asking.given(2))",
        "say(asking.contents([A], [1], [b'a'])); say(asking.given(2))",
        "say(asking.contents([C], [1], [b'a']))",
        "say(asking.contents([A], [1], [b'a'])); say(asking.contents([A], [1], [b'a']))",
        "say(asking.not_given(C, asking.MISSING, ''))",
        "say(asking.not_given(A, asking.RIGHT, ''))",
        "say(asking.piece(b'abc'))",
        "say(asking.end(asking.COMPLETE))",
        "say(asking.large(A, 3, 0)); say(asking.piece(b'abcd'))",
        "say(asking.large(A, 3, 0)); say(asking.piece(b'ab')); say(asking.end(asking.COMPLETE))",
        "say(asking.large(A, 3, 0)); say(asking.contents([B], [1], [b'a']))",
        "say(asking.large(A, 3, 0)); say(asking.large(B, 3, 0))",
        "say(asking.large(C, 3, 0))",
        "say(asking.large(A, 3, 4))",
    ],
)
def test_contents_that_cannot_be_are_not_taken(
    lying_receiver: Callable[[str], ReadingSession], answer: str
) -> None:
    session = lying_receiver(answer)
    session.ask_contents([A, B])
    taken = Taken()
    with pytest.raises(RemoteUnreachable):
        session.contents(taken)
    assert C not in taken.digests
    assert len(taken.digests) == len(set(taken.digests))


@pytest.mark.parametrize(
    "answer",
    [
        "say(asking.block_sums(1, [])); say(asking.given(1))",
        "say(asking.block_sums(1, [bytes(16)] * 2)); say(asking.given(1))",
        "say(asking.block_sums(1 << 60, [bytes(16)])); say(asking.given(1))",
        "say(frames.frame(asking.BLOCK_SUMS, bytes(9)))",
        "say(asking.piece(b'abc'))",
    ],
)
def test_hashes_of_blocks_that_cannot_be_end_the_session(
    lying_receiver: Callable[[str], ReadingSession], answer: str
) -> None:
    session = lying_receiver(answer)
    with pytest.raises(RemoteUnreachable):
        session.sums(A, lambda digest, verdict, text: None)


@pytest.mark.parametrize(
    "answer",
    [
        "say(asking.piece(b'abc')); say(asking.given(1))",
        "say(asking.piece(bytes(asking.BLOCK_BYTES))); say(asking.piece(b'x'))",
        "[say(asking.piece(bytes(asking.BLOCK_BYTES))) for _ in range(3)]",
        "say(asking.given(1))",
        "say(asking.verdicts(asking.Verdicts(1, 1, 0, [])))",
    ],
)
def test_blocks_that_cannot_be_end_the_session(
    lying_receiver: Callable[[str], ReadingSession], answer: str
) -> None:
    session = lying_receiver(answer)
    taken: list[int] = []
    with pytest.raises(RemoteUnreachable):
        session.blocks(
            A, 2 * read_messages.BLOCK_BYTES, [0, 1], lambda block: taken.append(len(block))
        )
    assert len(taken) <= 2


def test_a_remote_that_says_nothing_is_given_up_after_the_stall_timeout(
    lying_receiver: Callable[..., ReadingSession],
) -> None:
    session = lying_receiver("pass", stall_timeout=1)
    session.ask_verdicts([A])
    with pytest.raises(RemoteUnreachable, match="does not answer"):
        session.verdicts()


def test_a_right_that_the_remote_does_not_allow_is_named_before_it_is_used(
    lying_receiver: Callable[[str], ReadingSession],
) -> None:
    session = lying_receiver("pass")
    session.require("get")
    with pytest.raises(Unsupported) as caught:
        session.require("put")
    assert isinstance(caught.value, BackupError)
    assert "--allow" in caught.value.hint
    session.abort()
