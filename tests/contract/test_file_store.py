"""What every file store must do, whatever is behind it; see `filestore.contract`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Local, Sftp, Ssh
from ntt_backup.config.sealing import Keyring, SealPolicy
from ntt_backup.config.sections import RemoteSettings, RunSettings
from ntt_backup.config.signing_key import SigningKey, SigningKeys
from ntt_backup.errors import (
    ConfigError,
    NameTaken,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
)
from ntt_backup.filestore import by_receiver
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.by_directory import FileStoreByDirectory
from ntt_backup.filestore.by_receiver import FileStoreByReceiver
from ntt_backup.filestore.by_sftp import FileStoreBySftp
from ntt_backup.filestore.contract import (
    FileMissing,
    FileStore,
    Range,
    StoredFile,
    StoredFileDamaged,
    Sum,
)
from ntt_backup.filestore.pins import (
    pins_that_count,
    put_pin,
    read_pins,
    remove_pins,
    strange_pins,
)
from ntt_backup.filestore.sealed import SealedStore
from ntt_backup.objects.bucket import Bucket
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.wire.framing import MAX_CHUNK
from tests.contract.harness import PATIENT, Machine
from tests.helpers.blobs import Person
from tests.helpers.fake_bucket import SMALLEST_PART, FakeBucket
from tests.helpers.memory_store import MemoryStore
from tests.helpers.receivers import LYING_RECEIVER, PROJECT
from tests.helpers.sshd import Sshd
from tests.helpers.waiting import PATIENCE

VERSION = "db/20260304T120000Z-0badcafe"
KEYS, OTHERS = (SigningKeys([SigningKey.of(bytes([n]) * 32)], Path(f"key{n}")) for n in (1, 2))
NAMES = [
    "a-b/20260304T120000Z-0badcafe/manifest",
    "a/20260304T120000Z-0badcafe/map",
    f"{VERSION}/manifest",
    f"{VERSION}/map",
    f"{VERSION}/pack-00001",
    "db/20260305T120000Z-0badcafe/pack-00001",
]


Open = Callable[[], FileStore]


@pytest.fixture
def spec(tmp_path: Path) -> SessionSpec:
    """How the receiver is reached on this machine."""
    (tmp_path / "remote").mkdir()
    run = RunSettings(**PATIENT)
    return SessionSpec(Local(), str(tmp_path / "remote"), "0" * 12, "run", "snapshot", run)


@pytest.fixture
def over_ssh(remote: Sshd) -> SessionSpec:
    path = remote.directory().path
    settings = RemoteSettings(host=remote.alias, path=path, ssh_config=remote.ssh_config)
    run = RunSettings(**PATIENT)
    return SessionSpec(Ssh(settings), path, "0" * 12, "run", "snapshot", run)


@pytest.fixture
def over_sftp(remote: Sshd) -> SessionSpec:
    """An account that runs no command."""
    path = remote.directory().path
    url = f"sftp://{remote.alias}{path}"
    settings = RemoteSettings(url=url, ssh_config=remote.by_sftp().ssh_config)
    run = RunSettings(**PATIENT)
    return SessionSpec(Sftp(settings), path, "0" * 12, "run", "snapshot", run)


def in_bucket(
    bucket: Bucket,
    recipients: Sequence[str] = (),
    keyring: Keyring | None = None,
    policy: SealPolicy | None = None,
) -> SealedStore:
    """The store of snapshots in a bucket, as `filestore.open` makes it."""
    within = FileStoreByBucket(bucket, SMALLEST_PART, SNAPSHOTS)
    return sealing(within, recipients, keyring, policy)


def sealing(
    within: FileStore,
    recipients: Sequence[str] = (),
    keyring: Keyring | None = None,
    policy: SealPolicy | None = None,
) -> SealedStore:
    """A store whose files are sealed for recipients."""
    policy = policy or SealPolicy()
    return SealedStore(within, SNAPSHOTS, recipients, keyring or Keyring(), policy)


@pytest.fixture(
    params=["memory", "fake", "weak", "sealed", "s3", "receiver", "ssh", "sealed receiver", "sftp"]
)
def open_anew(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens one store, as often as it is called."""
    kind = request.param
    if kind == "memory":
        memory = MemoryStore()
        return lambda: memory
    owner = Person.new()
    keyring = Keyring(lambda: owner.file(tmp_path / "key"))
    if kind in ("receiver", "ssh", "sealed receiver"):
        way = request.getfixturevalue("over_ssh" if kind == "ssh" else "spec")
        if kind == "sealed receiver":
            return lambda: sealing(FileStoreByReceiver(way, SNAPSHOTS), [owner.public], keyring)
        return lambda: FileStoreByReceiver(way, SNAPSHOTS)
    if kind == "sftp":
        settings = request.getfixturevalue("over_sftp")
        return lambda: FileStoreBySftp(settings, SNAPSHOTS)
    if kind == "sealed":
        bucket = FakeBucket()
        return lambda: in_bucket(bucket, [owner.public], keyring)
    if kind == "s3":
        server = open_bucket(request.getfixturevalue("s3").bucket())
        return lambda: in_bucket(server)
    bucket = FakeBucket(weak=kind == "weak")
    return lambda: in_bucket(bucket)


