"""What `verify`, `reconcile`, `drill` and `restore` leave in the catalog's history of checks."""

from __future__ import annotations

import pytest

from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres


def notes(env: Environment) -> list[tuple[object, ...]]:
    return env.query(
        "select command, exit_code, blobs, wrong, detail from ntt_backup.checks order by ended_at"
    )


@pytest.mark.long
def test_each_check_is_noted_with_what_it_found(
    env: Environment, postgres: Postgres, database_url: str
) -> None:
    env.write_config(dump={"bin": str(postgres.programs)})
    lost, *_ = env.fill_both(5)
    env.send_all()
    env.call("dump", expect=0)
    scratch = ("--scratch", str(env.root / "scratch"), "--database", database_url)

    calls = [env.call("drill", *scratch)]
    env.remote_path(lost).unlink()
    for command in (
        ["reconcile"],
        ["restore", str(env.root / "back"), "--prefix", lost[:4]],
        ["verify", "--download"],
        ["verify", "--local"],
    ):
        calls.append(env.call(*command))

    codes = [done.returncode for done in calls]
    assert codes == [0, 7, 0, 7, 0], [done.stderr for done in calls]
    assert notes(env) == [
        ("drill", 0, 5, 0, ""),
        ("reconcile", 7, 5, 1, ""),
        ("restore", 0, 0, 0, f"prefix {lost[:4]}"),
        ("verify", 7, 5, 1, "way download"),
        ("verify --local", 0, 5, 0, ""),
    ]


def test_a_check_that_ends_by_an_error_is_noted_with_its_reason(env: Environment) -> None:
    env.fill_both(1)
    env.write_config(remote={"path": str(env.root / "nowhere")})

    code = env.call("restore", str(env.root / "back")).returncode

    assert code not in (0, 2)
    ((command, noted, *_, detail),) = notes(env)
    assert (command, noted) == ("restore", code)
    assert "nowhere" in str(detail)


def test_a_dead_database_changes_nothing_about_a_restore(env: Environment) -> None:
    blobids = env.fill_both(2)
    env.write_config(catalog={"url": "postgresql://127.0.0.1:1/none"})

    done = env.call("restore", str(env.root / "back"))

    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((env.root / "back").rglob("?" * 64))) == len(blobids)


def test_a_call_that_is_refused_for_its_arguments_is_no_failed_check(env: Environment) -> None:
    """Nothing is wrong with the target: the page stays as it is."""
    blobids = env.fill_both(1)
    file = env.root / "file"
    file.write_text("no directory, and no list of blobids")
    for command, code in (
        (["restore", str(file)], 6),
        (["restore", str(env.root / "back"), "--prefix", "xyz"], 2),
        (["restore", str(env.root / "back"), "--list", str(file)], 2),
        (["drill", "--scratch", str(env.store)], 2),
        (["drill", "--scratch", str(env.root / "s"), "--database", "host=/nowhere"], 4),
        (["verify", "--sample", "none"], 2),
        (["verify", "--local", "--sample", "1", "--prefix", blobids[0]], 2),
    ):
        done = env.call(*command)
        assert done.returncode == code, (command, done.stderr)
    env.settings["source"]["root"] = str(env.root / "nowhere")
    env.write_config()
    env.call("verify", "--local", expect=2)
    assert notes(env) == []
