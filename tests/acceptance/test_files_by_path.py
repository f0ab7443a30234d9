"""A store whose files go by their paths: listed by a query, read once, copied, found again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from blake3 import blake3

from tests.helpers.application import QUERY, Application
from tests.helpers.environment import Environment
from tests.helpers.waiting import PATIENCE, wait_until

CONTENTS = {
    "a/one.txt": b"one",
    "a/two.bin": bytes(range(256)) * 50,
    "b/ü x\n.txt": b"three",
    "b/same": b"one",
    "large": os.urandom(3_000_000),
}


def blobids() -> set[str]:
    return {blake3(content).hexdigest() for content in CONTENTS.values()}


@pytest.fixture
def listed(env: Environment, application: Application) -> Path:
    """The root of the files of CONTENTS, which the application lists."""
    root = env.root / "uploads"
    for name, content in CONTENTS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        application.add(name, size=len(content))
    env.write_config(
        source={"root": str(root)},
        **{"catalog.from": {"url": application.url, "query": QUERY}},
    )
    return root


def places(env: Environment) -> dict[str, str | None]:
    """Why each file that is listed has no blob, or not that of today; None for those that have."""
    with psycopg.connect(env.url) as conn:
        rows = conn.execute(
            "select path, failed from ntt_backup.places where replaced_at is null"
        ).fetchall()
    return {os.fsdecode(path): failed for path, failed in rows}


def test_check_takes_a_row_of_the_query(env: Environment, listed: Path) -> None:
    said = env.call("check", expect=0).stdout
    assert re.search(r"(?m)^ok +query .* such as a/one.txt$", said)
    env.write_config(**{"catalog.from": {"query": "select path as name from files"}})
    said = env.call("check", expect=4).stdout
    assert re.search(r"(?m)^FAILED +query .* has no column path", said)


@pytest.mark.parametrize("layout", ["files", "packs"])
def test_listed_files_are_copied_once_by_their_content(
    env: Environment, listed: Path, layout: str
) -> None:
    env.write_config(remote={"layout": layout})
    env.call("run", expect=0)
    assert set(env.copied()) == blobids()
    assert set(places(env)) == set(CONTENTS)
    if layout == "files":
        assert {Path(name).name for name in env.on_remote()} == blobids()
    env.call("run", expect=0)
    assert env.events("run_stop")[-1]["copied"] == 0
    env.call("verify", expect=0)
    env.call("verify", "--local", expect=0)
    env.call("reconcile", expect=0)
    (two,) = {one for one in blobids() if one == blake3(CONTENTS["a/two.bin"]).hexdigest()}
    shown = json.loads(env.call("show", "--json", "--verify", two, expect=0).stdout)
    assert shown["paths"] == ["a/two.bin"]
    assert shown["source"]["verified"] is True
    by_path = json.loads(env.call("show", "--json", "--verify", "a/two.bin", expect=0).stdout)
    file = by_path.pop("file")
    assert by_path == shown
    assert (file["path"], file["reason"], file["gone_at"]) == ("a/two.bin", None, None)
    assert file["registered_at"] <= file["read_at"]
    whole = json.loads(env.call("show", "--json", f"{listed}/a/two.bin", expect=0).stdout)
    assert (whole["blobid"], whole["file"]) == (two, file)


def test_what_is_wrong_with_a_file_is_said_and_the_others_are_copied(
    env: Environment, listed: Path, application: Application
) -> None:
    outside = env.root / "secret"
    outside.write_bytes(b"secret")
    (listed / "link").symlink_to(outside)
    (listed / "up").symlink_to(env.root)
    (listed / "fifo").mkdir()
    (listed / "sum").write_bytes(b"sum")
    application.add("missing", "link", "up/secret", "../secret", "a//one.txt", "fifo", size=None)
    application.add(str(outside), size=None)
    application.add("sum", size=3, sum="0" * 32)
    (listed / "a" / "one.txt").write_bytes(b"longer than it was")
    env.call("run", expect=7)
    found = places(env)
    assert {name: why for name, why in found.items() if why is not None} == {
        "missing": "missing",
        "link": "not-a-file",
        "up/secret": "not-a-file",
        "../secret": "bad-path",
        "a//one.txt": "bad-path",
        str(outside): "bad-path",
        "fifo": "not-a-file",
        "sum": "wrong-checksum",
        "a/one.txt": "wrong-size",
    }
    assert set(env.copied()) == blobids()  # b/same has the content of a/one.txt.
    assert blake3(b"secret").hexdigest() not in {Path(name).name for name in env.on_remote()}
    assert len(env.events("file_failed")) == 9
    status = env.status()
    assert status["files"] == {
        "listed": 13,
        "unread": 0,
        "failed": 9,
        "gone": 0,
        "registered_at": status["files"]["registered_at"],
    }
    assert status["health"]["level"] == "action_required"
    shown = json.loads(env.call("show", "--json", "sum", expect=0).stdout)
    assert (shown["blobid"], shown["file"]["reason"]) == (None, "wrong-checksum")
    assert "not read yet\n" in env.call("show", "../secret", expect=0).stdout
    assert "no file a/none" in env.call("show", "a/none", expect=2).stderr
    said = env.call("failed", "--json", "--reason", "wrong-size", expect=0).stdout
    assert [json.loads(line)["path"] for line in said.splitlines()] == ["a/one.txt"]

    (listed / "missing").write_bytes(b"found")
    application.owner.execute("update files set sum = null where path = 'sum'")
    env.call("scan", "--restart", expect=0)
    env.call("requeue", expect=0)
    env.call("run", expect=7)
    assert places(env)["missing"] is None
    assert blake3(b"found").hexdigest() in env.copied()


def test_a_path_below_the_root_may_be_absolute_and_is_checked_each_time(
    env: Environment, listed: Path, application: Application
) -> None:
    (listed / "absolute").write_bytes(b"absolute")
    application.add(str(listed / "absolute"), size=8)
    env.call("run", expect=0)
    content = blake3(b"absolute").hexdigest()
    assert content in env.copied()
    env.call("verify", "--local", expect=0)
    # Whoever may write to the catalog must not have a file read that lies elsewhere.
    secret = env.root / "secret"
    secret.write_bytes(b"secret")
    name = blake3(b"secret").hexdigest()
    env.register([name])
    with psycopg.connect(env.url) as conn:
        conn.execute(
            "insert into ntt_backup.places (id, origin, path, blobid)"
            " values (9999, '', '../secret'::bytea, %s)",
            (name,),
        )
    env.call("run", expect=7)
    assert name not in env.copied()
    assert env.failures() == {name: "missing"}


def test_a_watching_run_takes_what_is_listed_later(
    env: Environment, listed: Path, application: Application
) -> None:
    listens = {"every": 3600, "channel": "new files"}
    env.write_config(**{"catalog.from": listens}, run={"poll_interval": 0.2})
    with env.running("run", "--watch"):
        env.await_copied(blobids())
        (listed / "later").write_bytes(b"later")
        application.add("later", size=5)
        application.owner.execute('notify "new files"')
        env.await_copied(blobids() | {blake3(b"later").hexdigest()})
        # It keeps others out only as long as a pass takes.
        wait_until(lambda: env.call("scan", "--restart").returncode == 0, "the turn of a scan")


def test_a_file_that_is_young_waits_unless_its_checksum_is_right(
    env: Environment, listed: Path, application: Application
) -> None:
    env.write_config(source={"grace": 3600})
    content = b"checked"
    (listed / "checked").write_bytes(content)
    application.add("checked", size=7, sum=hashlib.sha1(content).hexdigest())
    old = time.time() - 7200
    os.utime(listed / "large", (old, old))
    env.call("run", expect=0)
    # The time of change of a file cannot be set back.
    assert set(env.copied()) == {blake3(content).hexdigest()}
    assert env.status()["files"]["unread"] == len(CONTENTS)
    assert env.events("run_stop")[-1]["young"] == len(CONTENTS)
    env.write_config(source={"grace": 0})
    with psycopg.connect(env.url) as conn:
        conn.execute("update ntt_backup.places set wait_until = now()")
    env.call("run", expect=0)
    assert env.events("run_stop")[-1]["young"] == 0
    assert set(env.copied()) == blobids() | {blake3(content).hexdigest()}


def test_a_changed_file_gets_a_version_where_that_is_wanted(
    env: Environment, listed: Path, application: Application
) -> None:
    env.write_config(**{"catalog.from": {"on_change": "version"}})
    env.call("run", expect=0)
    (listed / "large").write_bytes(b"small")
    application.owner.execute("update files set size = 5 where path = 'large'")
    env.call("scan", "--restart", expect=0)
    env.call("run", expect=0)
    assert set(env.copied()) == blobids() | {blake3(b"small").hexdigest()}


def test_a_root_that_is_not_mounted_loses_nothing(
    env: Environment, listed: Path, application: Application
) -> None:
    application.add(*map(str, range(2000)), size=None)
    env.call("scan", expect=0)
    listed.rename(listed.with_name("elsewhere"))
    listed.mkdir()
    env.write_config(run={"outage_timeout": 0})
    assert env.call("run").returncode == 2
    assert set(places(env).values()) == {None}
    (listed / "lost+found").mkdir()  # Of another disk: not empty, and most files are not on it.
    assert env.call("run").returncode == 2
    assert set(places(env).values()) == {None}
    (listed / "lost+found").rmdir()
    listed.rmdir()
    listed.with_name("elsewhere").rename(listed)
    env.write_config(run={"max_failed_share": 1})
    env.call("run", expect=7)
    assert set(env.copied()) == blobids()


def test_the_database_of_the_query_may_be_away(
    env: Environment, listed: Path, application: Application
) -> None:
    env.call("run", expect=0)
    env.write_config(**{"catalog.from": {"url": "host=/nowhere dbname=application"}})
    with psycopg.connect(env.url) as conn:
        conn.execute("update ntt_backup.origins set ended_at = ended_at - interval '1 day'")
    env.call("run", expect=7)
    (event,) = env.events("files_failed")
    assert "the database of catalog.from" in event["message"]
    # Blobs that are known do not wait for it, and it is no outage of the catalog.
    new = env.root / "uploads" / "new"
    new.write_bytes(b"new")
    with psycopg.connect(env.url) as conn:
        conn.execute(
            "insert into ntt_backup.places (id, origin, path) values (10000, '', 'new'::bytea)"
        )
    with env.running("run", "--watch"):
        env.await_copied(blobids() | {blake3(b"new").hexdigest()})
    assert not env.events("outage")


@pytest.mark.long
def test_a_stop_does_not_wait_for_the_first_read_of_a_large_file(
    env: Environment, listed: Path, application: Application
) -> None:
    env.call("run", expect=0)
    with (listed / "endless").open("wb") as file:
        file.truncate(1 << 43)
    application.add("endless", size=None)
    env.call("scan", expect=0)

    def is_read() -> bool:
        descriptors = (Path(f"/proc/{pid}/fd") for pid in env.processes())
        with suppress(OSError):
            return any(
                one.samefile(listed / "endless") for each in descriptors for one in each.iterdir()
            )
        return False

    with env.running("run", "--watch") as process:
        wait_until(is_read, "the file to be read")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
    assert places(env)["endless"] is None
    assert env.status()["files"]["unread"] == 1


@pytest.mark.long
def test_a_million_equal_files_are_one_blob(env: Environment, application: Application) -> None:
    """Hard links of one file, which take no space: each is read and registered."""
    count, content = 1_000_000, b"the same"
    root = env.root / "uploads"
    for number in range(count):
        if number % 1000 == 0:
            directory = root / str(number)
            directory.mkdir(parents=True)
            (directory / "0").write_bytes(content)
        else:
            os.link(directory / "0", directory / str(number % 1000))
    application.owner.execute(
        "insert into files (path, size) select i / 1000 * 1000 || '/' || i % 1000, 8"
        f" from generate_series(0, {count - 1}) as i"
    )
    env.write_config(
        source={"root": str(root)},
        **{"catalog.from": {"url": application.url, "query": QUERY}},
    )
    env.call("run", expect=0)
    (blobid,) = env.copied()
    assert env.status()["files"]["listed"] == count
    assert env.events("run_stop")[-1]["copied"] == 1
    shown = json.loads(env.call("show", "--json", blobid, expect=0).stdout)
    assert len(shown["paths"]) == 20
    env.call("verify", expect=0)


@pytest.fixture
def walked(env: Environment) -> Path:
    """The root of files with any names, of which [files.images] walks two directories."""
    root = env.root / "walked"
    contents = {
        b"images/a/one": b"one",
        b"images/new\nline/\xff\xfe": b"two",
        b"images/a/b/c/three": b"three",
        b"wal/000000010000000000000001": b"four",
        b"elsewhere/five": b"five",
    }
    for name, content in contents.items():
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "images" / "link").symlink_to(root / "elsewhere")
    paths = [str(root / name) for name in ("images", "wal")]
    env.write_config(
        source={"root": str(root)},
        run={"poll_interval": 0.2},
        **{"files.images": {"paths": paths, "every": 1, "exclude": ["*.tmp"]}},
    )
    return root


def blobids_of(*contents: bytes) -> set[str]:
    return {blake3(content).hexdigest() for content in contents}


WALKED = (b"one", b"two", b"three", b"four")


def test_walked_directories_are_copied_while_they_change(env: Environment, walked: Path) -> None:
    env.write_config(source={"grace": 1})
    (walked / "wal" / "partial.tmp").write_bytes(b"partial")
    with env.running("run", "--watch"):
        env.await_copied(blobids_of(*WALKED))
        (walked / "images" / "2026" / "11").mkdir(parents=True)
        (walked / "images" / "2026" / "11" / "new").write_bytes(b"new")
        (walked / "wal" / "partial.tmp").rename(walked / "wal" / "whole")
        (walked / "images" / "a").rename(walked / "images" / "z")
        env.await_copied(blobids_of(*WALKED, b"new", b"partial"))
    env.call("scan", expect=0)
    found = places(env)
    assert found["images/z/b/c/three"] is None
    assert env.status()["files"]["gone"] == 2
    assert blobids_of(b"five").isdisjoint(env.copied())
    env.call("verify", "--local", expect=0)


def test_a_walked_disk_that_is_not_mounted_is_said_and_loses_nothing(
    env: Environment, walked: Path
) -> None:
    env.call("run", expect=0)
    images = walked / "images"
    images.rename(walked / "disk")
    images.mkdir()
    scan = env.call("scan", "--json", expect=7)
    assert "images: it is empty, and had files: its disk is not mounted" in scan.stderr
    result = json.loads(scan.stdout)
    assert (result["gone"], result["unreadable"]) == (0, 1)
    (walked / "wal" / "new").write_bytes(b"new")
    env.call("run", expect=7)
    event = env.events("files_failed")[-1]
    assert event["message"] == "not all of files.images can be read"
    assert blobids_of(b"new") <= set(env.copied())
    assert env.status()["files"]["gone"] == 0
    images.rmdir()
    (walked / "disk").rename(images)
    env.call("scan", expect=0)
    env.call("run", expect=0)
