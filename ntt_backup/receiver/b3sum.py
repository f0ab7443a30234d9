"""The program b3sum computes BLAKE3 where Python cannot: one small package of Debian has it.

A process takes milliseconds to start, so it hashes many files, which it reads where they were
stored. It is trusted little: each line must be a digest and a name that was given; a file counts as
wrong only when the program gives the known answer for a known input right afterwards; whatever else
it does is an error of the program, and no verdict on any blob.
"""

from __future__ import annotations

import errno
import os
import re
import select
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ntt_backup.receiver.hashing import KNOWN_INPUT, KNOWN_OUTPUT

if TYPE_CHECKING:
    import subprocess

_LINE = re.compile(rb"([0-9a-f]{64})  (.+)")
# A file that shrinks while it is mapped would kill the program.
_OPTIONS = ("--no-mmap",)
_READABLE, _SOME_UNREADABLE = 0, 1
_LOOK_SECONDS = 1.0
# Slower than any disk: what takes longer hangs. A program that always hangs is found out by a known
# input: a session waits for that before it is ready, and goes on without the program.
_PATIENCE_SECONDS = 120.0
_PROOF_SECONDS = 5.0
_BYTES_PER_SECOND = 1_000_000
_LAST_WORDS_SECONDS = 10.0


class B3sum:
    """The program b3sum at that path."""

    def __init__(self, program: str) -> None:
        self._program = program

    def digests(
        self,
        files: Mapping[str, bytes],
        size: int,
        alive: Callable[[], None],
        directory: int = -1,
        fds: Sequence[int] = (),
    ) -> dict[str, bytes]:
        """Returns the digests of files, without those that cannot be read.

        files: what each name should hash to; names are relative to directory, or `by_descriptor` of
        one of fds. size: of all files together. alive is called every second, and may raise. Raises
        OSError where the program itself fails.
        """
        found = self._run(files, size, alive, directory, fds)
        if any(found.get(name, digest) != digest for name, digest in files.items()):
            self.prove()
        return found

    def keyed_sums(
        self, fds: Sequence[int], size: int, alive: Callable[[], None], key: bytes
    ) -> dict[str, bytes]:
        """Returns the keyed BLAKE3 of files, by `by_descriptor`, without those that cannot be read.
        Nobody here knows what is right. Raises OSError where the program itself fails.
        """
        return self._run([by_descriptor(fd) for fd in fds], size, alive, -1, fds, key)

    def prove(self, key: bytes = b"", output: bytes = KNOWN_OUTPUT) -> None:
        """Raises OSError unless it gives the known answer for a known input, and a known key."""
        fd = os.memfd_create("known")
        try:
            os.write(fd, KNOWN_INPUT)
            name = by_descriptor(fd)
            found = self._run([name], 0, lambda: None, -1, (fd,), key, _PROOF_SECONDS)
        finally:
            os.close(fd)
        if found != {name: output}:
            raise _broken("gives wrong answers")

    def _run(
        self,
        files: Collection[str],
        size: int,
        alive: Callable[[], None],
        directory: int,
        fds: Sequence[int],
        key: bytes = b"",
        patience: float = 0.0,
    ) -> dict[str, bytes]:
        import subprocess

        key_input, key_output = os.pipe()
        try:
            # A pipe takes so few bytes without a reader.
            os.write(key_output, key)
            os.close(key_output)
            process = subprocess.Popen(
                [self._program, *_OPTIONS, *(["--keyed"] if key else ()), *files],
                stdin=key_input,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=by_descriptor(directory) if directory >= 0 else None,
                pass_fds=fds,
            )
        except OSError as problem:
            raise _broken(f"cannot be started: {problem.strerror}") from None
        finally:
            os.close(key_input)
        patience = patience or _PATIENCE_SECONDS
        deadline = time.monotonic() + patience + size / _BYTES_PER_SECOND
        most = sum(len(name.encode()) + 67 for name in files)
        with process:
            try:
                said = _read(process, most, deadline, alive)
                status = process.wait(min(_LAST_WORDS_SECONDS, patience))
            except subprocess.TimeoutExpired:
                process.kill()
                raise _broken("does not end") from None
            except BaseException:
                process.kill()
                raise
        if status not in (_READABLE, _SOME_UNREADABLE):
            raise _broken(f"ended with status {status}")
        found = _parsed(said, files)
        if status == _READABLE and len(found) != len(files):
            raise _broken("left files out")
        return found


def find() -> B3sum | None:
    """Returns the one in the PATH, if it gives right answers. A relative PATH is not searched."""
    import shutil

    path = os.environ.get("PATH", os.defpath).split(":")
    program = shutil.which("b3sum", path=":".join(each for each in path if each[:1] == "/"))
    if program is None:
        return None
    found = B3sum(program)
    try:
        found.prove()
    except (OSError, AttributeError):  # No memfd: no Linux, and perhaps no /proc either.
        return None
    return found


def by_descriptor(fd: int) -> str:
    """Returns a name by which the program opens the very file that is open as fd."""
    return f"/proc/self/fd/{fd}"


def _read(
    process: subprocess.Popen[bytes], most: int, deadline: float, alive: Callable[[], None]
) -> bytes:
    assert process.stdout is not None
    fd = process.stdout.fileno()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    said = bytearray()
    while len(said) <= most:
        if poll.poll(_LOOK_SECONDS * 1000):
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return bytes(said)
            said += chunk
        else:
            alive()
        if time.monotonic() > deadline:
            raise _broken("does not end")
    raise _broken("says more than it was asked")


def _parsed(said: bytes, files: Collection[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for line in said.splitlines():
        match = _LINE.fullmatch(line)
        name = os.fsdecode(match[2]) if match is not None else ""
        if match is None or name not in files or name in found:
            raise _broken("says what is no digest of a file")
        found[name] = bytes.fromhex(match[1].decode("ascii"))
    return found


def _broken(what: str) -> OSError:
    """Returns an error of resources, since the program was right at the session's start."""
    return OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), f"b3sum {what}")
