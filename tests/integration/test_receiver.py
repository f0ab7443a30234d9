"""The receiver as a child process: what arrives, what is answered, what stays behind."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

import ntt_backup
from ntt_backup.client.bootstrap import GREETING, LOADER
from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.write_messages import Receipt
from tests.receiver_driver import (
    FarSide,
    assert_complete,
    digest_of,
    forced_command,
    litter,
    names_under,
    place_of,
    put,
)

HASHES = ("sha256", "blake3")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture(params=["sent along", "forced command"])
def far(request: pytest.FixtureRequest, root: Path) -> Iterator[FarSide]:
    command = None
    if request.param == "forced command":
        command = forced_command("--root", str(root), "--allow", "put,replace")
    with FarSide(root, command) as far:
        yield far


def verdicts(receipt: Receipt) -> dict[int, int]:
    assert receipt.outcome == write_messages.SETTLED, receipt
    return {position: verdict for position, verdict, _ in receipt.exceptions}


# --- the start


def test_the_banner_says_what_is_there(far: FarSide) -> None:
    assert far.protocol == str(framing.PROTOCOL)
    assert far.banner["version"] == ntt_backup.__version__
    assert far.banner["python"] == ".".join(map(str, sys.version_info[:3]))
    assert far.banner["hash"].split(",") == ["blake3", "sha256"]
    assert far.banner["codec"].split(",")[-1] == "zlib"


def test_it_needs_the_standard_library_only_and_imports_nothing_that_lies_around(
    root: Path,
) -> None:
    for name in ("zlib.py", "blake3.py", "json.py", "ntt_backup.py"):
        (root / name).write_text("raise SystemExit('planted')")
    python = f"{sys.executable} -S"
    with FarSide(root, python=python, cwd=root, env={"PYTHONPATH": str(root)}) as far:
        assert far.banner["hash"] == "sha256"
        far.hello()
        far.write(far.batch(1, [b"one"]))
        assert far.receipt().stored == 1
        assert far.bye() == 0
        assert far.stderr() == ""
    assert names_under(root) == {digest_of(b"one").hex()}


@pytest.mark.parametrize("shell", ["sh", "bash", "csh", "tcsh", "fish", "zsh", "busybox sh"])
def test_every_login_shell_starts_it(root: Path, shell: str) -> None:
    if which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed")
    with FarSide(root, shell=shell) as far:
        assert far.hello()["sync"] in ("syncfs", "fsync")


def test_a_python_that_is_too_old_says_so_and_reads_nothing() -> None:
    old = "import sys; sys.version_info = (3, 6, 8); sys.version = '3.6.8 (default)'; "
    done = subprocess.run(
        [sys.executable, "-c", old + LOADER, "1000", *GREETING], input=b"", capture_output=True
    )
    assert done.stdout == b"\nNTT-LOADER 1 python=3.6.8\n"
    assert done.stderr == b""


def test_ready_tells_room_clock_and_sync(far: FarSide) -> None:
    ready = far.hello()
    assert set(ready) == {"free_bytes", "total_bytes", "clock_us", "system", "sync", "placed"}
    assert ready["placed"] == 1
    assert 0 < ready["free_bytes"] <= ready["total_bytes"]


# --- batches


@pytest.mark.parametrize("hashed", HASHES)
@pytest.mark.parametrize("sync", ["syncfs", "fsync"])
def test_a_batch_is_stored_and_answered(far: FarSide, root: Path, hashed: str, sync: str) -> None:
    contents = [b"", b"a", bytes(3000), b"\xff" * framing.PACK_BYTES]
    assert far.hello(hash=hashed, sync=sync)["sync"] == sync

    far.write(far.batch(7, contents))

    receipt = far.receipt()
    assert receipt == Receipt(7, write_messages.SETTLED, write_messages.HASHES[hashed], 4, [])
    for content in contents:
        path = place_of(root, digest_of(content))
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o7777 == 0o644
    assert far.bye() == 0
    assert names_under(root) == {digest_of(content).hex() for content in contents}
    assert not (root / ".ntt-incoming").exists()


@pytest.mark.parametrize("hashed", HASHES)
def test_many_batches_flow_without_waiting_for_receipts(
    far: FarSide, root: Path, hashed: str
) -> None:
    far.hello(hash=hashed)
    batches = [[b"%d/%d" % (number, blob) for blob in range(50)] for number in range(40)]
    for number, contents in enumerate(batches):
        far.write(far.batch(number, contents))

    receipts = [far.receipt() for _ in batches]

    assert [receipt.number for receipt in receipts] == list(range(40))
    assert {(receipt.outcome, receipt.stored) for receipt in receipts} == {
        (write_messages.SETTLED, 50)
    }
    assert len(names_under(root)) == 2000
    assert_complete(root)


def test_compressed_packs(far: FarSide, root: Path) -> None:
    far.hello()
    far.write(far.batch(1, [b"text " * 1000], codec=write_messages.ZLIB, compress=zlib.compress))
    assert far.receipt().stored == 1
    assert_complete(root)


def test_what_is_there_and_right_is_kept(far: FarSide, root: Path) -> None:
    path = put(root, digest_of(b"old"), b"old")
    inode = path.stat().st_ino
    far.hello()

    far.write(far.batch(1, [b"new", b"old", b"twice", b"twice"]))

    receipt = far.receipt()
    assert verdicts(receipt) == {1: write_messages.PRESENT, 3: write_messages.PRESENT}
    assert receipt.stored == 2
    assert path.stat().st_ino == inode
    assert litter(root)[1:] == [litter(root)[0] + "/lock"]


@pytest.mark.parametrize("wrong", [b"wrong", b"OLD", b"", b"old and more"])
def test_what_is_there_and_wrong_is_replaced(far: FarSide, root: Path, wrong: bytes) -> None:
    path = put(root, digest_of(b"old"), wrong)
    far.hello()

    far.write(far.batch(1, [b"new", b"old"]))

    receipt = far.receipt()
    assert verdicts(receipt) == {1: write_messages.REPLACED}
    assert receipt.exceptions[0].text == "other content stood there"
    assert path.read_bytes() == b"old"


def test_a_directory_under_a_blobs_name_is_refused_and_its_neighbours_are_stored(
    far: FarSide, root: Path
) -> None:
    place_of(root, digest_of(b"b")).mkdir(parents=True)
    far.hello()

    far.write(far.batch(1, [b"a", b"b", b"c"]))

    receipt = far.receipt()
    assert verdicts(receipt) == {1: write_messages.REFUSED}
    assert receipt.stored == 2
    assert "a directory" in receipt.exceptions[0].text
    assert litter(root)[1:] == [litter(root)[0] + "/lock"]


def test_content_that_does_not_hash_to_its_name_is_never_named(far: FarSide, root: Path) -> None:
    contents = [b"a", b"b", b"c", b"d"]
    digests = [digest_of(content) for content in contents]
    far.hello(hash="blake3")

    far.write(far.batch(1, [b"X", b"b", b"Y", b"Z"], digests=digests))

    receipt = far.receipt()
    assert verdicts(receipt) == dict.fromkeys((0, 2, 3), write_messages.MISMATCH)
    assert receipt.stored == 1
    assert names_under(root) == {digests[1].hex()}
    assert far.bye() == 0


def test_a_pack_that_does_not_have_its_checksum_fails_its_batch_alone(
    far: FarSide, root: Path
) -> None:
    far.hello()
    far.write(far.batch(1, [b"a", b"b"], checksum=bytes(32)))
    far.write(far.batch(2, [b"c"]))

    receipts = {receipt.number: receipt for receipt in (far.receipt(), far.receipt())}

    assert receipts[1].outcome == write_messages.FAILED
    assert receipts[1].exceptions[0].text.startswith("EBADMSG: ")
    assert receipts[2].stored == 1
    assert names_under(root) == {digest_of(b"c").hex()}


def test_an_aborted_batch_leaves_nothing(far: FarSide, root: Path) -> None:
    far.hello()
    far.write(write_messages.batch(1, 2, 2) + far.pack([b"a", b"b"]))
    far.write(write_messages.numbered(framing.ABORT, 1))
    far.write(far.batch(2, [b"c"]))

    assert far.answer() == (framing.ABORTED, b"\0\0\0\x01")
    assert far.receipt().number == 2
    assert names_under(root) == {digest_of(b"c").hex()}
    assert litter(root)[1:] == [litter(root)[0] + "/lock"]


def test_a_batch_may_hold_less_than_announced(far: FarSide) -> None:
    far.hello()
    far.write(write_messages.batch(1, 1000, 10**9) + far.pack([b"a"]))
    far.write(write_messages.numbered(framing.COMMIT, 1))
    assert far.receipt().stored == 1
    far.write(write_messages.batch(2, 1000, 10**9) + write_messages.numbered(framing.COMMIT, 2))
    assert far.receipt() == Receipt(2, write_messages.SETTLED, write_messages.SHA256, 0, [])


def test_ping_is_answered_between_and_within_batches(far: FarSide) -> None:
    far.hello()
    for frame in (write_messages.batch(1, 1, 1), far.pack([b"a"])):
        far.write(frame)
        assert far.ask(framing.frame(framing.PING, b"12345678")) == (
            framing.PONG,
            b"12345678",
        )


# --- the end


def test_the_end_of_the_input_settles_what_is_committed_and_drops_the_rest(
    far: FarSide, root: Path
) -> None:
    far.hello()
    far.write(far.batch(1, [b"a"]) + write_messages.batch(2, 2, 2) + far.pack([b"b"]))
    far.stdin.close()

    assert far.receipt().number == 1
    assert far.answer() == (0, b"")
    assert far.child.wait() == 0
    assert far.stderr() == ""
    assert names_under(root) == {digest_of(b"a").hex()}
    assert not (root / ".ntt-incoming").exists()


def test_a_client_that_is_gone_altogether_changes_nothing_about_that(
    far: FarSide, root: Path
) -> None:
    far.hello()
    far.stdout.close()
    far.write(far.batch(1, [b"a"]) + far.batch(2, [b"b"]))
    far.stdin.close()

    assert far.child.wait() == 0
    assert far.stderr() == ""
    assert names_under(root) == {digest_of(b"a").hex(), digest_of(b"b").hex()}
    assert not (root / ".ntt-incoming").exists()


def test_bye_answers_what_is_committed_first(far: FarSide) -> None:
    far.hello()
    far.write(far.batch(1, [b"a"]) + far.batch(2, [b"b"]) + framing.frame(framing.BYE))
    assert [far.receipt().number, far.receipt().number] == [1, 2]
    assert far.answer() == (framing.LEFT, b"")
    assert far.answer() == (0, b"")
    assert far.child.wait() == 0


def test_its_last_word_comes_when_nothing_is_left(far: FarSide, root: Path) -> None:
    far.hello()
    far.write(framing.frame(framing.BYE))
    assert far.answer() == (framing.LEFT, b"")
    assert not (root / ".ntt-incoming").exists()


# --- what others left


def test_left_overs_of_dead_sessions_are_removed_and_those_of_the_living_are_not(
    root: Path,
) -> None:
    incoming = root / ".ntt-incoming"
    dead = "0123456789ab.00000000-0000-4000-8000-000000000000.0.77"
    others = "ba9876543210.00000000-0000-4000-8000-000000000000.0.77"
    tars_sibling = "0123456789ab.11111111-2222-4333-8444-555555555555.1.78"
    strange = "note.txt"
    for name in (dead, others, tars_sibling):
        (incoming / name / "3" / "aa").mkdir(parents=True)
        (incoming / name / "3" / "aa" / "file").write_bytes(b"half")
        (incoming / name / "3" / "link").symlink_to("/etc")
    (incoming / strange).write_bytes(b"mine")
    with FarSide(root) as first, FarSide(root) as second:
        first.hello(slot="0")
        first.write(write_messages.batch(1, 1, 5) + first.pack([b"first"]))
        assert first.ask(framing.frame(framing.PING, bytes(8)))[0] == framing.PONG
        second.hello(slot="2")

        stages = {path.name for path in incoming.iterdir()}
        assert dead not in stages
        assert {others, tars_sibling, strange} <= stages
        assert f"0123456789ab.11111111-2222-4333-8444-555555555555.0.{first.child.pid}" in stages
        first.write(write_messages.numbered(framing.COMMIT, 1))
        assert first.receipt().stored == 1
        assert (first.bye(), second.bye()) == (0, 0)
    assert {path.name for path in incoming.iterdir()} == {others, tars_sibling, strange}


def test_by_hash_that_is_gone_is_not_made_anew_unasked(root: Path) -> None:
    with FarSide(root) as far:
        assert far.hello(place=False)["placed"] == 0
        far.write(far.batch(1, [b"content"]))
        code, text = far.error()
        assert code == "gone"
        assert "mounted" in text
        assert far.child.wait() == 1
    assert list(root.iterdir()) == []


def test_the_root_is_never_made(root: Path) -> None:
    with FarSide(root) as far:
        far.write(write_messages.fields(framing.HELLO, far.hello_fields(root=str(root / "sub"))))
        assert far.error()[0] == "root"
    assert list(root.iterdir()) == []


def test_a_client_that_says_nothing_is_let_go(root: Path) -> None:
    with FarSide(root, forced_command("--root", str(root), "--idle-timeout", "2")) as far:
        far.hello()
        assert far.error()[0] == "idle"
        assert far.child.wait() == 1
    assert not (root / ".ntt-incoming").exists()
