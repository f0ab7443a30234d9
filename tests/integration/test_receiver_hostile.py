"""What a hostile client, or whoever tampered with the remote's directories, cannot do."""

from __future__ import annotations

import os
import select
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ntt_backup.wire import framing, write_messages
from tests.receiver_driver import (
    FarSide,
    digest_of,
    forced_command,
    litter,
    names_under,
    place_of,
    put,
)

ZERO = bytes(32)
BATCH = write_messages.batch(1, 10, 1000)
PACK = framing.frame(
    framing.PACK, write_messages.part_prefix(write_messages.RAW, 41, ZERO), bytes(41)
)
LARGE = write_messages.large(ZERO, 1000, 0)
DATA = framing.frame(framing.DATA, write_messages.part_prefix(write_messages.RAW, 3), b"abc")
END = write_messages.end(write_messages.COMPLETE, ZERO)
COMMIT = write_messages.numbered(framing.COMMIT, 1)
ABORT = write_messages.numbered(framing.ABORT, 1)
BYE = framing.frame(framing.BYE)
PLACE = framing.frame(framing.PLACE)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A place beside the root that must stay as it is."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    return outside


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    root.mkdir()
    yield root
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_bytes() == b"precious"
    assert sorted(path.name for path in root.parent.iterdir()) == ["outside", "root"]


@pytest.fixture
def far(root: Path) -> Iterator[FarSide]:
    """Behind a forced command that may not replace."""
    with FarSide(root, forced_command("--root", str(root), "--allow", "put")) as far:
        yield far


@pytest.fixture
def unable(root: Path) -> Iterator[FarSide]:
    """The same on a machine without BLAKE3."""
    command = forced_command("--root", str(root), "--allow", "put", checking="none")
    with FarSide(root, command) as far:
        yield far


def assert_refused(far: FarSide, code: str = "protocol") -> str:
    """The session ends with that ERROR, without a word on stderr, and leaves no stage."""
    found, text = far.error()
    assert found == code
    assert far.child.wait() == 1
    assert far.stderr() == ""
    assert litter(far.root) == []
    return text


# --- out of order, and lies about lengths


@pytest.mark.parametrize(
    "said",
    [
        [PACK],
        [LARGE],
        [DATA],
        [END],
        [COMMIT],
        [ABORT],
        [BATCH, BATCH],
        [BATCH, DATA],
        [BATCH, END],
        [BATCH, BYE],
        [BATCH, write_messages.numbered(framing.COMMIT, 2)],
        [BATCH, write_messages.numbered(framing.ABORT, 0)],
        [BATCH, COMMIT, COMMIT],
        [BATCH, COMMIT, BATCH],
        [BATCH, LARGE, LARGE],
        [BATCH, LARGE, PACK],
        [BATCH, LARGE, COMMIT],
        [BATCH, LARGE, write_messages.numbered(framing.ABORT, 0)],
        [BATCH, LARGE, write_messages.ask_offset(ZERO, 1 << 30)],
        [BATCH, LARGE, BYE],
        [BATCH, LARGE, DATA, END],
        [BATCH, LARGE, write_messages.end(write_messages.COMPLETE)],
        [BATCH, LARGE, write_messages.end(write_messages.WITHDRAWN, ZERO)],
        [BATCH, LARGE, write_messages.end(7)],
        [BATCH, write_messages.large(ZERO, 2, 0), DATA],
        [BATCH, write_messages.large(ZERO, 1001, 0)],
        [BATCH, write_messages.large(ZERO, 1000, 500)],
        [BATCH, write_messages.large(ZERO, 2**63, 0)],
        [write_messages.batch(1, 1, 1 << 40), write_messages.large(ZERO, 1 << 40, 1 << 30)],
        [BYE, BYE],
        [write_messages.batch(1, 2**32 - 1, 0)],
        [write_messages.ask_offset(ZERO, 2**64 - 1)],
        [framing.frame(framing.PONG, bytes(8))],
        [framing.frame(99)],
    ],
    ids=str,
)
def test_frames_out_of_order_end_the_session(far: FarSide, said: list[bytes]) -> None:
    far.hello()
    far.write(b"".join(said))
    while (answer := far.answer())[0] in (framing.RECEIPT, framing.OFFSET):
        pass
    assert answer[0] == framing.ERROR, answer
    assert write_messages.read_error(answer[1])[0] == "protocol"
    assert far.child.wait() == 1
    assert far.stderr() == ""
    assert names_under(far.root) == set()
    assert litter(far.root) == []


