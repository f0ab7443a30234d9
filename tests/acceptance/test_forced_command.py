"""A key behind the forced command `ntt-backup-receive`: it can back up, and nothing else.

The line comes from `install-receiver`, the receiver is the one file that it writes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from ntt_backup.catalog import history
from ntt_backup.catalog.connection import connect
from ntt_backup.cli.commands.install import RECEIVER, key_line
from ntt_backup.config import RemoteSettings
from tests.helpers.blobs import tree
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.receivers import RemoteReceiver, digest_of, place_of
from tests.helpers.sshd import ALIAS, Sshd, receiver_on
from tests.helpers.waiting import PATIENCE

MIB = 1 << 20


@pytest.fixture
def checking(request: pytest.FixtureRequest) -> str:
    """What the receiver has to check names with; nothing, where a test does not say."""
    return str(getattr(request, "param", "none"))


@pytest.fixture
def required() -> bool:
    """Whether the line requires BLAKE3 where there is none."""
    return False


@pytest.fixture
def allowed() -> str:
    """What the line allows."""
    return "put,list,verify,dump,snapshot"


@pytest.fixture
def forced(
    env: Environment, remote: Sshd, tmp_path: Path, checking: str, required: bool, allowed: str
) -> Iterator[list[str]]:
    """The environment's only key is one that the receiver stands behind; an ssh that uses it."""
    identity = tmp_path / "id_forced"
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "forced", "-f", str(identity)]
    subprocess.run(argv, check=True)
    line = key_line(RemoteSettings(host="x", path=env.remote.path, identity_file=identity))
    if checking == "none" and not required:
        line = line.replace(" --require blake3", "")
    line = line.replace("put,list,verify,dump,snapshot", allowed)
    authorized = remote.work / "keys" / "authorized_keys"
    before = authorized.read_text()
    authorized.write_text(before + line.replace(RECEIVER, receiver_on(remote, checking)) + "\n")
    config = tmp_path / "ssh_config"
    config.write_text(
        remote.ssh_config.read_text().replace(str(remote.identity_file), str(identity))
    )
    env.write_config(remote={"ssh_config": str(config)}, run={"strategy": "auto"})
    yield ["ssh", "-F", str(config), "-oBatchMode=yes"]
    authorized.write_text(before)


def client(env: Environment, forced: list[str]) -> RemoteReceiver:
    """A client that can say anything to what the key leads to."""
    return RemoteReceiver(env.remote.local, command=[*forced, "-T", ALIAS, "a command"])


@pytest.mark.parametrize("checking", ["b3sum", "none"], indirect=True)
def test_a_run_goes_through_the_forced_command(
    env: Environment, forced: list[str], checking: str
) -> None:
    env.fill(100)
    env.fill(1, seed=2, size=lambda chance: 3 * MIB + chance.randrange(1000))

    check = env.run("check", expect=0)
    assert "receiver" in check.stdout
    says = "by SHA-256 (no BLAKE3" if checking == "none" else "by BLAKE3 (b3sum)"
    assert f"checks {says}" in check.stdout
    env.run("run", expect=0)
    assert {line["strategy"] for line in env.events("worker_start")} == {"stream"}
    assert env.failures() == {}
    env.assert_complete()


@pytest.mark.parametrize("allowed", ["put,list,dump,get"])
def test_dumps_go_through_the_forced_command_and_come_back(
    env: Environment, forced: list[str], postgres: Postgres, allowed: str, database_url: str
) -> None:
    """What is past retention stays for a while: the key must not be able to end all dumps."""
    env.fill(20)
    env.write_config(
        run={"skip_pgdump": False},
        dump={"bin": str(postgres.programs), "keep_last": 1, "keep_daily": 0, "keep_weekly": 0},
    )
    check = env.run("check", expect=0)
    assert re.search(rf"^ok +dump +{postgres.programs}/pg_dump, ", check.stdout, re.MULTILINE)
    env.run("run", expect=0)
    for _ in range(3):
        env.run("dump", "--force", expect=0)
    event = env.events("dump_complete")[0]
    (said,) = env.status()["dumps"]
    assert said["error"] == ""
    names = [path.name for path in (env.remote.local / "pgdump").glob("*.dump")]
    assert len(names) == 3  # The first of the day, and the newest two.
    assert event["name"] in names

    env.write_config(catalog={"url": database_url})
    env.run("restore", "--catalog", expect=0)
    with psycopg.connect(database_url) as conn, psycopg.connect(env.url) as before:
        rows = "select blobid, remote_copied from blobs order by 1"
        assert conn.execute(rows).fetchall() == before.execute(rows).fetchall()


