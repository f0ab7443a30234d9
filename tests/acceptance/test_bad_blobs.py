"""One bad blob never fails its neighbours, and odd ones that are not bad arrive as they are."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which

import psycopg.conninfo
import pytest
from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from tests.helpers.blobs import noise
from tests.helpers.environment import Environment
from tests.helpers.waiting import PATIENCE, wait_until

AS_ROOT = os.geteuid() == 0
HEX = "0123456789abcdef" * 4
MALFORMED = {
    "empty": "",
    "upper case": HEX.upper(),
    "path of the right length": "../" * 21 + "x",
    "absolute path": "/etc/passwd",
    "newline after": HEX + "\n",
    "SQL": "'; drop table blobs; --",
    "command": "$(touch /tmp/ntt-was-here)",
    "option of tar": "--checkpoint-action=exec=sh",
    "escape sequence": "\x1b[2J" + HEX[4:],
    "other digits": "\u0661" * 64,
    "surrogate pair": "\U0001f4a9" * 16,
}


def failed_events(env: Environment) -> dict[str, str]:
    return {event["blobid"]: event["reason"] for event in env.events("blob_failed")}


def assert_failed(env: Environment, code: int, expected: dict[str, str]) -> None:
    """Exactly these failed, in the ledger as in the log; all others of the store were copied."""
    assert code == 7
    assert env.failures() == expected
    assert failed_events(env) == expected
    stop = env.events("run_stop")[-1]
    assert (stop["failed"], stop["outcome"]) == (len(expected), "some_failed")
    rows = env.query("select detail from ntt_backup.failures")
    assert all(detail for (detail,) in rows)
    good = {row[0] for row in env.query("select blobid from blobs")} - expected.keys()
    assert env.copied() == good
    assert {name.rpartition("/")[2] for name in env.on_remote()} == good
    assert env.litter() == []


# --- what the store has in a blob's place


@pytest.fixture
def mere_mortal(env: Environment) -> Iterator[None]:
    """The program may not read what file modes forbid: root gives up its power to."""
    if not AS_ROOT:
        yield
        return
    setpriv = which("setpriv") or pytest.skip("root needs setpriv to give up what makes it root")
    env.wrapper = [setpriv, "--bounding-set=-dac_override,-dac_read_search", "--"]
    # The database's socket lies in a directory of another user.
    sockets = Path(str(psycopg.conninfo.conninfo_to_dict(env.url)["host"]))
    mode = sockets.stat().st_mode
    sockets.chmod(mode | 0o011)
    yield
    sockets.chmod(mode)


@pytest.mark.usefixtures("mere_mortal")
def test_a_scan_that_cannot_read_a_directory_ends_with_7(env: Environment) -> None:
    blobids = {env.put_in_store(content) for content in (b"a blob", b"another")}
    (hidden, *_) = blobids
    env.path(hidden).parent.chmod(0)

    done = env.run("scan", expect=7)
    assert "1 stray, unreadable" in done.stdout
    assert {row[0] for row in env.query("select blobid from blobs")} == blobids - {hidden}
    env.path(hidden).parent.chmod(0o755)
    env.call("scan", expect=0)
    assert {row[0] for row in env.query("select blobid from blobs")} == blobids


@pytest.mark.usefixtures("mere_mortal")
def test_whatever_is_wrong_with_a_blob_stays_its_own_trouble(env: Environment) -> None:
    blobs = env.fill(60, size=lambda chance: chance.randrange(10, 9000))
    content = {blobid: env.path(blobid).read_bytes() for blobid in blobs[:10]}
    bad = dict(
        zip(
            content,
            (
                "missing",
                "unreadable",
                "wrong-size",
                "corrupt-source",
                "corrupt-source",
                "not-a-file",
                "not-a-file",
                "not-a-file",
                "not-a-file",
                "not-a-file",
            ),
            strict=True,
        )
    )
    paths = [env.path(blobid) for blobid in bad]
    paths[1].chmod(0)
    env.query("update blobs set size = %s where blobid = %s", 10_000, blobs[2])
    paths[3].write_bytes(content[blobs[3]][:-1])
    paths[4].write_bytes(bytes([content[blobs[4]][0] ^ 1]) + content[blobs[4]][1:])
    for path in (paths[0], *paths[5:]):
        path.unlink()
    paths[5].mkdir()
    paths[6].symlink_to(env.root)
    elsewhere = env.root / "elsewhere"
    elsewhere.write_bytes(content[blobs[7]])
    paths[7].symlink_to(elsewhere)
    os.mkfifo(paths[8])
    with socket.socket(socket.AF_UNIX) as listener:
        bind_in(listener, paths[9])
        first = env.run("run", "--once")

    assert_failed(env, first.returncode, bad)

    env.run("run", "--once", expect=0)
    assert env.failures() == bad

    env.query("update blobs set size = null where blobid = %s", blobs[2])
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(content[path.name])
    requeued = env.run("requeue")
    assert "10 blobs" in requeued.stdout
    env.run("run", "--once", expect=0)
    assert env.failures() == {}
    assert env.query("select * from ntt_backup.failures") == []
    elsewhere.unlink()
    env.assert_complete()


def bind_in(listener: socket.socket, path: Path) -> None:
    """Make a socket at a path that is too long for bind(2)."""
    fd = os.open(path.parent, os.O_PATH)
    try:
        listener.bind(f"/proc/self/fd/{fd}/s")
        (path.parent / "s").rename(path)
    finally:
        os.close(fd)


# --- what most of the store has


@contextmanager
def partly_mounted(env: Environment, count: int) -> Iterator[set[str]]:
    """Two thirds of count blobs, by their prefixes, are away until this ends; its value is those
    that are there.
    """
    blobs = env.fill(count, size=lambda chance: chance.randrange(4, 40))
    away = env.root / "away"
    away.mkdir()
    moved = {blobid[:2] for blobid in blobs if int(blobid[0], 16) % 3}
    for prefix in moved:
        (env.store / prefix).rename(away / prefix)
    yield {blobid for blobid in blobs if blobid[:2] not in moved}
    for prefix in moved:
        (away / prefix).rename(env.store / prefix)


def test_a_run_ends_with_2_when_most_of_the_store_is_missing(env: Environment) -> None:
    env.write_config(run={"workers": 2, "batch_size": 300})
    with partly_mounted(env, 4500) as there:
        done = env.run("run", "--once", expect=2)
        assert "most of the store cannot be read" in done.stdout + done.stderr
        assert "run.max_failed_share" in done.stdout
        assert set(env.failures().values()) <= {"missing"}
        assert len(env.failures()) < 2000  # A worker that has tried a thousand knows.
        assert env.copied() <= there
        (stop,) = env.events("run_stop")
        assert (stop["outcome"], stop["exit_code"]) == ("error", 2)
    env.run("requeue", "--reason", "missing", expect=0)
    env.run("run", "--once", expect=0)
    env.assert_complete()


def test_a_daemon_copies_what_a_store_has_that_is_not_whole_and_marks_nothing(
    env: Environment,
) -> None:
    run_often = {"poll_interval": 0.2, "backoff_base": 0.2, "backoff_cap": 1}
    env.write_config(run={"workers": 1, "batch_size": 1000, **run_often})
    with ExitStack() as away:
        there = away.enter_context(partly_mounted(env, 2500))
        with env.running("run", "--watch") as run:
            wait_until(lambda: env.copied() == there, "what is there to be copied")
            assert env.await_event("outage", 2)["what"] == "source"
            assert env.failures() == {}
            assert all(one["copied"] for one in env.events("batch_complete"))
            away.close()
            wait_until(lambda: len(env.copied()) == 2500, "all to be copied")
            run.send_signal(signal.SIGTERM)
            assert run.wait(PATIENCE) == 143, env.output()
    assert env.failures() == {}
    env.assert_complete()


def test_of_many_failed_blobs_a_hundred_have_a_line_each(env: Environment) -> None:
    env.write_config(run={"max_failed_share": 1, "batch_size": 300})
    with partly_mounted(env, 1500) as there:
        done = env.run("run", "--once")
        missing = 1500 - len(there)
        assert done.returncode == 7, done.stdout
        assert len(env.failures()) == missing
        assert len(env.events("blob_failed")) == 100
        told = env.events("blobs_failed")
        assert sum(event["count"] for event in told) == missing - 100
        assert sum(event["reasons"]["missing"] for event in told) == missing - 100
        assert "more failed: " in done.stdout
        assert len(done.stdout.splitlines()) < 40


def test_without_a_check_of_the_source_its_bytes_are_sent_as_they_are(env: Environment) -> None:
    env.write_config(run={"strategy": "tar", "verify_source": False})
    blobs = env.fill(40, size=lambda chance: chance.randrange(10, 9000))
    env.path(blobs[0]).write_bytes(b"something else")
    env.path(blobs[1]).unlink()
    env.query("update blobs set size = 3 where blobid = %s", blobs[2])

    done = env.run("run", "--once")

    assert_failed(env, done.returncode, {blobs[1]: "missing", blobs[2]: "wrong-size"})
    assert env.on_remote()[relative_path(blobs[0])] == b"something else"


# --- what the remote has in a blob's place


@pytest.mark.parametrize("strategy", ["stream", pytest.param("tar", marks=pytest.mark.long)])
def test_a_blob_that_the_remote_cannot_place_ends_alone(env: Environment, strategy: str) -> None:
    """tar answers for a whole batch, so that one is split until the blob is alone."""
    env.write_config(run={"strategy": strategy, "attempts": 2})
    blobs = env.fill(60, size=lambda chance: chance.randrange(10, 9000))
    directory = blobs[7]
    alone = [one for one in blobs if sum(one[:2] == other[:2] for other in blobs) == 1]
    file = next(one for one in alone if one != directory)
    top = f"{env.remote.path}/by-hash"
    made = env.sshd.run(f"mkdir -p {top}/{relative_path(directory)}; echo x >{top}/{file[:2]}")
    assert made.returncode == 0, made.stderr

    done = env.run("run", "--once")

    in_the_way = env.remote.local / "by-hash" / file[:2]
    assert in_the_way.read_bytes() == b"x\n"
    in_the_way.unlink()
    assert_failed(env, done.returncode, {directory: "remote-rejected", file: "remote-rejected"})
    assert len(env.copied()) == 58
    assert bool(env.events("batch_split")) == (strategy == "tar")

    (env.remote.local / "by-hash" / relative_path(directory)).rmdir()
    env.run("requeue", "--reason", "remote-rejected")
    env.run("run", "--once", expect=0)
    env.assert_complete()


# --- what the catalog has for a blobid


def test_what_is_no_blobid_is_failed_and_never_a_path(env: Environment) -> None:
    good = env.fill(40)
    env.register(list(MALFORMED.values()))

    done = env.run("run", "--once")

    assert_failed(env, done.returncode, dict.fromkeys(MALFORMED.values(), "bad-blobid"))
    assert env.on_remote() == env.in_store()
    assert env.copied() == set(good)
    assert not Path("/tmp/ntt-was-here").exists()
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) < len(MALFORMED) + 6
    env.run("run", "--once", expect=0)


# --- odd, but not bad


def test_odd_files_arrive_as_ordinary_ones(env: Environment) -> None:
    contents = [bytes([n % 256]) * n for n in (0, 1, 511, 512, 513, 1023, 1024, 10_239, 10_240)]
    blobs = [env.put(content) for content in contents]
    for blobid, mode in zip(
        blobs, (0 if AS_ROOT else 0o400, 0o777, 0o4755, 0o2000 | 0o444), strict=False
    ):
        env.path(blobid).chmod(mode)
    for blobid, moment in zip(blobs, (-1, -(2**31), 0, 1, 2**31, 2**33, 2**34 - 1), strict=False):
        os.utime(env.path(blobid), (moment, moment))
    os.link(env.path(blobs[3]), env.root / "another name")

    env.run("run", "--once", expect=0)
    env.assert_complete()
    top = env.remote.local / "by-hash"
    modes = {(path.is_dir(), path.stat().st_mode & 0o7777) for path in [top, *top.rglob("*")]}
    assert modes == {(True, 0o755), (False, 0o644)}


@pytest.mark.long
def test_a_blob_beyond_two_gigabytes_arrives(env: Environment) -> None:
    """One system call reads no more than that."""
    size = 2 * 1024**3 + 1
    hollow = env.root / "hollow"
    hollow.touch()
    os.truncate(hollow, size)
    blobid = blake3().update_mmap(hollow).hexdigest()
    env.path(blobid).parent.mkdir(parents=True)
    hollow.rename(env.path(blobid))
    env.register([blobid], [size])
    env.run("run", expect=0)
    arrived = env.remote_path(blobid)
    assert blake3().update_mmap(arrived).hexdigest() == blobid
    assert env.copied() == {blobid}
    arrived.unlink()


def test_files_that_are_written_in_place_are_not_failed(env: Environment) -> None:
    env.write_config(source={"grace": "15min"}, run={"poll_interval": 0.1})
    contents = {blake3(content).hexdigest(): content for content in map(noise, range(1, 200))}
    env.fill(3)
    env.register([*contents])
    with env.running("run", "--watch"):
        for number, (blobid, content) in enumerate(contents.items()):
            path = env.path(blobid)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb", buffering=0) as file:
                file.write(content[: len(content) // 2])
                if number % 50 == 0:
                    env.await_event("blobs_young", len(env.events("blobs_young")) + 1)
                file.write(content[len(content) // 2 :])
        env.await_copied(set(contents))
    assert env.events("blob_failed") == []
    assert env.failures() == {}


def test_blobs_do_not_wait_for_one_that_is_still_being_written(env: Environment) -> None:
    env.write_config(source={"grace": "15min"}, run={"poll_interval": 0.1})
    late = noise(1000)
    blobid = blake3(late).hexdigest()
    env.path(blobid).parent.mkdir(parents=True)
    # These are in the range that is claimed for it.
    beside = [one for one in map(noise, range(2000, 6000)) if _range(one) == blobid[:2]]
    with env.running("run", "--watch") as process:
        env.register([blobid])
        env.await_event("blobs_young", 2)
        for content in [noise(1), *beside[:4]]:
            env.await_copied({env.put(content)})
        env.put_in_store(late)
        env.await_copied({blobid})
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
    assert env.events("run_stop")[0]["copied"] == len(env.copied()) == 6


def _range(content: bytes) -> str:
    return blake3(content).hexdigest()[:2]


def test_a_missing_blob_is_failed_also_where_others_are_written_beside_it(
    env: Environment,
) -> None:
    env.write_config(source={"grace": "2s"}, run={"poll_interval": 0.1})
    missing = "ab" * 32
    env.path(missing).parent.mkdir(parents=True)
    env.register([missing])
    env.fill(3)

    def is_failed() -> bool:
        path = env.path(missing).with_name("others are written here")
        path.touch()
        path.unlink()
        return missing in env.failures()

    with env.running("run", "--watch"):
        wait_until(is_failed, "the missing blob to be failed")
    assert env.events("blobs_young")
    assert env.failures() == {missing: "missing"}


@pytest.mark.long
def test_a_file_that_stays_wrong_is_failed_once_it_is_old_enough(env: Environment) -> None:
    env.write_config(source={"grace": "5s"}, run={"poll_interval": 0.1})
    missing, good = "ab" * 32, set(env.fill(5))
    with env.running("run", "--watch") as run:
        env.await_copied(good)
        wrong = env.put_in_store(b"it will be cut")
        env.path(wrong).write_bytes(b"it will be")
        env.register([wrong, missing])
        env.await_event("blobs_young")
        env.await_event("blob_failed", 2)
        run.send_signal(signal.SIGTERM)
        run.wait()
    assert env.failures() == {wrong: "corrupt-source", missing: "missing"}
    assert env.copied() == good
