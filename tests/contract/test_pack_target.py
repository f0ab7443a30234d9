"""What every store of packs must do, whatever is behind it; see `filestore.contract.PackTarget`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Local, Sftp, Ssh
from ntt_backup.config.sections import RemoteSettings, RunSettings
from ntt_backup.errors import BackupError, NameTaken, RemoteCannotStore, RemoteUnreachable
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.by_directory import FileStoreByDirectory
from ntt_backup.filestore.by_receiver import FileStoreByReceiver
from ntt_backup.filestore.by_sftp import FileStoreBySftp
from ntt_backup.filestore.contract import (
    CommittedFile,
    FileMissing,
    FileUnreadable,
    PackTarget,
    SharedStore,
    StoredFile,
    checksum,
)
from ntt_backup.filestore.open import PACK_AREA
from ntt_backup.filestore.reconnecting import ReconnectingSharedStore
from ntt_backup.objects.bucket import Bucket
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.wire.framing import FORMAT, MAX_CHUNK
from ntt_backup.wire.messages import MAX_OPEN
from tests.contract.harness import PATIENT
from tests.helpers.fake_bucket import SMALLEST_PART, FakeBucket
from tests.helpers.processes import children
from tests.helpers.sshd import Sshd
from tests.helpers.waiting import wait_until


def pack_name(number: int) -> str:
    low = f"{number:016x}"
    return f"packs/{low[:2]}/{low}-{low[:2]}{'f' * 14}-{number:032x}.tar"


NAME, OTHER = pack_name(1), pack_name(2)
BLOB = f"blobs/ab/cd/abcd{'0' * 60}"
RUN = RunSettings(**PATIENT, backoff_base=0.05, backoff_cap=0.5)


@dataclass
class Kind:
    """One kind of target.

    Attributes:
        name: Of the kind.
        write: Opens the store for writing and reading, as often as it is called.
        read: Opens the store for reading.
        top: The directory with the files; None for a bucket.
        bucket: The bucket; None for a directory.
    """

    name: str
    write: Callable[[], PackTarget]
    read: Callable[[], SharedStore]
    top: Path | None = None
    bucket: Bucket | None = None

    def put(self, name: str, content: bytes) -> None:
        """Stores a file by a session of its own."""
        with closing(self.write()) as store:
            assert commit(store, name, content).result().size == len(content)

    def path(self, name: str) -> Path:
        assert self.top is not None
        return self.top / name


def _receiver(spec: SessionSpec, name: str, top: Path) -> Kind:
    def write() -> FileStoreByReceiver:
        return FileStoreByReceiver(spec, PACK_AREA)

    readers: dict[str, Callable[[], SharedStore]] = {
        "directory": lambda: FileStoreByDirectory(str(top), PACK_AREA),
        "patient receiver": lambda: ReconnectingSharedStore(write, RUN, lambda *_: None),
    }
    return Kind(name, write, readers.get(name, write), top)


def _bucket(bucket: Bucket, name: str) -> Kind:
    def write() -> FileStoreByBucket:
        return FileStoreByBucket(bucket, SMALLEST_PART, PACK_AREA)

    readers: dict[str, Callable[[], SharedStore]] = {
        "patient bucket": lambda: ReconnectingSharedStore(write, RUN, lambda *_: None),
    }
    return Kind(name, write, readers.get(name, write), bucket=bucket)


def made(name: str, request: pytest.FixtureRequest) -> Kind:
    """Returns an empty target of a kind."""
    if name == "sftp":
        sshd: Sshd = request.getfixturevalue("remote").by_sftp()
        directory = sshd.directory()
        url = f"sftp://{sshd.alias}{directory.path}"
        by_sftp = Sftp(RemoteSettings(url=url, ssh_config=sshd.ssh_config))
        way = SessionSpec(by_sftp, directory.path, "0" * 12, "run", "packs", RUN)
        write = partial(FileStoreBySftp, way, PACK_AREA)
        return Kind(name, write, write, directory.local)
    if name == "ssh":
        remote: Sshd = request.getfixturevalue("remote")
        directory = remote.directory()
        settings = RemoteSettings(
            host=remote.alias, path=directory.path, ssh_config=remote.ssh_config
        )
        way = SessionSpec(Ssh(settings), directory.path, "0" * 12, "run", "packs", RUN)
        return _receiver(way, name, directory.local)
    if "bucket" in name:
        return _bucket(FakeBucket(weak=name == "weak bucket"), name)
    if name == "s3":
        return _bucket(open_bucket(request.getfixturevalue("s3").bucket()), name)
    top = request.getfixturevalue("tmp_path") / "remote"
    top.mkdir()
    return _receiver(SessionSpec(Local(), str(top), "0" * 12, "run", "packs", RUN), name, top)


WRITING = ["bucket", "weak bucket", "s3", "receiver", "ssh", "sftp"]
RECEIVERS = ["receiver", "ssh"]
READING = [*WRITING, "directory", "patient bucket", "patient receiver"]


@pytest.fixture(params=WRITING)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every kind of target that is written to."""
    return made(request.param, request)


