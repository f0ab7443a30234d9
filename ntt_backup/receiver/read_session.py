"""A session that reads answers questions about blobs: LIST, VERIFY, HASH and GET.

What a client may ask is listed by `--allow`. Nothing that this module does changes what lies below
the root. A VERIFY has it synced first: content is marked as stored because of the answer, and a
sum of what is only in memory would not outlive a power cut.
"""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ntt_backup.blobdir.descriptors import can_syncfs, error_line, forget, sync_directory, syncfs
from ntt_backup.blobdir.layout import BlobDirectory, NotAFile
from ntt_backup.blobdir.walk import Stray, StrayKind, Tree
from ntt_backup.receiver.b3sum import B3sum, by_descriptor
from ntt_backup.receiver.hashing import HOW_TO_GET, KNOWN_KEY, KNOWN_KEYED, under_key
from ntt_backup.receiver.question_session import QuestionSession, in_threads, pieces, read_at
from ntt_backup.receiver.workspace import Refusal, Workspace, gone
from ntt_backup.wire import messages
from ntt_backup.wire.framing import DIGEST_BYTES, PACK_BYTES
from ntt_backup.wire.messages import BLAKE3, MISSING, SHA256, SUM_BYTES, UNREADABLE, WHOLE, WRONG

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.hashing import NewHasher
    from ntt_backup.receiver.terms import Terms

_KINDS = tuple(StrayKind)
_CHUNK = 1 << 20
_MOST_THREADS = 8
_NOTHING = bytes(32)
# For one process of b3sum: enough files to make its start cheap, few enough that the descriptors
# of all threads stay far below what a process may have.
_FILES = 32
_BYTES = 64 << 20
_TABLE_ENTRY = DIGEST_BYTES + 4
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)


