"""A small client of the `stream` protocol, which can also misbehave, and its receiver as a child.

The tests drive the receiver with it frame by frame; the product's own sender would not send what
half of them are about.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from ntt_backup.client.bootstrap import bundle
from ntt_backup.wire import framing, read_messages, write_messages
from ntt_backup.wire.framing import Inbox
from ntt_backup.wire.write_messages import Receipt
from tests.patience import PATIENCE

PROJECT = Path(__file__).resolve().parent.parent


def digest_of(content: bytes) -> bytes:
    return blake3(content).digest()


def place_of(root: Path, digest: bytes) -> Path:
    name = digest.hex()
    return root / "by-hash" / name[:2] / name[2:4] / name


def put(root: Path, digest: bytes, content: bytes) -> Path:
    """Content under a digest's name, as somebody else may have left it there."""
    path = place_of(root, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names_under(root: Path) -> set[str]:
    """Every name below by-hash that is no directory."""
    by_hash = root / "by-hash"
    return {path.name for path in by_hash.rglob("*") if not path.is_dir() or path.is_symlink()}


def assert_complete(root: Path) -> None:
    """Whatever is visible hashes to its own name."""
    for path in (root / "by-hash").rglob("*"):
        if path.is_file():
            assert blake3(path.read_bytes()).hexdigest() == path.name


def litter(root: Path) -> list[str]:
    """What lies below .ntt-incoming, the directories included."""
    incoming = root / ".ntt-incoming"
    return sorted(str(path.relative_to(incoming)) for path in incoming.rglob("*"))


def forced_command(*options: str, checking: str = "blake3") -> list[str]:
    """A receiver with these options. checking: what it has to check names with, `blake3` in its
    Python, the program `b3sum`, or `none`.
    """
    program = "from ntt_backup.receiver.__main__ import main; raise SystemExit(main())"
    if checking == "blake3":
        return [sys.executable, "-c", program, *options]
    lacking = "from ntt_backup.receiver import hashing; hashing.LIBRARIES = (); "
    if checking == "none":
        lacking += "import os; os.environ['PATH'] = '/nowhere'; "
    elif shutil.which("b3sum") is None:
        pytest.skip("b3sum is not installed")
    return [sys.executable, "-S", "-c", lacking + program, *options]


class FarSide:
    """A receiver as a child, and the client's end of its two pipes.

    command: how it is started; None for the loader and the bundle, the way a login shell gets them.
    shell and python: which ones those are.
    """

    def __init__(
        self,
        root: Path,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        shell: str = "sh",
        python: str = sys.executable,
        cwd: Path | None = None,
    ) -> None:
        self.root = root
        self.hash = "sha256"
        remote_command, source = bundle()
        if command is None:
            remote_command = remote_command.replace("exec python3", f"exec {python}")
            command = [*shell.split(), "-c", remote_command]
        else:
            source = b""
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(PROJECT), **(env or {})},
        )
        self._timer = threading.Timer(PATIENCE, self.child.kill)
        self._timer.start()
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.stdin, self.stdout = self.child.stdin, self.child.stdout
        if source:
            self._line(b"NTT-LOADER ")
            self.write(source)
        words = self._line(b"NTT-RECEIVE ").split()
        self.protocol = words[1]
        self.banner = dict(word.split("=", 1) for word in words[2:])
        self._inbox = Inbox({**write_messages.TO_CLIENT, **read_messages.TO_CLIENT})

    def __enter__(self) -> FarSide:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.child.kill()
        self.child.wait()
        for stream in (self.stdin, self.stdout, self.child.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _line(self, start: bytes) -> str:
        while line := self.stdout.readline():
            if line.startswith(start):
                return line.decode()
        stderr = self.child.stderr
        raise AssertionError(stderr.read() if stderr is not None else "no banner")

    # --- the client's side of the protocol

    def write(self, data: bytes) -> None:
        self.stdin.write(data)
        self.stdin.flush()

    def hello(self, *, place: bool = True, **changes: Any) -> dict[str, Any]:
        """Say HELLO with what any client says, but for changes; the READY. place: have by-hash made
        where it is missing.
        """
        ready = self._ready(write_messages.fields(framing.HELLO, self.hello_fields(**changes)))
        if place and not ready["placed"] and not changes.get("reading"):
            ready = self._ready(framing.frame(framing.PLACE))
        return ready

    def _ready(self, frame: bytes) -> dict[str, Any]:
        kind, payload = self.ask(frame)
        assert kind == framing.READY, payload
        return write_messages.read_fields(payload)

    def hello_fields(self, **changes: Any) -> dict[str, Any]:
        fields = {
            "protocol": framing.PROTOCOL,
            "root": str(self.root),
            "owner": "0123456789ab",
            "run": "11111111-2222-4333-8444-555555555555",
            "slot": "0",
            "hash": "sha256",
            "sync": "syncfs",
            **changes,
        }
        self.hash = str(fields["hash"])
        return fields

    def ask(self, frame: bytes) -> tuple[int, bytes]:
        self.write(frame)
        return self.answer()

    def answer(self) -> tuple[int, bytes]:
        """The next frame that is not a sign of life; (0, b"") at the end."""
        while True:
            found = self._inbox.next()
            if found is None:
                space = self._inbox.space()
                count = os.readv(self.stdout.fileno(), [space])
                if count == 0:
                    return 0, b""
                self._inbox.filled(count)
            elif found[0] != framing.BUSY:
                return found[0], bytes(found[1])

    def receipt(self) -> Receipt:
        kind, payload = self.answer()
        assert kind == framing.RECEIPT, (kind, payload)
        return write_messages.read_receipt(payload)

    def error(self) -> tuple[str, str]:
        """The ERROR that must come next, and nothing after it."""
        kind, payload = self.answer()
        assert kind == framing.ERROR, (kind, payload)
        assert self.answer() == (0, b"")
        return write_messages.read_error(payload)

    def pack(
        self,
        contents: Sequence[bytes],
        digests: Sequence[bytes] | None = None,
        codec: int = write_messages.RAW,
        compress: Any = bytes,
        checksum: bytes | None = None,
    ) -> bytes:
        if digests is None:
            digests = [digest_of(content) for content in contents]
        raw = write_messages.table(digests, [len(content) for content in contents]) + b"".join(
            contents
        )
        if checksum is None:
            checksum = hashlib.sha256(raw).digest()
        if self.hash != "sha256":
            checksum = b""
        return framing.frame(
            framing.PACK,
            write_messages.part_prefix(codec, len(raw), checksum),
            compress(raw),
        )

    def batch(self, number: int, contents: Sequence[bytes], **how: Any) -> bytes:
        """A whole batch of small blobs: BATCH, one PACK, COMMIT."""
        return b"".join(
            [
                write_messages.batch(number, len(contents), sum(map(len, contents))),
                self.pack(contents, **how),
                write_messages.numbered(framing.COMMIT, number),
            ]
        )

    def pieces(self, content: bytes, size: int = framing.MAX_CHUNK) -> Iterable[bytes]:
        """The DATA frames of a large blob."""
        for at in range(0, len(content), size):
            piece = content[at : at + size]
            prefix = write_messages.part_prefix(write_messages.RAW, len(piece))
            yield framing.frame(framing.DATA, prefix, piece)

    def end(self, content: bytes, digest: bytes | None = None) -> bytes:
        """The END of a large blob that is complete; digest: its name, if that is not its own."""
        name = digest_of(content) if digest is None else digest
        checksum = hashlib.sha256(name + content).digest() if self.hash == "sha256" else b""
        return write_messages.end(write_messages.COMPLETE, checksum)

    def bye(self) -> int:
        """BYE, and the exit status; what came meanwhile is dropped."""
        self.write(framing.frame(framing.BYE))
        return self.hang_up()

    def hang_up(self) -> int:
        """The end of the client's input, and the exit status."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        while self.answer() != (0, b""):
            pass
        return self.child.wait(PATIENCE)

    def stderr(self) -> str:
        assert self.child.stderr is not None
        return self.child.stderr.read().decode()
