"""`--shard` and `--query`: a scheduler spreads what needs no catalog, and a query chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.blobs import tree
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import RemoteDir

COUNT = 3
SHARDS = [f"{number}/{COUNT}" for number in range(1, COUNT + 1)]


@pytest.fixture(params=[pytest.param("files", marks=pytest.mark.long), "packs"])
def stored(request: pytest.FixtureRequest, env: Environment) -> Environment:
    """A backup on a disk of this machine, of several packs that overlap where it has packs."""
    place = env.root / "disk"
    place.mkdir()
    env.remote = RemoteDir(str(place), place)
    env.settings["remote"] = {"url": f"file://{place}", "layout": request.param}
    env.write_config(run={"batch_size": 40})
    for seed in (1, 2, 3):
        env.fill(60, seed=seed, size=lambda chance: chance.randrange(10, 3000))
        env.run("run", expect=0)
    return env


def done(env: Environment, *command: str, code: int = 0) -> dict[str, Any]:
    found = env.call(*command, "--json", "--workers", "1")
    assert found.returncode == code, f"{found.stdout}\n{found.stderr}"
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


def test_the_shards_of_a_restore_are_everything_and_each_blob_once(stored: Environment) -> None:
    env, back = stored, stored.root / "back"
    with env.running("restore", "--to", str(back), "--shard", SHARDS[0]) as process:
        # Another host, at the same time, into the same directory.
        first = done(env, "restore", "--to", str(back), "--shard", SHARDS[1])
        assert process.wait() == 0
    own = {Path(name).name for name in tree(back)}
    third = done(env, "restore", "--to", str(back), "--shard", SHARDS[2])
    assert 0 < first["restored"] < len(own) < len(env.in_store())
    assert len(own) + third["restored"] == len(env.in_store())
    assert (first["right"], third["right"]) == (0, 0)
    assert tree(back) == env.in_store()

    # What a list names, too; and a shard has the same blobs each time.
    listing = env.root / "list"
    listing.write_text("\n".join(Path(name).name for name in env.in_store()))
    again = done(env, "restore", "--to", str(back), "--list", str(listing), "--shard", SHARDS[1])
    assert (again["restored"], again["right"]) == (0, first["restored"])


def test_the_shards_of_a_verify_check_each_blob_once(stored: Environment) -> None:
    env = stored
    packs = env.settings["remote"]["layout"] == "packs"
    found = [done(env, "verify", "--shard", one)["checked"] for one in SHARDS]
    assert sum(found) == len(env.copied())
    assert packs or min(found) > 0
    local = [done(env, "verify", "--local", "--shard", one)["checked"] for one in SHARDS]
    assert sum(local) == len(env.copied())
    assert min(local) > 0


def test_the_shards_of_a_drill_prove_all_together(
    stored: Environment, postgres: Postgres, database_url: str
) -> None:
    env = stored
    env.write_config(dump={"bin": str(postgres.programs)})
    env.call("dump", expect=0)
    shard = done(
        env,
        *("drill", "--scratch", str(env.root / "scratch"), "--database", database_url),
        *("--shard", "3/3"),
    )
    assert shard["proved"]
    expected = [one for one in env.copied() if int(one[:2], 16) >= 0xAB]  # Nearly.
    assert shard["right"] == shard["copied"] == shard["rows"]
    assert abs(shard["right"] - len(expected)) < 5


@pytest.mark.long
def test_a_query_says_which_blobs_are_restored(env: Environment) -> None:
    blobids = env.fill_both(30, size=lambda chance: chance.randrange(10, 3000))
    env.query("create table album (name text, blob text)")
    env.query("insert into album select 'summer', unnest(%s::text[])", blobids[:7])
    back = env.root / "back"
    chosen = "select blob from album join blobs on blobid = blob where name like 'sum%'"

    assert done(env, "restore", "--to", str(back), "--query", chosen)["restored"] == 7
    assert {Path(name).name for name in tree(back)} == set(blobids[:7])
    shards = [
        done(env, "restore", "--to", str(back), "--query", chosen, "--shard", one)["right"]
        for one in SHARDS
    ]
    assert sum(shards) == 7

    # It changes nothing, whatever it is, and what it gives is looked at.
    rows = env.query("select count(*) from album")
    for text, code, said in (
        ("delete from album returning blob", 4, "syntax error"),
        ("with x as (delete from album returning blob) select blob from x", 4, "DECLARE CURSOR"),
        ("select blob from album; delete from album", 4, "multiple commands"),
        ("select setval('s', 1)::text", 4, "does not exist"),
        ("select name from album", 2, "row 1 of the query is no blobid"),
        ("select blob, name from album", 2, "one column"),
        ("select null::text", 2, "no blobid"),
        ("", 4, "syntax error"),
    ):
        refused = env.call("restore", "--to", str(back), "--query", text)
        assert refused.returncode == code, f"{text}: {refused.stderr}"
        assert said in refused.stderr
    assert env.query("select count(*) from album") == rows
    env.query("create sequence s")
    refused = env.call("restore", "--to", str(back), "--query", "select setval('s', 7)::text")
    assert "read-only transaction" in refused.stderr
    both = env.call("restore", "--to", str(back), "--query", chosen, "--prefix", "00", expect=2)
    assert "only one of" in both.stderr


@pytest.mark.parametrize(
    ("shard", "environ", "said"),
    [
        ("0/4", {}, "from 1/N to N/N"),
        ("5/4", {}, "from 1/N to N/N"),
        ("1/", {}, "from 1/N to N/N"),
        ("1/4 --prefix 00", {}, "--prefix or --shard"),
        ("auto", {}, "in the environment"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "3"}, "SLURM_ARRAY_TASK_COUNT=''"),
        (
            "auto",
            {
                "SLURM_ARRAY_TASK_ID": "9",
                "SLURM_ARRAY_TASK_MIN": "1",
                "SLURM_ARRAY_TASK_COUNT": "3",
            },
            "without gaps",
        ),
        ("auto", {"JOB_COMPLETION_INDEX": "-1", "JOB_COMPLETIONS": "4"}, "numbers"),
        ("auto", {"JOB_COMPLETION_INDEX": "4", "JOB_COMPLETIONS": "4"}, "without gaps"),
    ],
)
def test_a_shard_that_cannot_be_is_refused(
    env: Environment, shard: str, environ: dict[str, str], said: str
) -> None:
    env.environ |= environ
    done = env.call("restore", "--to", str(env.root / "back"), "--shard", *shard.split(), expect=2)
    assert said in done.stderr
    assert not (env.root / "back").exists()


def test_a_shard_is_read_from_the_environment_of_a_scheduler(env: Environment) -> None:
    env.fill_both(30, size=lambda chance: chance.randrange(10, 3000))
    slurm = [
        {
            "SLURM_ARRAY_TASK_ID": str(task),
            "SLURM_ARRAY_TASK_MIN": "7",
            "SLURM_ARRAY_TASK_COUNT": "2",
        }
        for task in (7, 8)
    ]
    kubernetes = [{"JOB_COMPLETION_INDEX": str(task), "JOB_COMPLETIONS": "2"} for task in range(2)]
    for tasks in (slurm, kubernetes):
        checked = []
        for environ in tasks:
            env.environ = environ
            checked.append(done(env, "verify", "--local", "--shard", "auto")["checked"])
        assert sum(checked) == 30
        assert min(checked) > 0
