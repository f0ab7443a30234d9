"""A file store in memory: the contract of `filestore.contract`, faults on request, and counts.

store = MemoryStore()
store.before = lambda verb, name: ...     # may raise: the request did not arrive
store.requests["read"]                    # ranges asked for
store.append_only = True                  # nothing may be removed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256

from ntt_backup.errors import NameTaken, RemoteDenied
from ntt_backup.filestore.contract import Area, Buffer, FileMissing, Range, StoredFile, Sum
from ntt_backup.snapshot.names import SNAPSHOTS, FileName
from ntt_backup.wire.stored_names import begun


def _nothing(verb: str, name: str) -> None: ...


class MemoryStore:
    """See the module. files: the content by name, which a test may change as it likes. arrived:
    when a file came, by name; clock tells it. removed: names in the order in which they went.
    """

    placed = True

    def __init__(self, area: Area = SNAPSHOTS) -> None:
        self.area = area
        self.files: dict[str, bytes] = {}
        self.arrived: dict[str, datetime] = {}
        self.removed: list[str] = []
        self.clock: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.append_only = False
        self.before: Callable[[str, str], object] = _nothing
        self.requests: Counter[str] = Counter()
        self.closed = False
        self.writing = 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))

    def list(self, below: str = "") -> Iterator[StoredFile]:
        assert below.count("/") <= 2
        self._ask("list", below)
        for name in sorted(self.files):
            if name.startswith(below) and (below.endswith("/") or below in ("", name)):
                yield StoredFile(name, len(self.files[name]), self._arrival(name))

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        for name, start, length in ranges:
            assert start >= 0
            assert length > 0
            self._ask("read", name)
            if name not in self.files:
                raise FileMissing(name)
            yield self.files[name][start : start + length]

    def write(self, name: str) -> MemoryFile:
        self.area.require_name(name)
        assert self.writing < 3, "three files at a time"
        self._ask("write", name)
        if name in self.files:
            raise NameTaken(name, self.area.file)
        self.writing += 1
        return MemoryFile(self, name)

    def try_out(self) -> None:
        self._ask("write", "")

    def remove(self, names: Sequence[str]) -> int:
        gone = 0
        for name in names:
            self.area.require_name(name)
            self._ask("remove", name)
            if self.append_only:
                raise RemoteDenied("the target is append-only")
            if self.files.pop(name, None) is not None:
                self.removed.append(name)
                gone += 1
        return gone

    def close(self) -> None:
        self.closed = True

    def _arrival(self, name: str) -> datetime:
        """Returns when a file came: of one that no session has brought, when its version began."""
        return self.arrived.get(name) or begun(FileName.read(name).version)

    def _ask(self, verb: str, name: str) -> None:
        assert not self.closed
        self.requests[verb] += 1
        self.before(verb, name)


class MemoryFile:
    """A file on its way to a MemoryStore."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store = store
        self._name = name
        self._data = bytearray()
        self._open, self._finished = True, False

    def add(self, data: Buffer) -> None:
        assert self._open
        assert not self._finished
        self._store.before("add", self._name)
        self._data += data

    def poll(self) -> None:
        self._store.before("poll", self._name)

    def finish(self) -> Sum:
        assert self._open
        self._store.before("finish", self._name)
        self._finished = True
        return Sum(len(self._data), sha256(self._data).digest())

    def publish(self) -> None:
        assert self._open
        assert self._finished
        self._store.before("publish", self._name)
        if self._name in self._store.files:
            raise NameTaken(self._name, self._store.area.file)
        self.discard()
        self._store.files[self._name] = bytes(self._data)
        self._store.arrived[self._name] = self._store.clock()

    def discard(self) -> None:
        if self._open:
            self._open = False
            self._store.writing -= 1
