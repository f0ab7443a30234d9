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

import shlex
import time
from collections.abc import Mapping
from typing import Final

from ntt_backup.errors import RemoteDenied, RemoteUnreachable, SourceError
from ntt_backup.process import Child, wait_for, write
from ntt_backup.transport import Transport

SSH_FAILED: Final = 255

_ANSWER: Final = b"NTT-ANSWER\n"


def shell_script(script: str, values: Mapping[str, str]) -> tuple[str, bytes]:
    """The remote command, and what must be written to its stdin first: script, with values as
    variables.
    """
    assignments = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    source = (assignments + script).encode()
    return f"exec sh -c 'eval \"$(head -c {len(source)})\"'", source


def login_words(stdout: bytes, stderr: str) -> str:
    """What a login said that never came to our script: /usr/sbin/nologin, for one, uses stdout."""
    return f"{stdout[-2000:].decode('utf-8', 'backslashreplace')}\n{stderr}".strip()


def start(transport: Transport, command: str) -> Child:
    """The local process that runs command on the remote. Raises SourceError where ssh is
    missing.
    """
    argv = transport.argv(command)
    try:
        return Child(argv, env=transport.environment())
    except FileNotFoundError as error:
        raise SourceError(
            f"{argv[0]} is not installed on this machine", hint="apt-get install openssh-client"
        ) from error


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
    child = start(transport, command)
    deadline = time.monotonic() + timeout
    said = b""
    pending = memoryview(source)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RemoteUnreachable(
                    f"the remote did not answer in time: {doing}",
                    detail=f"waited {timeout:.0f} s; {child.stderr.text[-200:]}".rstrip("; "),
                    hint="check the link, and what startup files of the remote account do",
                )
            fds = [child.stdout_fd, *([child.stderr_fd] if child.stderr_fd >= 0 else [])]
            ready = wait_for(
                reading=fds, writing=[child.stdin_fd] if pending else [], timeout=min(left, 1.0)
            )
            child.drain_stderr()
            if pending and child.stdin_fd in ready:
                try:
                    pending = pending[write(child.stdin_fd, pending) :]
                except BrokenPipeError:
                    pending = memoryview(b"")
                if not pending:
                    child.close_stdin()
            if child.stdout_fd in ready and (data := child.read()) is not None:
                if not data:
                    break
                said += data
                if len(said) > limit + (64 << 10):
                    raise RemoteDenied(
                        f"the remote said too much: {doing}", detail=f"over {limit} bytes"
                    )
        status = child.wait(max(0.0, deadline - time.monotonic()))
        stderr = child.stderr.text
    finally:
        child.kill()
    _, found, answer = said.partition(b"\n" + _ANSWER)
    if not found:
        raise transport.explain(status, login_words(said, stderr))
    if status in (None, SSH_FAILED):
        raise transport.explain(status, stderr)
    if status != 0:
        raise RemoteDenied(
            f"the remote failed: {doing}", detail=stderr[-300:] or f"status {status}"
        )
    return answer
