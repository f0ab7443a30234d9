"""Questions to the remote's shell: the answer alone, or an error that says what failed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ntt_backup.client.remote_shell import ScriptAnswer, ask
from ntt_backup.client.transport import Local, Ssh
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import BackupError, RemoteDenied, RemoteUnreachable, SourceError
from tests.helpers.waiting import PATIENCE


@dataclass(frozen=True)
class Account:
    """A shell of this machine whose startup files do something first; it fails as ssh does."""

    startup: str = ":"
    program: str = "/bin/sh"
    connect_timeout: float = PATIENCE
    hint: str = ""

    def argv(self, remote_command: str) -> list[str]:
        return [self.program, "-c", f"{self.startup}\n{remote_command}"]

    def environment(self) -> Mapping[str, str]:
        return Local().environment()

    def explain(self, status: int | None, stderr: str) -> BackupError:
        return Ssh(RemoteSettings(host="h", path="/p")).explain(status, stderr)


def asked(
    script: str, startup: str = ":", timeout: float = PATIENCE, limit: int = 1 << 20
) -> bytes:
    return ask(Account(startup), script, {}, doing="a question", timeout=timeout, limit=limit)


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_may_be_empty_or_binary_or_look_like_ours() -> None:
    assert asked("true") == b""
    assert asked("printf '\\000\\377\\n\\n'") == b"\0\xff\n\n"
    assert asked("echo; echo NTT-ANSWER; echo after") == b"\nNTT-ANSWER\nafter\n"


@pytest.mark.parametrize(
    "noise",
    [
        "echo Welcome",
        "printf 'no end of line'",
        "echo NTT-ANSWE",
        "yes | head -n 30000",
        "yes | head -n 100000 >&2",
    ],
)
def test_noise_before_it_is_skipped(noise: str) -> None:
    assert asked("echo answer", noise) == b"answer\n"


def test_a_script_may_be_longer_than_any_command_line() -> None:
    assert asked("# " + "x" * 3_000_000 + "\necho done") == b"done\n"


@settings(max_examples=15)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60))
@example("'; echo hit; '")
@example("$(echo hit)`echo hit`\necho hit\n' # *")
@example("-n")
def test_no_value_is_run(value: str) -> None:
    said = ask(Local(), 'printf "%s" "$value"', {"value": value}, doing="it", timeout=PATIENCE)
    assert said == value.encode()


# --- logins that leave something behind -----------------------------------------------------------

HOLDER = "sleep 1000 & echo $! >>{pids}"
# Noted before the noise begins, which ends whoever started it.
NOISE = "sh -c 'echo $$ >>{pids}; exec yes noise >&2' &"


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """Where a startup file notes what it leaves behind; ended with the test."""
    pids = tmp_path / "pids"
    yield pids
    for pid in pids.read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_a_process_that_a_login_left_behind_is_not_waited_for(left: Path) -> None:
    """It holds the connection open: there is no other end than the answer's own."""
    assert asked("printf said", HOLDER.format(pids=left)) == b"said"


def test_endless_noise_on_stderr_is_refused_and_not_listened_to_for_ever(left: Path) -> None:
    with pytest.raises(RemoteDenied) as caught:
        asked("echo", f"{NOISE.format(pids=left)} sleep 1000")
    assert "prints too much: a question" in caught.value.message
    assert "noise" in caught.value.detail
    assert caught.value.hint


def test_an_answer_is_heard_beside_endless_noise_on_stderr(left: Path) -> None:
    assert asked(f"{NOISE.format(pids=left)} sleep 1; echo heard").endswith(b"heard\n")


def test_functions_that_go_by_the_name_of_a_tool_are_put_aside(tmp_path: Path) -> None:
    bash = shutil.which("bash") or pytest.skip("no bash")
    (tmp_path / "sh").symlink_to(bash)
    functions = "head() { echo no; }; tar() { sleep 1000; }; export -f head tar"
    account = Account(f"{functions}; PATH={tmp_path}:$PATH", program=bash)
    said = ask(account, "head -c 3 /dev/zero; tar --version", {}, doing="it", timeout=PATIENCE)
    assert said.startswith(b"\0\0\0tar ")


@given(st.binary(max_size=60), st.lists(st.integers(0, 120), max_size=8), st.integers(0, 255))
def test_the_mark_is_found_however_the_answer_is_cut(
    content: bytes, cuts: list[int], status: int
) -> None:
    answer = ScriptAnswer()
    whole = content + f"{mark_of(answer)}{status}\n".encode() + b"after"
    said = b""
    for begin, end in pairwise([0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]):
        said += answer.take(whole[begin:end])
    assert (said, answer.status) == (content, status)
    assert answer.take(b"noise") == answer.rest() == b""


def mark_of(answer: ScriptAnswer) -> str:
    """The mark that the script of an answer leaves, up to the status."""
    (mark,) = re.findall(r"NTT-END \w+ ", answer.script(""))
    return f"\n{mark}"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("echo partial; echo 'df: no such thing' >&2; exit 3", "df: no such thing"),
        ("exit 3", "status 3"),
    ],
)
def test_a_failing_script_gives_its_words_or_its_status_also_beside_a_left_process(
    left: Path, script: str, detail: str
) -> None:
    with pytest.raises(RemoteDenied) as caught:
        asked(script, HOLDER.format(pids=left))
    assert "a question" in caught.value.message
    assert caught.value.detail == detail


@pytest.mark.parametrize(
    ("script", "startup"),
    [
        ("echo", "exec sleep 600"),
        ("echo", "cat >/dev/null; exec sleep 600"),
        ("echo begun; exec sleep 600", ":"),
    ],
)
def test_silence_ends_after_the_time_out_and_says_what_was_asked(script: str, startup: str) -> None:
    with pytest.raises(RemoteUnreachable) as caught:
        asked(script, f"echo 'Password:' >&2; {startup}", timeout=2.0)
    assert "in time: a question" in caught.value.message
    assert "Password:" in caught.value.detail
    assert caught.value.hint


@pytest.mark.parametrize(("script", "startup"), [("exec yes", ":"), ("true", "exec yes")])
def test_endless_output_is_refused(script: str, startup: str) -> None:
    with pytest.raises(RemoteDenied) as caught:
        asked(script, startup, limit=1000)
    assert "prints too much: a question" in caught.value.message


def test_an_answer_up_to_the_limit_is_taken() -> None:
    assert len(asked("head -c 100000 /dev/zero", limit=100_000)) == 100_000


@pytest.mark.parametrize(
    ("script", "startup", "kind"),
    [
        ("", "echo 'This account is currently not available.'; exit 1", RemoteDenied),
        ("", "echo 'ssh: connect to host h: Connection refused' >&2; exit 255", RemoteUnreachable),
        ("", "exit 255", RemoteUnreachable),
        # ssh's own status for a lost link is 255; no script of ours has it.
        ("echo half; echo 'Broken pipe' >&2; exit 255", ":", RemoteUnreachable),
    ],
)
def test_an_end_of_the_connection_is_explained_by_what_was_said(
    script: str, startup: str, kind: type[BackupError]
) -> None:
    with pytest.raises(kind):
        asked(script, startup)


def test_an_ssh_that_is_not_installed_is_a_matter_of_this_machine() -> None:
    missing = Account(program="/nowhere/ssh")
    with pytest.raises(SourceError) as caught:
        ask(missing, "true", {}, doing="it", timeout=PATIENCE)
    assert "apt-get install" in caught.value.hint
