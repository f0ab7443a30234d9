"""The strategy `objects` and a bucket in memory: what is told as stored is in a pack, and right."""

from __future__ import annotations

import errno
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup.blobdir.layout import Marker
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.throttle import SharedPace
from ntt_backup.config import RunSettings
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import RemoteCannotStore, RemoteUnreachable, SourceError
from ntt_backup.filestore import by_bucket
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.contract import Progress
from ntt_backup.filestore.open import PACK_AREA
from ntt_backup.model import Batch, Blob, Failure, Receipt
from ntt_backup.objects import s3
from ntt_backup.objects.bucket import Buffer, Protection, sweep
from ntt_backup.pack.age_encryption import Unseal, is_sealed, no_identity
from ntt_backup.pack.names import BLOBS, LARGE_BLOB, PACKS, blobid_of
from ntt_backup.pack.reader import PackReader
from ntt_backup.source.reader import Reader, TooLarge
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies import packs, packs_probe
from ntt_backup.upload.strategies.packs import ContentReport, PacksSession
from ntt_backup.upload.strategies.packs_probe import BucketProbe
from ntt_backup.upload.strategies.session import Outcome, Rejection
from tests.helpers.blobs import Person, put
from tests.helpers.bucket_packs import packs_in
from tests.helpers.fake_bucket import FakeBucket
from tests.helpers.waiting import PATIENCE

PART = 5 * 1024**2