def test_snapshots_go_through_the_forced_command_and_cannot_be_removed(
    env: Environment, forced: list[str], tmp_path: Path
) -> None:
    """Nothing is read back: a version builds on what this machine has kept of the last one."""
    env.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    data = tmp_path / "data"
    data.mkdir()
    parents = []
    for number in range(3):
        (data / str(number)).write_text("content")
        taken = env.run("snapshot", "take", "data", str(data), "--json", expect=0)
        parents.append(json.loads(taken.stdout[taken.stdout.index("{") :])["parent"])
        if number == 1:
            shutil.rmtree(tmp_path / "cache")
    versions = sorted(path.name for path in (env.remote.local / "snapshots" / "data").iterdir())
    assert parents == ["", versions[0], ""]
    assert "is known to be of this host, so all files are read" in taken.stderr
    assert "the target lacks" not in taken.stderr
    listed = env.run("snapshot", "list", "data")
    assert [one.split()[0] for one in listed.stdout.splitlines()] == [
        f"data@{version}" for version in versions
    ]
    assert "only names and sizes can be told: the receiver on the remote may not get" in (
        listed.stderr
    )
    removed = env.run("snapshot", "forget", "data", "--keep-last", "1", "--yes", expect=5)
    assert "its --allow lists" in removed.stderr
    assert len(list((env.remote.local / "snapshots" / "data").iterdir())) == 3


@pytest.mark.parametrize("allowed", ["put,list,verify"])
@pytest.mark.long
def test_check_says_that_no_dump_goes_through_the_forced_command(
    env: Environment, forced: list[str], postgres: Postgres, allowed: str
) -> None:
    """A warning until somebody relies on dumps, then a failure: as the run ends, so does check."""
    env.fill(1)
    env.write_config(run={"skip_pgdump": False})
    env.environ = {"PATH": f"{postgres.programs}:{os.environ['PATH']}"}
    check = env.run("check", expect=0)
    assert re.search(
        r"^warning +dump .*forced command.*add dump to --allow.*skip_pgdump", check.stdout, re.M
    )

    with connect(env.url, "test") as conn:
        now = datetime.now(UTC)
        history.record_dump(conn, "remote", now, name="x.dump", bytes=1, sha256="", error="")

    check = env.run("check", expect=7)
    assert re.search(r"^FAILED +dump .*forced command", check.stdout, re.MULTILINE)
    env.run("run", expect=7)


def go_by_paths(env: Environment, postgres: Postgres) -> Path:
    """Has the store be three files that a walk finds; returns the root."""
    root = env.root / "files"
    root.mkdir()
    for number in range(3):
        (root / f"file {number}").write_bytes(b"content %d" % number)
    env.write_config(
        source={"root": str(root)},
        dump={"bin": str(postgres.programs)},
        **{"files.all": {"paths": [str(root)]}},
    )
    return root


@pytest.mark.parametrize(
    ("allowed", "lacks"),
    [("put,list,verify,dump", "get"), pytest.param("put,list,get", "dump", marks=pytest.mark.long)],
)
def test_files_come_back_by_their_paths_where_the_line_allows_it(
    env: Environment, forced: list[str], postgres: Postgres, remote: Sshd, allowed: str, lacks: str
) -> None:
    root = go_by_paths(env, postgres)
    env.call("run", expect=0)
    if "dump" in allowed:
        env.call("dump", expect=0)
    back = ("restore", "--as-paths", "--to", str(env.root / "back"), "--places", "latest")
    done = env.call(*back)
    assert done.returncode not in (0, 1)
    assert f"add {lacks} to --allow in the line of our key" in done.stderr
    assert not (env.root / "back").exists()
    authorized = remote.work / "keys" / "authorized_keys"
    authorized.write_text(authorized.read_text().replace(allowed, "put,list,dump,get"))
    env.call("dump", "--force", expect=0)
    env.call(*back, expect=0)
    assert tree(env.root / "back") == tree(root)


