"""Dumps of the catalog as a series: increments on the remote, whole dumps when they come back."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ntt_backup.config import Settings, load
from ntt_backup.dump import job
from ntt_backup.dump.events import DumpComplete
from ntt_backup.events import Event
from tests.helpers.blobs import Person
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.s3_servers import S3Server


@pytest.fixture
def series(
    env: Environment, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Environment:
    """The environment, whose dumps are a series and whose catalog has 8,000 rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    env.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    env.write_config(
        run={"skip_pgdump": False}, dump={"bin": str(postgres.programs), "mode": "series"}
    )
    insert(env, 8_000)
    return env


def insert(env: Environment, count: int) -> None:
    env.query(
        "insert into blobs (blobid, size) select encode(sha256(random()::text::bytea), 'hex'), n"
        f" from generate_series(1, {count}) as n"
    )


def make(env: Environment, *, whole: bool = False) -> DumpComplete:
    """A dump as the command makes it, without starting Python."""
    said: list[Event] = []
    settings = load(Settings, file=env.config, environ={})
    job.dump(settings, said.append, force=True, whole=whole)
    (made,) = (one for one in said if isinstance(one, DumpComplete))
    return made


def names(env: Environment) -> list[str]:
    return sorted(path.name for path in (env.remote.local / "pgdump").glob("*.dump"))


def rows_of(url: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute("select * from blobs order by blobid").fetchall()


def history(env: Environment) -> dict[str, list[tuple[Any, ...]]]:
    """Three dumps, and what the catalog had at each; the second and third are increments."""
    made, known = [make(env)], [rows_of(env.url)]
    for change in (
        "update blobs set size = size + 1 where random() < 0.01",
        "delete from blobs where random() < 0.01",
    ):
        env.query(change)
        insert(env, 50)
        made.append(make(env))
        known.append(rows_of(env.url))
    first, second, third = made
    assert (first.base, second.base, third.base) == ("", first.name, first.name)
    assert max(second.bytes, third.bytes) < first.bytes / 20
    assert [one.kept for one in made] == [1, 2, 3]
    return dict(zip([one.name for one in made], known, strict=True))


def restored(env: Environment, postgres: Postgres, url: str, *options: str) -> Any:
    """The end of `restore --catalog` into the database of url, which is emptied first."""
    postgres.psql("drop schema public cascade; create schema public;", url)
    postgres.psql("drop schema if exists ntt_backup cascade;", url)
    live = env.url
    env.write_config(catalog={"url": url})
    done = env.run("restore", "--catalog", *options)
    env.write_config(catalog={"url": live})
    return done


# By the receiver, and by the shell.
@pytest.mark.parametrize("strategy", ["auto", pytest.param("tar", marks=pytest.mark.long)])
def test_each_dump_of_a_series_comes_back(
    series: Environment, postgres: Postgres, database_url: str, strategy: str
) -> None:
    series.write_config(run={"strategy": strategy})
    known = history(series)
    *_, last = known
    for name, rows in known.items():
        which = () if name == last else ("--dump", name)
        done = restored(series, postgres, database_url, *which)
        assert done.returncode == 0, done.stderr
        assert name in done.stdout
        assert rows_of(database_url) == rows


def test_a_series_goes_into_a_bucket_sealed_and_comes_back(
    series: Environment, postgres: Postgres, s3: S3Server, database_url: str, tmp_path: Path
) -> None:
    owner = Person.new()
    series.settings["remote"] = {
        "url": s3.bucket().url,
        "endpoint": s3.endpoint,
        "addressing": "path",
    }
    series.write_config(
        pack={
            "recipients": [owner.public],
            "identity_file": str(owner.file(tmp_path / "key")),
        }
    )
    for name, rows in history(series).items():
        done = restored(series, postgres, database_url, "--dump", name)
        assert done.returncode == 0, done.stderr
        assert rows_of(database_url) == rows


def test_a_whole_dump_is_made_where_the_last_one_is_not_at_hand(
    series: Environment, tmp_path: Path
) -> None:
    make(series)
    shutil.rmtree(tmp_path / "cache")
    second = make(series)
    assert second.base == ""
    assert make(series).base == second.name
    # Another host has made one meanwhile.
    shutil.copytree(tmp_path / "cache", tmp_path / "ours")
    assert make(series, whole=True).base == ""
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "ours").rename(tmp_path / "cache")
    assert make(series).base == ""


