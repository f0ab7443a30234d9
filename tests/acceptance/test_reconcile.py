"""`reconcile`: catalog, store and remote side by side, every kind of difference told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ntt_backup.audit.reconcile import Difference
from tests.helpers.environment import Environment
from tests.helpers.sshd import Sshd
from tests.helpers.waiting import PATIENCE, wait_until
from tests.integration.catalogs import losing

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
    shown = env.call("reconcile", expect=7)
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
    env.run("run", expect=0)
    again = differing(compared(env))
    assert not {Difference.LOST, Difference.REMOTE_SIZE, Difference.UNMARKED} & set(again)
    for blobid in blobids[:2]:
        assert env.remote_path(blobid).read_bytes() == env.path(blobid).read_bytes()


def test_a_deadlock_with_another_program_ends_no_check(env: Environment) -> None:
    """The server ends the transaction of the check, as that of whoever lost."""
    lost = backed_up(env, 4)[0]
    env.remote_path(lost).unlink()
    with psycopg.connect(env.url, autocommit=True) as other:
        losing(other, "blobs", "40P01")
    assert compared(env, "--apply", code=7)["requeued"] == 1
    assert lost not in env.copied()


def test_a_disk_that_is_not_mounted_marks_nothing(env: Environment) -> None:
    blobids = backed_up(env, 20)
    by_hash = env.remote.local / "by-hash"
    by_hash.rename(by_hash.with_name("aside"))
    by_hash.mkdir()
    done = env.call("reconcile", "--apply", expect=5)
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


def laid_there(env: Environment, count: int = 300) -> tuple[list[str], list[str]]:
    """Blobs that somebody else has put on the remote, three of them wrong: (right, wrong)."""
    blobids = backed_up(env, count)
    forget = "update blobs set remote_copied = false, remote_last_checked = null"
    env.query(forget)
    cut, flipped, empty = wrong = blobids[:3]
    content = bytearray(env.remote_path(flipped).read_bytes())
    content[0] ^= 1
    env.remote_path(flipped).write_bytes(content)
    env.remote_path(cut).write_bytes(env.remote_path(cut).read_bytes()[:-1])
    env.remote_path(empty).write_bytes(b"")
    return blobids[3:], wrong


def unchecked(env: Environment) -> set[str]:
    rows = env.query("select blobid from blobs where remote_copied and remote_last_checked is null")
    return {blobid for (blobid,) in rows}


def test_what_somebody_else_has_put_there_is_marked_once_it_is_proved(env: Environment) -> None:
    right, wrong = laid_there(env)
    env.query("update blobs set remote_copy_failed = true where blobid = %s", right[0])

    found = compared(env, "--adopt")

    assert env.copied() == set(right)
    assert (found["marked"], found["requeued"]) == (len(right), 0)
    assert differing(found) == {Difference.UNMARKED: 300, Difference.UNPROVED: len(wrong)}
    assert env.failures() == {}
    ran = env.run("run")
    assert ran.returncode == 0
    (batch,) = env.events("batch_complete")
    assert batch["blobs"] == len(wrong)
    env.assert_complete()
    assert differing(compared(env, "--adopt")) == {}


@pytest.mark.long
def test_where_sizes_are_trusted_the_next_verify_begins_with_these(env: Environment) -> None:
    right, (_, flipped, _) = laid_there(env)

    found = compared(env, "--adopt", "--trust-size")

    assert found["marked"] == len(right) + 1
    assert env.copied() == unchecked(env) == {*right, flipped}
    # Blobs that a run sends are checked while they are sent.
    assert env.run("run").returncode == 0
    assert unchecked(env) == {*right, flipped}
    done = env.call("verify", "--older-than", "1h", "--json")
    verified = json.loads(done.stdout)
    assert (done.returncode, verified["checked"]) == (7, len(right) + 1)
    assert [one["blobid"] for one in verified["failures"]] == [flipped]


def test_nothing_is_adopted_without_the_content_in_the_store(env: Environment) -> None:
    right, _ = laid_there(env)
    env.path(right[0]).unlink()
    found = compared(env, "--adopt")
    assert right[0] not in env.copied()
    assert found["marked"] == len(right) - 1
    shown = env.call("reconcile", "--adopt")
    assert f"{right[0]} the store has no copy" in shown.stdout


def test_an_adoption_that_is_killed_has_marked_nothing_that_is_wrong(env: Environment) -> None:
    right, _ = laid_there(env, 3000)
    adoption = env.running("reconcile", "--adopt")
    with adoption as process:
        wait_until(env.copied, "something is adopted")
        process.kill()
    assert set() < env.copied() <= set(right)
    assert compared(env, "--adopt")["differences"][Difference.UNPROVED] == 3
    assert env.copied() == set(right)


@pytest.mark.long
def test_two_adoptions_beside_a_run_mark_what_is_right_and_nothing_else(env: Environment) -> None:
    """What is wrong there is replaced by the run, whoever comes first; nothing is failed."""
    right, wrong = laid_there(env, 1000)
    put = [env.remote_path(one).stat().st_ino for one in right]
    with (
        env.running("reconcile", "--adopt") as first,
        env.running("reconcile", "--adopt") as second,
        env.running("run") as run,
    ):
        ended = [one.wait(PATIENCE) for one in (first, second, run)]
    assert ended == [0, 0, 0], env.output()
    assert env.copied() == {*right, *wrong}
    env.assert_complete()
    assert env.failures() == {}
    assert env.events("blob_failed") == []
    assert [env.remote_path(one).stat().st_ino for one in right] == put
    assert differing(compared(env)) == {}


def test_sizes_are_trusted_for_an_adoption_alone(env: Environment) -> None:
    done = env.call("reconcile", "--trust-size")
    assert done.returncode == 2
    assert "--adopt" in done.stderr