@pytest.fixture(params=READING)
def read_kind(request: pytest.FixtureRequest) -> Kind:
    """Every kind of store that is read."""
    return made(request.param, request)


@pytest.fixture(params=RECEIVERS)
def by_receiver(request: pytest.FixtureRequest) -> Kind:
    """Every kind of target with a receiver."""
    return made(request.param, request)


@pytest.fixture
def store(kind: Kind) -> Iterator[PackTarget]:
    with closing(kind.write()) as opened:
        yield opened


def begun(store: PackTarget, name: str, content: bytes, *, look: bool = False) -> CommittedFile:
    """Returns a file whose commit has begun."""
    file = store.write(name, len(content), look=look)
    for at in range(0, len(content), 1_000_000):
        file.add(content[at : at + 1_000_000])
    file.commit()
    return file


def settle(store: PackTarget, *files: CommittedFile) -> None:
    """Waits until the end of each file is known."""

    def settled() -> bool:
        store.wait(0.1)
        return all(one.settled for one in files)

    wait_until(settled, "the files to be settled")


def commit(store: PackTarget, name: str, content: bytes, *, look: bool = False) -> CommittedFile:
    """Returns a file that is settled."""
    file = begun(store, name, content, look=look)
    settle(store, file)
    return file


def publish(store: PackTarget, name: str, content: bytes) -> None:
    """Stores a file in two steps, as a marker is stored."""
    file = store.write(name)
    file.add(content)
    file.finish()
    file.publish()


def send(store: PackTarget, file: CommittedFile) -> None:
    """Sends 20 MB, and waits for the end."""
    for _ in range(20):
        file.add(bytes(1_000_000))
    file.commit()
    settle(store, file)


def sha(content: bytes) -> str:
    return checksum(sha256(content).digest())


# --- what is read ---------------------------------------------------------------------------------


def test_a_file_is_told_with_its_size_and_arrival(read_kind: Kind) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)
    read_kind.put(NAME, b"content")
    with closing(read_kind.read()) as store:
        assert store.stat(OTHER) is None
        assert store.stat(FORMAT) is None
        found = store.stat(NAME)
        assert found is not None
        assert (found.name, found.size) == (NAME, 7)
        assert before <= found.arrived <= datetime.now(UTC) + timedelta(seconds=2)
        assert found.checksum in ("", sha(b"content"))


def test_bytes_beyond_the_end_do_not_come(read_kind: Kind) -> None:
    content = os.urandom(300_000)
    for name in (NAME, BLOB, FORMAT):
        read_kind.put(name, content[:4000] if name == FORMAT else content)
    with closing(read_kind.read()) as store:
        assert store.fetch(FORMAT, 0, 1 << 20) == content[:4000]
        for name in (NAME, BLOB):
            for start, length in (
                (0, 300_000),
                (0, 300_001),
                (299_999, 2),
                (300_000, 1),
                (10**12, 1),
                (7, 1),
            ):
                assert store.fetch(name, start, length) == content[start : start + length]
        with pytest.raises(FileMissing):
            store.fetch(OTHER, 0, 1)


