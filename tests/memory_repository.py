"""A repository in memory: the contract of `snapshot.repository`, faults on request, and counts.

repository = MemoryRepository()
repository.before = lambda verb, name: ...     # may raise: the request did not arrive
repository.requests["read"]                    # ranges asked for
repository.append_only = True                  # nothing may be removed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256

from ntt_backup.errors import NameTaken, RemoteDenied
from ntt_backup.snapshot.repository.contract import A_FILE, Buffer, FileMissing, Range, StoredFile
from ntt_backup.snapshot.repository.names import FileName
from ntt_backup.wire.snapshot_names import begun


def _nothing(verb: str, name: str) -> None: ...


class MemoryRepository:
    """See the module. files: the content by name, which a test may change as it likes. arrived:
    when a file came, by name; clock tells it. removed: names in the order in which they went.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.arrived: dict[str, datetime] = {}
        self.removed: list[str] = []
        self.clock: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.append_only = False
        self.before: Callable[[str, str], object] = _nothing
        self.requests: Counter[str] = Counter()
        self.closed = False
        self.writing = False

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))

    def list(self, below: str = "") -> Iterator[StoredFile]:
        assert not below or (below.endswith("/") and below.count("/") <= 2)
        self._ask("list", below)
        for name in sorted(self.files):
            if name.startswith(below):
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
        FileName.read(name)
        assert not self.writing, "one file at a time"
        self._ask("write", name)
        if name in self.files:
            raise NameTaken(name, A_FILE)
        self.writing = True
        return MemoryFile(self, name)

    def remove(self, names: Sequence[str]) -> int:
        gone = 0
        for name in names:
            FileName.read(name)
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
    """A file on its way to a MemoryRepository."""

    def __init__(self, repository: MemoryRepository, name: str) -> None:
        self._repository = repository
        self._name = name
        self._data = bytearray()
        self._open = True

    def add(self, data: Buffer) -> None:
        assert self._open
        self._repository.before("add", self._name)
        self._data += data

    def finish(self) -> bytes:
        assert self._open
        self._repository.before("finish", self._name)
        if self._name in self._repository.files:
            raise NameTaken(self._name, A_FILE)
        self._open = self._repository.writing = False
        self._repository.files[self._name] = bytes(self._data)
        self._repository.arrived[self._name] = self._repository.clock()
        return sha256(self._data).digest()

    def give_up(self) -> None:
        if self._open:
            self._open = self._repository.writing = False
