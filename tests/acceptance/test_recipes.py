"""The recipes of docs/stores: role, query and settings as they stand there, on their schemas."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from blake3 import blake3

from tests.helpers.blobs import files_with_looks
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres

PAGES: Final = Path(__file__).parents[2] / "docs" / "stores"
ROWS: Final = 100_000
EVERY: Final = 3


@dataclass(frozen=True)
class Installed:
    """What an application has of one file.

    Attributes:
        path: The path below the root of its files.
        insert: The statement that adds the row, and its values; none for a file without a row.
    """

    path: str
    insert: str = ""
    values: tuple[object, ...] = ()


def sha(name: str, content: bytes) -> str:
    return hashlib.new(name, content, usedforsecurity=False).hexdigest()


def _gitlab(content: bytes, nth: int) -> Installed:
    oid = sha("sha256", content)
    return Installed(
        f"{oid[:2]}/{oid[2:4]}/{oid[4:]}",
        "insert into lfs_objects (oid, size, file, file_store) values (%s, %s, %s, 1)",
        (oid, len(content), oid[4:]),
    )


def _gitea(content: bytes, nth: int) -> Installed:
    oid = sha("sha256", content)
    return Installed(
        f"{oid[:2]}/{oid[2:4]}/{oid[4:]}",
        "insert into lfs_meta_object (oid, size, repository_id) values (%s, %s, 1), (%s, %s, 2)",
        (oid, len(content), oid, len(content)),
    )


def _pulp(content: bytes, nth: int) -> Installed:
    name = sha("sha256", content)
    path = f"artifact/{name[:2]}/{name[2:]}"
    return Installed(
        path,
        "insert into core_artifact (file, size, sha256, sha224) values (%s, %s, %s, %s)",
        (path, len(content), name, sha("sha224", content)),
    )


def _odoo(content: bytes, nth: int) -> Installed:
    name = sha("sha1", content)
    path = f"{name[:2]}/{name}"
    return Installed(
        path,
        "insert into ir_attachment (name, store_fname, file_size, checksum, db_datas)"
        " values ('a', %s, %s, %s, null), ('b', %s, %s, %s, null), ('c', null, 3, 'x', 'abc')",
        (path, len(content), name) * 2,
    )


def _discourse(content: bytes, nth: int) -> Installed:
    name = sha("sha1", content)
    path = f"uploads/default/original/1X/{name}.png"
    return Installed(
        path,
        "insert into uploads (user_id, original_filename, filesize, url, sha1, original_sha1)"
        " values (1, 'x.png', %s, %s, %s, %s),"
        " (1, 's3.png', 5, '//bucket.example.org/y.png', %s, null)",
        # Old uploads have no sum, and those of secure uploads a random name.
        (len(content), f"/{path}", *_sums_of_discourse(name, nth), f"{nth:040x}"),
    )


def _sums_of_discourse(name: str, nth: int) -> tuple[str | None, str | None]:
    return ((name, None), (None, None), (f"a{nth:039x}", name))[nth % 3]


def _dspace(content: bytes, nth: int) -> Installed:
    internal = f"{random.Random(nth).randrange(10**38):038d}"
    return Installed(
        f"{internal[:2]}/{internal[2:4]}/{internal[4:6]}/{internal}",
        "insert into bitstream (checksum, checksum_algorithm, internal_id, size_bytes, deleted,"
        " store_number) values (%s, 'MD5', %s, %s, false, 0), ('0', 'MD5', %s, 1, true, 0)",
        (sha("md5", content), internal, len(content), f"9{internal[1:]}x"),
    )


def _immich(content: bytes, nth: int) -> Installed:
    path = f"library/admin/2026/{nth % 12 + 1:02}/IMG_{nth:05}.jpg"
    if nth % 10 == 9:
        return Installed(f"{path}.xmp")
    asset = "('IMAGE', %s, %s, %s, %s)"
    sha1 = hashlib.sha1(content, usedforsecurity=False).digest()
    before = ("/usr/src/app/upload", "/data", "upload")[nth % 3]
    return Installed(
        path,
        'insert into asset (type, "originalPath", checksum, "isExternal", status) values'
        f" {asset}, {asset}, {asset}",
        (
            *(f"{before}/{path}", sha1, False, ("active", "trashed")[nth % 2]),
            *(f"/mnt/elsewhere/{nth}.jpg", b"of its path", True, "active"),
            *(f"/data/library/removed-{nth}.jpg", sha1, False, "deleted"),
        ),
    )


def _synapse(content: bytes, nth: int) -> Installed:
    media = "".join(random.Random(nth).choices("ABCDEFabcdefghijkl", k=24))
    return Installed(
        f"local_content/{media[:2]}/{media[2:4]}/{media[4:]}",
        "insert into local_media_repository (media_id, media_length, sha256, url_cache)"
        " values (%s, %s, %s, null), (%s, 1, null, 'https://example.org'), (%s, null, null, null)",
        (
            *(media, len(content), sha("sha256", content) if nth % 2 else None),
            f"2026-01-01_{media}",
            f"announced{media}",
        ),
    )


def _images(content: bytes, nth: int) -> Installed:
    return Installed(f"images/2026-{nth % 12 + 1:02}/{nth}.img")


SCHEMAS: Final[dict[str, tuple[str, Callable[[bytes, int], Installed]]]] = {
    "gitlab-lfs": (
        "create table lfs_objects (id bigserial primary key, oid varchar unique not null,"
        " size bigint not null, created_at timestamp default now(), updated_at timestamp,"
        " file varchar, file_store integer default 1)",
        _gitlab,
    ),
    "gitea": (
        "create table lfs_meta_object (id bigserial primary key, oid varchar(255) not null,"
        " size bigint not null, repository_id bigint not null, created_unix bigint,"
        " updated_unix bigint, unique (oid, repository_id))",
        _gitea,
    ),
    "pulp": (
        "create table core_artifact (pulp_id uuid primary key default gen_random_uuid(),"
        " pulp_created timestamptz not null default clock_timestamp(),"
        " pulp_last_updated timestamptz, file varchar(255) unique not null,"
        " size bigint not null, md5 varchar(32) unique, sha1 varchar(40) unique,"
        " sha224 varchar(56) unique not null, sha256 varchar(64) unique not null)",
        _pulp,
    ),
    "odoo": (
        "create table ir_attachment (id serial primary key, name varchar not null,"
        " res_model varchar, type varchar default 'binary', store_fname varchar,"
        " file_size integer, checksum varchar(40), db_datas bytea, index_content text)",
        _odoo,
    ),
    "discourse": (
        "create table uploads (id serial primary key, user_id integer not null,"
        " original_filename varchar not null, filesize bigint not null, url varchar not null,"
        " created_at timestamp default now(), sha1 varchar(40) unique, original_sha1 varchar);"
        "create table optimized_images (id serial primary key, sha1 varchar(40) not null,"
        " upload_id integer not null, url varchar not null, filesize integer)",
        _discourse,
    ),
    "dspace": (
        "create table bitstream (uuid uuid primary key default gen_random_uuid(),"
        " bitstream_id integer, checksum varchar(64), checksum_algorithm varchar(32),"
        " internal_id varchar(256), deleted boolean, store_number integer,"
        " sequence_id integer, size_bytes bigint)",
        _dspace,
    ),
    "immich": (
        "create type assets_status_enum as enum ('active', 'trashed', 'deleted');"
        'create table asset (id uuid primary key default gen_random_uuid(), "ownerId" uuid,'
        ' type varchar not null, "originalPath" varchar not null, checksum bytea not null,'
        ' "isExternal" boolean not null default false, "libraryId" uuid,'
        ' "createdAt" timestamptz default now(), "deletedAt" timestamptz,'
        " status assets_status_enum not null default 'active')",
        _immich,
    ),
    "synapse": (
        "create table local_media_repository (media_id text unique, media_type text,"
        " media_length integer, created_ts bigint, upload_name text, user_id text,"
        " quarantined_by text, url_cache text, last_access_ts bigint, sha256 text,"
        " safe_from_quarantine boolean not null default false)",
        _synapse,
    ),
    "disk-images": ("", _images),
}


@dataclass
class Recipe:
    """A recipe, applied to an application with some files.

    Attributes:
        root: The root of the files.
        owner: A session of the owner of the application's database.
    """

    root: Path
    owner: psycopg.Connection
    install: Callable[[bytes, int], Installed]
    contents: dict[str, bytes]

    def add(self, content: bytes) -> None:
        """Add a file as the application does: the file first, then its row."""
        insert, values = self._write(content)
        if insert:
            self.owner.execute(insert, values)

    def add_many(self, count: int) -> None:
        """Add files, and their rows at once."""
        rows = [self._write(b"%d" % nth) for nth in range(count)]
        with self.owner.transaction(), self.owner.cursor() as cursor:
            for insert in {insert for insert, _ in rows if insert}:
                cursor.executemany(insert, [values for one, values in rows if one == insert])

    def _write(self, content: bytes) -> tuple[str, tuple[object, ...]]:
        nth = len(self.contents)
        one = self.install(content, nth)
        path = self.root / one.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod((0o640, 0o644, 0o444)[nth % 3])
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + nth))
        self.contents[one.path] = content
        return one.insert, one.values

    @property
    def blobids(self) -> set[str]:
        return {blake3(content).hexdigest() for content in self.contents.values()}

    def assert_restored(self, env: Environment) -> None:
        """The files come back as they lie there: names, contents, times and modes."""
        back = env.root / "back"
        env.call("restore", "--as-paths", "--to", str(back), expect=0)
        found = files_with_looks(back)
        assert found == files_with_looks(self.root)
        assert {os.fsdecode(name): one[0] for name, one in found.items()} == self.contents


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)


def apply(page: str, env: Environment, url: str, owner: psycopg.Connection, reader: str) -> Recipe:
    """Do what a page says. The role is another one, since all tests share a server."""
    schema, install = SCHEMAS[page]
    root = env.root / "files"
    root.mkdir()
    (settings,) = blocks(page, "toml")
    said: dict[str, Any] = tomllib.loads(settings)
    if schema:
        owner.execute(schema)
        (grants,) = blocks(page, "sql")
        assert grants.startswith('create role "ntt-backup" login')
        for statement in grants.split(";")[1:]:
            if statement.strip():
                owner.execute(statement.replace('"ntt-backup"', reader))
        given = said["catalog"]["from"]
        assert "//ntt-backup@" in given["url"]
        given["url"] = psycopg.conninfo.make_conninfo(url, user=reader)
        env.write_config(**{"catalog.from": given})
    for name, walked in said.get("files", {}).items():
        paths = [path.replace(said["source"]["root"], str(root), 1) for path in walked["paths"]]
        for path in paths:
            Path(path).mkdir(parents=True, exist_ok=True)
        env.write_config(**{f"files.{name}": {**walked, "paths": paths}})
    env.write_config(source={**said["source"], "root": str(root), "grace": 0})
    return Recipe(root, owner, install, {})


def schema_of(postgres: Postgres, url: str) -> str:
    done = subprocess.run(
        [postgres.programs / "pg_dump", "-s", "--dbname", url],
        capture_output=True,
        text=True,
        check=True,
    )
    # Since some releases a key of that moment stands there.
    return re.sub(r"(?m)^\\(un)?restrict .*$", "", done.stdout)


@pytest.fixture
def owner(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as session:
        yield session


@pytest.mark.parametrize(
    "page", ["gitlab-lfs", *(pytest.param(name, marks=pytest.mark.long) for name in SCHEMAS)]
)
def test_a_recipe_copies_all_files_and_changes_nothing(
    page: str,
    env: Environment,
    database_url: str,
    owner: psycopg.Connection,
    role: Callable[[], str],
    postgres: Postgres,
) -> None:
    recipe = apply(page, env, database_url, owner, role())
    before = schema_of(postgres, database_url)
    for nth in range(40):
        recipe.add(b"%d" % nth * (nth * 37 + 1))
    env.call("check", expect=0)
    env.call("run", expect=0)
    assert set(env.copied()) == recipe.blobids
    recipe.add(b"a later one")
    env.call("run", expect=0)
    assert set(env.copied()) == recipe.blobids
    env.call("verify", expect=0)
    recipe.assert_restored(env)
    assert schema_of(postgres, database_url) == before


def test_every_page_is_a_recipe_that_is_tried() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*SCHEMAS}


@pytest.mark.long
@pytest.mark.parametrize("page", ["gitlab-lfs", "odoo", "discourse", "immich"])
def test_a_hundred_thousand_files_of_an_application(
    page: str,
    env: Environment,
    database_url: str,
    scratch_url: str,
    owner: psycopg.Connection,
    role: Callable[[], str],
    postgres: Postgres,
) -> None:
    """All are copied and proved, a new file follows in `every`, and nothing is changed there."""
    recipe = apply(page, env, database_url, owner, role())
    before = schema_of(postgres, database_url)
    recipe.add_many(ROWS)
    env.write_config(
        run={"workers": 2, "poll_interval": 1, "skip_pgdump": False},
        dump={"bin": str(postgres.programs)},
        **{"catalog.from": {"every": EVERY}},
    )
    env.call("run", expect=0)
    assert set(env.copied()) == recipe.blobids
    began = time.monotonic()  # With the start of Python, as for an operator.
    subprocess.run(env.argv("run"), env=env.environment(), check=True, capture_output=True)
    print(f"{page}: a second run takes {time.monotonic() - began:.1f} s")
    starts = len(env.events("worker_start"))
    with env.running("run", "--watch"):
        env.await_event("worker_start", starts + 1)
        recipe.add(b"one more")
        began = time.monotonic()
        env.await_copied(recipe.blobids)
        waited = time.monotonic() - began
    print(f"{page}: a new file was copied after {waited:.1f} s, every {EVERY} s is looked")
    recipe.assert_restored(env)
    env.call("dump", "--force", expect=0)
    drill = ("drill", "--scratch", str(env.root / "scratch"), "--database", scratch_url)
    assert "PROVED" in env.call(*drill, expect=0).stdout
    assert schema_of(postgres, database_url) == before
