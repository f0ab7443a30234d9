"""A server by SFTP, version 3, on stdin and stdout, that is told what to do wrong.

python sftp_server.py [FAULT]

It serves paths of this machine, as few of them as the tests need. FAULT is one of

    silent      says nothing at all
    noisy       prints a line before all else
    plain       has no extensions
    weak        has none, and a rename overwrites
    full        has no room: it refuses each write, and says that nothing is free
    broken      refuses each write, and tells no reason
    denied      opens no file for writing
    short       gives a part of what is asked for
    long        gives more than is asked for
    cut         ends at the second write
    lost        renames, and ends before it has said so
    endless     lists the same names again and again
    many        announces names that do not come
    strange     answers in a way that the protocol does not have
    smaller     tells of each file that it has one byte less
"""

from __future__ import annotations

import os
import struct
import sys
import time
from typing import BinaryIO

OK, EOF, MISSING, DENIED, FAILURE = range(5)
TEXTS = ["Success", "End of file", "No such file", "Permission denied", "Failure"]


def text(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def status(code: int) -> tuple[int, bytes]:
    return 101, struct.pack(">I", code) + text(TEXTS[code].encode()) + text(b"")


class Server:
    """Serves one client."""

    def __init__(self, fault: str, source: BinaryIO, out: BinaryIO) -> None:
        self.fault = fault
        self.source = source
        self.out = out
        self.handles: dict[bytes, int | list[str]] = {}
        self.writes = 0
        self.rest = b""

    def say(self, kind: int, payload: bytes) -> None:
        self.out.write(struct.pack(">IB", len(payload) + 1, kind) + payload)
        self.out.flush()

    def serve(self) -> None:
        while self.fault == "silent":
            time.sleep(1)
        if self.fault == "noisy":
            self.out.write(b"Welcome to this account\n")
        while head := self.source.read(5):
            length, kind = struct.unpack(">IB", head)
            self.rest = self.source.read(length - 1)
            if kind == 1:
                extensions = b""
                if self.fault not in ("plain", "weak"):
                    for name in (b"fsync@openssh.com", b"statvfs@openssh.com"):
                        extensions += text(name) + text(b"1")
                self.say(2, struct.pack(">I", 3) + extensions)
                continue
            number = self.take(4)
            try:
                answer, payload = self.answer(kind)
            except FileNotFoundError:
                answer, payload = status(MISSING)
            except PermissionError:
                answer, payload = status(DENIED)
            except OSError:
                answer, payload = status(FAILURE)
            self.say(answer, number + payload)

    def take(self, count: int) -> bytes:
        data, self.rest = self.rest[:count], self.rest[count:]
        return data

    def string(self) -> bytes:
        return self.take(struct.unpack(">I", self.take(4))[0])

    def number(self, form: str = ">I") -> int:
        number: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return number

    def attributes(self, path: str, *, follow: bool = False) -> bytes:
        found = os.stat(path, follow_symlinks=follow)
        size = found.st_size - (self.fault == "smaller")
        return struct.pack(">IQIII", 13, size, found.st_mode, 0, int(found.st_mtime))

    def new(self, what: int | list[str]) -> tuple[int, bytes]:
        handle = b"%d" % len(self.handles)
        self.handles[handle] = what
        return 102, text(handle)

    def answer(self, kind: int) -> tuple[int, bytes]:
        first = self.string()
        path = first.decode()
        if self.fault == "strange" and kind != 3:
            return 77, b"\xff"
        if kind == 3:
            flags = self.number()
            if flags & 2 and self.fault == "denied":
                return status(DENIED)
            opened = os.O_RDONLY if flags == 1 else os.O_WRONLY | os.O_CREAT | os.O_EXCL
            assert self.number() == 4
            return self.new(os.open(path, opened, self.number()))
        if kind == 4:
            closed = self.handles.pop(first)
            if isinstance(closed, int):
                os.close(closed)
            return status(OK)
        if kind == 5:
            start, length = self.number(">Q"), self.number()
            length += {"short": -(length // 3), "long": 9}.get(self.fault, 0)
            fd = self.handles[first]
            assert isinstance(fd, int)
            data = os.pread(fd, length, start)
            return (103, text(data)) if data else status(EOF)
        if kind == 6:
            self.writes += 1
            if self.fault == "cut" and self.writes == 2:
                sys.exit()
            if self.fault in ("full", "broken"):
                return status(FAILURE)
            fd = self.handles[first]
            assert isinstance(fd, int)
            start = self.number(">Q")
            os.pwrite(fd, self.string(), start)
            return status(OK)
        if kind in (7, 17):
            return 105, self.attributes(path, follow=kind == 17)
        if kind == 11:
            names = sorted(os.listdir(path))
            return self.new([path, *names])
        if kind == 12:
            return self.listed(first)
        if kind == 13:
            os.unlink(path)
        elif kind == 14:
            assert self.number() == 4
            os.mkdir(path, self.number())
        elif kind == 15:
            os.rmdir(path)
        elif kind == 18:
            to = self.string().decode()
            if self.fault != "weak" and os.path.exists(to):
                return status(FAILURE)
            os.rename(path, to)
            if self.fault == "lost":
                sys.exit()
        elif path == "statvfs@openssh.com":
            free = 0 if self.fault == "full" else 1 << 40
            return 201, struct.pack(">11Q", 1, 1, free, free, free, 9, 9, 9, 0, 0, 255)
        else:
            assert path == "fsync@openssh.com"
        return status(OK)

    def listed(self, handle: bytes) -> tuple[int, bytes]:
        found = self.handles[handle]
        assert isinstance(found, list)
        path, *names = found
        if not names:
            return status(EOF)
        if self.fault != "endless":
            self.handles[handle] = [path]
        count = 1_000_000 if self.fault == "many" else len(names)
        entries = (
            text(name.encode()) + text(b"") + self.attributes(f"{path}/{name}") for name in names
        )
        return 104, struct.pack(">I", count) + b"".join(entries)


if __name__ == "__main__":
    Server((sys.argv[1:] or [""])[0], sys.stdin.buffer, sys.stdout.buffer).serve()
