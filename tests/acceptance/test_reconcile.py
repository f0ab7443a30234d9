"""`reconcile`: catalog, store and remote side by side, every kind of difference told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.audit.reconcile import Difference
from tests.helpers.environment import Environment
from tests.helpers.sshd import Sshd

ABSENT = "ab" * 32


def compared(env: Environment, *options: str, code: int = 0) -> dict[str, Any]:
    done = env.call("reconcile", "--json", *options)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def differing(found: dict[str, Any]) -> dict[str, int]:
    return {what: count for what, count in found["differences"].items() if count}


def backed_up(env: Environment, count: int = 300) -> list[str]:
    return env.fill_both(count, size=lambda chance: chance.randrange(1, 5000))


def make_all_kinds(env: Environment, blobids: list[str], out: Path) -> dict[Difference, set[str]]:
    """One or two of everything; what should be found, by kind."""
    lost, cut, unmarked, unknown, sourceless, resized = blobids[:6]
    env.remote_path(lost).unlink()
    content = env.remote_path(cut).read_bytes()
    env.remote_path(cut).write_bytes(content + b"x")
    env.query("update blobs set remote_copied = false where blobid = %s", unmarked)
    env.query("delete from blobs where blobid = %s", unknown)
    env.path(sourceless).unlink()
    env.query("update blobs set size = size + 1 where blobid = %s", resized)
    unregistered = env.put_in_store(b"never registered")
    env.register([ABSENT, "no blobid", "zz" * 32])
    strays = ["00/README", blobids[0][:2] + "/tmp"]
    for root in (env.store, env.remote.local / "by-hash"):
        (root / "00").mkdir(exist_ok=True)
        for name in strays:
            (root / name).write_text("x")
    return {
        Difference.LOST: {lost},
        Difference.REMOTE_SIZE: {cut},
        Difference.UNMARKED: {unmarked},
        Difference.UNKNOWN: {unknown},
        Difference.UNREGISTERED: {unregistered, unknown},
        Difference.SOURCELESS: {sourceless, ABSENT},
        Difference.STORE_SIZE: {resized},
        Difference.BAD_BLOBID: {"no blobid", "zz" * 32},
        Difference.STRAY_STORE: set(strays),
        Difference.STRAY_REMOTE: set(strays),
    }


def test_no_difference_is_reported_where_all_agree(env: Environment) -> None:
    blobids = backed_up(env)
    found = compared(env)
    assert differing(found) == {}
    assert found["rows"] == found["agreed"] == found["in_store"] == len(blobids)
    assert found["on_remote"] == len(blobids)
    assert "300 rows agree with both" in env.call("reconcile").stdout


def test_every_kind_of_difference_is_reported_and_written(env: Environment, tmp_path: Path) -> None:
    blobids = backed_up(env)
    out = tmp_path / "out"
    expected = make_all_kinds(env, blobids, out)

    found = compared(env, "--out", str(out), code=7)

    assert differing(found) == {str(what): len(names) for what, names in expected.items()}
    for what in Difference:
        lines = (out / f"{what}.txt").read_text().splitlines()
        assert {line.split("\t")[0] for line in lines} == expected.get(what, set()), what
    assert found["requeued"] == 0
    assert env.copied() == set(blobids) - {blobids[2], blobids[3]}
    shown = env.call("reconcile")
    assert shown.returncode == 7
    for what, names in expected.items():
        assert str(what) in shown.stdout
        assert any(name in shown.stdout for name in names)


def test_apply_only_makes_lost_blobs_pending(env: Environment, tmp_path: Path) -> None:
    blobids = backed_up(env)
    make_all_kinds(env, blobids, tmp_path)
    before = env.copied()

    found = compared(env, "--apply", code=7)

    assert found["requeued"] == 2
    assert env.copied() == before - set(blobids[:2])
    reasons = dict(env.query("select blobid, reason from ntt_backup.failures"))
    assert reasons == {blobids[0]: "remote-missing", blobids[1]: "remote-corrupt"}
    env.query("delete from blobs where blobid = any(%s)", [ABSENT, "no blobid", "zz" * 32])
    assert env.run("run").returncode == 0
    again = differing(compared(env))
    assert not {Difference.LOST, Difference.REMOTE_SIZE, Difference.UNMARKED} & set(again)
    for blobid in blobids[:2]:
        assert env.remote_path(blobid).read_bytes() == env.path(blobid).read_bytes()


def test_a_disk_that_is_not_mounted_marks_nothing(env: Environment) -> None:
    blobids = backed_up(env, 20)
    by_hash = env.remote.local / "by-hash"
    by_hash.rename(by_hash.with_name("aside"))
    by_hash.mkdir()
    done = env.call("reconcile", "--apply")
    assert done.returncode == 5, done.stdout
    assert "mounted" in done.stderr
    assert env.copied() == set(blobids)


def test_blobs_in_an_unreadable_remote_directory_are_not_taken_for_lost(
    env: Environment, remote: Sshd
) -> None:
    blobids = backed_up(env, 50)
    directory = env.remote_path(blobids[0]).parent.parent
    hidden = {one for one in blobids if one.startswith(directory.name)}
    directory.chmod(0)
    try:
        if remote.run(f"ls {env.remote.path}/by-hash/{directory.name}").returncode == 0:
            pytest.skip("the remote's account reads everything")
        found = compared(env, "--apply", code=7)
    finally:
        directory.chmod(0o755)
    assert differing(found) == {
        str(Difference.UNREADABLE): len(hidden),
        str(Difference.STRAY_REMOTE): 1,
    }
    assert env.copied() == set(blobids)