@pytest.fixture
def repository(open_anew: Open) -> Iterator[FileStore]:
    opened = open_anew()
    yield opened
    opened.close()


def put(repository: FileStore, name: str, content: bytes = b"content") -> None:
    file = repository.write(name)
    for at in range(0, len(content), 1_000_000):
        file.add(content[at : at + 1_000_000])
    assert file.finish() == Sum(len(content), sha256(content).digest())
    file.publish()


def get(repository: FileStore, name: str, start: int = 0, length: int = 1 << 26) -> bytes:
    (found,) = repository.read([Range(name, start, length)])
    return found


def test_files_are_listed_by_name_and_below_a_set_or_a_version(repository: FileStore) -> None:
    assert list(repository.list()) == []
    for name in reversed(NAMES):
        put(repository, name, name.encode())
    found = list(repository.list())
    assert sorted(sizes(found)) == [(name, len(name)) for name in sorted(NAMES)]
    assert [one for one in found if one.name[:3] == "db/"] == sorted(found)[-4:]
    for below in ("a/", "db/", f"{VERSION}/", "none/"):
        expected = [name for name in sorted(NAMES) if name.startswith(below)]
        assert [one.name for one in repository.list(below)] == expected


def sizes(found: Iterable[StoredFile]) -> list[tuple[str, int]]:
    return [(one.name, one.size) for one in found]


def test_a_file_has_arrived_when_it_got_its_name(repository: FileStore) -> None:
    """By the clock of the target: in these tests the same machine, to the second in a bucket."""
    before = datetime.now(UTC) - timedelta(seconds=2)
    put(repository, NAMES[3])
    (found,) = repository.list()
    assert before <= found.arrived <= datetime.now(UTC) + timedelta(seconds=2)


def test_a_file_of_a_bucket_that_does_not_say_when_it_came_is_of_1970() -> None:
    bucket = FakeBucket()
    bucket.objects[f"snapshots/{NAMES[3]}"] = b"content"
    (found,) = in_bucket(bucket).list()
    assert found.arrived == datetime(1970, 1, 1, tzinfo=UTC)


def test_a_client_cannot_choose_when_its_file_came(spec: SessionSpec) -> None:
    """It may write today, and ask for the name in a month."""
    snapshots = Path(spec.root) / "snapshots"
    with closing(FileStoreByReceiver(spec, SNAPSHOTS)) as repository:
        file = repository.write(NAMES[3])
        file.add(bytes(MAX_CHUNK))
        list(repository.list())  # So the receiver has begun the file.
        (incoming,) = (one for one in snapshots.iterdir() if one.is_file())
        os.utime(incoming, (0, 0))
        before = datetime.now(UTC) - timedelta(seconds=1)
        file.finish()
        file.publish()
        (found,) = repository.list()
        assert found.arrived > before
        (by_path,) = FileStoreByDirectory(spec.root, SNAPSHOTS).list()
        assert by_path == found
        for mtime, said in ((-(10**9), 1970), (1 << 40, 9999)):
            os.utime(snapshots / NAMES[3], (mtime, mtime))
            assert [one.arrived.year for one in repository.list()] == [said]


