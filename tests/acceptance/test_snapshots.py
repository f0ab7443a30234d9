"""`snapshot` as an operator types it, on a directory of this machine."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Local
from ntt_backup.config.sections import RunSettings
from ntt_backup.errors import RemoteDenied
from ntt_backup.filestore.by_receiver import FileStoreByReceiver
from ntt_backup.snapshot.format.manifest import (
    END_BYTES,
    ManifestReader,
    ManifestWriter,
    ending_of,
    tail_size,
)
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.snapshot.origins import NO_KEYS
from ntt_backup.snapshot.take.last_version import Copies
from ntt_backup.snapshot.take.new_version import take
from ntt_backup.snapshot.take.walk import SnapshotSet
from tests.acceptance.snapshot_machine import Machine
from tests.helpers import program
from tests.helpers.blobs import tree
from tests.helpers.waiting import PATIENCE, wait_until


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_versions_are_taken_listed_compared_checked_and_brought_back(machine: Machine) -> None:
    files = machine.files
    (files / "hosts").write_text("127.0.0.1 localhost\n")
    (files / "odd \x1b[2J\n").write_text("a name that must not reach the terminal")
    (files / "image").write_bytes(random.Random(1).randbytes(3 << 20))
    contents = {machine.take(): tree(files)}
    with (files / "image").open("r+b") as image:
        image.seek(1 << 20)
        image.write(b"changed")
    (files / "hosts").unlink()
    (files / "link").symlink_to("image")
    contents[machine.take()] = tree(files)

    listed = machine.json("list", "etc")["versions"]
    assert [row["version"] for row in listed] == list(contents)
    assert [row["full"] for row in listed] == [True, False]
    assert listed[1]["stored"] < listed[0]["stored"] // 50
    shown = machine.call("show", "etc", "--files")
    assert "\x1b" not in shown
    assert "link -> image" in shown
    entries = [
        json.loads(line)
        for line in machine.call("show", "etc", "--files", "--json").split("\n")
        if line
    ]
    assert {Path(entry["path"]).name for entry in entries} >= {"odd \x1b[2J\n", "image", "link"}
    compared = machine.call("diff", "etc").splitlines()
    name = str(files)[1:]
    assert compared[:3] == [f"- {name}/hosts", f"M {name}/image", f"+ {name}/link"]
    assert machine.json("verify", "etc", "--download")["versions"] == 2
    for version, content in contents.items():
        assert machine.restored(version) == content

    (pack,) = machine.target.glob(f"snapshots/etc/{listed[0]['version']}/pack-*")
    pack.write_bytes(pack.read_bytes()[:-1])
    found = machine.json("verify", expect=7)
    assert found["damaged"] == [f"etc@{version}" for version in contents]
    assert {one["path"] for one in found["wrong"]} >= {f"{name}/image"}
    assert "snapshot take etc --full" in machine.call("verify", "etc", expect=7)

    (manifest,) = machine.target.glob(f"snapshots/etc/{listed[1]['version']}/manifest")
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert "damage" in machine.json("list", "etc", expect=7)["versions"][1]
    assert "DAMAGED" in machine.call("list", expect=7)


def test_a_restore_of_what_no_version_has_is_told(machine: Machine) -> None:
    (machine.files / "hosts").write_text("127.0.0.1 localhost\n")
    machine.take()
    back = machine.root / "back"
    restore = ("restore", "etc", "--to", str(back), "--path")
    said = machine.call(*restore, "*/hosts", "--path", "/srv/nothing*", expect=2)
    assert "/srv/nothing*" in said
    assert not list(back.iterdir())
    assert machine.json(*restore, "hosts")["files"] == 1


def test_a_set_has_no_snapshots_of_its_own_target(machine: Machine) -> None:
    (machine.files / "hosts").write_text("127.0.0.1 localhost\n")
    machine.target = machine.target.rename(machine.root / "target [a]*")
    machine.write_config(all={"paths": [str(machine.root)]})
    for _ in range(2):
        taken = machine.json("take", "all")
    assert (taken["unsettled"], taken["skipped"]) == (0, 0)
    shown = machine.call("show", "all", "--files")
    assert f"{machine.files}/hosts"[1:] in shown
    assert f"{machine.target}"[1:] in shown
    assert "manifest" not in shown


def test_forget_asks_and_keeps_what_is_needed(machine: Machine) -> None:
    (machine.files / "hosts").write_text("one")
    taken = [machine.take("--full"), machine.take(), machine.take("--full"), machine.take()]
    # Nobody can be asked: nothing is removed.
    said = machine.call("forget", "etc", "--keep-last", "1", expect=2)
    assert f"remove etc@{taken[0]}" in said
    assert f"which {taken[3]} needs" in said
    assert machine.versions() == taken
    done = machine.json("forget", "etc", "--keep-last", "1", "--yes")
    assert (done["gone"], done["kept"]) == (taken[:2], taken[3:])
    assert machine.versions() == taken[2:]
    assert not (machine.target / "snapshots" / "etc" / taken[0]).exists()
    # A take does the same by the settings of its set.
    machine.configure(keep_last=1)
    last = machine.take("--full")
    assert machine.versions() == [last]
    machine.call("forget", "other", "--yes", expect=2)


def test_forget_of_a_set_without_versions_is_an_error_unless_it_is_configured(
    machine: Machine,
) -> None:
    machine.configure(keep_last=1)
    assert "nothing was removed" in machine.call("forget", "etc")
    machine.call("forget", "ect", "--keep-last", "1", "--yes", expect=2)


def test_forget_removes_no_more_than_was_agreed_to(machine: Machine) -> None:
    (machine.files / "hosts").write_text("one")
    taken = [machine.take("--full"), machine.take("--full")]
    asked, answers = os.openpty()
    argv = machine.argv("forget", "etc", "--keep-last", "1")
    environ = {**machine.environ, "NTT_LOCK_FILE": str(machine.root / "lock-of-another-host")}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=environ, stdin=answers, stdout=pipe, stderr=pipe) as child:
        assert child.stderr is not None
        said = b""
        while b"Remove them?" not in said:
            piece = os.read(child.stderr.fileno(), 1000)
            assert piece, said
            said += piece
        taken.append(machine.take("--full"))
        os.write(asked, b"y\n")
        said = child.communicate(timeout=PATIENCE)[1]
    for one in (asked, answers):
        os.close(one)
    assert (child.returncode, b"nothing was removed" in said) == (3, True)
    assert machine.versions() == taken


@dataclass(frozen=True, slots=True)
class AddsSnapshots(Local):
    """As an ssh key whose forced command lists nothing else in its --allow."""

    root: str = ""

    def argv(self, _: str) -> list[str]:
        program = "from ntt_backup.receiver.__main__ import main; raise SystemExit(main())"
        return [sys.executable, "-c", program, "--root", self.root, "--allow", "snapshot"]


def planted(machine: Machine, count: int) -> list[str]:
    """Empty versions with clocks over days, as a client adds them whose key allows no more."""
    target = str(machine.target)
    key = AddsSnapshots(root=target)
    spec = SessionSpec(key, target, "0" * 12, "x", "snapshot", RunSettings())
    empty = machine.root / "empty"
    empty.mkdir(exist_ok=True)
    (machine.root / "cache of the enemy").mkdir(exist_ok=True)
    copies = Copies(machine.root / "cache of the enemy")
    names = []
    with closing(FileStoreByReceiver(spec, SNAPSHOTS)) as repository:
        with pytest.raises(RemoteDenied, match="append-only"):
            repository.remove([f"etc/{machine.versions()[0]}/manifest"])
        for number in range(count):
            taken = take(
                repository,
                SnapshotSet("etc", (str(empty),)),
                copies=copies,
                origins=copies.origins(NO_KEYS),
                now=datetime.now(UTC) - timedelta(days=number, hours=-1),
                full=True,
            )
            names.append(taken.version)
    return names


@pytest.mark.parametrize(
    "key", [False, pytest.param(True, marks=pytest.mark.long)], ids=["no key", "key"]
)
def test_what_an_append_only_client_plants_has_no_good_version_removed_nor_restored(
    machine: Machine, key: bool
) -> None:
    if key:
        machine.make_signing_key()
    contents = {}
    for number in range(3):
        (machine.files / "hosts").write_text(f"{number}")
        contents[machine.take("--full")] = tree(machine.files)
    bad = planted(machine, 20)
    name = "snapshots/etc/99991231T235959Z-00000000"
    (machine.target / name).mkdir()
    (machine.target / name / "manifest").write_bytes(b"x")

    def forget(**how: str) -> Any:
        # As on another host, which prunes: it has the key, if there is one, and nothing else.
        environ = {**machine.environ, "XDG_CACHE_HOME": str(machine.root / "cache of another")}
        args = machine.args("forget", "etc", "--keep-last", "2", "--yes", "--json")
        done = program.run([*args, *how], environ, PATIENCE)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    done = forget()
    # Without a key, those of three days alone would do for a keep_last of 2.
    assert [one for one in done["gone"] if one in contents] == list(contents)[:1] * key
    assert {one["version"] for one in done["doubtful"]} >= set(bad)
    kept = list(contents)[key:]
    # The host itself goes on, and tells its own from the others.
    (machine.files / "hosts").write_text("last")
    taken = machine.json("take", "etc")
    assert taken["parent"] == kept[-1]
    contents[taken["version"]] = tree(machine.files)
    rows = {row["version"]: row for row in machine.json("list", "etc", expect=7)["versions"]}
    assert {row["origin"] for one, row in rows.items() if one in (*kept, taken["version"])} == {
        "this host"
    }
    assert {rows[one]["origin"] for one in bad} == {"unknown"}
    back = machine.root / "newest"
    assert machine.json("restore", "etc", "--to", str(back))["version"] == taken["version"]
    for one in (*kept, taken["version"]):
        assert machine.restored(one) == contents[one]
    refused = machine.call("restore", f"etc@{bad[0]}", "--to", str(back), expect=2)
    assert "--trust-target" in refused
    restored = machine.json("restore", f"etc@{bad[0]}", "--to", str(back), "--trust-target")
    assert restored["origin"] == "unknown"
    checked = machine.json("verify", "etc", expect=7)
    assert (len(checked["damaged"]), len(checked["foreign"])) == (1, 20)
    # Once an operator has looked at them, they go.
    machine.call("forget", "etc", "--keep-last", "100", "--drop-doubtful", "--yes")
    assert machine.versions() == [*kept, taken["version"]]


def test_a_new_machine_restores_with_the_key_or_by_an_option(machine: Machine) -> None:
    machine.make_signing_key()
    (machine.files / "hosts").write_text("content")
    version = machine.take()
    shutil.rmtree(machine.root / "cache")
    assert machine.restored(version) == tree(machine.files)
    shutil.rmtree(machine.root / "config")
    back = machine.root / "by option"
    assert "--trust-target" in machine.call("restore", "etc", "--to", str(back), expect=2)
    assert not [one for one in back.iterdir() if not one.name.startswith(".")]
    said = machine.call("restore", "etc", "--to", str(back), "--trust-target")
    assert "this version is not of this host" in said
    assert tree(back / str(machine.files)[1:]) == tree(machine.files)
    assert "nothing that this host sends is signed" in machine.call("take", "etc")


def test_a_version_that_plays_this_host_is_forged(machine: Machine) -> None:
    machine.make_signing_key()
    (machine.files / "hosts").write_text("content")
    version = machine.take()
    shutil.rmtree(machine.root / "cache")
    (manifest,) = machine.target.glob(f"snapshots/etc/{version}/manifest")
    data = manifest.read_bytes()
    signature = ending_of(data[-tail_size(data[-END_BYTES:]) :])[1].signature
    reader = ManifestReader([data])
    out: list[bytes] = []
    writer = ManifestWriter(out.append, reader.header, lambda _: signature)
    for entry in reader.entries():
        writer.add(entry.line())
    assert reader.trailer is not None
    writer.end(replace(reader.trailer, skipped=1))
    manifest.write_bytes(b"".join(out))
    assert machine.json("list")["versions"][0]["origin"] == "forged"
    assert "FORGED" in machine.call("list")
    assert "FORGED" in machine.call("verify", expect=7)
    back = str(machine.root / "back")
    assert "FORGED" in machine.call("restore", f"etc@{version}", "--to", back, expect=2)


def test_a_target_that_shows_an_older_state_of_itself_is_told(machine: Machine) -> None:
    (machine.files / "hosts").write_text("content")
    taken = [machine.take(), machine.take()]
    assert machine.json("verify", "etc")["missed"] == []
    last = machine.target / "snapshots" / "etc" / taken[1]
    last.rename(machine.root / "withheld")
    (told,) = machine.json("verify", "etc", expect=7)["missed"]
    assert f"etc@{taken[1]}" in told
    # One version is asked about alone: others are not looked for.
    assert machine.json("verify", f"etc@{taken[0]}")["missed"] is None
    assert "MISSED: the target lacks" in machine.call("verify", expect=7)
    # A take says it, too, and goes on with what is there.
    again = machine.run("take", "etc", "--json")
    assert f"etc@{taken[1]}" in again.stderr
    assert json.loads(again.stdout)["parent"] == taken[0]
    (machine.root / "withheld").rename(last)
    assert machine.json("verify", "etc")["missed"] == []
    # What is removed by us is not missed.
    machine.call("forget", "etc", "--keep-last", "1", "--yes")
    assert machine.json("verify", "etc")["missed"] == []


def test_a_set_is_changed_by_one_at_a_time(machine: Machine) -> None:
    taken = [machine.take("--full"), machine.take("--full")]
    with (machine.root / "lock-remote-snapshot-etc").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        machine.call("take", "etc", expect=3)
        machine.call("forget", "etc", "--keep-last", "1", "--yes", expect=3)
    assert machine.versions() == taken


def test_what_cannot_be_taken_has_its_exit_code_and_one_clear_line(machine: Machine) -> None:
    said = machine.run("take", "home", expect=2).stderr
    assert said.count("\n") == 2
    assert "no set home is in the configuration, and no paths are given" in said
    done = machine.run("take", "home", str(machine.files), "/no/where", expect=7)
    assert done.stderr == "/no: No such file or directory\n"
    assert "NOT taken: 1 that could not be read" in done.stdout
    machine.files.rmdir()
    said = machine.call("take", "etc", expect=2)
    assert "no path of the snapshot set etc exists" in said
    machine.target.rename(machine.root / "elsewhere")
    machine.call("take", "home", "/bin/sh", expect=6)


@pytest.mark.parametrize(
    ("signum", "status"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_take_that_is_stopped_leaves_no_version_and_the_next_one_is_whole(
    machine: Machine, signum: int, status: int
) -> None:
    (machine.files / "big").write_bytes(random.randbytes(20_000_000))
    machine.limits["bwlimit"] = "1MB/s"
    machine.configure()

    def arrived() -> bool:
        # A file that is renamed meanwhile is looked at again.
        with suppress(FileNotFoundError):
            return any(tree(machine.target).values())
        return False

    with machine.running("take", "etc") as child:
        wait_until(arrived, "content on the target")
        said = machine.call("take", "etc", expect=3)
        assert f"another take or forget of etc is running, with PID {child.pid}" in said
        child.send_signal(signum)
        assert child.wait(PATIENCE) == status
    assert machine.versions() == []
    machine.limits.clear()
    machine.configure()
    assert machine.restored(machine.take()) == tree(machine.files)
    assert [one.name.count(".") for one in (machine.root / "cache").rglob("*.m*")] == [1, 1]


@pytest.fixture
def latin(machine: Machine) -> dict[str, str]:
    """The environment of a user whose locale is ISO-8859-1."""
    places = machine.root / "locales"
    places.mkdir()
    made = subprocess.run(
        ["localedef", "-c", "-i", "en_US", "-f", "ISO-8859-1", str(places / "latin")],
        capture_output=True,
    )
    if not (places / "latin").exists():
        pytest.skip(f"no locale can be made: {made.stderr!r}")
    return {"LOCPATH": str(places), "LC_ALL": "latin"}


def test_names_come_back_byte_for_byte_by_another_locale(
    machine: Machine, latin: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {b"caf\xe9", "caf\u00e9".encode(), "\u4e2d".encode(), b"\xff\xfe"}
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(machine.files), name))).write_bytes(name)
    machine.take()
    monkeypatch.setattr(Machine, "environ", {**machine.environ, **latin})
    back = machine.root / "back"
    machine.call("restore", "etc", "--path", "*\u00e9", "--path", "**", "--to", str(back))
    where = os.fsencode(back / str(machine.files)[1:])
    assert set(os.listdir(where)) == names
    for name in names:
        assert Path(os.fsdecode(os.path.join(where, name))).read_bytes() == name


def test_a_pinned_version_outlives_the_retention_and_this_host(machine: Machine) -> None:
    machine.make_signing_key()
    (machine.files / "hosts").write_text("one")
    first, second = machine.take("--full"), machine.take("--full")
    assert f"pinned etc@{first}" in machine.call("pin", f"etc@{first}", "--reason", "an \x1b audit")
    assert "already" in machine.call("pin", f"etc@{first}")
    # Only the target and the key are left.
    shutil.rmtree(machine.root / "cache")
    machine.configure(keep_last=1)
    third = machine.take("--full")
    assert machine.versions() == [first, third]
    rows = {row["version"]: row for row in machine.json("list", "etc")["versions"]}
    assert (rows[first]["pinned"], rows[third]["pinned"]) == (True, False)
    assert rows[first]["pin_reason"] == "an \x1b audit"
    assert "pinned: an \\x1b audit" in machine.call("list", "etc")
    assert machine.json("verify", "etc", "--download")["damaged"] == []
    assert machine.json("forget", "etc", "--keep-last", "1", "--yes")["pinned"] == [first]
    assert machine.json("unpin", f"etc@{first}")["removed"] == 1
    assert machine.json("forget", "etc", "--keep-last", "1", "--yes")["gone"] == [first]
    assert second not in machine.versions()