def test_eight_threads_read_while_files_are_written(read_kind: Kind) -> None:
    content = os.urandom(2_000_000)
    read_kind.put(NAME, content)
    with closing(read_kind.write()) as writing, ThreadPoolExecutor(8) as threads:
        same = read_kind.name in WRITING
        reading = writing if same else read_kind.read()

        def fetch(number: int) -> bool:
            start, length = number * 13_777 % 1_900_000, 1 + number * 991 % 100_000
            if number % 10 == 0:
                assert reading.stat(pack_name(number + 1000)) is None
            return bytes(reading.fetch(NAME, start, length)) == content[start : start + length]

        right = [threads.submit(fetch, number) for number in range(150)]
        files = [begun(writing, pack_name(number), content) for number in range(10, 16)]
        settle(writing, *files)
        assert all(one.result() for one in right)
        for number in range(10, 16):
            assert reading.fetch(pack_name(number), 1_000_000, 2_000_000) == content[1_000_000:]
        if not same:
            reading.close()


def test_a_sum_is_of_what_lies_there_now(read_kind: Kind) -> None:
    content = os.urandom(3_000_000)
    read_kind.put(NAME, content)
    with closing(read_kind.read()) as store:
        said = store.prove(NAME)
        if not store.hashes:
            assert said == ""  # No bucket reads an object for us.
            return
        assert read_kind.top is not None
        assert said == sha(content)
        assert store.prove(NAME, "blake3") in ("", checksum(blake3(content).digest()))
        path = read_kind.path(NAME)
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert store.prove(NAME) not in ("", said)
        with pytest.raises(FileMissing):
            store.prove(OTHER)
        path.with_name(Path(OTHER).name).symlink_to(path)
        for ask in (store.prove, partial(store.fetch, start=0, length=1)):
            with pytest.raises(FileUnreadable):
                ask(OTHER)
        assert store.prove(NAME) == sha(path.read_bytes())


def test_what_is_no_name_of_packs_is_refused(read_kind: Kind) -> None:
    read_kind.put(NAME, b"")
    with closing(read_kind.read()) as store:
        asks: list[Callable[[str], object]] = [store.stat, partial(store.fetch, start=0, length=1)]
        # Who hashes nothing is not asked for a sum.
        asks += [store.prove] if store.hashes else []
        for name in ("", "packs", "../x", "by-hash/aa", f"{NAME}.json", "packs/aa/x"):
            for ask in asks:
                with pytest.raises(ValueError, match="is no"):
                    ask(name)


@pytest.mark.parametrize("name", ["patient bucket", "patient receiver"])
def test_eight_threads_outlast_a_connection_that_is_lost(
    request: pytest.FixtureRequest, name: str
) -> None:
    kind = made(name, request)
    content = os.urandom(1_000_000)
    kind.put(FORMAT, b"{}")
    kind.put(NAME, content)
    outages: list[BackupError] = []
    opened: list[PackTarget] = []

    def open_() -> PackTarget:
        opened.append(kind.write())
        return opened[-1]

    with (
        closing(
            ReconnectingSharedStore(open_, RUN, lambda error, _: outages.append(error))
        ) as store,
        ThreadPoolExecutor(8) as threads,
    ):
        assert store.fetch(NAME, 0, 10) == content[:10]

        def fetch(number: int) -> bool:
            if number in (20, 60):
                lose(opened[-1], kind)
            found = store.fetch(NAME, number * 1000, 1000)
            return bytes(found) == content[number * 1000 : number * 1000 + 1000]

        assert all(threads.map(fetch, range(100)))
        assert outages


def lose(store: PackTarget, kind: Kind) -> None:
    """Ends the connection of a store; has one request of a bucket fail."""
    if isinstance(store, FileStoreByReceiver):
        ours = store.channel._child.pid
        with suppress(ProcessLookupError):
            for pid in children(ours) or [ours]:  # On this machine, or ssh.
                os.kill(pid, signal.SIGKILL)
        return
    assert isinstance(kind.bucket, FakeBucket)
    left = [RemoteUnreachable("the link is down")]

    def fail(verb: str, key: str) -> None:
        if left:
            raise left.pop()

    kind.bucket.before = fail


# --- what is written ------------------------------------------------------------------------------


