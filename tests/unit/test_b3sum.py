"""The program b3sum, and programs that are called so: never a wrong verdict, whatever they do."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from blake3 import blake3

from ntt_backup.receiver import b3sum, hashing
from ntt_backup.receiver.b3sum import B3sum
from ntt_backup.receiver.read_session import HashJob
from ntt_backup.receiver.workspace import Refusal, Workspace
from tests.helpers.receivers import digest_of, put
from tests.helpers.waiting import PATIENCE

REAL = shutil.which("b3sum")
needs_b3sum = pytest.mark.skipif(REAL is None, reason="b3sum is not installed")
# A program that is right once, for the known input, and then does something else.
RIGHT_ONCE = """#!/bin/sh
if [ ! -e {marker} ]; then : >{marker}; echo "{known}  $2"; exit 0; fi
{then}
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A few files, by name, with what they hash to."""
    contents = {f"d{number}/name": os.urandom(number * 1000) for number in range(40)}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    return {name: blake3(content).digest() for name, content in contents.items()}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def fake(tmp_path: Path, then: str) -> B3sum:
    program = tmp_path / "fake"
    known = hashing.KNOWN_OUTPUT.hex()
    text = RIGHT_ONCE.format(marker=tmp_path / "marker", known=known, then=then)
    program.write_text(text)
    program.chmod(0o755)
    found = B3sum(str(program))
    found.prove()
    return found


def silent() -> None:
    """Nobody waits for a sign of life."""


@needs_b3sum
def test_wrong_files_are_told_and_unreadable_ones_left_out(
    tmp_path: Path, files: dict[str, bytes], directory: int
) -> None:
    program = b3sum.find()
    assert program is not None
    (tmp_path / "d1/name").write_bytes(b"rotten")
    (tmp_path / "d2/name").unlink()
    found = program.digests(files, 0, silent, directory)
    assert found.pop("d1/name") == blake3(b"rotten").digest()
    assert found == {name: files[name] for name in files if name not in ("d1/name", "d2/name")}


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("kill -9 $$", "ended with status -9"),
        ("exit 2", "ended with status 2"),
        ("exit 0", "left files out"),
        ("echo garbage", "no digest"),
        ('shift; sha256sum "$@"', "wrong answers"),
        ('shift; for f; do printf "%064d  %s\\n" 0 "$f"; done', "wrong answers"),
        ('shift; for f; do printf "%064d  %s\\n" 0 "${f#d}"; done', "no digest"),
        ('shift; for f; do printf "%064d  %s\\n" 0 "$1"; done', "no digest"),
        ("while :; do echo garbage; done", "more than it was asked"),
    ],
)
def test_a_program_that_does_anything_else_gives_no_verdict(
    tmp_path: Path, files: dict[str, bytes], directory: int, then: str, why: str
) -> None:
    program = fake(tmp_path, then)
    with pytest.raises(OSError, match="temporarily unavailable") as caught:
        program.digests(files, 0, silent, directory)
    assert why in str(caught.value.filename)


def test_a_program_that_was_removed_cannot_be_started(
    tmp_path: Path, files: dict[str, bytes], directory: int
) -> None:
    program = fake(tmp_path, "exit 0")
    (tmp_path / "fake").unlink()
    with pytest.raises(OSError, match="temporarily unavailable") as caught:
        program.digests(files, 0, silent, directory)
    assert "cannot be started" in str(caught.value.filename)


def test_a_program_that_hangs_is_killed(
    tmp_path: Path, files: dict[str, bytes], directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake(tmp_path, f"echo $$ >{tmp_path}/pid; exec sleep 600")
    signs: list[int] = []
    monkeypatch.setattr(b3sum, "_PATIENCE_SECONDS", 2.5)
    with pytest.raises(OSError, match="temporarily unavailable") as caught:
        program.digests(files, 0, lambda: signs.append(1), directory)
    assert "does not end" in str(caught.value.filename)
    assert signs
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_program_that_says_no_more_and_does_not_end_is_killed(
    tmp_path: Path, files: dict[str, bytes], directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake(tmp_path, "exec >&-; exec sleep 600")
    monkeypatch.setattr(b3sum, "_LAST_WORDS_SECONDS", 0.01)
    with pytest.raises(OSError, match="temporarily unavailable") as caught:
        program.digests(files, 0, silent, directory)
    assert "does not end" in str(caught.value.filename)


def test_an_exception_of_the_waiting_caller_kills_the_program(
    tmp_path: Path, files: dict[str, bytes], directory: int
) -> None:
    program = fake(tmp_path, "exec sleep 600")

    def stop() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        program.digests(files, 0, stop, directory)


@pytest.mark.parametrize("text", ["exit 0", "echo 0", "exit 127", "exec cat"])
def test_a_program_with_wrong_answers_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "b3sum").write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path / "b3sum").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert b3sum.find() is None


def test_a_program_that_hangs_keeps_no_session_from_being_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits for that no longer than twice `remote.connect_timeout`, 30 seconds."""
    (tmp_path / "b3sum").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "b3sum").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert b3sum._PROOF_SECONDS <= 5
    monkeypatch.setattr(b3sum, "_PROOF_SECONDS", 0.5)
    began = time.monotonic()
    assert b3sum.find() is None
    assert time.monotonic() - began < PATIENCE


@needs_b3sum
def test_a_relative_path_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert REAL is not None
    shutil.copy(REAL, tmp_path / "b3sum")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f":.:{tmp_path.name}")
    assert b3sum.find() is None
    monkeypatch.setenv("PATH", f".:{tmp_path}")
    assert b3sum.find() is not None


def test_a_program_that_leaves_out_what_can_be_read_says_nothing_of_any_blob(
    tmp_path: Path,
) -> None:
    digest = digest_of(b"content")
    put(tmp_path, digest, b"content")
    workspace = Workspace(str(tmp_path))
    told, wake = os.pipe()
    program = SimpleNamespace(digests=lambda *_, **__: {})
    job = HashJob(workspace, [digest], None, cast(Any, program), b"", wake)
    with pytest.raises(Refusal, match="b3sum reads no blob"):
        list(job.frames(bytes))
    workspace.leave()
    for fd in told, wake:
        os.close(fd)
