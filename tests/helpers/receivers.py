"""Receivers for tests: driven frame by frame, traced by strace, or lying.

Tests drive a receiver frame by frame, as a child (`RemoteReceiver`) or in this process
(`ScriptedSession`); the product's own sender would not send what half of them are about.

    with RemoteReceiver(root, trace("-y", "-e", "trace=write,fsync")) as receiver:
        ...
    seen = Events(tmp_path / "trace")
    assert seen.first("write", "content") < seen.first("fsync", "content")
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from ntt_backup.client.bootstrap import bundle
from ntt_backup.receiver import b3sum, codec, hashing
from ntt_backup.receiver.dispatcher import Receiver
from ntt_backup.receiver.terms import Terms
from ntt_backup.wire import framing, messages
from ntt_backup.wire.framing import Inbox
from ntt_backup.wire.messages import Receipt
from ntt_backup.wire.stored_names import DUMPS, SNAPSHOTS
from tests.helpers.waiting import PATIENCE

PROJECT = Path(__file__).resolve().parents[2]
TO_CLIENT = messages.to_client(messages.ANY)

BYE = messages.BYE.frame()
PING = messages.PING.frame(bytes(8))
PLACE = messages.PLACE.frame()


def commit(number: int) -> bytes:
    return messages.COMMIT.frame(number)


def abort(number: int) -> bytes:
    return messages.ABORT.frame(number)


def ask_hashes(digests: Iterable[bytes]) -> bytes:
    return messages.HASH.frame(messages.BLAKE3, digests)


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


def frames(data: bytes, lengths: dict[int, tuple[int, int]]) -> Iterator[tuple[int, memoryview]]:
    """The whole frames in data, which must have no others. lengths: of each kind's payload."""
    inbox = Inbox(lengths)
    inbox.space()[: len(data)] = data
    inbox.filled(len(data))
    yield from iter(inbox.next, None)
    assert inbox.waiting == 0


def litter(root: Path) -> list[str]:
    """What lies below .ntt-incoming, the directories included."""
    incoming = root / ".ntt-incoming"
    return sorted(str(path.relative_to(incoming)) for path in incoming.rglob("*"))


def lock_only(root: Path) -> bool:
    """Whether nothing but the living session's lock lies in its stage."""
    (stage, lock) = litter(root)
    return lock == f"{stage}/lock"


