"""A remote proves that it has the content of blobs.

A hash that the remote tells is its word: whoever has kept names, sizes and hashes, and thrown the
content away, could tell it as well. So the question carries a new key, and the remote answers with
a sum of each blob under that key: keyed BLAKE3, or HMAC-SHA-256 where the remote has no BLAKE3.
That takes the content. The same sums are made of the local store, which is compared with the names
in the same pass.

A blob whose sum differs is asked for once more, by its plain hash: that says what is there. Of a
blob that the store does not have, the plain hash is all that can be known; a remote without BLAKE3
cannot tell it. Contents do not go over the link: a blob costs 45 bytes.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

from blake3 import blake3

from ntt_backup.audit.register import open_store
from ntt_backup.catalog.connection import Connection
from ntt_backup.client.read_session import ReadSession, hash_mismatch, remote_failure
from ntt_backup.client.session_pool import ReconnectingSession
from ntt_backup.config import CatalogConfig
from ntt_backup.errors import SourceError, Unsupported
from ntt_backup.model import Blob, Failure, Reason, total_size
from ntt_backup.name_hash import NEW_HASHER, HashOfNames
from ntt_backup.process.threads import WorkQueue
from ntt_backup.source.reader import Reader
from ntt_backup.source.store import Store
from ntt_backup.upload.batching import cut
from ntt_backup.wire import messages
from ntt_backup.wire.messages import Large

Result = TypeVar("Result")
Blobs = tuple[Blob, ...]

# The buffer for a blob that is read whole.
_SMALL: Final = 1 << 20
# What is asked for again when the link drops, and a step of the progress of a download.
JOB_BLOBS: Final = 1000
JOB_BYTES: Final = 64 << 20
# Jobs asked for on one connection: while one is hashed, the next has reached the remote.
_AHEAD: Final = 2
_UNPROVED: Final = "the remote says that its {} bytes are right, but cannot prove it"
_NOT_OURS: Final = "its {} bytes on the remote are not those of the store"


@dataclass(slots=True)
class Proved:
    """What the remote has told of the blobs of one job.

    Attributes:
        job: The blobs.
        bytes: The bytes of content that were hashed.
        failures: The blobs that the remote does not have, or not right.
        of_source: The blobs that the local store has, but not right.
        by_remote_hash: The blobs that are right by the remote's word, since the store lacks them.
        unchecked: The blobs of which nothing is known, since neither end can hash the names.
    """

    job: Blobs
    bytes: int = 0
    failures: list[Failure] = field(default_factory=list)
    of_source: list[Failure] = field(default_factory=list)
    by_remote_hash: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


class RemoteQuestion(Protocol):
    """A question to the remote about the blobs of one job."""

    def ask(self, session: ReadSession) -> None:
        """Sends the question; in a new session once more."""

    def receive(self, session: ReadSession) -> Proved | RemoteQuestion:
        """Returns the result of the job, or the next question that it takes."""


@dataclass
class Proof:
    """Asks for a sum of each blob of a job under a new key, and compares it with that of the store.

    Attributes:
        job: The blobs.
        source: The store.
    """

    job: Blobs
    source: Store

    def __post_init__(self) -> None:
        self._key = secrets.token_bytes(messages.KEY_BYTES)
        self._hash = messages.BLAKE3

    def ask(self, session: ReadSession) -> None:
        self._hash = messages.BLAKE3 if session.banner.can_hash else messages.SHA256
        session.ask_sums(self._hash, self._key, _digests(self.job))

    def receive(self, session: ReadSession) -> Proved | RemoteQuestion:
        # The store is read while the remote reads.
        found = Proved(self.job)
        ours = self._our_sums(found)
        theirs = session.sums(total_size(self.job))
        doubtful = [
            blob
            for blob, (state, said) in zip(self.job, theirs, strict=True)
            if state != messages.WHOLE or said != ours.get(blob.blobid)
        ]
        return Hashes(found, tuple(doubtful), ours.keys()) if doubtful else found

    def _our_sums(self, found: Proved) -> dict[str, bytes]:
        """Returns the sum of each blob that the store has right, and adds the others to `found`.

        Raises:
            SourceError: The store cannot be read.
        """
        sums: dict[str, bytes] = {}
        failed: list[Failure] = []
        buffer = memoryview(bytearray(_SMALL))
        with Reader(self.source.ready_for(self.job)) as reader:
            for blob in self.job:
                # The size that the catalog has is of no interest: the name tells what is right.
                unsized = Blob(blob.blobid, None)
                outcome = reader.read(unsized, buffer)
                if isinstance(outcome, int):
                    size, keyed = outcome, self._keyed(buffer[:outcome])
                elif isinstance(outcome, Failure):
                    failed.append(outcome)
                    continue
                else:
                    keyed = self._keyed(b"")
                    examined = reader.examine(unsized, verify=True, also=keyed.update)
                    if isinstance(examined, Failure):
                        failed.append(examined)
                        continue
                    size = examined[0].expected
                sums[blob.blobid] = keyed.digest()[: messages.SUM_BYTES]
                found.bytes += size
            reader.require_life(failed, nothing_sent=not sums)
        found.of_source = [one for one in failed if one.reason is not Reason.MISSING]
        return sums

    def _keyed(self, data: bytes | memoryview) -> Any:
        """Begins a sum under the key."""
        if self._hash == messages.BLAKE3:
            return blake3(data, key=self._key)
        return hmac.new(self._key, data, "sha256")


@dataclass
class Hashes:
    """Asks for the hashes of blobs, which are the remote's word, and tell what lies there.

    Attributes:
        found: What is known of the job so far.
        blobs: The blobs.
        ours: The blobids of which the store has the content: they were not proved.
    """

    found: Proved
    blobs: Blobs
    ours: Container[str] = ()

    def ask(self, session: ReadSession) -> None:
        can_name = session.banner.can_hash and session.hash_of_names == "blake3"
        self._hash = messages.BLAKE3 if can_name else messages.SHA256
        session.ask_hashes(self._hash, _digests(self.blobs))

    def receive(self, session: ReadSession) -> Proved:
        named = self._hash == messages.HASHES[session.hash_of_names]
        hashes = session.hashes(total_size(self.blobs))
        for blob, said in zip(self.blobs, hashes, strict=True):
            blobid = blob.blobid
            if blobid not in self.ours:
                self.found.bytes += said.size
            if said.state != messages.WHOLE:
                self.found.failures.append(remote_failure(blobid, said.state, said.text))
            elif named and said.hash.hex() != blobid:
                text = hash_mismatch(said.size, said.hash)
                self.found.failures.append(Failure(blobid, Reason.REMOTE_CORRUPT, text))
            elif blobid in self.ours:
                text = (_UNPROVED if named else _NOT_OURS).format(said.size)
                self.found.failures.append(Failure(blobid, Reason.REMOTE_CORRUPT, text))
            elif named:
                self.found.by_remote_hash.append(blobid)
            else:
                self.found.unchecked.append(blobid)
        return self.found


@dataclass
class Fetch:
    """Fetches the blobs of a job, and hashes them here. It proves as much, and costs the transfer.

    Attributes:
        job: The blobs.
    """

    job: Blobs

    def ask(self, session: ReadSession) -> None:
        session.ask_contents(_digests(self.job))

    def receive(self, session: ReadSession) -> Proved:
        hashing = Hashing(session.hash_of_names)
        session.contents(hashing)
        return Proved(self.job, hashing.bytes, hashing.failures)


def cut_jobs(blobs: Sequence[Blob]) -> Iterator[Blobs]:
    """Yields the jobs for some blobs, in order."""
    at = 0
    while at < len(blobs):
        sizes = (blob.expected for blob in islice(blobs, at, None))
        count = cut(sizes, JOB_BLOBS, JOB_BYTES)
        yield tuple(blobs[at : at + count])
        at += count


def answer_questions(
    jobs: WorkQueue[Blobs, Result],
    question: Callable[[Blobs], RemoteQuestion],
    result: Callable[[Proved], Result],
    session: ReconnectingSession,
) -> None:
    """Does the jobs of one thread: asks for them ahead of their answers. A new session asks again
    for those without one.

    Args:
        jobs: The jobs, and their results.
        question: Makes the first question of a job.
        result: Makes the result of a job.
        session: The session of the thread.
    """
    asked: deque[RemoteQuestion] = deque()

    def work(session: ReadSession) -> None:
        for again in asked:
            again.ask(session)
        while True:
            while len(asked) < _AHEAD and (job := jobs.take_job(wait=not asked)) is not None:
                asked.append(question(job))
                asked[-1].ask(session)
            if not asked:
                return
            answer = asked[0].receive(session)
            asked.popleft()
            session.settled += 1
            if isinstance(answer, Proved):
                jobs.add_result(result(answer))
            else:
                asked.append(answer)
                answer.ask(session)

    session.do(work)


def store_of(settings: CatalogConfig, conn: Connection) -> Store | None:
    """Returns the local store, or None where this host has none that can be read."""
    if settings.source is None:
        return None
    store = open_store(settings, conn)
    try:
        store.probe()
    except SourceError:
        return None
    return store


def require_sums(session: ReadSession, source: Store | None) -> None:
    """Raises Unsupported where no sum of the remote could say anything about its blobs."""
    can_name = session.banner.can_hash or session.hash_of_names == "sha256"
    if source is None and not can_name:
        raise Unsupported(
            "the remote has no BLAKE3, and there is no store here to compare its blobs with",
            detail=f"receiver {session.banner.version}, Python {session.banner.python}",
            hint="install it on the remote, on Debian by `apt-get install b3sum` ('BLAKE3 on the"
            " remote' in docs/forced-command.md), or fetch every blob and hash it locally:"
            " `ntt-backup-remote verify --download`",
        )


def _digests(job: Blobs) -> list[bytes]:
    return [bytes.fromhex(blob.blobid) for blob in job]


class Hashing:
    """A `ContentSink` that hashes contents, and keeps only failures. names: the hash of names."""

    def __init__(self, names: HashOfNames = "blake3") -> None:
        self._new = NEW_HASHER[names]
        self.bytes = 0
        self.failures: list[Failure] = []
        self._large: Large | None = None
        self._hasher = self._new()

    def whole(self, digest: bytes, content: memoryview) -> None:
        self.bytes += len(content)
        self._compare(digest, self._new(content).digest(), len(content))

    def begin(self, large: Large) -> None:
        self._large = large
        self._hasher = self._new()

    def piece(self, data: memoryview) -> None:
        self.bytes += len(data)
        self._hasher.update(data)

    def end(self, problem: str) -> None:
        assert self._large is not None
        if problem:
            self.not_given(self._large.digest, messages.UNREADABLE, problem)
        else:
            self._compare(self._large.digest, self._hasher.digest(), self._large.size)

    def not_given(self, digest: bytes, verdict: int, text: str) -> None:
        self.failures.append(remote_failure(digest.hex(), verdict, text))

    def _compare(self, digest: bytes, found: bytes, size: int) -> None:
        if found != digest:
            self.not_given(digest, messages.WRONG, hash_mismatch(size, found))