@pytest.mark.parametrize("allowed", ["put,list,dump,get"])
def test_a_receiver_that_knows_no_list_of_files_is_to_be_copied_again(
    env: Environment, forced: list[str], postgres: Postgres, remote: Sshd, allowed: str
) -> None:
    go_by_paths(env, postgres)
    line = (remote.work / "keys" / "authorized_keys").read_text().splitlines()[-1]
    program = line.partition('command="')[2].split("/receive ")[0]
    assert remote.run(f"sed -i s/places.jsonl/other.jsonl/ {program}/{RECEIVER}").returncode == 0
    done = env.call("dump")
    assert done.returncode not in (0, 1)
    assert "does not know the list of files of a dump" in done.stderr
    assert "install-receiver --write" in done.stderr


@pytest.mark.parametrize("required", [True])
def test_a_line_that_requires_blake3_says_what_to_install(
    env: Environment, forced: list[str], required: bool
) -> None:
    env.fill(3)
    done = env.run("run", expect=5)
    assert "apt-get install b3sum" in done.stdout
    assert env.copied() == set()
    assert list(env.remote.local.iterdir()) == []


def test_whatever_is_asked_for_the_receiver_runs(env: Environment, forced: list[str]) -> None:
    for command in (
        "touch {root}/was-here",
        "scp -t {root}/was-here",
        "ntt-backup-receive --root / --allow put,replace",
        "$(touch {root}/was-here)",
        "",
    ):
        asked = command.format(root=env.remote.path)
        done = subprocess.run([*forced, "-T", ALIAS, asked], input=b"", capture_output=True)
        assert done.stdout.startswith(b"\nNTT-RECEIVE 1 ")
        assert b" allow=put,list,verify,dump,snapshot " in done.stdout
    assert list(env.remote.local.iterdir()) == []


def test_no_other_service_is_to_be_had(env: Environment, forced: list[str]) -> None:
    for asked in ("-s HOST sftp", "-W 127.0.0.1:22 HOST", "-N -R 0:h:1 HOST"):
        done = subprocess.run(
            [*forced, "-oExitOnForwardFailure=yes", *asked.replace("HOST", ALIAS).split()],
            input=b"\0\0\0\5\1\0\0\0\3",  # sftp's INIT
            capture_output=True,
            timeout=PATIENCE,
        )
        assert done.returncode != 0
        assert not done.stdout or b"NTT-RECEIVE" in done.stdout
    assert list(env.remote.local.iterdir()) == []


@pytest.mark.parametrize("checking", ["b3sum", "none"], indirect=True)
def test_wrong_content_under_a_new_name_is_mended_by_whoever_may(
    env: Environment, forced: list[str], remote: Sshd, checking: str
) -> None:
    """Without BLAKE3 there the receiver cannot know; a run with replace in its --allow can."""
    good = env.put(b"good content")
    with client(env, forced) as far:
        far.hello(root=env.remote.path)
        far.write(far.batch(1, [b"evil content"], digests=[digest_of(b"good content")]))
        stored = far.receipt().stored
        assert far.banner["check"] == checking
        assert far.bye() == 0
    assert stored == (checking == "none")
    if stored:
        env.run("run", expect=7)
        assert env.failures() == {good: "remote-rejected"}
        assert env.copied() == set()
        env.through(remote)
        env.run("requeue", expect=0)
    env.run("run", expect=0)
    assert place_of(env.remote.local, bytes.fromhex(good)).read_bytes() == b"good content"


@pytest.mark.long
@pytest.mark.parametrize("checking", ["blake3", "b3sum"], indirect=True)
def test_the_forced_command_lists_and_hashes_and_sends_no_blob(
    env: Environment, forced: list[str], remote: Sshd
) -> None:
    blobids = env.fill(30, size=lambda chance: chance.randrange(1, 5000))
    env.run("run", expect=0)
    lost = place_of(env.remote.local, bytes.fromhex(blobids[0]))
    lost.write_bytes(b"rotten")

    env.run("reconcile", expect=7)
    done = env.run("verify", expect=7)
    assert f"{blobids[0]} remote-corrupt" in done.stdout
    env.run("run", expect=0)
    env.run("verify", expect=0)
    env.assert_complete()

    for command in (["verify", "--download"], ["restore", "--to", str(env.root / "back")]):
        refused = env.run(*command, expect=5)
        assert "may not get" in refused.stderr
        assert "--allow" in refused.stderr
    assert not (env.root / "back").exists()