def everything(root: Path) -> dict[str, bytes]:
    """What lies below the root, scratch space included."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b""
        for path in root.rglob("*")
    }


def verdicts(receipt: Receipt) -> dict[int, int]:
    """The exceptions of a receipt, by position."""
    assert receipt.outcome == messages.SETTLED, receipt
    return {position: verdict for position, verdict, _ in receipt.exceptions}


def failure(receipt: Receipt) -> str:
    """The reason for which nothing of the batch counts."""
    assert (receipt.outcome, receipt.stored) == (messages.FAILED, 0)
    (exception,) = receipt.exceptions
    return exception.text


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


def an_unnamed_file(content: bytes, slot: int = 0) -> bytes:
    """What a client says to send a file, but for its name."""
    pieces = (content[at : at + framing.MAX_CHUNK] for at in range(0, len(content), 1 << 20))
    data = b"".join(messages.FILE_DATA.frame(slot, piece) for piece in pieces)
    return data + messages.FILE_END.frame(slot)


def a_file(content: bytes, name: str, slot: int = 0) -> bytes:
    """All that a client says to send a file."""
    return an_unnamed_file(content, slot) + messages.PUBLISH.frame(slot, name)


def a_record(content: bytes, **record: Any) -> bytes:
    """The record of a dump. record: what it says that is not so."""
    digest = hashlib.sha256(content).hexdigest()
    said = {"target": "remote", "database": "x", "bytes": len(content), "sha256": digest, **record}
    return json.dumps(said).encode()


def a_dump(content: bytes, name: str, **record: Any) -> bytes:
    """All that a client says to send a dump. record: what its record says that is not so."""
    beside = a_file(a_record(content, **record), f"{name}.json", slot=1)
    return an_unnamed_file(content) + beside + messages.PUBLISH.frame(0, name)


class Frames:
    """Makes what a client says. hash: that of its session. names: that of names."""

    def __init__(self, root: Path, hash: str = "sha256") -> None:
        self.root = root
        self.hash = hash
        self.names = "blake3"

    def hello_fields(self, **changes: Any) -> dict[str, Any]:
        fields = {
            "protocol": framing.PROTOCOL,
            "root": str(self.root),
            "owner": "0123456789ab",
            "run": "11111111-2222-4333-8444-555555555555",
            "slot": "0",
            "hash": self.hash,
            "sync": "syncfs",
            **({"names": self.names} if self.names != "blake3" else {}),
            **changes,
        }
        self.hash = str(fields["hash"])
        return fields

    def hello_frame(self, **changes: Any) -> bytes:
        return messages.HELLO.frame(self.hello_fields(**changes))

    def pack(
        self,
        contents: Sequence[bytes],
        digests: Sequence[bytes] | None = None,
        codec: int = messages.RAW,
        compress: Any = bytes,
        checksum: bytes | None = None,
    ) -> bytes:
        names = [digest_of(content) for content in contents] if digests is None else digests
        raw = messages.table(names, [len(each) for each in contents]) + b"".join(contents)
        return self.raw_pack(raw, codec, compress(raw), checksum=checksum)

    def raw_pack(
        self,
        raw: bytes,
        codec: int = messages.RAW,
        part: bytes | None = None,
        length: int | None = None,
        checksum: bytes | None = None,
    ) -> bytes:
        """A PACK that says it is raw. part and length: what it has instead, and announces."""
        if checksum is None:
            checksum = hashlib.sha256(raw).digest()
        if self.hash == self.names:
            checksum = b""
        prefix = messages.part_prefix(codec, len(raw) if length is None else length, checksum)
        return framing.frame(messages.PACK, prefix, raw if part is None else part)

    def pieces(self, content: bytes) -> Iterable[bytes]:
        """The DATA frames of a large blob."""
        for at in range(0, len(content), framing.MAX_CHUNK):
            piece = content[at : at + framing.MAX_CHUNK]
            prefix = messages.part_prefix(messages.RAW, len(piece))
            yield framing.frame(messages.DATA, prefix, piece)

    def end(self, content: bytes, digest: bytes | None = None) -> bytes:
        """The END of a large blob that is complete; digest: its name, if that is not its own."""
        name = digest_of(content) if digest is None else digest
        checksum = hashlib.sha256(name + content).digest() if self.hash != self.names else b""
        return messages.END.frame(messages.COMPLETE, checksum)

    def large(self, content: bytes, offset: int = 0, digest: bytes | None = None) -> bytes:
        """LARGE to END, from offset on."""
        name = digest_of(content) if digest is None else digest
        return b"".join(
            [
                messages.LARGE.frame(name, len(content), offset),
                *self.pieces(content[offset:]),
                self.end(content, digest),
            ]
        )

    def batch(
        self,
        number: int,
        contents: Sequence[bytes],
        digests: Sequence[bytes] | None = None,
        large: bool = False,
        **how: Any,
    ) -> bytes:
        """A whole batch: BATCH, one PACK or large blobs, COMMIT."""
        said = messages.BATCH.frame(number, len(contents), sum(map(len, contents)))
        if large:
            names = [None] * len(contents) if digests is None else digests
            pairs = zip(contents, names, strict=True)
            said += b"".join(self.large(content, digest=name) for content, name in pairs)
        else:
            said += self.pack(contents, digests, **how)
        return said + commit(number)


class Client(Frames):
    """The client's end of a session, over two pipes."""

    stdin: Any
    stdout: Any

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._inbox = Inbox(TO_CLIENT)

    def write(self, *data: bytes) -> None:
        self.stdin.write(b"".join(data))
        self.stdin.flush()

    def hello(self, *, place: bool = True, **changes: Any) -> dict[str, Any]:
        """Say HELLO with what any client says, but for changes; the READY. place: have by-hash made
        where it is missing.
        """
        ready = self._ready(self.hello_frame(**changes))
        if place and not ready["placed"] and not changes.get("reading"):
            ready = self._ready(PLACE)
        return ready

    def _ready(self, frame: bytes) -> dict[str, Any]:
        kind, payload = self.ask(frame)
        assert kind == messages.READY, payload
        return messages.READY.read(payload)

    def ask(self, frame: bytes) -> tuple[int, bytes]:
        self.write(frame)
        return self.answer()

    def ping(self) -> None:
        """Returns when all that was said before has been taken in."""
        assert self.ask(PING) == (messages.PONG, bytes(8))

    def frame(self) -> tuple[int, bytes]:
        """The next frame; (0, b"") at the end."""
        while (found := self._inbox.next()) is None:
            count = os.readv(self.stdout.fileno(), [self._inbox.space()])
            if count == 0:
                return 0, b""
            self._inbox.filled(count)
        return found[0], bytes(found[1])

    def answer(self) -> tuple[int, bytes]:
        """The next frame that is not a sign of life."""
        while (found := self.frame())[0] == messages.BUSY:
            pass
        return found

    def receipt(self) -> Receipt:
        kind, payload = self.answer()
        assert kind == messages.RECEIPT, (kind, payload)
        return messages.RECEIPT.read(payload)

    def error(self) -> tuple[str, str]:
        """The ERROR that must come next, and nothing after it."""
        kind, payload = self.answer()
        assert kind == messages.ERROR, (kind, payload)
        assert self.answer() == (0, b"")
        return messages.ERROR.read(payload)


