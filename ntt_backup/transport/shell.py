"""Small questions to the remote's shell: a script goes out, its output comes back.

The preflight, free space and the like could ask over a second ssh implementation in process; but
then the check would pass where the job fails, and the other way round: another reading of the ssh
configuration, of keys and agents, of known hosts. So control takes the same way as data does,
`Transport.argv`.

A script is not passed as the remote command: that is read by the account's login shell, which may
be csh or fish. The command is short and means the same to all of them; the script follows on stdin
and is read by sh alone, exactly to its last byte, so that data may follow it.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from typing import Final

from ntt_backup.errors import RemoteDenied, RemoteUnreachable
from ntt_backup.transport import Transport
from ntt_backup.transport.channel import Channel

_SSH_FAILED: Final = 255
_ANSWER: Final = re.compile(rb"^NTT-ANSWER$")


def shell_script(script: str, values: Mapping[str, str]) -> tuple[str, bytes]:
    """The remote command, and what must be written to its stdin first: script, with values as
    variables.
    """
    assignments = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    source = (assignments + script).encode()
    return f"exec sh -c 'eval \"$(head -c {len(source)})\"'", source


def ask(
    transport: Transport,
    script: str,
    values: Mapping[str, str],
    *,
    doing: str,
    timeout: float,
    limit: int = 1 << 20,
) -> bytes:
    """Run script there and return what it printed, at most limit bytes; noise before it is skipped.

    doing names the question for the error when no answer has come after timeout seconds. Raises
    what `Transport.explain` says for a failure of ssh, RemoteDenied for a script that fails.
    """
    command, source = shell_script("echo\necho NTT-ANSWER\n" + script, values)
    deadline = time.monotonic() + timeout
    channel = Channel(transport, command)
    try:
        channel.greet(source, _ANSWER, timeout, doing=doing)
        channel.end_input()
        answer = b""
        while data := _next(channel, deadline, doing):
            answer += data
            if len(answer) > limit:
                raise RemoteDenied(
                    f"the remote says too much: {doing}", detail=f"over {limit} bytes"
                )
        status = channel.wait(max(0.0, deadline - time.monotonic()))
        if status in (None, _SSH_FAILED):
            raise channel.lost()
        if status != 0:
            raise RemoteDenied(
                f"the remote failed: {doing}", detail=channel.stderr[-300:] or f"status {status}"
            )
        return answer
    finally:
        channel.abort()


def _next(channel: Channel, deadline: float, doing: str) -> bytes:
    """More of the answer; nothing at its end."""
    while (left := deadline - time.monotonic()) > 0:
        if (data := channel.read(left)) is not None:
            return data
    raise RemoteUnreachable(
        f"the remote did not answer in time: {doing}",
        detail=channel.stderr[-200:],
        hint="check the link, and what startup files of the remote account do",
    )