def test_more_files_are_under_way_than_there_are_slots(kind: Kind, store: PackTarget) -> None:
    contents = {pack_name(n): os.urandom(n * 70_001) for n in range(3 * MAX_OPEN)}
    files = {name: begun(store, name, content) for name, content in contents.items()}
    first, second = store.write(BLOB), store.write(pack_name(99))
    for _ in range(30):
        first.add(b"first" * 1000)
        second.add(b"second" * 1000)
    second.commit()
    first.commit()
    settle(store, first, second, *files.values())
    contents |= {BLOB: b"first" * 30_000, pack_name(99): b"second" * 30_000}
    results = {one.name: one for one in (two.result() for two in (first, second, *files.values()))}
    assert {name: one.size for name, one in results.items()} == {
        name: len(content) for name, content in contents.items()
    }
    with closing(kind.read()) as other:
        listed = [*other.list("packs/"), *other.list("blobs/")]
        assert {one.name: one.size for one in listed} == {
            name: len(content) for name, content in contents.items()
        }
        for name, content in contents.items():
            assert other.fetch(name, 0, 10_000_000) == content
            if kind.top is not None:
                assert results[name].checksum == sha(content)
                assert other.prove(name) in ((sha(content),) if other.hashes else ("",))
    progress = store.progress
    assert progress.added == sum(map(len, contents.values()))
    assert (progress.unsent, progress.awaited) == (0, 0)


@pytest.mark.parametrize("size", [0, 100, 2 * MAX_CHUNK + 1, SMALLEST_PART + 1])
def test_what_may_be_there_already_is_compared_and_not_sent(
    kind: Kind, store: PackTarget, size: int
) -> None:
    content = os.urandom(size)
    assert commit(store, NAME, content, look=True).result().size == size
    before = store.progress.sent
    for _ in range(2):
        file = commit(store, NAME, content, look=True).result()
        assert (file.name, file.size) == (NAME, size)
        if kind.top is not None:
            assert file.checksum == sha(content)
    # By SFTP it is read, by requests for each 32 KiB.
    most = 3000 + size // 50 if kind.name == "sftp" else 1000
    assert store.progress.sent - before < most
    others = [content + b"more", os.urandom(size + 1)]
    others += [content[:-1], b"", bytes(size)] if size else []
    for other in others:
        with pytest.raises(NameTaken):
            commit(store, NAME, other, look=True).result()
    assert store.fetch(NAME, 0, size + 10) == content


def test_a_name_that_is_taken_stays_as_it_is(kind: Kind, store: PackTarget) -> None:
    if kind.name == "weak bucket":
        pytest.skip("a weak server lets objects be overwritten")
    for content in (b"content", bytes(SMALLEST_PART + 1)):
        name = pack_name(len(content))
        assert commit(store, name, content).result().size == len(content)
        # It will do: an earlier answer was lost.
        assert commit(store, name, content).result().size == len(content)
        for other in (b"another", content + b"more", b""):
            with pytest.raises(NameTaken):
                commit(store, name, other).result()
        assert store.fetch(name, 0, SMALLEST_PART + 10) == content
    with closing(kind.write()) as marker:
        publish(marker, FORMAT, b"first")
        with pytest.raises(NameTaken):
            publish(marker, FORMAT, b"second")
    assert store.fetch(FORMAT, 0, 100) == b"first"


def test_what_is_discarded_was_never_there(kind: Kind, store: PackTarget) -> None:
    for number in range(2 * MAX_OPEN):
        file = store.write(NAME)
        file.add(bytes(number * 500_000))
        if number % 3 == 0:
            file.poll()
        file.discard()
        file.discard()
    assert store.stat(NAME) is None
    file = commit(store, NAME, b"content")
    file.discard()
    assert file.result().size == 7
    assert store.fetch(NAME, 0, 10) == b"content"
    if kind.top is not None:
        assert not list(kind.top.rglob(".incoming-*"))
    elif kind.bucket is not None:
        assert not list(kind.bucket.uploads(""))


def test_what_is_removed_is_gone_but_the_marker_stays(kind: Kind, store: PackTarget) -> None:
    trial = "packs/trial-0123456789ab"
    commit(store, NAME, b"content").result()
    commit(store, trial, b"trial").result()
    store.remove([trial])
    store.remove([trial])
    assert store.stat(trial) is None
    if kind.top is not None:
        commit(store, FORMAT, b"{}").result()
        with pytest.raises(BackupError):
            store.remove([FORMAT])
        assert kind.path(FORMAT).read_bytes() == b"{}"
        assert kind.path(NAME).read_bytes() == b"content"


