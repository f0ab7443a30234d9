"""The `tar` strategy sends batches as tar archives, back to back over one ssh connection.

`tar | ssh | tar` pays ssh's handshake for every batch; at 28 ms that is most of the time for small
blobs. Here a small loop in the remote's shell (`tar_loop.sh`) takes one archive after the other
from its stdin. It knows where each ends because its length is sent first, which is known before tar
has run (see `archive_length`).

The next batch is sent while the remote still extracts and syncs the last one. After the archive
comes one more line: `commit`, once the local tar has ended well, its length was as announced, and
every blob is still the file that was inspected; else `abort`. Only then does the remote publish
anything. So a blob that changes while tar reads it never arrives. The length alone would not show
it: tar pads a file that became shorter.

The remote needs sh and tar, and nothing of ours. It does not hash; the source is hashed before it
is sent instead (`run.verify_source`), and ssh guards the bytes on the way.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import BinaryIO, Final

from ntt_backup.blobdir.layout import BY_HASH_LAYOUT, Layout
from ntt_backup.client.channel import NOISE_LIMIT
from ntt_backup.client.remote_errors import (
    explain_another,
    explain_batch,
    explain_gone,
    explain_root,
)
from ntt_backup.client.remote_shell import shell_script
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.errors import BatchRejected, ProtocolViolation, SourceError
from ntt_backup.model import Batch, Blob, total_size
from ntt_backup.process.spawn import Child, start
from ntt_backup.source.store import Inspection, Store
from ntt_backup.upload.strategies.in_flight import Flight, PipelinedSession

_GREETING: Final = re.compile(rb"^NTT-TAR 2 (ready|fatal|gone|another) (.*)$")
_LAST_WORD: Final = b"\nNTT-TAR 2 end\n"
_BLOCK: Final = 512
_RECORD: Final = 20 * _BLOCK


def _loop(spec: SessionSpec) -> tuple[str, bytes]:
    """Returns the remote command that runs the loop, and the script for its stdin."""
    loop = resources.files(__package__).joinpath("tar_loop.sh").read_text("utf-8")
    session = {"owner": spec.owner, "run": spec.run_id, "slot": spec.slot}
    values = {"root": spec.root, **session, "token": secrets.token_hex(8)}
    values["identity"] = spec.identity
    return shell_script(loop, values)


class TarSession(PipelinedSession):
    """See `session.Session`."""

    def __init__(self, spec: SessionSpec, store: Store) -> None:
        command, script = _loop(spec)
        super().__init__(spec, spec.channel(command))
        self._numbers = count(1)
        self._store = store
        self._line = b""
        self._extracted = ""
        try:
            self._lockstep = self._greet(script)
        except BaseException:
            self.abort()
            raise

    def put(self, batch: Batch) -> None:
        started = time.monotonic()
        checked = self._store.inspect(batch.blobs, verify=self._spec.run.verify_source)
        ready = checked.ready
        flight = Flight(next(self._numbers), batch, started, sent=ready, failed=checked.failed)
        if not ready:
            self._confirm(flight, ())
            return
        flight.wire_bytes = length = archive_length(blob.size or 0 for blob in ready)
        self._flights.append(flight)
        files = len({blob.blobid for blob in ready})
        self._send(f"{flight.number} {length} {files}\n".encode())
        self._announce_content(flight, total_size(ready), length)
        try:
            problem = self._send_archive(ready, length) or self._alteration(checked)
        except SourceError:
            self.abort()
            raise
        if problem is not None and not self._usable:
            self._flights.remove(flight)
            raise problem
        if self._lockstep:
            self._await(lambda: self._extracted == str(flight.number), flight)
        self._send(b"commit\n" if problem is None else b"abort\n")
        flight.handed_over = time.monotonic()
        if problem is not None:
            flight.aborted = True
            self._correct_content(flight, 0)
            raise problem

    def close(self) -> None:
        if self._usable:
            self._usable = False
            self.channel.close(_LAST_WORD)

    def _greet(self, script: bytes) -> bool:
        """Starts the remote loop; returns whether the two sides must take turns (lockstep)."""
        patience = self._spec.transport.connect_timeout
        said = self.channel.greet(script, _GREETING, patience, doing="starting our loop")
        verdict, text = said[1].decode(), said[2].decode("utf-8", "backslashreplace")
        if verdict == "fatal":
            raise explain_root(text)
        if verdict == "gone":
            raise explain_gone(text)
        if verdict == "another":
            raise explain_another(self._spec.identity, text)
        return text == "lockstep"

    def _send_archive(self, ready: Sequence[Blob], length: int) -> BatchRejected | None:
        """Runs tar over the blobs into the connection; returns what went wrong with tar.

        When tar wrote another length than announced, the remote no longer knows where the archive
        ends: the session is aborted.
        """
        layout = self._store.layout
        with name_list(layout.path_of(blob.blobid) for blob in ready) as names:
            tar = start(
                tar_argv(self._store.root, layout),
                stdin=names.fileno(),
                env=tar_environment(os.environ),
                capable=True,  # It reads the store.
            )
        try:
            sent = self._pump(tar, length)
            status = tar.wait(self._spec.run.stall_timeout)
        finally:
            tar.kill()
        detail = tar.stderr.text or f"tar ended with status {status}"
        if sent != length:
            self.abort()
            return BatchRejected(
                "tar did not write what was announced",
                detail=f"{sent} of {length} bytes; {detail}",
                hint="a blob changed while it was read; it is examined again",
            )
        return BatchRejected("tar failed on a batch", detail=detail) if status != 0 else None

    def _alteration(self, checked: Inspection) -> BatchRejected | None:
        """Returns the error where what was sent is not what was inspected."""
        altered = self._store.altered(checked)
        if not altered:
            return None
        more = f", and {len(altered) - 1} more" if len(altered) > 1 else ""
        return BatchRejected(
            "a blob changed while it was sent",
            detail=f"{self._store.layout.path_of(altered[0].blobid)}{more}",
            hint="it is examined again",
        )

    def _pump(self, tar: Child, length: int) -> int:
        """Copies tar's output to the connection; returns its length, as far as it was read."""
        sent = 0
        while data := self._next_chunk(tar):
            if sent + len(data) > length:
                return sent + len(data)
            self._send(data, _error_fd(tar))
            tar.drain_stderr()
            sent += len(data)
        return sent

    def _next_chunk(self, tar: Child) -> bytes:
        """Returns output of tar, b"" at its end. Raises SourceError when the store hangs."""
        waiting_since = time.monotonic()
        while (data := tar.read()) is None:
            if time.monotonic() - waiting_since > self._spec.run.stall_timeout:
                raise SourceError(
                    "the store does not answer",
                    detail=f"tar read nothing for {self._spec.run.stall_timeout:.0f} s",
                    hint=f"look at the disk of {self._store.root}",
                )
            self._hear(1.0, [tar.stdout_fd, *_error_fd(tar)])
            tar.drain_stderr()
        return data

    def _take(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._answer(line.decode("utf-8", "backslashreplace"))
        if len(self._line) > NOISE_LIMIT:
            raise ProtocolViolation(detail="no line end")

    def _answer(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        number, _, text = rest.partition(" ")
        if word == "got":
            self._extracted = number
            return
        if not self._flights or number != str(self._flights[0].number):
            raise ProtocolViolation(detail=line[:200])
        if word == "gone":
            raise explain_gone(text)
        if word == "another":
            raise explain_another(self._spec.identity, text)
        flight = self._flights.popleft()
        if flight.aborted:
            return
        if word == "ok":
            self._confirm(flight, flight.sent)
        elif word == "err":
            self._reject(flight, explain_batch(text))
        else:
            raise ProtocolViolation(detail=line[:200])


def _error_fd(child: Child) -> list[int]:
    return [child.stderr_fd] if child.stderr_fd >= 0 else []


def archive_length(sizes: Iterable[int]) -> int:
    """Returns the bytes of the archive that tar_argv writes for files of these sizes (bytes).

    With the GNU format and names under 100 characters, an archive is a 512-byte header a file, the
    content padded to 512, two empty blocks, and padding to records of 10 KiB. So its length follows
    from the sizes alone, provided that tar is told every option that could change it.
    """
    blocks = sum(1 + -(-size // _BLOCK) for size in sizes)
    return -(-(blocks + 2) * _BLOCK // _RECORD) * _RECORD


def tar_argv(root: Path, layout: Layout = BY_HASH_LAYOUT) -> list[str]:
    """Returns the argv of the local tar: NUL-separated names, relative to root, come from stdin.

    Every option that would change the length or what arrives is named: hard links are sent as
    content, owners and modes are fixed, and no name is read as an option. In the archive the blobs
    lie as they do on every target.
    """
    return [
        "tar",
        "--create",
        "--file=-",
        "--format=gnu",
        "--blocking-factor=20",
        "--no-recursion",
        "--hard-dereference",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "--mode=0644",
        *_renaming(layout),
        f"--directory={root}",
        "--null",
        "--verbatim-files-from",
        "--files-from=-",
    ]


def _renaming(layout: Layout) -> list[str]:
    """Returns the option by which tar makes aa/bb/<blobid> of a path in a layout."""
    if layout.text == BY_HASH_LAYOUT.text:
        return []
    # The digits in groups, each of which is in one directory of both layouts.
    ends = {*accumulate(layout.widths)} if layout.file_at else set()
    cuts = sorted({2, 4, *ends})
    pattern = "^" if layout.file_at else "^.*/"
    for begin, end in pairwise([0, *cuts]):
        pattern += f"\\({'.' * (end - begin)}\\)" + ("/" if end in ends else "")
    above, below = (
        "".join(f"\\{number}" for number, end in enumerate(cuts, 1) if low < end <= low + 2)
        for low in (0, 2)
    )
    return [f"--transform=s,{pattern}\\(.*\\)$,{above}/{below}/{_all(len(cuts) + 1)},"]


def _all(groups: int) -> str:
    return "".join(f"\\{number}" for number in range(1, groups + 1))


def name_list(paths: Iterable[str]) -> BinaryIO:
    """Returns the stdin for tar_argv, an anonymous file: nothing is left to clean up."""
    names = os.fdopen(os.memfd_create("ntt-names", os.MFD_CLOEXEC), "wb")
    names.write(b"".join(path.encode() + b"\0" for path in paths))
    names.seek(0)
    return names


def tar_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns environ without TAR_OPTIONS and the like, and with messages in plain English."""
    hidden = {"TAR_OPTIONS", "POSIXLY_CORRECT", "TAPE"}
    return {**{k: v for k, v in environ.items() if k not in hidden}, "LC_ALL": "C"}
