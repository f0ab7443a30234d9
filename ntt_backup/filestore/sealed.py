"""Files are sealed on their way to a store, and opened on their way back; see `contract.FileStore`.

A sealed file is a file of age, with `.age` behind its name. If a name has a plain and a sealed
file and both may be read, the one that arrived first is used: somebody else added the other one.
So a file is stored only where none stands beside it once it has its name.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import sha256
from itertools import chain
from typing import Final, NamedTuple

from ntt_backup.config.sealing import NOT_SEALED, Keyring, SealPolicy, seal_writer
from ntt_backup.errors import RemoteCannotStore
from ntt_backup.filestore.contract import (
    UNKNOWN_ARRIVAL,
    Area,
    Buffer,
    FileMissing,
    FileStore,
    NewFile,
    Range,
    ReadableStore,
    StoredFile,
    StoredFileDamaged,
    Sum,
    WholeFileDamaged,
)
from ntt_backup.pack.age_encryption import HEAD, AgeContent, plain_size
from ntt_backup.pack.format import PackError
from ntt_backup.wire.stored_names import SEALED

# Keys of sealed files that are kept.
_KEPT_OPEN: Final = 1024
# Of files, to find one that the identities open.
_MOST_TRIED: Final = 256


class _Stored(NamedTuple):
    """A file as it lies in the store. twice: another one is beside it."""

    file: StoredFile
    twice: bool = False

    @property
    def sealed(self) -> bool:
        return self.file.name.endswith(SEALED)

    @property
    def arrived(self) -> datetime | None:
        return None if self.file.arrived == UNKNOWN_ARRIVAL else self.file.arrived

    def beside(self, other: _Stored | None, policy: SealPolicy) -> _Stored:
        """Returns the one of two files of a name that counts."""
        if other is None:
            return self
        plain, sealed = sorted((self, other), key=lambda one: one.sealed)
        first = sealed if policy.required else plain
        # A server tells whole seconds.
        told = plain.arrived and sealed.arrived and plain.arrived != sealed.arrived
        if told and not policy.refuses(plain.arrived):
            first = min(plain, sealed, key=lambda one: one.file.arrived)
        return first._replace(twice=True)


class ReadableSealedStore:
    """A store for reading, of which some files are sealed.

    Args:
        store: Has the files as they are stored.
        area: Of the store.
        keyring: Opens what is sealed.
        policy: Which files need not be sealed.
    """

    def __init__(
        self, store: ReadableStore, area: Area, keyring: Keyring, policy: SealPolicy
    ) -> None:
        self._within = store
        self._area = area
        self._keyring = keyring
        self._policy = policy
        self._known: dict[str, _Stored] = {}
        self._opened: OrderedDict[str, AgeContent] = OrderedDict()
        self.close = store.close

    def list(self, below: str = "") -> Iterator[StoredFile]:
        listed: dict[str, _Stored] = {}
        is_file = below and not below.endswith("/")
        sealed = is_file and self._area.sealed(below)
        asked = [below, below + SEALED] if sealed else [below]
        for file in chain.from_iterable(map(self._within.list, asked)):
            name = file.name.removesuffix(SEALED)
            listed[name] = _Stored(file).beside(listed.get(name), self._policy)
        self._known.update(listed)
        for name, found in sorted(listed.items()):
            size = plain_size(found.file.size) if found.sealed else found.file.size
            refused = self._refused(name, found)
            yield StoredFile(name, size, found.file.arrived, refused, found.sealed)

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        asked: deque[tuple[Range, AgeContent | None]] = deque()
        broken: list[Exception] = []

        def stored() -> Iterator[Range]:
            for one in ranges:
                try:
                    content, wanted = self._wanted(one)
                except Exception as error:  # noqa: BLE001 - raised when its turn comes
                    broken.append(error)
                    return
                asked.append((one, content))
                yield wanted

        for data in self._within.read(stored()):
            one, content = asked.popleft()
            try:
                plain = data if content is None else content.open(one.start, one.length, data)
            except PackError as error:
                raise StoredFileDamaged(f"{one.name}: {error}") from error
            yield plain
        for problem in broken:
            raise problem

    def _wanted(self, one: Range) -> tuple[AgeContent | None, Range]:
        """Returns the content of the file where it is sealed, and the range to ask for."""
        found = self._find(one.name)
        if refused := self._refused(one.name, found):
            raise WholeFileDamaged(f"{one.name} {refused}")
        if not found.sealed:
            return None, one
        content = self._open(one.name, found)
        return content, Range(found.file.name, *content.place(one.start, one.length))

    def _refused(self, name: str, found: _Stored) -> str:
        plain = not found.sealed and self._area.sealed(name)
        return NOT_SEALED if plain and self._policy.refuses(found.arrived) else ""

    def _find(self, name: str) -> _Stored:
        """Returns a file as it is stored. Raises FileMissing."""
        if name not in self._known:
            for _ in self.list(self._area.require_name(name)[: name.rfind("/") + 1]):
                continue
        if name not in self._known:
            raise FileMissing(name)
        return self._known[name]

    def _open(self, name: str, found: _Stored) -> AgeContent:
        """Returns the content of a sealed file; its key is fetched and opened once."""
        content = self._opened.get(name)
        if content is None:
            try:
                content = self._unseal(found)
            except PackError as error:
                self._require_fit()
                raise WholeFileDamaged(f"{name}: {error}") from error
            self._opened[name] = content
            if len(self._opened) > _KEPT_OPEN:
                self._opened.popitem(last=False)
        return content

    def _unseal(self, found: _Stored) -> AgeContent:
        (head,) = self._within.read([Range(found.file.name, 0, HEAD)])
        return self._keyring.unseal(head, found.file.size)

    def _require_fit(self) -> None:
        """Raises ConfigError where nothing was opened yet, and no other file can be: the ones that
        arrived first are tried, since nobody can put others there before them.
        """
        if self._keyring.fits:
            return
        files = [one for one in self.list() if self._area.first(one.name)]
        for one in sorted(files, key=lambda one: one.arrived)[:_MOST_TRIED]:
            if (found := self._known[one.name]).sealed:
                with suppress(PackError, FileMissing, StoredFileDamaged):
                    self._unseal(found)
                if self._keyring.fits:
                    return
        raise self._keyring.foreign()


class SealedStore(ReadableSealedStore):
    """A store to which files are sealed. recipients: whom files are sealed for; none: nobody."""

    def __init__(
        self,
        store: FileStore,
        area: Area,
        recipients: Sequence[str],
        keyring: Keyring,
        policy: SealPolicy,
    ) -> None:
        super().__init__(store, area, keyring, policy)
        self._store = store
        self._recipients = recipients
        self.try_out = store.try_out

    @property
    def placed(self) -> bool:
        return self._store.placed

    def write(self, name: str) -> NewFile:
        if not self._area.sealed(self._area.require_name(name)):
            return self._store.write(name)
        if not self._recipients:
            return _WatchedFile(self, self._store.write(name), name + SEALED)
        file = self._store.write(name + SEALED)
        try:
            return _SealedFile(self, file, name, self._recipients)
        except BaseException:
            file.discard()
            raise

    def remove(self, names: Sequence[str]) -> int:
        stored = []
        for name in names:
            self._opened.pop(name, None)
            known = self._known.pop(name, None)
            if known is not None and not known.twice:
                stored.append(known.file.name)
            else:
                sealed = self._area.sealed(self._area.require_name(name))
                stored += [name, name + SEALED] if sealed else [name]
        return self._store.remove(stored)

    def require_alone(self, other: str) -> None:
        """Raises RemoteCannotStore where the other file, plain or sealed, is in the store."""
        if any(one.name == other for one in self._store.list(other)):
            raise RemoteCannotStore(
                f"somebody else has stored a file beside {self._area.file} that was being sent",
                detail=f"{self._area.name}/{other}",
                hint="check who may write to the target; then store it again",
            )


class _WatchedFile:
    """A plain file on its way; see `contract.NewFile`."""

    def __init__(self, store: SealedStore, file: NewFile, other: str) -> None:
        self._store = store
        self._file = file
        self._other = other
        self.add, self.poll, self.finish = file.add, file.poll, file.finish
        self.discard = file.discard

    def publish(self) -> None:
        self._file.publish()
        self._store.require_alone(self._other)


class _SealedFile:
    """A file that is sealed on its way; see `contract.NewFile`."""

    def __init__(
        self, store: SealedStore, file: NewFile, name: str, recipients: Sequence[str]
    ) -> None:
        self._store = store
        self._file = file
        self._name = name
        self._writer = seal_writer(file.add, recipients)
        self._digest = sha256()
        self._size = 0
        self.poll, self.discard = file.poll, file.discard

    def add(self, data: Buffer) -> None:
        self._digest.update(data)
        self._size += len(memoryview(data))
        self._writer.write(data)

    def finish(self) -> Sum:
        self._writer.close()
        self._file.finish()
        return Sum(self._size, self._digest.digest())

    def publish(self) -> None:
        self._file.publish()
        self._store.require_alone(self._name)
