"""Far sides that lie to whoever reads them: no wrong answer is taken for a right one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ntt_backup.client.read_session import ReadSession
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config.sections import RunSettings
from ntt_backup.errors import (
    AnotherTarget,
    BackupError,
    RemoteDenied,
    RemoteUnreachable,
    Unsupported,
)
from ntt_backup.wire.messages import BLAKE3
from tests.contract.harness import Machine, Taken
from tests.helpers.receivers import LYING_RECEIVER
from tests.helpers.waiting import PATIENCE

A, B, C = bytes(32), b"\x01" * 32, b"\x02" * 32


@pytest.fixture
def lying_receiver(tmp_path: Path) -> Callable[..., ReadSession]:
    def make(
        answer: str, stall_timeout: float = PATIENCE, ready: str = "", identity: str = ""
    ) -> ReadSession:
        machine = Machine(tmp_path)
        program = tmp_path / "lying.py"
        lies = LYING_RECEIVER.replace("{answer}", answer)
        program.write_text(lies.replace('{"placed": 1}', f'{{"placed": 1, {ready}}}'))
        project = Path(__file__).resolve().parents[2]
        machine.tool("python3", f"PYTHONPATH={project} exec {sys.executable} {program}")
        run = RunSettings(stall_timeout=stall_timeout)
        spec = SessionSpec(machine, "/x", "0" * 12, "test", "0", run, identity=identity)
        return ReadSession(spec)

    return make


@pytest.mark.parametrize(
    "answer",
    [
        "say(NAMES.frame([(B, 1), (A, 1)]))",
        "say(NAMES.frame([(A, 1), (A, 1)]))",
        "say(NAMES.frame([(A, 1)])); say(NAMES.frame([(A, 1)]))",
        "say(NAMES.frame([(C, 1)]))",
        "say(NAMES.frame([(A, 1), (B, 1)]))",
        "say(GIVEN.frame(1))",
        "say(head(NAMES, 1 << 30))",
        "say(frame(NAMES, bytes(39)))",
        "say(NAMES.frame([(A, 1)])[:-1] + b'x')",
        "say(ERROR.frame('internal', 'a defect'))",
        "os._exit(0)",
    ],
)
def test_names_that_cannot_be_end_a_listing_session(
    lying_receiver: Callable[[str], ReadSession], answer: str
) -> None:
    session = lying_receiver(answer)
    with pytest.raises(RemoteUnreachable):
        session.names(A, B, most=1)


@pytest.mark.parametrize(
    "answer",
    [
        "say(SUMS.frame([]))",
        "say(SUMS.frame([(WHOLE, A)]))",
        "say(SUMS.frame([(WHOLE, A)] * 3))",
        "say(SUMS.frame([(WHOLE, A), (4, B)]))",
        "say(HASHED.frame([BlobHash(WHOLE, 1, A)] * 2))",
        "say(GIVEN.frame(2))",
    ],
)
def test_sums_that_cannot_be_end_a_session(
    lying_receiver: Callable[[str], ReadSession], answer: str
) -> None:
    session = lying_receiver(answer)
    session.ask_sums(BLAKE3, A, [A, B])
    with pytest.raises(RemoteUnreachable):
        session.sums()


@pytest.mark.parametrize(
    "answer",
    [
        "say(GIVEN.frame(2))",
        "say(contents([A], [1], [b'a'])); say(GIVEN.frame(2))",
        "say(contents([C], [1], [b'a']))",
        "say(contents([A], [1], [b'a'])); say(contents([A], [1], [b'a']))",
        "say(NOT_GIVEN.frame(C, MISSING, ''))",
        "say(NOT_GIVEN.frame(A, RIGHT, ''))",
        "say(piece(b'abc'))",
        "say(BLOB_END.frame(COMPLETE))",
        "say(BLOB.frame(A, 3, 0)); say(piece(b'abcd'))",
        "say(BLOB.frame(A, 3, 0)); say(piece(b'ab')); say(BLOB_END.frame(COMPLETE))",
        "say(BLOB.frame(A, 3, 0)); say(contents([B], [1], [b'a']))",
        "say(BLOB.frame(A, 3, 0)); say(BLOB.frame(B, 3, 0))",
        "say(BLOB.frame(C, 3, 0))",
        "say(BLOB.frame(A, 3, 4))",
        "say(BLOB.frame(A, 3, 2)); say(BLOB_END.frame(BROKEN));"
        " say(NOT_GIVEN.frame(B, MISSING, '')); say(GIVEN.frame(2))",
    ],
)
def test_contents_that_cannot_be_are_not_taken(
    lying_receiver: Callable[[str], ReadSession], answer: str
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
        "say(BLOB.frame(A, 4, 0))",
        "say(BLOB.frame(A, 1 << 60, 0))",
        "say(contents([A], [4], [b'abcd']))",
    ],
)
def test_no_more_of_a_blob_is_taken_than_the_remote_has_listed(
    lying_receiver: Callable[[str], ReadSession], answer: str
) -> None:
    session = lying_receiver(answer)
    session.ask_contents([A], listed={A: 3})
    taken = Taken()
    with pytest.raises(RemoteUnreachable):
        session.contents(taken)
    assert taken.digests == []


def test_a_remote_that_says_nothing_is_given_up_after_the_stall_timeout(
    lying_receiver: Callable[..., ReadSession],
) -> None:
    session = lying_receiver("pass", stall_timeout=1)
    session.ask_sums(BLAKE3, A, [A])
    with pytest.raises(RemoteUnreachable, match="does not answer"):
        session.sums()


def test_a_session_does_not_wait_for_names_that_nobody_takes(
    lying_receiver: Callable[[str], ReadSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = lying_receiver("os.read(os.pipe()[0], 1)")
    session.ask_names(A, B, most=1)
    monkeypatch.setattr(session.channel, "close", pytest.fail)  # It waits for the last answer.
    session.close()
    assert session.channel.ended


def test_a_right_that_the_remote_does_not_allow_is_named_before_it_is_used(
    lying_receiver: Callable[[str], ReadSession],
) -> None:
    session = lying_receiver("pass")
    session.require("get")
    with pytest.raises(Unsupported) as caught:
        session.require("put")
    assert isinstance(caught.value, BackupError)
    assert "--allow" in caught.value.hint
    session.abort()


OURS = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("ready", "error", "said"),
    [
        (f'"target": "{OURS}"', None, ""),
        (f'"target": "{"f" * 32}"', AnotherTarget, f"knows it as {OURS}, and {'f' * 32} is there"),
        ('"target": ""', AnotherTarget, "a place without an identity is there"),
        ("", RemoteDenied, "does not tell the identity"),
        (f'"target": "{OURS.upper()}"', RemoteDenied, "cannot be read"),
        (f'"target": "{OURS}\\n"', RemoteDenied, "cannot be read"),
        ('"target": "?"', RemoteDenied, "cannot be read"),
        ('"target": "\\x1b[2J" * 5000', RemoteDenied, "cannot be read"),
        ('"target": 7', RemoteDenied, "cannot be read"),
        ('"target": "x" * 70000', RemoteUnreachable, "violates the protocol"),
    ],
)
def test_an_identity_that_is_none_is_refused(
    lying_receiver: Callable[..., ReadSession],
    ready: str,
    error: type[BackupError] | None,
    said: str,
) -> None:
    if error is None:
        lying_receiver("pass", ready=ready, identity=OURS).abort()
        return
    with pytest.raises(error) as caught:
        lying_receiver("pass", ready=ready, identity=OURS)
    assert type(caught.value) is error or error is RemoteUnreachable
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    if error is not RemoteUnreachable:  # Where nothing is expected nothing is refused.
        lying_receiver("pass", ready=ready).abort()