class RemoteReceiver(Client):
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
        super().__init__(root)
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
        self.stdin, self.stdout = self.child.stdin, self.child.stdout
        if source:
            self._line(b"NTT-LOADER ")
            self.write(source)
        words = self._line(b"NTT-RECEIVE ").split()
        self.protocol = words[1]
        self.banner = dict(word.split("=", 1) for word in words[2:])

    def __enter__(self) -> RemoteReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.child.kill()
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout, self.child.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _line(self, start: bytes) -> str:
        while line := self.stdout.readline():
            if line.startswith(start):
                return str(line.decode())
        raise AssertionError(self.stderr() or "no banner")

    def bye(self) -> int:
        """BYE, and the exit status; what came meanwhile is dropped."""
        self.write(BYE)
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

    def peak_kilobytes(self) -> int:
        """The most memory that it has used."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        (peak,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        return int(peak)


class ScriptedSession(Frames):
    """A receiver in this process, from a file into a file: all is said before anything is answered,
    so hundreds of sessions fit into seconds. Answers are all frames of the last session.
    """

    def __init__(
        self,
        root: Path,
        allow: Iterable[str] = ("put",),
        checking: str = "blake3",
        hash: str = "sha256",
        require: Iterable[str] = (),
    ) -> None:
        super().__init__(root, hash)
        hashes = hashing.available()
        if checking != "blake3":
            del hashes[messages.BLAKE3]
        program = b3sum.find() if checking == "b3sum" else None
        self._terms = Terms(
            str(root),
            frozenset(allow),
            60.0,
            hashes,
            codec.available(),
            program,
            frozenset(require),
        )
        self._area = SNAPSHOTS
        self.status = -1
        self.answers: list[tuple[int, bytes]] = []

    def say(self, *said: bytes, **hello: Any) -> ScriptedSession:
        """One session, from HELLO to the end of what is said."""
        hash, frame = self.hash, self.hello_frame(**{"sync": "fsync", **hello})
        self.hash = hash
        return self.send(frame, *said)

    def read(self, *asked: bytes) -> ScriptedSession:
        return self.say(*asked, reading=1)

    def dumps(self, *said: bytes) -> ScriptedSession:
        """A session for dumps of the catalog."""
        return self._files(DUMPS, *said)

    def snapshots(self, *said: bytes) -> ScriptedSession:
        return self._files(SNAPSHOTS, *said)

    def _files(self, area: str, *said: bytes) -> ScriptedSession:
        self._area = area
        return self.say(*said, files=area)

    def send(self, *said: bytes) -> ScriptedSession:
        """One session without a HELLO of its own. Once begun, it leaves no descriptor open."""
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as sink:
            source.write(b"".join(said))
            source.seek(0)
            before = len(os.listdir("/proc/self/fd"))
            self.status = Receiver(self._terms, source.fileno(), sink.fileno()).run()
            after = len(os.listdir("/proc/self/fd"))
            sink.seek(0)
            data = sink.read()
        found = frames(data, TO_CLIENT)
        self.answers = [(kind, bytes(payload)) for kind, payload in found if kind != messages.BUSY]
        # What an earlier test has left may be collected, and closed, meanwhile.
        assert after <= before or messages.READY not in self.kinds
        return self

    @property
    def kinds(self) -> list[int]:
        return [kind for kind, _ in self.answers]

    @property
    def error(self) -> str:
        """The code of the ERROR that ended the session; empty where there was none."""
        kind, payload = self.answers[-1]
        assert (kind == messages.ERROR) == (self.status == 1)
        return messages.ERROR.read(payload)[0] if kind == messages.ERROR else ""

    @property
    def error_text(self) -> str:
        return messages.ERROR.read(self.answers[-1][1])[1]

    def said(self) -> list[int]:
        """What was said of files."""
        said = [payload for kind, payload in self.answers if kind == messages.FILE_SAID]
        return [messages.FILE_SAID.read(payload)[0] for payload in said]

    def sums(self) -> list[tuple[int, bytes]]:
        """The sums of files that have ended."""
        said = [payload for kind, payload in self.answers if kind == messages.FILE_SUM]
        return [messages.FILE_SUM.read(payload) for payload in said]

    def listed(self) -> list[tuple[str, int]]:
        """The files that were listed."""
        pages = [payload for kind, payload in self.answers if kind == messages.FILE_NAMES]
        return [
            (name, size)
            for payload in pages
            for name, size, _ in messages.FILE_NAMES.read(payload, self._area)
        ]

    def receipts(self) -> list[Receipt]:
        return [
            messages.RECEIPT.read(payload)
            for kind, payload in self.answers
            if kind == messages.RECEIPT
        ]


_LINE = re.compile(r"^\d+ +(<\.\.\. )?(\w+)")

Trace = Callable[..., list[str]]


@pytest.fixture
def trace(root: Path, tmp_path: Path) -> Trace:
    """The start of a command that runs the receiver under strace.

    options are strace's; allow: what the receiver may do.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True)
    if tried.returncode != 0:
        pytest.skip(f"no ptrace here: {tried.stderr.decode()[-100:]}")

    def command(*options: str, allow: str = "put,replace") -> list[str]:
        receiver = forced_command("--root", str(root), "--allow", allow)
        return ["strace", "-f", "-o", str(tmp_path / "trace"), *options, *receiver]

    return command


