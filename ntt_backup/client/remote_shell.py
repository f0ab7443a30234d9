"""Scripts run in the shell of the remote, and their answers are read.

Small questions use the same transport as data: another ssh implementation would read the
configuration, keys and known hosts in another way, and a check could pass where the job fails.

A script is not passed as the remote command, since that is read by the account's login shell, which
may be csh or fish. The command is short and means the same to all shells; the script follows on
stdin and is read only by sh, exactly to its last byte, so that data may follow. A login may also
leave functions in the environment that have the name of a tool; they are unset.

The end of an answer is a mark that the shell of the script prints when it ends, not the end of the
connection: a process that a login has left behind may keep the connection open.
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Mapping
from typing import Final

from ntt_backup.client.channel import Channel
from ntt_backup.client.transport import Transport
from ntt_backup.errors import RemoteDenied, RemoteUnreachable

_SSH_FAILED: Final = 255
_LAST_WORDS_SECONDS: Final = 1.0
ANSWER: Final = re.compile(rb"^NTT-ANSWER$")
_TOOLS: Final = (
    "awk cat cd cmp cp cut date df echo find head id mkdir mv printf rm rmdir sed sha256sum sleep"
    " stat sync tar tr uname wc xargs"
)


def shell_script(script: str, values: Mapping[str, str]) -> tuple[str, bytes]:
    """Returns the remote command, and the source that must be written to its stdin first.

    values: the variables of the script.
    """
    assignments = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    source = (f"unset -f {_TOOLS} 2>/dev/null\n" + assignments + script).encode()
    return f"exec sh -c 'eval \"$(command head -c {len(source)})\"'", source


class ScriptAnswer:
    """The output of a script up to the mark at its end.

    Attributes:
        status: The exit status of the script; None before the mark.
    """

    def __init__(self) -> None:
        self._words = f"NTT-END {secrets.token_hex(8)}"
        self._mark = f"\n{self._words} ".encode()
        self._held = b""
        self.status: int | None = None

    def script(self, script: str) -> str:
        """Returns a script that prints NTT-ANSWER before its answer, and the mark after it."""
        end = f'printf "\\n{self._words} %s\\n" $?'
        return f"trap '{end}' EXIT\necho\necho NTT-ANSWER\n{script}"

    def take(self, data: bytes) -> bytes:
        """Adds data, and returns the part of the answer that is complete."""
        if self.status is not None:
            return b""
        self._held += data
        said, mark, rest = self._held.partition(self._mark)
        if not mark:
            begun = next(n for n in range(len(self._mark), -1, -1) if said.endswith(self._mark[:n]))
            said, self._held = said[: len(said) - begun], said[len(said) - begun :]
        elif b"\n" in rest:
            self.status, self._held = int(rest.partition(b"\n")[0]), b""
        else:
            self._held = mark + rest
        return said

    def rest(self) -> bytes:
        """Returns the data that was held back, if there will be no mark."""
        held, self._held = self._held, b""
        return held

    def hear(self, channel: Channel, deadline: float) -> bytes | None:
        """Returns more of the answer: b"" at its end, None after the deadline (monotonic)."""
        while self.status is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            data = channel.read(left)
            if data == b"":
                return self.rest()
            if said := self.take(data or b""):
                return said
        return b""


def ask(
    transport: Transport,
    script: str,
    values: Mapping[str, str],
    *,
    doing: str,
    timeout: float,
    limit: int = 1 << 20,
) -> bytes:
    """Runs a script on the remote, and returns its output. Earlier output is skipped.

    values: the variables of the script. doing: the purpose, for errors. limit: bytes of output.

    Raises:
        RemoteUnreachable: There was no answer in time.
        RemoteDenied: The script has failed, or its output is too long.
        BackupError: As `Transport.explain` returns, if ssh has failed.
    """
    answer = ScriptAnswer()
    command, source = shell_script(answer.script(script), values)
    deadline = time.monotonic() + timeout
    channel = Channel(transport, command)
    try:
        channel.greet(source, ANSWER, timeout, doing=doing)
        channel.end_input()
        said = b""
        while data := answer.hear(channel, deadline):
            said += data
            if len(said) > limit:
                raise RemoteDenied(
                    f"the remote prints too much: {doing}", detail=f"over {limit} bytes"
                )
        if data is None:
            raise late(channel, doing)
        require_success(channel, answer, doing)
        return said
    finally:
        channel.abort()


def require_success(channel: Channel, answer: ScriptAnswer, doing: str) -> None:
    """Raises RemoteDenied where the script has failed, another error where its mark is missing."""
    if answer.status == 0:
        return
    ended = channel.wait(_LAST_WORDS_SECONDS)
    status = ended if answer.status is None else answer.status
    if status in (None, _SSH_FAILED):
        raise channel.lost()
    raise RemoteDenied(
        f"the remote failed: {doing}", detail=channel.stderr[-300:] or f"status {status}"
    )


def late(channel: Channel, doing: str) -> RemoteUnreachable:
    """Returns the error for an answer that has not arrived in time."""
    return RemoteUnreachable(
        f"the remote did not answer in time: {doing}",
        detail=channel.stderr[-200:],
        hint=channel.hint or "check the link, and what startup files of the remote account do",
    )
