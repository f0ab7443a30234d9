"""Blobs whose files are gone are removed from a target: on request, and none that has a file."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from blake3 import blake3

from ntt_backup.cli.commands.install import RECEIVER, key_line
from ntt_backup.config import RemoteSettings
from ntt_backup.filestore.by_receiver import FileStoreByReceiver
from tests.helpers.application import QUERY, Application
from tests.helpers.blobs import Person, tree
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import RemoteDir, Sshd, receiver_on

LONG = pytest.mark.long
KEPT = {f"kept/{number}": bytes([number]) * (1000 + number) for number in range(3)}
GONE = {f"gone/{number}": bytes([number]) * (20_000 + number) for number in range(4)}
# Equal to a file that stays, and to one that goes as well.
EQUAL = {"gone/equal": KEPT["kept/0"], "gone/twice": GONE["gone/0"]}
CONTENTS = {**KEPT, **GONE, **EQUAL}
ALL = ("prune", "--json", "--gone-for", "90d", "--max-share", "99%")
APPLY = (*ALL, "--apply")


def blobids(contents: dict[str, bytes]) -> set[str]:
    return {blake3(content).hexdigest() for content in contents.values()}


def root(env: Environment) -> Path:
    return env.root / "uploads"


def fill(env: Environment, application: Application) -> None:
    """Has the files of CONTENTS copied."""
    for name, content in CONTENTS.items():
        path = root(env) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        application.add(name, size=len(content))
    listed = {"url": application.url, "query": QUERY}
    env.write_config(source={"root": str(root(env))}, **{"catalog.from": listed})
    env.call("run", expect=0)


def drop(env: Environment, application: Application, *names: str, days: int = 100) -> None:
    """Has the application forget files, so many days ago; without names all that are to go."""
    for name in names or (*GONE, *EQUAL):
        application.owner.execute("delete from files where path = %s", (name,))
        (root(env) / name).unlink()
    env.call("scan", "--restart", expect=0)
    env.query(
        "update ntt_backup.places set gone_at = gone_at - %s * interval '1 day'"
        " where gone_at > now() - interval '1 day'",
        days,
    )


def on_this_machine(env: Environment) -> None:
    place = env.root / "disk"
    place.mkdir()
    env.remote = RemoteDir(str(place), place)
    env.settings["remote"] = {"url": f"file://{place}"}


def prune(env: Environment, *args: str, expect: int = 0) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(env.call(*(args or APPLY), expect=expect).stdout)
    return said


def assert_sound(env: Environment, kept: set[str]) -> None:
    """What is copied is on the target, and is what stays; nothing failed or is pending."""
    env.call("verify", expect=0)
    env.call("reconcile", expect=0)
    assert env.copied() == kept
    assert env.failures() == {}
    assert env.query("select count(*) from blobs") == [(len(kept),)]


KINDS = [
    ("file", "packs"),
    pytest.param("ssh", "files", marks=LONG),
    pytest.param("file", "files", marks=LONG),
    pytest.param("ssh", "packs", marks=LONG),
    pytest.param("sftp", "packs", marks=LONG),
]


@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_what_is_gone_is_removed_and_the_rest_comes_back_as_it_was(
    env: Environment, application: Application, kind: str, layout: str
) -> None:
    if kind == "file":
        on_this_machine(env)
    if kind == "sftp":
        ssh_config = str(env.sshd.by_sftp().ssh_config)
        url = f"sftp://{env.sshd.alias}{env.remote.path}"
        env.settings["remote"] = {"url": url, "ssh_config": ssh_config}
    env.write_config(remote={"layout": layout} if kind != "sftp" else {})
    fill(env, application)
    drop(env, application)
    before = tree(env.remote.local)
    said = prune(env, *ALL)
    assert (said["blobs"], said["bytes"]) == (4, sum(map(len, GONE.values())))
    assert said["paths"] == ["gone/0", "gone/1", "gone/2", "gone/3"]
    assert said["share"] > 0.9
    assert tree(env.remote.local) == before
    assert len(env.copied()) == 7
    assert prune(env, "prune", "--json", "--gone-for", "101d", "--apply")["blobs"] == 0

    said = prune(env)
    assert (said["removed"], said["removed_bytes"], said["left"]) == (4, said["bytes"], 0)
    assert_sound(env, blobids(KEPT))
    if layout == "files":
        assert {Path(name).name for name in env.on_remote()} == blobids(KEPT)
    else:
        assert said["packs"] == 1
        held = b"".join(tree(env.remote.local).values())
        assert not any(content in held for content in GONE.values())
    *_, event = env.events("blobs_pruned")
    assert (event["blobs"], event["bytes"]) == (4, said["bytes"])
    gone = env.query("select path, blobid from ntt_backup.places where gone_at is not null")
    assert {bytes(path).decode() for path, blobid in gone if blobid is not None} == {"gone/equal"}
    assert env.status()["health"]["level"] != "action_required"

    env.call("restore", "--as-paths", "--to", str(env.root / "back"), expect=0)
    assert tree(env.root / "back") == {
        name: content for name, content in CONTENTS.items() if name in KEPT
    }
    # Files that come back are read and sent anew.
    for name, content in GONE.items():
        (root(env) / name).write_bytes(content)
        application.add(name, size=len(content))
    env.call("run", expect=0)
    assert_sound(env, blobids({**KEPT, **GONE}))


@LONG
def test_what_is_gone_is_removed_from_a_bucket(
    bucket_env: BucketEnvironment, application: Application
) -> None:
    env = bucket_env
    fill(env, application)
    drop(env, application)
    assert prune(env)["removed"] == 4
    assert {blobid for pack in env.packs().values() for blobid in pack} == blobids(KEPT)
    env.assert_ledger()
    assert_sound(env, blobids(KEPT))


@LONG
def test_sealed_packs_are_made_anew_sealed(env: Environment, application: Application) -> None:
    person = Person.new()
    identity = person.file(env.root / "identity")
    on_this_machine(env)
    env.write_config(
        remote={"layout": "packs"},
        pack={"recipients": [person.public], "identity_file": str(identity)},
    )
    fill(env, application)
    drop(env, application)
    assert prune(env)["removed"] == 4
    names = [name for name in tree(env.remote.local) if name.startswith("packs/")]
    assert [name.endswith(".tar.age") for name in names] == [True]
    assert_sound(env, blobids(KEPT))


@LONG
def test_a_pack_that_is_mostly_needed_stays_as_it_is(
    env: Environment, application: Application
) -> None:
    on_this_machine(env)
    env.write_config(remote={"layout": "packs"})
    fill(env, application)
    drop(env, application, "gone/1")
    before = tree(env.remote.local)
    said = prune(env)
    assert (said["packs"], said["in_packs"], said["removed"]) == (0, 1, 0)
    assert tree(env.remote.local) == before
    assert env.copied() == blobids(CONTENTS)


def test_what_is_not_known_to_be_gone_stays(env: Environment, application: Application) -> None:
    fill(env, application)
    application.owner.execute("create table away as select * from files")
    application.add("elsewhere", size=None)
    application.owner.execute("delete from files where path <> 'elsewhere'")
    env.call("scan", "--restart", expect=0)
    env.query("update ntt_backup.places set gone_at = gone_at - interval '100 days'")
    before = tree(env.remote.local)
    refused = env.call("prune", "--gone-for", "90d", "--apply", expect=2)
    assert "100.0% of the target would be removed" in refused.stderr
    for change in (
        "update ntt_backup.origins set ended_at = now() - interval '1 day'",
        "update ntt_backup.origins set ended_at = now(), whole_at = now() - interval '5 days'",
        "update ntt_backup.origins set whole_at = now(), problem = 'a: it is empty'",
        "update ntt_backup.origins set problem = null, definition = 'another'",
        "delete from ntt_backup.origins",
    ):
        env.query(change)
        refused = env.call(*APPLY, "--max-share", "100%", expect=2)
        assert "it is not known which files of the query are gone" in refused.stdout
    assert tree(env.remote.local) == before
    assert env.copied() == blobids(CONTENTS)
    # Nobody looks any more whether files of an origin are there that is not in the settings.
    (root(env) / "other").mkdir()
    del env.settings["catalog.from"]
    env.write_config(**{"files.other": {"paths": [str(root(env) / "other")]}})
    env.call("scan", "--restart", expect=0)
    assert prune(env, *APPLY, "--max-share", "100%")["blobs"] == 0
    del env.settings["files.other"]
    env.write_config()
    refused = env.call("prune", "--gone-for", "90d", expect=2)
    assert "prune is for a store whose files go by their paths" in refused.stderr


def come_back(env: Environment, application: Application, *names: str) -> None:
    for name in names:
        (root(env) / name).write_bytes(CONTENTS[name])
        application.add(name, size=len(CONTENTS[name]))
    env.call("scan", "--restart", expect=0)


@pytest.mark.parametrize(
    "moment",
    ["marked", pytest.param("before", marks=LONG), pytest.param("removed", marks=LONG)],
)
def test_a_file_that_comes_back_meanwhile_is_copied_in_the_end(
    env: Environment, application: Application, moment: str
) -> None:
    """gone/1 comes back at its path; gone/2 as the content of another file, which is read."""
    on_this_machine(env)
    fill(env, application)
    drop(env, application)
    prune(env, *ALL)
    again = {name: GONE[name] for name in ("gone/1", "gone/2")}
    remove = FileStoreByReceiver.remove

    def back() -> None:
        come_back(env, application, "gone/1")
        (root(env) / "new").write_bytes(GONE["gone/2"])
        application.add("new", size=len(GONE["gone/2"]))
        env.run("run", expect=0)

    def removing(store: FileStoreByReceiver, names: list[str]) -> int:
        count = 0
        if names and moment == "marked":
            back()
        count = remove(store, names)
        if names and moment == "removed":
            back()
        return count

    if moment == "before":
        back()
    with mock.patch.object(FileStoreByReceiver, "remove", removing):
        said = prune(env)
    assert said["removed"] == 2
    assert said["back"] == (0 if moment == "before" else 2)
    assert env.copied() <= {Path(name).name for name in env.on_remote()}
    env.call("run", expect=0)
    assert_sound(env, blobids({**KEPT, **again}))


# What is killed, when that is done: before or after.
STEPS = {
    "files": [
        ("Prunable.mark", "before"),
        ("Prunable.mark", "after"),
        ("FileStoreByReceiver.remove", "after"),
        ("Prunable.settle", "after"),
    ],
    "packs": [
        ("Prunable.mark", "after"),
        ("_Work._make_anew", "after"),
        ("FileStoreByReceiver.remove", "after"),
        ("Prunable.settle", "after"),
    ],
}
KILLING = """
import os, signal, sys
from ntt_backup.audit.prune import _Work
from ntt_backup.catalog.pruning import Prunable
from ntt_backup.filestore.by_receiver import FileStoreByReceiver
name, when = {step!r}
owner, method = name.split(".")
owner = globals()[owner]
work = getattr(owner, method)
def killed(*args):
    if args[1:] == ([],):
        return work(*args)
    if when == "after":
        work(*args)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, method, killed)