@pytest.mark.parametrize(
    "header",
    [
        framing.head(framing.PACK, 2**32 - 1),
        framing.head(framing.DATA, 2 << 20),
        framing.head(framing.BATCH, 17),
        framing.head(200, 0),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_a_header_that_cannot_be_is_refused_without_waiting_for_more(
    far: FarSide, header: bytes
) -> None:
    far.hello()
    far.write(header)
    assert_refused(far)


def checked_pack(
    raw: bytes, codec: int = write_messages.RAW, announced: int | None = None
) -> bytes:
    import hashlib

    checksum = hashlib.sha256(raw).digest()
    part = zlib.compress(raw) if codec == write_messages.ZLIB else raw
    length = len(raw) if announced is None else announced
    return framing.frame(framing.PACK, write_messages.part_prefix(codec, length, checksum), part)


@pytest.mark.parametrize(
    "pack",
    [
        checked_pack(bytes(4)),
        checked_pack(struct.pack("!I", 2**32 - 1) + bytes(100)),
        checked_pack(write_messages.table([ZERO], [5]) + b"four"),
        checked_pack(write_messages.table([ZERO], [2**32 - 1])),
        checked_pack(write_messages.table([ZERO] * 11, [0] * 11)),
        checked_pack(write_messages.table([ZERO], [1001]) + bytes(1001)),
        checked_pack(write_messages.table([ZERO], [2 << 20]) + bytes(2 << 20)),
        checked_pack(bytes(41), announced=40),
        checked_pack(bytes(41), announced=2**32 - 1),
        checked_pack(bytes(41), announced=0),
        checked_pack(bytes(50_000_000), write_messages.ZLIB, announced=41),
        checked_pack(bytes(50_000_000), write_messages.ZLIB, announced=50_000_000),
        checked_pack(bytes(41), write_messages.ZLIB, announced=42),
        checked_pack(bytes(41), codec=9),
    ],
)
def test_packs_that_lie_end_the_session(far: FarSide, pack: bytes) -> None:
    far.hello()
    far.write(BATCH + pack)
    assert_refused(far)
    assert names_under(far.root) == set()


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": 2},
        {"protocol": "1"},
        {"owner": "../../etc"},
        {"owner": ""},
        {"owner": "a" * 33},
        {"run": "a/b"},
        {"run": "."},
        {"slot": ".."},
        {"slot": 0},
        {"slot": "0\n"},
        {"hash": "md5"},
        {"hash": 1},
        {"sync": "none"},
        {"root": 7},
    ],
    ids=str,
)
def test_a_hello_that_cannot_be_is_refused(far: FarSide, changes: dict[str, object]) -> None:
    far.write(write_messages.fields(framing.HELLO, far.hello_fields(**changes)))
    assert_refused(far)
    assert list(far.root.iterdir()) == []


@pytest.mark.parametrize("payload", [b"[[[[", b"{}", b'{"protocol":1}', b"\xff\xfe", b"[" * 60000])
def test_a_hello_that_is_no_object_is_refused(far: FarSide, payload: bytes) -> None:
    far.write(framing.frame(framing.HELLO, payload))
    assert_refused(far)


@pytest.mark.parametrize("path", ["..", "/", "/etc", "{root}/../outside", "{root}/by-hash"])
def test_no_other_root_than_the_forced_commands(far: FarSide, path: str) -> None:
    path = path.replace("{root}", str(far.root))
    far.write(write_messages.fields(framing.HELLO, far.hello_fields(root=path)))
    assert_refused(far, "refused")


def test_a_root_with_a_nul_or_half_a_character(root: Path) -> None:
    for path in ("/tmp/\0", "/tmp/\ud800"):
        with FarSide(root) as far:
            far.write(write_messages.fields(framing.HELLO, far.hello_fields(root=path)))
            assert_refused(far, "root")


def test_who_may_not_put_has_no_session_that_puts(root: Path) -> None:
    with FarSide(root, forced_command("--root", str(root), "--allow", "list,verify")) as far:
        far.write(write_messages.fields(framing.HELLO, far.hello_fields()))
        assert "--allow" in assert_refused(far, "refused")
    assert list(root.iterdir()) == []