class Scene:
    """A store, a bucket, and sessions between them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bucket = FakeBucket()
        self.content = 0
        self.wire = 0
        self.run: dict[str, Any] = {}
        self.recipients: tuple[str, ...] = ()
        self.unseal: Unseal = no_identity
        self.sessions: list[PacksSession] = []

    def spec(self) -> SessionSpec:
        return SessionSpec(
            cast(Any, None),
            "/nowhere",
            "owner",
            "run",
            "0",
            RunSettings(window=2, **self.run),
            recipients=self.recipients,
            on_bytes=lambda count: setattr(self, "wire", self.wire + count),
            on_content=lambda count: setattr(self, "content", self.content + count),
        )

    def opened(self) -> PacksSession:
        remote = RemoteSettings.model_validate({"url": "s3://bucket/backup"})
        made = packs.open_packs(replace(self.spec(), bucket=remote), Store(self.root))
        self.sessions.append(made)
        return made

    @property
    def target(self) -> FileStoreByBucket:
        """Returns the store of the last session."""
        return cast(FileStoreByBucket, self.sessions[-1]._target)

    def session(self, pace: Any = None, part_size: int = PART) -> PacksSession:
        shared, store = SharedPace(pace), Store(self.root)
        target = FileStoreByBucket(self.bucket, part_size, PACK_AREA, shared)
        made = PacksSession(self.spec(), store, target, b"s" * 16)
        self.sessions.append(made)
        return made

    def blobs(self, *sizes: int, seed: int = 1) -> tuple[Blob, ...]:
        chance = random.Random(seed)
        return tuple(put(self.root, chance.randbytes(size)) for size in sizes)

    def stored(self) -> dict[str, bytes]:
        """Blobid to content of all that the bucket shows; each once, each right."""
        found: dict[str, bytes] = {}
        for key, content in self.bucket.objects.items():
            if key.startswith(PACKS):
                read = partial(self.bucket.get_range, key)
                unseal = self.unseal if is_sealed(content) else None
                reader = PackReader(read, len(content), unseal)
                for entry in reader.table:
                    assert entry.digest.hex() not in found
                    found[entry.digest.hex()] = reader.read_blob(entry)
            else:
                blobid = blobid_of(key)
                assert blobid is not None
                found[blobid] = content
        return found

    def in_store(self, blobs: tuple[Blob, ...]) -> dict[str, bytes]:
        return {
            blob.blobid: (self.root / blob.blobid[:2] / blob.blobid[2:4] / blob.blobid).read_bytes()
            for blob in blobs
        }


def settled(session: PacksSession) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while session.in_flight:
        outcomes += session.collect(PATIENCE)
    return outcomes


def exchange(session: PacksSession, one: Batch) -> list[Outcome]:
    session.put(one)
    return settled(session)


def receipt(outcomes: list[Outcome]) -> Receipt:
    (one,) = outcomes
    assert isinstance(one, Receipt)
    return one


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(packs, "LARGE_BLOB", 6 * 1024**2)
    made = Scene(tmp_path)
    yield made
    for session in made.sessions:
        session.close()


def batch(blobs: tuple[Blob, ...], name: str = "0.1", attempt: int = 1) -> Batch:
    return Batch(name, blobs, frozenset({1}), attempt)


def test_a_batch_is_one_pack_and_its_large_blobs_objects(scene: Scene) -> None:
    blobs = scene.blobs(0, 1, 513, 70_000, 5_000_000, 5_900_000, 7_000_000, 11_000_001)
    session = scene.session()

    session.put(batch(blobs))
    got = receipt(settled(session))
    session.close()

    assert scene.stored() == scene.in_store(blobs)
    assert sorted(got.stored, key=lambda blob: blob.blobid) == sorted(
        blobs, key=lambda blob: blob.blobid
    )
    assert got.failed == ()
    (pack,) = got.packs
    info = scene.bucket.head(pack.key)
    assert info is not None
    assert (pack.size, pack.checksum, pack.blobs) == (info.size, info.checksum, 6)
    assert len(pack.checksum.rpartition("-")[2]) == 1
    assert scene.content == got.stored_bytes == sum(blob.size or 0 for blob in blobs)
    assert scene.wire == scene.target._pace.taken
    assert list(scene.bucket.uploads("")) == []


@pytest.mark.parametrize(("codec", "smaller"), [("none", False), ("auto", True)])
def test_a_pack_is_compressed_unless_the_settings_say_none(
    scene: Scene, codec: str, smaller: bool
) -> None:
    scene.run = {"codec": codec}
    blobs = tuple(put(scene.root, b"%d all work and no play " % n * 80) for n in range(300))
    (pack,) = receipt(exchange(scene.session(), batch(blobs))).packs
    assert (pack.size < sum(blob.size or 0 for blob in blobs)) == smaller
    assert scene.stored() == scene.in_store(blobs)


def test_a_small_batch_is_one_request(scene: Scene) -> None:
    blobs = scene.blobs(*[300] * 200)
    session = scene.session()
    session._looks = 0

    session.put(batch(blobs))
    receipt(settled(session))

    assert scene.bucket.requests == {"put": 1}
    assert scene.stored() == scene.in_store(blobs)


def test_a_small_batch_takes_no_memory_of_the_size_of_a_part(scene: Scene) -> None:
    part_size, before = 512 * 1024**2, _resident()
    receipt(exchange(scene.session(part_size=part_size), batch(scene.blobs(*[300] * 20))))
    assert _resident() - before < part_size // 8


@pytest.mark.parametrize(
    "failure",
    [MemoryError(), OSError(errno.ENOMEM, "no memory"), RuntimeError("can't start new thread")],
)
@pytest.mark.parametrize("of", ["open_bucket", "new_buffer", "PackWriter"])
def test_a_machine_without_memory_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, failure: Exception, of: str
) -> None:
    made = Marker(1, (b"s" * 16).hex(), "blake3")
    monkeypatch.setattr("ntt_backup.packstore.marker.find", lambda _: made)
    blobs, failures = scene.blobs(10, 20), [failure]
    module = {"open_bucket": s3, "new_buffer": by_bucket}.get(of, packs)
    monkeypatch.setattr(s3, "open_bucket", lambda *_: scene.bucket)
    real = getattr(module, of)

    def first_fails(*values: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*values, **named)

    monkeypatch.setattr(module, of, first_fails)
    with pytest.raises(SourceError, match="no memory left"):
        scene.opened().put(batch(blobs))
    assert not any(session.usable for session in scene.sessions)
    receipt(exchange(scene.opened(), batch(blobs)))
    assert scene.stored() == scene.in_store(blobs)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_bad_blobs_are_failed_and_the_pack_is_made_without_them(scene: Scene) -> None:
    good = scene.blobs(10, 3_000_000, 4_000_000, 5_500_000, 7_000_000)
    bad = scene.blobs(20, 5_400_000, 8_000_000, 30, seed=2)
    for blob in bad[:3]:
        path = scene.root / blob.blobid[:2] / blob.blobid[2:4] / blob.blobid
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    (scene.root / bad[3].blobid[:2] / bad[3].blobid[2:4] / bad[3].blobid).unlink()
    session = scene.session()

    session.put(batch((*bad, *good, Blob("../" * 22))))
    got = receipt(settled(session))

    assert scene.stored() == scene.in_store(good)
    assert {one.blobid: str(one.reason) for one in got.failed} == {
        **{blob.blobid: "corrupt-source" for blob in bad[:3]},
        bad[3].blobid: "missing",
        "../" * 22: "bad-blobid",
    }
    assert scene.content == got.stored_bytes == sum(blob.size or 0 for blob in good)
    session.close()
    assert list(scene.bucket.uploads("")) == []


def test_what_was_stored_before_is_not_sent_again(scene: Scene) -> None:
    blobs = scene.blobs(10, 3_000_000, 4_000_000, 7_000_000)
    for number in range(2):
        session = scene.session()
        scene.bucket.requests.clear()
        session.put(batch(blobs))
        got = receipt(settled(session))
        assert scene.stored() == scene.in_store(blobs)
        assert len(got.packs) == 1
        assert ("put_part" in scene.bucket.requests) == (number == 0)


@pytest.mark.parametrize("verb", ["put", "complete"])
def test_a_lost_answer_is_found_out_by_looking(scene: Scene, verb: str) -> None:
    blobs = scene.blobs(*([10] if verb == "put" else [3_000_000, 4_000_000]))
    lost: list[str] = []

    def lose(done: str, key: str) -> None:
        if done == verb and not lost:
            lost.append(key)
            raise RemoteUnreachable("the answer was lost")

    scene.bucket.after = lose
    session = scene.session()
    session.put(batch(blobs))

    got = receipt(settled(session))

    assert lost == [got.packs[0].key]
    assert scene.stored() == scene.in_store(blobs)
    assert list(scene.bucket.uploads("")) == []


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("sizes", [(3_000_000, 4_000_000), (10,), (7_000_000,)])
def test_what_has_another_content_under_its_key_is_sent_under_another(
    scene: Scene, sizes: tuple[int, ...], summed: bool
) -> None:
    """An object that was damaged in the bucket, also where the bucket still names the checksum of
    what was stored once; and the next one in its place, too.
    """
    blobs = scene.blobs(*sizes)
    session = scene.session()
    keys: list[str] = []
    for attempt in (1, 2, 3):
        got = receipt(exchange(session, batch(blobs, attempt=attempt)))
        assert {*got.stored} == {*blobs}
        (key,) = {*scene.bucket.objects} - {*keys, *(pack.key for pack in got.packs[1:])}
        keys.append(key)
        scene.bucket.objects[key] = scene.bucket.objects[key][:-1] + b"?"
        if not summed:
            scene.bucket._infos.pop(key)
        scene.bucket.requests.clear()

        (refused,) = exchange(session, batch(blobs, attempt=attempt + 1))

        assert isinstance(refused, Rejection)
        assert refused.error.detail == key
        assert "put_part" not in scene.bucket.requests
        assert scene.content == attempt * sum(blob.size or 0 for blob in blobs)


def test_a_blob_that_is_found_to_be_large_is_an_object_of_its_own(scene: Scene) -> None:
    """Its size is not known to the catalog, which has it after the receipt."""
    blobs = scene.blobs(10, 7_000_000, 3_000_000)
    got = receipt(exchange(scene.session(), batch(tuple(Blob(one.blobid) for one in blobs))))
    assert {*got.stored} == {*blobs}
    assert [pack.blobs for pack in got.packs] == [2]
    assert scene.stored() == scene.in_store(blobs)


def test_the_same_content_of_other_parts_is_read_back(scene: Scene) -> None:
    blobs = scene.blobs(3_000_000, 4_000_000, 7_000_000)
    session = scene.session()
    session.put(batch(blobs))
    (pack,) = receipt(settled(session)).packs
    scene.bucket._infos.clear()  # It keeps no checksum of them any more.

    session.put(batch(blobs, attempt=2))

    assert receipt(settled(session)).packs == (pack,)
    assert scene.bucket.requests["get_range"] >= 4


def test_a_key_that_is_taken_while_it_is_sent_is_compared(scene: Scene) -> None:
    """Another host has sent the same pack meanwhile."""
    blobs = scene.blobs(3_000_000, 4_000_000)
    other = scene.session()
    other.put(batch(blobs))
    expected = receipt(settled(other)).packs
    session = scene.session()
    session._looks = 0

    session.put(batch(blobs))

    assert receipt(settled(session)).packs == expected
    assert list(scene.bucket.uploads("")) == []


@pytest.mark.parametrize("verb", ["create_upload", "put_part", "complete", "head"])
def test_an_error_ends_the_session_with_the_batch_in_flight(scene: Scene, verb: str) -> None:
    blobs = scene.blobs(3_000_000, 4_000_000, 5_900_000, 7_000_000)

    def fail(asked: str, key: str) -> None:
        if asked == verb:
            raise RemoteUnreachable("away")

    scene.bucket.before = fail
    session = scene.session()
    with pytest.raises(RemoteUnreachable, match="away"):
        exchange(session, batch(blobs))

    assert not session.usable
    assert [one.name for one in session.in_flight] == ["0.1"]
    assert scene.content == 0
    scene.bucket.before = lambda verb, key: None
    sweep(scene.bucket, (PACKS, BLOBS), time.time() + 60)
    assert list(scene.bucket.uploads("")) == []
    again = scene.session()
    again.put(batch(blobs, attempt=2))
    receipt(settled(again))
    assert scene.stored() == scene.in_store(blobs)


def test_an_error_that_comes_once_all_is_put_ends_the_session_too(scene: Scene) -> None:
    is_put = Event()

    def fail(verb: str, key: str) -> None:
        if verb in ("put", "put_part"):
            is_put.wait(PATIENCE)
            raise RemoteUnreachable("away")

    scene.bucket.before = fail
    session = scene.session()
    session.put(batch(scene.blobs(10, 20)))
    is_put.set()
    with pytest.raises(RemoteUnreachable, match="away"):
        settled(session)
    assert not session.usable
    assert [one.name for one in session.in_flight] == ["0.1"]


def test_an_upload_that_somebody_else_has_aborted_is_an_outage(scene: Scene) -> None:
    blobs = scene.blobs(11_000_000)

    def sweep_all(verb: str, key: str) -> None:
        if verb == "put_part":
            sweep(scene.bucket, (PACKS, BLOBS), time.time() + 60)

    scene.bucket.before = sweep_all
    with pytest.raises(RemoteUnreachable, match="aborted"):
        exchange(scene.session(), batch(blobs))
    scene.bucket.before = lambda verb, key: None
    receipt(exchange(scene.session(), batch(blobs, attempt=2)))
    assert scene.stored() == scene.in_store(blobs)


def test_a_bucket_that_says_nothing_is_given_up(scene: Scene) -> None:
    blobs = scene.blobs(3_000_000, 4_000_000)
    quiet = Event()
    scene.bucket.before = lambda verb, key: quiet.wait(PATIENCE) if verb == "put_part" else None
    scene.run = {"stall_timeout": 1, "receipt_timeout": 1}
    session = scene.session()
    with pytest.raises(RemoteUnreachable, match="does not answer"):
        exchange(session, batch(blobs))
    quiet.set()
    assert not session.usable


def test_a_bucket_that_has_all_is_given_as_long_as_a_receipt(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.run = {"stall_timeout": 1, "receipt_timeout": 3}
    now, sent = 100.0, 5
    monkeypatch.setattr(packs, "time", SimpleNamespace(monotonic=lambda: now))
    session = scene.session()
    progress = Progress(sent, sent, 0, awaited=1, answers=0, all_sent=True, throttled=0.0)
    session._target = cast(Any, SimpleNamespace(progress=progress, abort=lambda: None))
    session._hear()
    now += 2
    session._hear()
    now += 2
    with pytest.raises(RemoteUnreachable, match="does not answer"):
        session._hear()


def test_a_store_that_is_away_fails_no_blob(scene: Scene) -> None:
    blobs = scene.blobs(10, 20)
    session = scene.session()
    for path in list(scene.root.iterdir()):
        path.rename(scene.root.parent / f"away-{path.name}")
    scene.root.rmdir()

    with pytest.raises(SourceError):
        session.put(batch(blobs))

    assert session.in_flight == ()
    assert session.usable


def test_a_weak_bucket_that_overwrites_and_keeps_no_checksum_is_survived(scene: Scene) -> None:
    scene.bucket = FakeBucket(weak=True)
    blobs = scene.blobs(3_000_000, 4_000_000)
    session = scene.session()

    session.put(batch(blobs))

    got = receipt(settled(session))
    # The ETag is enough: nothing is read back.
    assert scene.bucket.requests["get_range"] == 0
    assert scene.stored() == scene.in_store(blobs)
    info = scene.bucket.head(got.packs[0].key)
    assert info is not None
    assert got.packs[0].checksum == f"md5:{info.etag}"
    assert info.etag.endswith("-2")


@pytest.mark.parametrize("sizes", [(3_000_000, 4_000_000), (1000,), (LARGE_BLOB,)])
def test_what_a_bucket_refuses_since_it_was_deleted_is_sent_under_another_name(
    scene: Scene, sizes: tuple[int, ...]
) -> None:
    blobs = scene.blobs(*sizes)
    receipt(exchange(scene.session(), batch(blobs)))
    scene.bucket.marked.update(scene.bucket.objects)
    scene.bucket.objects.clear()
    session = scene.session()
    (rejected,) = exchange(session, batch(blobs))
    assert isinstance(rejected, Rejection)

    receipt(exchange(session, batch(blobs)))

    assert scene.stored() == scene.in_store(blobs)
    assert [*scene.bucket.uploads("")] == []


@pytest.mark.parametrize("sizes", [(3_000_000, 4_000_000), (1000,)])
def test_what_an_etag_does_not_prove_is_read_back(scene: Scene, sizes: tuple[int, ...]) -> None:
    scene.bucket = FakeBucket(weak=True, opaque=True)
    blobs = scene.blobs(*sizes)
    session = scene.session()

    session.put(batch(blobs))

    got = receipt(settled(session))
    assert scene.bucket.requests["get_range"] >= 1
    assert scene.stored() == scene.in_store(blobs)
    assert got.packs[0].checksum.startswith("etag:")


@pytest.mark.parametrize(("opaque", "kept"), [(False, "md5:"), (True, "etag:")])
def test_the_sums_of_the_parts_are_enough_where_there_is_none_of_the_whole(
    scene: Scene, opaque: bool, kept: str
) -> None:
    scene.bucket = FakeBucket(of_parts=True, opaque=opaque)
    blobs = scene.blobs(3_000_000, 4_000_000)
    session = scene.session()

    session.put(batch(blobs))

    got = receipt(settled(session))
    assert scene.bucket.requests["get_range"] == 0
    assert scene.stored() == scene.in_store(blobs)
    assert got.packs[0].checksum.startswith(kept)


@pytest.mark.parametrize("fault", ["joined wrongly", "cut", "answer lost"])
def test_the_sums_of_parts_do_not_count_for_what_was_joined_otherwise(
    scene: Scene, fault: str
) -> None:
    scene.bucket = bucket = FakeBucket(of_parts=True, opaque=fault != "joined wrongly")

    def harm(verb: str, key: str) -> None:
        if verb == "complete":
            content = bucket.objects[key]
            wrong = content[:-1] if fault == "cut" else bytes([content[0] ^ 1]) + content[1:]
            bucket.objects[key] = wrong
            etag = "0" * 32 + "-2" if fault == "joined wrongly" else "0"
            bucket.tells(key, etag=etag)
            if fault == "answer lost":
                raise RemoteUnreachable("the link is down")

    bucket.after = harm
    session = scene.session()

    session.put(batch(scene.blobs(3_000_000, 4_000_000)))

    (outcome,) = settled(session)
    assert isinstance(outcome, Rejection)


@pytest.mark.parametrize("sizes", [(3_000_000, 4_000_000), (1000,)])
@pytest.mark.parametrize("opaque", [False, True])
def test_what_a_weak_bucket_has_damaged_has_no_receipt(
    scene: Scene, sizes: tuple[int, ...], opaque: bool
) -> None:
    class Damaging(FakeBucket):
        def _checked(self, data: Buffer, sha256: bytes) -> bytes:
            content = bytes(data)
            return content[:-1] + bytes([content[-1] ^ 1])

    scene.bucket = Damaging(weak=True, opaque=opaque)
    session = scene.session()

    session.put(batch(scene.blobs(*sizes)))

    (outcome,) = settled(session)
    assert isinstance(outcome, Rejection)


def test_no_md5_is_made_where_the_bucket_keeps_sha256(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_bucket, "md5", None)
    session = scene.session()
    receipt(exchange(session, batch(scene.blobs(1000))))
    receipt(exchange(session, batch(scene.blobs(2000, 3_000_000, 4_000_000))))


# --- sealed packs ---------------------------------------------------------------------------------


@pytest.fixture
def owner(scene: Scene) -> Person:
    """Who alone may open what is sent."""
    owner = Person.new()
    scene.recipients, scene.unseal = (owner.public,), owner.opens
    return owner


@pytest.mark.usefixtures("owner")
def test_what_is_sealed_tells_no_name_and_no_content(scene: Scene) -> None:
    blobs = scene.blobs(0, 1, 513, 70_000, 5_900_000, 7_000_000, 11_000_001)
    session = scene.session()

    got = receipt(exchange(session, batch(blobs)))
    session.close()

    contents = scene.in_store(blobs)
    assert scene.stored() == contents
    assert {blob.blobid for blob in got.stored} == contents.keys()
    assert sorted(pack.blobs for pack in got.packs) == [1, 1, 5]
    for pack in got.packs:
        data = scene.bucket.objects[pack.key]
        info = scene.bucket.head(pack.key)
        assert info is not None
        assert (pack.size, pack.checksum) == (len(data), info.checksum)
        low, high = pack.key.rpartition("/")[2].split("-")[:2]
        assert (low, high) == (pack.low[:2].ljust(16, "0"), pack.high[:2].ljust(16, "f"))
        for blobid, content in contents.items():
            assert blobid[2:8] not in pack.key
            assert bytes.fromhex(blobid)[:8] not in data
            assert len(content) < 32 or content[:16] not in data
    assert not [key for key in scene.bucket.objects if key.startswith(BLOBS)]
    assert scene.content == sum(map(len, contents.values()))


@pytest.mark.usefixtures("owner")
def test_what_is_sealed_is_sealed_anew_for_another_attempt(scene: Scene) -> None:
    blobs = scene.blobs(10, 20_000, 6_500_000)
    for attempt in (1, 2):
        session = scene.session()
        got = receipt(exchange(session, batch(blobs, attempt=attempt)))
        session.close()
        assert len(got.stored) == 3
    assert len(scene.bucket.objects) == 4
    assert len({content[:100] for content in scene.bucket.objects.values()}) == 4


@pytest.mark.usefixtures("owner")
def test_a_bad_large_blob_is_left_out_of_what_is_sealed(scene: Scene) -> None:
    bad, good = scene.blobs(7_000_000, 900)
    path = scene.root / bad.blobid[:2] / bad.blobid[2:4] / bad.blobid
    path.write_bytes(bytes(7_000_000))
    session = scene.session()

    got = receipt(exchange(session, batch((bad, good))))
    session.close()

    assert [one.blobid for one in got.failed] == [bad.blobid]
    assert scene.stored() == scene.in_store((good,))
    assert scene.content == 900


@pytest.mark.parametrize("size", [4_000_000, 100_000])
def test_content_is_reported_when_it_is_sent_and_not_when_it_is_buffered(
    scene: Scene, size: int
) -> None:
    """Two parts fit into the buffers: on a slow link it takes minutes until they have gone."""
    blobs = scene.blobs(*[size] * (8_000_000 // size))
    go = Event()
    scene.bucket.before = lambda verb, key: verb == "put_part" and go.wait(PATIENCE)
    session = scene.session()

    session.put(batch(blobs))
    while scene.target.answers < 2:  # a look, and the begin of an upload
        scene.target.wait(0.1)
    assert scene.content == 0
    scene.target._pace.take_now(2_000_000)
    session._hear()
    assert scene.content == pytest.approx(2_000_000, rel=0.01)

    go.set()
    assert receipt(settled(session)).stored_bytes == scene.content == 8_000_000


@pytest.mark.parametrize("are_there", [True, False])
def test_life_is_shown_while_a_disk_reads_what_fills_a_pack(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, are_there: bool
) -> None:
    """Else a worker whose disk takes a second a blob counts as stalled, and loses its claims."""
    read, since = Reader.read, [0]

    def reading(reader: Reader, blob: Blob, into: memoryview) -> int | TooLarge | Failure:
        since[-1] += 1
        return read(reader, blob, into)

    monkeypatch.setattr(Reader, "read", reading)
    blobs = scene.blobs(*[100] * 100)
    if not are_there:
        blobs = (*blobs[:1], *(Blob(f"{number:064x}", 100) for number in range(100)))
    session = scene.session()
    session._spec = replace(scene.spec(), on_bytes=lambda _: since.append(0))
    session.put(Batch("b", blobs))
    assert sum(since) >= 100
    assert max(since) <= 16


def test_a_bucket_that_is_no_store_any_more_is_an_outage(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "open_bucket", lambda *_: scene.bucket)
    with pytest.raises(RemoteUnreachable):
        scene.opened()


def test_what_a_probe_has_found_is_not_asked_for_again(scene: Scene) -> None:
    target = FileStoreByBucket(scene.bucket, PART, PACK_AREA)
    spec, store = replace(scene.spec(), identity="0a" * 16), Store(scene.root)
    session = packs.open_packs(spec, store, cast(Any, target))
    scene.sessions.append(session)
    assert not scene.bucket.requests
    with pytest.raises(RemoteUnreachable, match="no store of packs"):
        packs.open_packs(replace(spec, identity="", root="/there"), store, cast(Any, target))


def test_what_may_be_there_is_looked_for_before_it_is_sent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is what a run before this one may have sent last, and what is sent again."""
    looks: list[bool] = []
    session = scene.session()
    begin = scene.target.begin

    def begun(name: str, key: str, size: int, *, look: bool) -> Any:
        looks.append(look)
        return begin(name, key, size, look=look)

    monkeypatch.setattr(scene.target, "begin", begun)
    for seed, attempt in enumerate((1, 1, 1, 2, 1)):
        exchange(session, batch(scene.blobs(10, seed=seed), attempt=attempt))
    assert looks == [True, True, False, True, False]