from ntt_backup.__main__ import main
sys.argv = ["ntt-backup-remote", *sys.argv[4:]]
main()
"""


@LONG
@pytest.mark.parametrize("layout", ["files", "packs"])
def test_a_kill_in_any_step_leaves_no_mark_without_a_copy(
    env: Environment, application: Application, layout: str
) -> None:
    on_this_machine(env)
    env.write_config(remote={"layout": layout})
    fill(env, application)
    script = env.root / "killing.py"
    kept = dict(KEPT)
    env.wrapper = [sys.executable, str(script)]
    for number, step in enumerate(STEPS[layout]):
        if number:
            # The pack of this round has something that is needed, too.
            name, content = f"kept/more{number}", bytes([100 + number]) * 1000
            (root(env) / name).write_bytes(content)
            application.add(name, size=len(content))
            kept[name] = content
            come_back(env, application, *GONE)
            env.call("run", expect=0)
            drop(env, application, *GONE)
        else:
            drop(env, application)
        script.write_text(KILLING.format(step=step))
        done = env.run(*APPLY)
        assert done.returncode == -signal.SIGKILL, (step, done.stderr)
        compared = json.loads(env.call("reconcile", "--json", expect=0).stdout)
        assert compared["differences"]["copied-but-absent"] == 0, step
        # The ledger may have a pack that was just removed, whose blobs are all in others.
        env.call("reconcile", "--apply", expect=0)
        if number % 2:
            # A file that comes back before the next call is copied in the end, too.
            come_back(env, application, "gone/1")
            prune(env)
            env.call("run", expect=0)
            assert_sound(env, blobids({**kept, "": GONE["gone/1"]}))
            drop(env, application, "gone/1")
        prune(env)
        assert_sound(env, blobids(kept))
        if layout == "packs":
            held = b"".join(tree(env.remote.local).values())
            assert not any(content in held for content in GONE.values()), step


@LONG
def test_what_another_target_has_stays_known_until_that_is_pruned(
    env: Environment, application: Application
) -> None:
    on_this_machine(env)
    other = env.root / "other"
    other.mkdir()
    env.write_config(**{"targets.other": {"url": f"file://{other}"}})
    env.call("--target", "other", "init-db", expect=0)
    fill(env, application)
    env.call("--target", "other", "run", expect=0)
    drop(env, application)
    said = prune(env)
    assert (said["removed"], said["elsewhere"]) == (4, 4)
    assert set(env.failures().values()) == {"pruned"}
    assert env.call("requeue", expect=0).stdout.startswith("0 blobs pending again")
    env.call("run", expect=0)
    assert {Path(name).name for name in env.on_remote()} == blobids(KEPT)
    assert env.status()["health"]["level"] != "action_required"
    # One comes back at its path, one as another file: both are sent where they were removed.
    come_back(env, application, "gone/1")
    (root(env) / "new").write_bytes(GONE["gone/2"])
    application.add("new", size=len(GONE["gone/2"]))
    env.call("run", expect=0)
    again = blobids({**KEPT, "1": GONE["gone/1"], "2": GONE["gone/2"]})
    assert {Path(name).name for name in env.on_remote()} == again
    said = prune(env, "--target", "other", *APPLY)
    assert (said["removed"], said["elsewhere"]) == (2, 0)
    assert_sound(env, again)
    assert {Path(name).name for name in tree(other / "by-hash")} == again


@LONG
def test_what_a_pinned_dump_lists_stays(
    env: Environment, application: Application, postgres: Postgres
) -> None:
    on_this_machine(env)
    env.write_config(dump={"bin": str(postgres.programs)})
    fill(env, application)
    drop(env, application, "gone/3")
    env.call("dump", expect=0)
    (dump,) = json.loads(env.call("dumps", "--json", expect=0).stdout)["dumps"]
    env.call("dumps", "--pin", dump["name"], expect=0)
    drop(env, application, *(name for name in (*GONE, *EQUAL) if name != "gone/3"))
    said = prune(env)
    assert (said["blobs"], said["pinned"], said["removed"]) == (1, 3, 1)
    env.call(
        "restore", "--as-paths", "--places", dump["name"], "--to", str(env.root / "back"), expect=0
    )
    expected = {name: content for name, content in CONTENTS.items() if name != "gone/3"}
    assert tree(env.root / "back") == expected
    env.call("dumps", "--unpin", dump["name"], expect=0)
    assert prune(env)["removed"] == 3
    # What can no longer be restored is said.
    back = env.call(
        "restore", "--as-paths", "--places", dump["name"], "--to", str(env.root / "less"), expect=7
    )
    assert "remote-missing" in back.stdout
    assert tree(env.root / "less") == {**KEPT, "gone/equal": CONTENTS["gone/equal"]}


@contextmanager
def key_with(env: Environment, remote: Sshd, words: str) -> Iterator[None]:
    """The environment's only key is one of a receiver that allows these words."""
    identity = env.root / "id_forced"
    identity.unlink(missing_ok=True)
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "forced", "-f", str(identity)]
    subprocess.run(argv, check=True)
    place = RemoteSettings(host="x", path=env.remote.path, identity_file=identity)
    line = re.sub(r"--allow [a-z,]+( --require blake3)?", f"--allow {words}", key_line(place))
    authorized = remote.work / "keys" / "authorized_keys"
    before = authorized.read_text()
    authorized.write_text(before + line.replace(RECEIVER, receiver_on(remote, "none")) + "\n")
    config = env.root / "ssh_config"
    config.write_text(
        remote.ssh_config.read_text().replace(str(remote.identity_file), str(identity))
    )
    settings = dict(env.settings["remote"])
    env.write_config(remote={"ssh_config": str(config)})
    try:
        yield
    finally:
        authorized.write_text(before)
        env.settings["remote"] = settings
        env.write_config()


@LONG
def test_a_key_that_can_only_back_up_removes_nothing(
    env: Environment, application: Application, remote: Sshd
) -> None:
    fill(env, application)
    drop(env, application)
    before = env.on_remote()
    for words in ("put,list,verify,get,replace,dump", "put,list,verify,get,prune,dump"):
        with key_with(env, remote, words):
            refused = env.call(*APPLY, expect=5)
            assert "replace" in refused.stdout or "prune" in refused.stdout
    assert env.on_remote() == before
    assert env.copied() == blobids(CONTENTS)
    with key_with(env, remote, "put,list,verify,get,replace,dump,prune"):
        assert prune(env)["removed"] == 4