# --- when it goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["end", "name"])
def test_a_file_whose_receiver_was_killed_is_there_whole_or_sent_again(
    by_receiver: Kind, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, last: str
) -> None:
    """The receiver is killed when the file is on its disk, or when the file has its name."""
    content = os.urandom(3_000_000)
    store = by_receiver.write()
    request.addfinalizer(store.close)
    assert isinstance(store, FileStoreByReceiver)
    publish = store.begin_publish

    def killed_before(slot: int, name: str) -> object:
        lose(store, by_receiver)
        return publish(slot, name)

    def killed_after(question: object) -> bool:
        lose(store, by_receiver)
        raise RemoteUnreachable("the answer was lost")

    if last == "end":
        monkeypatch.setattr(store, "begin_publish", killed_before)
    else:
        monkeypatch.setattr(store, "is_taken", killed_after)
    file = begun(store, NAME, content)
    with pytest.raises(RemoteUnreachable):
        settle(store, file)
    assert not file.settled
    with pytest.raises(RemoteUnreachable):
        store.wait(0.1)
    store.close()
    with closing(by_receiver.write()) as again:
        assert (again.stat(NAME) is not None) == (last == "name")
        before = again.progress.sent
        assert commit(again, NAME, content, look=True).result().checksum == sha(content)
        assert (again.progress.sent - before < 1000) == (last == "name")
        assert again.prove(NAME) == sha(content)


class Stop(Exception):
    """What the owner of a session raises."""


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("error", [Stop(), RemoteUnreachable("stopped")], ids=["stop", "away"])
def test_what_is_raised_while_it_waits_ends_it(kind: Kind, error: Exception, aborts: bool) -> None:
    store = kind.write()
    file = store.write(NAME)

    def stop() -> None:
        if aborts:
            store.abort()
        raise error

    store.on_wait = stop
    with pytest.raises(type(error)):
        send(store, file)
    store.abort()
    file.discard()
    store.close()
    with closing(kind.write()) as other:
        assert other.stat(NAME) is None


def test_a_store_is_closed_as_often_as_one_likes(kind: Kind) -> None:
    for ends in (("close", "close"), ("abort", "abort", "close"), ("close", "abort", "close")):
        store = kind.write()
        store.write(NAME).add(bytes(100_000))
        assert store.stat(NAME) is None
        for end in ends:
            getattr(store, end)()
    with closing(kind.write()) as other:
        assert other.stat(NAME) is None


@pytest.fixture(params=[*RECEIVERS, "sftp"])
def full(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """A target whose disk has room for a megabyte."""
    if request.param in ("ssh", "sftp") and request.getfixturevalue("remote").kind == "docker":
        pytest.skip("a mount of this machine is none in the container")
    kind = made(request.param, request)
    assert kind.top is not None
    argv = ["mount", "-t", "tmpfs", "-o", "size=1M,mode=1777", "tmpfs", str(kind.top)]
    if subprocess.run(argv, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield kind
    subprocess.run(["umount", "--lazy", kind.top], check=True)


def test_a_full_disk_cannot_store(full: Kind) -> None:
    store = full.write()
    assert commit(store, NAME, bytes(100_000)).result().size == 100_000
    file = store.write(OTHER)
    with pytest.raises(RemoteCannotStore):
        send(store, file)
    file.discard()
    store.close()
    assert full.top is not None
    assert [one.name for one in full.top.rglob("*") if one.is_file()] == [Path(NAME).name]
    with closing(full.write()) as again:
        assert commit(again, OTHER, bytes(100_000)).result().size == 100_000


def test_a_bucket_that_is_full_cannot_store() -> None:
    bucket = FakeBucket()

    def refuse(verb: str, key: str) -> None:
        if verb in ("put", "put_part"):
            raise RemoteCannotStore("the bucket is full")

    bucket.before = refuse
    for size in (7, SMALLEST_PART + 1):
        store = FileStoreByBucket(bucket, SMALLEST_PART, PACK_AREA)
        with closing(store), pytest.raises(RemoteCannotStore):
            commit(store, NAME, bytes(size))


def test_a_result_is_a_file_of_the_store(kind: Kind, store: PackTarget) -> None:
    result = commit(store, NAME, b"content").result()
    found = store.stat(NAME)
    assert isinstance(found, StoredFile)
    assert (result.name, result.size) == (found.name, found.size)
    assert found.checksum in ("", result.checksum)