@pytest.mark.parametrize(("versioning", "keeps"), [("on", True), ("off", False), ("", False)])
@pytest.mark.parametrize("append_only", [False, True])
def test_versions_are_told_of_where_anything_can_be_overwritten(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, versioning: str, keeps: bool, append_only: bool
) -> None:
    bucket = scene.bucket
    monkeypatch.setattr(bucket, "protection", lambda: Protection(versioning))
    bucket.append_only = append_only
    probe = BucketProbe(packs_in(bucket), "owner")
    said = probe.try_out()
    assert (f"; versioning is {versioning}" in said) == bool(versioning)
    assert ("versioning keeps" in said) == (keeps and not append_only)
    assert said.endswith("packs/trial-owner stays") == append_only
    assert ("append-only: overwriting and deleting are refused" in said) == append_only


@pytest.mark.parametrize(
    ("held", "sent", "told"), [(0, 0, 100), (100, 0, 0), (100, 40, 40), (100, 100, 100)]
)
def test_content_is_told_as_far_as_it_was_sent(held: int, sent: int, told: int) -> None:
    pace = SharedPace(None)
    store = FileStoreByBucket(FakeBucket(), PART, PACK_AREA, pace)
    store.held, store.added = held, 100

    def hear(sent: int) -> None:
        pace.taken = sent
        report.hear(store.progress)

    found: list[int] = []
    report = ContentReport(found.append)
    report.put(100)
    hear(sent)
    assert sum(found) == told
    hear(sent)
    assert sum(found) == told
    report.settle(100, 70)
    assert sum(found) == 70
    store.answers, store.held, store.added = 1, 50, 150
    report.put(50)
    hear(sent + 20)  # What was sent before the last answer is not of what is held.
    assert sum(found) == 70
    hear(sent + 50)
    assert sum(found) == 100