class BlobError(Exception):
    """A blob that cannot be read, or is none. verdict and text are what the client is told."""

    def __init__(self, verdict: int, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict
        self.text = text


def open_blob(blobs: BlobDirectory, digest: bytes) -> tuple[int, int]:
    """Returns (a descriptor for the caller to close, its size). Raises BlobError."""
    try:
        fd, status = blobs.open_blob(digest.hex())
    except NotAFile as found:
        raise BlobError(WRONG, str(found)) from None
    except OSError as problem:
        raise blob_error(problem) from None
    return fd, status.st_size


class _OpenedBlob:
    """Opens a blob: (descriptor, size). Raises BlobError, also for an OSError while it is read."""

    def __init__(self, blobs: BlobDirectory, digest: bytes) -> None:
        self._opened = open_blob(blobs, digest)

    def __enter__(self) -> tuple[int, int]:
        return self._opened

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        fd, _ = self._opened
        forget(fd)
        os.close(fd)
        if isinstance(problem, OSError):
            raise blob_error(problem) from None


def blob_error(problem: OSError) -> BlobError:
    """Returns what an error of the system says about one blob."""
    if problem.errno == errno.ENOENT:
        return BlobError(MISSING, "it is not there")
    if problem.errno in _NOT_A_FILE:
        return BlobError(WRONG, "a symlink or a socket is in its place")
    return BlobError(UNREADABLE, error_line(problem))


def listing(
    workspace: Workspace, asked: messages.Range, alive: Callable[[], None]
) -> Generator[bytes, None, None]:
    """Yields the answer to a LIST: the names below `by-hash`, in order, with their sizes.

    There may be tens of millions, so one directory `aa/bb` is read and sorted at a time. What is no
    blob is counted, and named up to a bound. A client that reads slowly holds up the walk, and
    fills no memory. alive is called now and then while a directory is read.
    """
    low, high = asked.low.hex(), asked.high.hex()
    tree = Tree(workspace.by_hash, workspace.device)
    count = size = strays = 0
    more = False
    page: list[tuple[bytes, int]] = []
    try:
        for found in _found(tree, low, high, alive):
            if asked.most and count == asked.most:
                more = True
                break
            if isinstance(found, Stray):
                # A stray is told with the page in which its directory begins, a directory that
                # cannot be read in any case.
                is_directory = found.kind is StrayKind.UNREADABLE
                parent = found.path.rpartition("/")[0].replace("/", "")
                if is_directory or parent.ljust(len(low), "0") >= low:
                    strays += 1
                    if is_directory or strays <= messages.MAX_STRAYS:
                        yield messages.STRAY.frame(_KINDS.index(found.kind), found.path)
                continue
            page.append(found)
            count += 1
            size += found[1]
            if len(page) == messages.MAX_NAMES:
                yield messages.NAMES.frame(page)
                page = []
    finally:
        tree.close()
    if page:
        yield messages.NAMES.frame(page)
    yield messages.LISTED.frame(count, size, strays, more)


def _found(
    tree: Tree, low: str, high: str, alive: Callable[[], None]
) -> Iterator[tuple[bytes, int] | Stray]:
    """Yields the blobs from low to high in order, each with its size, and the strays."""
    for directory in tree.directories(first=low, last=high):
        if isinstance(directory, Stray):
            yield directory
            continue
        for found in tree.sizes(directory, alive):
            if isinstance(found, Stray):
                yield found
            elif low <= found[0] <= high:
                yield bytes.fromhex(found[0]), found[1]


class _Stopped(Exception):
    """The client does not wait for the verdicts any more."""


class _Open(NamedTuple):
    """A blob that is being hashed by b3sum."""

    position: int
    fd: int
    size: int


class HashJob:
    """One VERIFY or HASH.

    Args:
        workspace: The root.
        digests: The blobs.
        new: Begins a hash, or a sum under a key; None where only b3sum can compute it.
        b3sum: The program.
        key: The key for b3sum, or empty for none.
        durable: Whether what is hashed is made durable before, with its names.
        wake: A descriptor that gets a byte when a thread has ended.
    """

    def __init__(
        self,
        workspace: Workspace,
        digests: Sequence[bytes],
        new: NewHasher | None,
        b3sum: B3sum | None,
        key: bytes,
        wake: int,
        durable: bool = False,
    ) -> None:
        self._workspace = workspace
        self._digests = digests
        self._new = new
        self._b3sum = b3sum
        self._key = key
        self._wake = wake
        self._durable = durable
        # Whether each file is synced by itself, and the directories that were.
        self._by_file = False
        self._synced: set[str] = set()
        self._work: queue.SimpleQueue[int] = queue.SimpleQueue()
        # In order of digest: each directory is opened once or twice.
        for position in sorted(range(len(digests)), key=lambda one: digests[one]):
            self._work.put(position)
        # Each thread sets those of its own blobs.
        self.found = [messages.BlobHash(UNREADABLE, 0, _NOTHING)] * len(digests)
        self._stopped = False

    def frames(self, answer: Callable[[], bytes]) -> Generator[bytes, None, None]:
        """Yields empty frames until all is hashed, then the one answer."""
        count = min(_MOST_THREADS, os.cpu_count() or 1, len(self._digests))
        if self._durable:
            yield from in_threads(self._sync_all, 1, self._wake)
        yield from in_threads(self._run, count, self._wake, self._stop)
        yield answer()

    def _stop(self) -> None:
        self._stopped = True

    def _sync_all(self) -> None:
        """Makes all that is stored durable at once, where the system can. Raises Refusal."""
        self._by_file = not can_syncfs(self._workspace.device)
        if not self._by_file:
            try:
                syncfs(self._workspace.by_hash)
            except OSError as problem:
                raise Refusal("storage", error_line(problem)) from None

    def _begin(self, blobs: BlobDirectory, digest: bytes, fd: int) -> None:
        """Has an open blob read from the disk. Raises OSError."""
        if self._by_file:
            os.fsync(fd)
            name = digest.hex()
            for path in (f"{name[:2]}/{name[2:4]}", name[:2], ""):
                if path not in self._synced:
                    sync_directory(blobs.directory(path))
                    self._synced.add(path)
        forget(fd)

    def _run(self) -> None:
        blobs = BlobDirectory(self._workspace.by_hash, self._workspace.device)
        buffer = memoryview(bytearray(_CHUNK))
        try:
            while not self._stopped:
                position = self._work.get_nowait()
                if self._new is not None:
                    self.found[position] = self._sum(blobs, position, self._new, buffer)
                elif self._b3sum is not None:
                    self._sum_several(blobs, position, self._b3sum, buffer)
        except (queue.Empty, _Stopped):
            pass
        finally:
            blobs.close()

    def _sum(
        self, blobs: BlobDirectory, position: int, new: NewHasher, buffer: memoryview
    ) -> messages.BlobHash:
        try:
            digest = self._digests[position]
            with _OpenedBlob(blobs, digest) as (fd, expected):
                self._begin(blobs, digest, fd)
                size = os.readv(fd, [buffer])
                hasher = new(buffer[:size])
                # The end of a small blob need not be asked for.
                while (size < expected or size >= _CHUNK) and (count := os.readv(fd, [buffer])):
                    self._require_going()
                    hasher.update(buffer[:count])
                    size += count
                return messages.BlobHash(WHOLE, size, hasher.digest())
        except BlobError as said:
            return messages.BlobHash(said.verdict, 0, _NOTHING, said.text)

    def _sum_several(
        self, directory: BlobDirectory, position: int, b3sum: B3sum, buffer: memoryview
    ) -> None:
        """Sums this blob, and the next few with it. Raises Refusal where b3sum fails, which says
        nothing about any blob.
        """
        blobs: list[_Open] = []
        total = 0
        try:
            while True:
                try:
                    fd, size = open_blob(directory, self._digests[position])
                except BlobError as said:
                    self.found[position] = messages.BlobHash(said.verdict, 0, _NOTHING, said.text)
                else:
                    blobs.append(_Open(position, fd, size))
                    self._begin(directory, self._digests[position], fd)
                    total += size
                if len(blobs) == _FILES or total >= _BYTES:
                    break
                try:
                    position = self._work.get_nowait()
                except queue.Empty:
                    break
            if blobs:
                self._sum_by_program(b3sum, blobs, total, buffer)
        except OSError as problem:
            raise Refusal("internal", error_line(problem)) from None
        finally:
            for blob in blobs:
                forget(blob.fd)
                os.close(blob.fd)

    def _sum_by_program(
        self, b3sum: B3sum, blobs: Sequence[_Open], total: int, buffer: memoryview
    ) -> None:
        fds = [blob.fd for blob in blobs]
        if self._key:
            found = b3sum.keyed_sums(fds, total, self._require_going, self._key)
        else:
            names = {by_descriptor(blob.fd): self._digests[blob.position] for blob in blobs}
            found = b3sum.digests(names, total, self._require_going, fds=fds)
        for blob in blobs:
            digest = found.get(by_descriptor(blob.fd))
            if digest is None:
                said = self._why_unreadable(blob.fd, buffer)
                one = messages.BlobHash(said.verdict, 0, _NOTHING, said.text)
            else:
                one = messages.BlobHash(WHOLE, blob.size, digest)
            self.found[blob.position] = one

    def _why_unreadable(self, fd: int, buffer: memoryview) -> BlobError:
        """Returns the system's error for a blob that b3sum could not read. Raises OSError where
        this process can read it.
        """
        try:
            while os.readv(fd, [buffer]):
                self._require_going()
        except OSError as problem:
            return blob_error(problem)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "b3sum reads no blob")

    def _require_going(self) -> None:
        if self._stopped:
            raise _Stopped