def test_files_come_back_as_they_were_sent(open_anew: Open, repository: FileStore) -> None:
    contents = {
        name: os.urandom(size)
        for name, size in zip(NAMES, (0, 1, SMALLEST_PART, 2 * SMALLEST_PART + 1), strict=False)
    }
    for name, content in contents.items():
        put(repository, name, content)
    assert sorted(sizes(repository.list())) == sorted(
        (name, len(content)) for name, content in contents.items()
    )
    with closing(open_anew()) as other:
        for name, content in contents.items():
            assert get(other, name) == content


def test_a_version_is_pinned_and_unpinned_on_every_store(
    open_anew: Open, repository: FileStore
) -> None:
    """Whoever lists the store can tell the pins of this host, and read the reason."""
    put(repository, f"{VERSION}/manifest")
    assert put_pin(repository, SNAPSHOTS, VERSION, KEYS, "before the move")
    with closing(open_anew()) as other:
        assert not put_pin(other, SNAPSHOTS, VERSION, KEYS, "again")
        names = [one.name for one in other.list("db/")]
        assert read_pins(other, SNAPSHOTS, names, KEYS) == {VERSION: "before the move"}
        # One key more or less: another host's pin keeps nothing here.
        assert read_pins(other, SNAPSHOTS, names, OTHERS) == {}
        assert [*strange_pins(names, SNAPSHOTS, OTHERS)] == pins_that_count(names, SNAPSHOTS, KEYS)
        assert remove_pins(other, names) == 1
        assert [one.name for one in other.list()] == [f"{VERSION}/manifest"]


def test_a_closed_repository_leaves_no_thread(open_anew: Open, repository: FileStore) -> None:
    """A process with threads is not copied, as a restore is into its jobs."""
    put(repository, NAMES[2])
    before = set(threading.enumerate())
    with closing(open_anew()) as other:
        assert get(other, NAMES[2]) == b"content"
    assert set(threading.enumerate()) <= before


def test_ranges_come_in_their_order_from_several_files(repository: FileStore) -> None:
    contents = {name: os.urandom(300_000) for name in NAMES[2:5]}
    for name, content in contents.items():
        put(repository, name, content)
    ranges = [
        Range(name, start, 1000) for start in range(0, 300_500, 1500) for name in reversed(contents)
    ]
    ranges.append(Range(NAMES[2], 0, 300_000))
    assert list(repository.read(iter(ranges))) == [
        contents[name][start : start + length] for name, start, length in ranges
    ]


def test_several_readings_a_listing_and_a_file_can_be_under_way_at_once(
    repository: FileStore,
) -> None:
    content = os.urandom(400_000)
    put(repository, NAMES[2], content)
    names = iter(repository.list())
    one, two = (
        repository.read(Range(NAMES[2], at, 1000) for at in range(0, 400_000, 1000)) for _ in "12"
    )
    file = repository.write(NAMES[4])
    for at in range(0, 200_000, 1000):
        piece = content[at : at + 1000]
        assert next(one) == piece
        assert next(two) == piece
        file.add(piece)
    assert file.finish() == Sum(200_000, sha256(content[:200_000]).digest())
    file.publish()
    del one
    assert get(repository, NAMES[4]) == content[:200_000]
    assert b"".join(two) == content[200_000:]
    assert [each.name for each in names][:1] == [NAMES[2]]


def test_ranges_are_taken_a_bounded_number_of_bytes_ahead(repository: FileStore) -> None:
    put(repository, NAMES[2], bytes(1_000_000))
    taken = 0

    def ranges() -> Iterator[Range]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield Range(NAMES[2], 0, 1_000_000)

    reading = repository.read(ranges())
    assert next(reading) == bytes(1_000_000)
    assert taken < 40


def test_a_file_that_is_missing_is_told_when_its_turn_comes(repository: FileStore) -> None:
    put(repository, NAMES[2])
    reading = repository.read(Range(name, 0, 7) for name in (NAMES[2], NAMES[3], NAMES[2]))
    assert next(reading) == b"content"
    with pytest.raises(FileMissing):
        next(reading)
    assert get(repository, NAMES[2]) == b"content"


def test_a_name_that_is_taken_stays_as_it_is(open_anew: Open, repository: FileStore) -> None:
    put(repository, NAMES[2], b"first")
    other = open_anew()
    with pytest.raises(NameTaken):
        put(other, NAMES[2], b"second")
    put(other, NAMES[3], b"third")
    assert get(repository, NAMES[2]) == b"first"
    other.close()