@pytest.mark.parametrize("left", ["other", "more", "nothing"])
def test_a_trial_that_reads_back_something_else_is_damage(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    read = scene.bucket.get_range

    def get_range(key: str, start: int, length: int) -> bytes:
        content = read(key, start, length)
        return {"other": content[:-1] + b"?", "more": content + b"?", "nothing": b""}[left]

    monkeypatch.setattr(scene.bucket, "get_range", get_range)
    with pytest.raises(RemoteCannotStore, match="something else than was sent"):
        BucketProbe(packs_in(scene.bucket), "owner").try_out()


def test_a_trial_object_that_is_gone_is_damage() -> None:
    bucket = FakeBucket(weak=True)
    bucket.after = lambda verb, key: verb == "complete" and bucket.objects.pop(key)
    with pytest.raises(RemoteCannotStore) as caught:
        BucketProbe(packs_in(bucket), "owner").try_out()
    assert caught.value.detail.endswith(": it is missing")


@pytest.mark.parametrize(
    ("overwriting", "deleting", "said"),
    [
        (True, True, "append-only: overwriting and deleting are refused"),
        (True, False, "deleting is allowed"),
        (False, True, "overwriting is allowed"),
        (False, False, "overwriting and deleting are allowed"),
    ],
)
def test_a_bucket_is_append_only_where_it_refuses_both(
    overwriting: bool, deleting: bool, said: str
) -> None:
    assert said in packs_probe._append_only(overwriting, deleting)