def test_a_session_does_not_change_over_to_another_by_hash(far: FarSide, root: Path) -> None:
    """What has a name in the one before would be answered for as if it had it in this one."""
    far.hello()
    (root / "by-hash").rename(root / "taken-away")
    far.write(PLACE + far.batch(1, [b"blob"]))
    assert far.answer()[0] == framing.READY
    assert_refused(far, "gone")
    assert not (root / "by-hash").exists()


# --- good content, and what is planted in its way


def test_good_content_survives_a_client_that_may_not_replace(unable: FarSide, root: Path) -> None:
    path = put(root, digest_of(b"good"), b"good")
    digests = [digest_of(b"good"), digest_of(b"else")]
    unable.hello()
    unable.write(unable.batch(1, [b"evil", b"else"], digests=digests))

    receipt = unable.receipt()

    assert [e[:2] for e in receipt.exceptions] == [(0, write_messages.REFUSED)]
    assert receipt.stored == 1
    assert path.read_bytes() == b"good"


def test_with_blake3_wrong_content_is_mended_even_behind_a_forced_command(
    far: FarSide, root: Path
) -> None:
    good, bad = put(root, digest_of(b"good"), b"good"), put(root, digest_of(b"bad"), b"damaged")
    far.hello(hash="blake3")
    far.write(far.batch(1, [b"evil", b"bad"], digests=[digest_of(b"good"), digest_of(b"bad")]))

    receipt = far.receipt()

    assert {e[:2] for e in receipt.exceptions} == {
        (0, write_messages.MISMATCH),
        (1, write_messages.REPLACED),
    }
    assert good.read_bytes() == b"good"
    assert bad.read_bytes() == b"bad"


def test_good_content_survives_when_its_blob_is_sent_as_a_large_one(
    unable: FarSide, root: Path
) -> None:
    far = unable
    path = put(root, digest_of(b"good"), b"good")
    far.hello()
    far.write(write_messages.batch(1, 1, 4) + write_messages.large(digest_of(b"good"), 4, 0))
    for piece in far.pieces(b"evil"):
        far.write(piece)
    far.write(far.end(b"evil", digest_of(b"good")) + COMMIT)

    assert [e[:2] for e in far.receipt().exceptions] == [(0, write_messages.REFUSED)]
    assert path.read_bytes() == b"good"


def test_a_symlink_planted_as_a_directory_is_not_followed(
    far: FarSide, root: Path, outside: Path
) -> None:
    first, second = digest_of(b"a").hex(), digest_of(b"b").hex()
    (root / "by-hash" / second[:2]).mkdir(parents=True)
    (root / "by-hash" / first[:2]).symlink_to(outside)
    (root / "by-hash" / second[:2] / second[2:4]).symlink_to(outside)
    far.hello()

    far.write(far.batch(1, [b"a", b"b", b"c"]))

    receipt = far.receipt()
    assert {e[:2] for e in receipt.exceptions} == {
        (0, write_messages.REFUSED),
        (1, write_messages.REFUSED),
    }
    assert all(e.text.startswith(("ELOOP", "ENOTDIR")) for e in receipt.exceptions)
    assert receipt.stored == 1
    assert far.bye() == 0


@pytest.mark.parametrize("name", ["by-hash", ".ntt-incoming"])
def test_a_symlink_planted_in_the_root_is_not_followed(
    far: FarSide, root: Path, outside: Path, name: str
) -> None:
    (root / name).symlink_to(outside)
    far.write(write_messages.fields(framing.HELLO, far.hello_fields()))
    assert far.error()[0] == "place"


def test_a_file_in_the_place_of_a_directory(far: FarSide, root: Path) -> None:
    (root / "by-hash").write_bytes(b"")
    far.write(write_messages.fields(framing.HELLO, far.hello_fields()))
    assert_refused(far, "place")


def plant_symlink(path: Path) -> None:
    path.symlink_to(path.parents[4] / "outside" / "precious")


def plant_dangling(path: Path) -> None:
    path.symlink_to(path.parents[4] / "outside" / "not-there")