def test_a_file_is_visible_only_when_it_is_finished(open_anew: Open, repository: FileStore) -> None:
    other = open_anew()
    for end in ("discard", "publish"):
        file = repository.write(NAMES[2])
        file.add(bytes(SMALLEST_PART + 1))
        assert list(other.list()) == []
        with pytest.raises(FileMissing):
            get(other, NAMES[2])
        if end == "publish":
            file.finish()
        getattr(file, end)()
    assert [one.name for one in other.list()] == [NAMES[2]]
    other.close()


def test_files_are_removed_and_those_that_are_gone_are_no_error(repository: FileStore) -> None:
    for name in NAMES[2:5]:
        put(repository, name)
    assert get(repository, NAMES[2]) == b"content"
    repository.remove([NAMES[3], NAMES[2]])
    repository.remove([NAMES[2], NAMES[0]])
    assert [one.name for one in repository.list()] == [NAMES[4]]
    with pytest.raises(FileMissing):
        get(repository, NAMES[2])


@pytest.mark.parametrize(
    "name",
    ["", "db", "../db/map", "db/../map", "/etc/passwd", f"{VERSION}/other", f"{VERSION}/x/y"],
)
def test_what_is_no_name_of_a_file_is_refused(repository: FileStore, name: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        repository.write(name)
    with pytest.raises(ValueError, match="is not"):
        repository.remove([name])


# --- a directory of this machine, read without a receiver -----------------------------------------


def test_a_directory_is_read_as_by_its_receiver(spec: SessionSpec) -> None:
    with pytest.raises(FileNotFoundError):
        FileStoreByDirectory(spec.root, SNAPSHOTS)
    contents = {name: os.urandom(300_000) for name in NAMES}
    with closing(FileStoreByReceiver(spec, SNAPSHOTS)) as receiver:
        for name, content in contents.items():
            put(receiver, name, content)
        with closing(FileStoreByDirectory(spec.root, SNAPSHOTS)) as repository:
            for below in ("", "a/", f"{VERSION}/", "none/", NAMES[0]):
                assert list(repository.list(below)) == list(receiver.list(below))
            ranges = [Range(name, at, 1000) for at in range(0, 300_500, 1500) for name in NAMES]
            assert list(repository.read(ranges)) == [
                contents[name][at : at + 1000] for name, at, _ in ranges
            ]
            with pytest.raises(FileMissing):
                list(repository.read([Range(f"{VERSION}/pack-00009", 0, 1)]))


def test_a_directory_is_read_below_its_root_alone(spec: SessionSpec, tmp_path: Path) -> None:
    with closing(FileStoreByReceiver(spec, SNAPSHOTS)) as receiver:
        put(receiver, NAMES[2])
    snapshots = Path(spec.root, "snapshots")
    snapshots.joinpath("db").rename(tmp_path / "elsewhere")
    snapshots.joinpath("db").symlink_to(tmp_path / "elsewhere")
    with closing(FileStoreByDirectory(spec.root, SNAPSHOTS)) as repository:
        assert list(repository.list()) == []
        with pytest.raises(RemoteDenied):
            list(repository.read([Range(NAMES[2], 0, 1)]))
        with pytest.raises(ValueError, match="is not"):
            list(repository.read([Range("../elsewhere/map", 0, 1)]))


# --- in a bucket ----------------------------------------------------------------------------------


def test_a_bucket_that_is_append_only_says_so_and_keeps_the_file() -> None:
    bucket = FakeBucket()
    repository = in_bucket(bucket)
    put(repository, NAMES[2])
    bucket.append_only = True
    with pytest.raises(RemoteDenied):
        repository.remove([NAMES[2]])
    assert get(repository, NAMES[2]) == b"content"


def test_what_a_bucket_has_damaged_is_not_taken_for_stored() -> None:
    bucket = FakeBucket(weak=True, opaque=True)

    def damage(verb: str, key: str) -> None:
        if verb in ("put", "complete"):
            bucket.objects[key] = b"damaged" + bucket.objects[key][7:]

    bucket.after = damage
    repository = in_bucket(bucket)
    for name, size in ((NAMES[2], 10), (NAMES[3], SMALLEST_PART + 1)):
        with pytest.raises(RemoteCannotStore, match="not what was sent"):
            put(repository, name, bytes(size))


def test_an_upload_that_fails_or_is_aborted_is_an_outage() -> None:
    bucket = FakeBucket()
    repository = in_bucket(bucket)

    def lose(verb: str, key: str) -> None:
        if verb == "put_part":
            raise RemoteUnreachable("the link is down")

    def forget(verb: str, key: str) -> None:
        for one in bucket.uploads("") if verb == "put_part" else ():
            bucket.abort(one.key, one.upload_id)

    for before in (lose, forget):
        bucket.before = before
        with pytest.raises(RemoteUnreachable):
            put(repository, NAMES[2], bytes(3 * SMALLEST_PART))
    assert list(repository.list()) == []


def test_what_was_given_up_leaves_no_parts_in_a_bucket() -> None:
    bucket = FakeBucket()
    file = in_bucket(bucket).write(NAMES[2])
    file.add(bytes(3 * SMALLEST_PART))
    file.discard()
    assert list(bucket.uploads("")) == []


# --- sealed ---------------------------------------------------------------------------------------


def test_nothing_of_a_sealed_file_is_in_the_bucket_and_only_an_identity_opens_it(
    tmp_path: Path,
) -> None:
    bucket, owner, stranger = FakeBucket(), Person.new(), Person.new()
    content = os.urandom(200_000)
    put(in_bucket(bucket), NAMES[4], b"in clear")
    sealing = in_bucket(bucket, [owner.public])
    put(sealing, NAMES[2], content)
    stored = bucket.objects[f"snapshots/{NAMES[2]}.age"]
    assert not any(content[at : at + 32] in stored for at in range(0, len(content) - 32, 32))
    for identity, said in (
        (lambda: None, "no identity is given"),
        (lambda: stranger.file(tmp_path / "other"), "for other identities"),
    ):
        repository = in_bucket(bucket, keyring=Keyring(identity))
        assert sizes(repository.list("db/")) == [(NAMES[2], 200_000), (NAMES[4], 8)]
        assert get(repository, NAMES[4]) == b"in clear"
        with closing(repository), pytest.raises(ConfigError, match=said):
            get(repository, NAMES[2])
    keyring = Keyring(lambda: owner.file(tmp_path / "own"))
    repository = in_bucket(bucket, keyring=keyring)
    assert get(repository, NAMES[2], 65_530, 70_000) == content[65_530:135_530]
    repository.remove([NAMES[2], NAMES[4]])
    repository.close()
    assert bucket.objects == {}


def test_a_sealed_file_that_is_altered_or_cut_off_is_damaged(tmp_path: Path) -> None:
    bucket, owner = FakeBucket(), Person.new()
    keyring = Keyring(lambda: owner.file(tmp_path / "key"))
    put(in_bucket(bucket, [owner.public]), NAMES[2], os.urandom(200_000))
    put(in_bucket(bucket, [owner.public]), NAMES[0])  # One that can be opened.
    key, kept = f"snapshots/{NAMES[2]}.age", 4096 + 65_552
    whole = bucket.objects[key]
    for damaged in (
        whole[:100] + b"!" + whole[101:],
        whole[:kept] + b"!" + whole[kept + 1 :],
        whole[:kept],
        whole[:50],
        b"plain" * 10_000,
        b"",
    ):
        bucket.objects[key] = damaged
        with pytest.raises(StoredFileDamaged):
            get(in_bucket(bucket, keyring=keyring), NAMES[2])


# --- by the receiver ------------------------------------------------------------------------------


def test_a_repository_that_is_not_used_for_long_stays_open(
    spec: SessionSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = f"--root {spec.root} --allow snapshot --idle-timeout 1"
    program = "from ntt_backup.receiver.__main__ import main; raise SystemExit(main())"
    run = f"PYTHONPATH={PROJECT} exec {sys.executable} -c '{program}' {options}"
    machine.tool("python3", run)
    way = replace(spec, transport=machine)
    monkeypatch.setattr(by_receiver, "_PING_SECONDS", PATIENCE)
    quiet = FileStoreByReceiver(way, SNAPSHOTS)
    monkeypatch.setattr(by_receiver, "_PING_SECONDS", 0.1)
    used = FileStoreByReceiver(way, SNAPSHOTS)
    assert b"idle" in (quiet.channel.read(PATIENCE) or b"")
    put(used, NAMES[2])
    assert [one.name for one in used.list()] == [NAMES[2]]
    for repository in (quiet, used):
        repository.close()


def test_a_connection_that_is_lost_while_nothing_is_said_is_an_outage(
    spec: SessionSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_receiver, "_PING_SECONDS", 0.05)
    repository = FileStoreByReceiver(replace(spec, transport=machine), SNAPSHOTS)
    file = repository.write(NAMES[2])
    file.add(b"content")
    os.kill(repository.channel._child.pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while not repository.channel.ended and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RemoteUnreachable):
        file.add(bytes(MAX_CHUNK))
    with pytest.raises(RemoteUnreachable):
        list(repository.list())
    file.discard()
    repository.close()


def test_a_receiver_that_takes_no_snapshots_is_named_before_it_is_asked(
    spec: SessionSpec, machine: Machine
) -> None:
    words = "NTT-RECEIVE 1 version=0 hash=sha256 allow=put,list,verify,get,dump"
    forced = replace(machine, startup=f"printf '\\n{words}\\n'; exit 1")
    with pytest.raises(RemoteDenied, match="takes no snapshots") as caught:
        FileStoreByReceiver(replace(spec, transport=forced), SNAPSHOTS)
    assert "add snapshot to --allow" in caught.value.hint


def lying(machine: Machine, directory: Path, answer: str) -> Machine:
    """A remote that answers so whatever is asked."""
    program = directory / "lying.py"
    program.write_text(LYING_RECEIVER.replace("{answer}", answer))
    machine.tool("python3", f"PYTHONPATH={PROJECT} exec {sys.executable} {program}")
    return machine


def test_a_file_that_did_not_come_as_it_was_sent_is_not_taken_for_stored(
    spec: SessionSpec, machine: Machine, tmp_path: Path
) -> None:
    answer = "say(FILE_SUM.frame(7, bytes(32)))"
    repository = FileStoreByReceiver(
        replace(spec, transport=lying(machine, tmp_path, answer)), SNAPSHOTS
    )
    with closing(repository), pytest.raises(RemoteCannotStore, match="not what was sent") as told:
        put(repository, NAMES[2])
    assert f"7 bytes with {'00' * 32}" in told.value.detail


@pytest.mark.parametrize(
    ("answer", "ask"),
    [
        ("say(frame(FILE_NAMES, bytes(8) + b'b/x\\n'))", "list"),
        (f"say(FILE_NAMES.frame([('{NAMES[3]}', 1, 0), ('{NAMES[2]}', 1, 0)]))", "list"),
        (f"say(FILE_NAMES.frame([('{NAMES[0]}', 1, 0)])); say(DONE.frame(2))", "list"),
        (
            f"say(FILE_NAMES.frame([('{NAMES[0]}', 1, -1)])); say(DONE.frame(1))",
            "list",
        ),
        (f"say(FILE_NAMES.frame([('{NAMES[0]}', 1, 1 << 62)]))", "list"),
        ("say(FILE_SAID.frame(0))", "list"),
        ("say(piece(bytes(8))); say(BLOB_END.frame(0))", "read"),
        ("say(FILE_NAMES.frame([]))", "read"),
        ("say(FILE_SAID.frame(9))", "read"),
        ("say(DONE.frame(1)); say(DONE.frame(1))", "remove"),
        ("os._exit(0)", "read"),
    ],
)
def test_answers_that_cannot_be_end_the_session(
    spec: SessionSpec, machine: Machine, tmp_path: Path, answer: str, ask: str
) -> None:
    repository = FileStoreByReceiver(
        replace(spec, transport=lying(machine, tmp_path, answer)), SNAPSHOTS
    )
    asked: dict[str, Callable[[], object]] = {
        "list": lambda: list(repository.list("db/")),
        "read": lambda: get(repository, NAMES[2], 0, 7),
        "remove": lambda: [repository.remove([NAMES[2]]), list(repository.list())],
    }
    with closing(repository), pytest.raises(RemoteUnreachable):
        asked[ask]()