class Events:
    """Begins and ends of system calls in the order strace saw them."""

    def __init__(self, trace: Path) -> None:
        self.lines = trace.read_text().splitlines()

    def first(self, call: str, text: str, after: int = -1, ended: bool = True) -> int:
        """The line where the first such call after that line ends, or begins."""
        return next(at for at in self._all(call, text, ended) if at > after)

    def last(self, call: str, text: str, before: int, ended: bool = True) -> int:
        return max(at for at in self._all(call, text, ended) if at < before)

    def count(self, call: str, text: str, after: int, before: int) -> int:
        return sum(after < at < before for at in self._all(call, text, ended=True))

    def _all(self, call: str, text: str, ended: bool) -> Iterator[int]:
        begun: dict[str, bool] = {}
        for at, line in enumerate(self.lines):
            match = _LINE.match(line)
            if match is None or match[2] != call:
                continue
            thread = line.split()[0]
            if match[1]:  # The end of a call that began above.
                if ended and begun.pop(thread, False):
                    yield at
                continue
            if text in line:
                unfinished = line.endswith("<unfinished ...>")
                begun[thread] = unfinished
                if not ended or not unfinished:
                    yield at


# A receiver that greets correctly, and then lies. A test puts its answer to each question in the
# place of `{answer}`: statements that `say` frames.
LYING_RECEIVER = """
import os
from ntt_backup.wire.framing import *
from ntt_backup.wire.messages import *
inbox = Inbox(to_receiver(ANY))
words = b"version=0 python=3.11.0 hash=blake3 codec=zlib "
words += b"allow=list,get,verify,replace,dump,snapshot"
os.write(1, b"\\nNTT-RECEIVE 1 " + words + b"\\n")
def say(frame): os.write(1, frame)
A, B, C = bytes(32), b"\\x01" * 32, b"\\x02" * 32
while True:
    count = os.readv(0, [inbox.space()])
    if not count: break
    inbox.filled(count)
    while (found := inbox.next()) is not None:
        if found[0] == HELLO: say(READY.frame({"placed": 1}))
        if found[0] in (*range(LIST, GET + 1), FILES, READ, REMOVE, FILE_END, PUBLISH):
            {answer}
"""