def plant_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("plant", [plant_symlink, plant_dangling, os.mkfifo, plant_socket])
@pytest.mark.parametrize(
    ("checking", "allow"), [("none", "put"), ("none", "put,replace"), ("blake3", "put")]
)
def test_what_is_no_file_under_a_blobs_name(
    root: Path, plant: Callable[[Path], None], checking: str, allow: str
) -> None:
    path = place_of(root, digest_of(b"a"))
    path.parent.mkdir(parents=True)
    plant(path)
    kind = stat.S_IFMT(path.lstat().st_mode)
    command = forced_command("--root", str(root), "--allow", allow, checking=checking)
    with FarSide(root, command) as far:
        far.hello()
        far.write(far.batch(1, [b"a"]))
        (exception,) = far.receipt().exceptions
    if checking == "blake3" or "replace" in allow:
        assert exception.verdict == write_messages.REPLACED
        assert stat.S_ISREG(path.lstat().st_mode)
        assert path.read_bytes() == b"a"
    else:
        assert exception.verdict == write_messages.REFUSED
        assert stat.S_IFMT(path.lstat().st_mode) == kind


def test_links_planted_where_partial_files_are_kept(root: Path, outside: Path) -> None:
    content = bytes(write_messages.RESUMABLE + 1)
    name = digest_of(content).hex()
    partial = root / ".ntt-incoming" / "partial"
    partial.mkdir(parents=True)
    (partial / name).symlink_to(outside / "precious")
    (partial / (name + ".mark")).symlink_to(outside / "precious")
    with FarSide(root) as far:
        far.hello()
        far.write(
            write_messages.batch(1, 1, len(content))
            + write_messages.large(digest_of(content), len(content), 0)
        )
        for piece in far.pieces(content):
            far.write(piece)
        far.write(far.end(content) + COMMIT)
        assert far.receipt().stored == 1
    assert place_of(root, digest_of(content)).stat().st_size == len(content)


def test_a_hard_link_planted_where_partial_files_are_kept(root: Path, outside: Path) -> None:
    content = bytes(write_messages.RESUMABLE + 1)
    partial = root / ".ntt-incoming" / "partial"
    partial.mkdir(parents=True)
    os.link(outside / "precious", partial / digest_of(content).hex())
    with FarSide(root) as far:
        far.hello()
        far.write(
            write_messages.batch(1, 1, len(content))
            + write_messages.large(digest_of(content), len(content), 0)
        )
        for piece in far.pieces(content):
            far.write(piece)
        far.write(far.end(content) + COMMIT)
        assert far.receipt().stored == 1


# --- a client that does not read, or sends without end


def test_answers_that_nobody_reads_do_not_pile_up(far: FarSide) -> None:
    far.hello()
    os.set_blocking(far.stdin.fileno(), False)
    ping = framing.frame(framing.PING, bytes(8)) * 1000
    sent = 0
    # Until it takes no more, because its pipes and its bounded outbox are full. A receiver without
    # a bound would take all of it.
    while sent < 200 << 20 and select.select([], [far.stdin], [], 2.0)[1]:
        sent += os.write(far.stdin.fileno(), ping)
    status = Path(f"/proc/{far.child.pid}/status").read_text()
    (peak,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    assert sent < 200 << 20
    assert int(peak) < 60_000


def test_verdicts_do_not_pile_up(root: Path) -> None:
    # As many blobs as a batch may hold, none of them right: each costs a verdict, not a file.
    with FarSide(root) as far:
        far.hello(hash="blake3")
        wrong = [bytes(31) + b"x"] * framing.MAX_BLOBS
        pack = far.pack([b""] * framing.MAX_BLOBS, digests=wrong)
        for number in range(3):
            far.write(write_messages.batch(number, framing.MAX_BLOBS, 0) + pack)
            far.write(write_messages.numbered(framing.COMMIT, number))
            assert len(far.receipt().exceptions) == framing.MAX_BLOBS
        status = Path(f"/proc/{far.child.pid}/status").read_text()
        (peak,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        assert int(peak) < 100_000
    assert names_under(root) == set()


def test_a_link_planted_as_a_stage_of_ours_is_not_followed(root: Path, outside: Path) -> None:
    (outside / "precious").rename(outside / "lock")
    with FarSide(root) as far:
        fields = far.hello_fields()
        name = f"{fields['owner']}.{fields['run']}.{fields['slot']}.1"
        (root / ".ntt-incoming").mkdir()
        (root / ".ntt-incoming" / name).symlink_to(outside)
        far.hello()
        assert far.bye() == 0
    (outside / "lock").rename(outside / "precious")