def contents(
    blobs: BlobDirectory, digests: Sequence[bytes], offset: int
) -> Generator[bytes, None, None]:
    """Yields the frames that answer a GET: something for every blob, in no order, then a GIVEN.
    offset: where a single blob begins.
    """
    names: list[bytes] = []
    parts: list[bytes] = []
    room = PACK_BYTES
    for digest in digests:
        try:
            with _OpenedBlob(blobs, digest) as (fd, size):
                if offset or size > PACK_BYTES - _TABLE_ENTRY:
                    begin = min(offset, size)
                    yield messages.BLOB.frame(digest, size, begin)
                    yield from pieces(fd, begin, size)
                    continue
                content = read_at(fd, size, 0)
        except BlobError as said:
            yield messages.NOT_GIVEN.frame(digest, said.verdict, said.text)
            continue
        if len(content) + _TABLE_ENTRY > room:
            yield messages.contents(names, [len(part) for part in parts], parts)
            names, parts, room = [], [], PACK_BYTES
        names.append(digest)
        parts.append(content)
        room -= len(content) + _TABLE_ENTRY
    if names:
        yield messages.contents(names, [len(part) for part in parts], parts)
    yield messages.GIVEN.frame(len(digests))


class ReadSession(QuestionSession):
    """Answers LIST, VERIFY, HASH and GET."""

    def __init__(self, workspace: Workspace, terms: Terms, connection: Connection) -> None:
        super().__init__(terms, connection)
        self._workspace = workspace
        self._blobs = BlobDirectory(workspace.by_hash, workspace.device)
        self._keyed_works = False

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        return {
            messages.LIST: self._list,
            messages.VERIFY: self._verify,
            messages.GET: self._get,
            messages.HASH: self._hash,
        }

    def close(self) -> None:
        super().close()
        self._blobs.close()

    def _list(self, payload: memoryview) -> None:
        self.require("list")
        asked = messages.LIST.read(payload)
        self.frames = listing(self._workspace, asked, self.connection.show_life)

    def _verify(self, payload: memoryview) -> None:
        self.require("verify")
        asked = messages.VERIFY.read(payload)
        new, b3sum = self._hasher(asked.hash)
        if new is not None or asked.hash == SHA256:
            new = under_key(asked.key, new if asked.hash == BLAKE3 else None)
        elif b3sum is not None and not self._keyed_works:
            self._prove_keyed(b3sum)
        wake = self.connection.wake
        job = HashJob(self._workspace, asked.digests, new, b3sum, asked.key, wake, durable=True)
        self.frames = job.frames(
            lambda: messages.SUMS.frame((one.state, one.hash[:SUM_BYTES]) for one in job.found)
        )

    def _hash(self, payload: memoryview) -> None:
        self.require("verify")
        asked = messages.HASH.read(payload)
        new, b3sum = self._hasher(asked.hash)
        job = HashJob(self._workspace, asked.digests, new, b3sum, b"", self.connection.wake)
        self.frames = job.frames(lambda: messages.HASHED.frame(job.found))

    def _hasher(self, hashed: int) -> tuple[NewHasher | None, B3sum | None]:
        """Returns what computes a hash: in this process, or the program b3sum. Raises Refusal where
        neither can.
        """
        new, b3sum = self.terms.hashes.get(hashed), self.terms.b3sum
        if new is None and (b3sum is None or hashed != BLAKE3):
            raise Refusal("refused", f"there is no BLAKE3 on this machine: {HOW_TO_GET}")
        return new, b3sum

    def _prove_keyed(self, b3sum: B3sum) -> None:
        """Raises Refusal unless b3sum knows keys. Nobody here could tell a wrong keyed sum."""
        try:
            b3sum.prove(KNOWN_KEY, KNOWN_KEYED)
        except OSError as problem:
            raise Refusal("internal", error_line(problem)) from None
        self._keyed_works = True

    def _get(self, payload: memoryview) -> None:
        self.require("get")
        offset, digests = messages.GET.read(payload)
        self.frames = contents(self._blobs, digests, offset)

    def require(self, word: str) -> None:
        """Raises Refusal where `--allow` does not list the word, or `by-hash` is missing."""
        super().require(word)
        if not self._workspace.placed:
            raise gone()