@pytest.mark.parametrize("harm", ["damaged", pytest.param("missing", marks=pytest.mark.long)])
def test_without_their_whole_dump_increments_leave_the_database_empty(
    series: Environment, postgres: Postgres, database_url: str, harm: str
) -> None:
    first, second, third = history(series)
    path = series.remote.local / "pgdump" / first
    if harm == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        # In many places: a bit that no later dump needs leaves what they restore proved as right.
        for at in range(len(data) // 4, len(data) * 3 // 4, len(data) // 64):
            data[at] ^= 1
        path.write_bytes(bytes(data))

    done = restored(series, postgres, database_url)

    assert done.returncode == 7, done.stdout
    assert "no good dump" in done.stderr
    assert f"{third} cannot be read: {first} is" in done.stderr
    assert f"{second} cannot be read: {first} is" in done.stderr
    with psycopg.connect(database_url) as conn:
        assert conn.execute("select to_regclass('blobs')").fetchone() == (None,)
    # What is not complete is nothing that the next dump could refer to.
    if harm == "missing":
        assert make(series).base == ""


@pytest.mark.long
def test_an_increment_without_its_whole_dump_is_no_dump(series: Environment) -> None:
    series.write_config(dump={"mode": "full"})
    plain = make(series)
    insert(series, 1)
    series.write_config(dump={"mode": "series"})
    first, second = make(series), make(series)
    series.write_config(dump={"keep_last": 2, "keep_daily": 0, "keep_weekly": 0})
    (series.remote.local / "pgdump" / first.name).unlink()
    listed = json.loads(series.call("dumps", "--json").stdout)
    assert [
        (one["name"], one["kind"], one["base"], one["restorable"]) for one in listed["dumps"]
    ] == [
        (second.name, "increment", first.name, False),
        (first.name, "full", "", False),
        (plain.name, "plain", "", True),
    ]
    assert [one["name"] for one in listed["ledger"]] == [second.name, first.name, plain.name]
    series.query("delete from ntt_backup.dumps where name = %s", plain.name)
    said = series.call("dumps").stdout.splitlines()
    of = listed["dumps"][2]
    assert f"  plain, of {of['database']} on {of['host']}" in said[2]
    assert [("CANNOT BE READ" in line, "not in the ledger" in line) for line in said[::2]] == [
        (True, False),
        (False, True),
    ]

    # Not skipped, though nothing has changed since the last one.
    told: list[Event] = []
    job.dump(load(Settings, file=series.config, environ={}), told.append)

    (third,) = (one for one in told if isinstance(one, DumpComplete))
    assert (second.base, third.base) == (first.name, "")
    # The last two that can be restored, and what would stay if it could be.
    assert names(series) == sorted([plain.name, second.name, third.name])


@pytest.mark.long
def test_a_whole_dump_stays_as_long_as_an_increment_on_it_is_kept(series: Environment) -> None:
    series.write_config(dump={"full_every": 4, "keep_last": 1, "keep_daily": 0, "keep_weekly": 0})
    first, second, third, fourth, fifth = [make(series) for _ in range(5)]
    assert [one.base for one in (second, third, fourth)] == [first.name] * 3
    # An increment goes by itself.
    assert [one.pruned for one in (first, second, third, fourth)] == [0, 0, 1, 1]
    assert (fifth.base, fifth.pruned, names(series)) == ("", 2, [fifth.name])
    sixth = make(series)
    assert sixth.base == fifth.name
    assert names(series) == sorted([fifth.name, sixth.name])


@pytest.mark.long
def test_dumps_of_both_modes_lie_beside_each_other(
    series: Environment, postgres: Postgres, database_url: str
) -> None:
    known = history(series)
    series.write_config(dump={"mode": "full"})
    plain = make(series)
    assert (plain.base, plain.text_bytes) == ("", plain.bytes)
    *_, third = known
    record = json.loads((series.remote.local / "pgdump" / f"{plain.name}.json").read_text())
    assert record["format"] == 1
    os.truncate(series.remote.local / "pgdump" / plain.name, 100)
    done = restored(series, postgres, database_url)
    assert done.returncode == 0, done.stderr
    assert rows_of(database_url) == known[third]
