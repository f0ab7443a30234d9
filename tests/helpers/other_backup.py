"""What an operator has on his first day: a database and targets that another program has tracked.

The other program has a table `blobs` without sizes, beside tables that are partitioned by medium,
a materialized view, and an extension that only a superuser may create. It marks blobs in columns of
two targets, `external` and `remote`; a third one, `cold`, was filled from listings. Much of what it
says is wrong: marks of what was never sent, or is damaged; blobs that are there and not marked;
rows that were lost.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psycopg
from psycopg import sql

from tests.helpers.blobs import path_of, put

# Untrusted, as blake3 is: a database of an ordinary role cannot create it.
EXTENSION = "vector"
MEDIA = 6
_CHECKED = datetime(2025, 11, 2, tzinfo=UTC)
_TABLES = """
create table medium (
    medium_hash text primary key, medium_human text, added_at timestamptz default now(),
    health text, image_path text, enum_done timestamptz, copy_done timestamptz
);
create table inode (
    medium_hash text not null references medium, dev bigint not null, ino bigint not null,
    nlink int, size bigint, mtime bigint, blobid text, copied boolean default false,
    fs_type char(1), primary key (medium_hash, ino)
) partition by list (medium_hash);
create index on inode (blobid) where blobid is not null;
create index on inode (medium_hash, ino) where copied = false;
create table path (
    medium_hash text not null, dev bigint not null, ino bigint not null, path bytea not null,
    exclude_reason text, primary key (medium_hash, path)
) partition by list (medium_hash);
create table blobs (
    blobid text primary key, last_checked timestamptz, n_hardlinks int not null default 0,
    expected_hardlinks int,
    external_copied boolean default false, external_last_checked timestamptz,
    external_copy_failed boolean default false,
    remote_copied boolean default false, remote_last_checked timestamptz,
    remote_copy_failed boolean default false
);
create index idx_blobs_external_pending on blobs (blobid)
    where external_copied is false or external_copied is null;
create index idx_blobs_remote_pending on blobs (blobid)
    where remote_copied is false or remote_copied is null;
create index idx_blobs_remote_failed on blobs (blobid) where remote_copy_failed is true;
create materialized view duplicates as
    select blobid, count(*) as inodes from inode where blobid is not null group by blobid;
"""
# All that the other program has in its database, but for what our program is there to correct.
_THEIRS = (
    "select * from medium order by 1",
    "select * from inode order by medium_hash, ino",
    "select * from path order by medium_hash, path",
    "select * from duplicates order by 1",
    "select blobid, last_checked, n_hardlinks, expected_hardlinks from blobs"
    " where n_hardlinks > 0 order by 1",
    "select indexdef from pg_indexes where schemaname = 'public' and indexdef not like '%cold%'"
    " order by 1",
)


@dataclass
class OtherBackup:
    """The other program's database and targets.

    Attributes:
        url: A superuser's URL of the database.
        owner: The role that owns the tables.
        store: The store.
        targets: The directory of each target, on this machine.
        absent: The blobids that each target lacks, or has wrong.
    """

    url: str
    owner: str
    store: Path
    targets: dict[str, Path]
    absent: dict[str, set[str]] = field(default_factory=dict)
    _media: int = 0

    def make(self, count: int = 3000, seed: int = 1) -> None:
        """Fills store, database and targets with `count` blobs of 2 to 10 kB."""
        chance = random.Random(seed)
        self._execute(_TABLES)
        blobids = [self._put(chance) for _ in range(count)]
        part = [count * n // 60 for n in range(61)]
        rows = blobids[: part[50]]  # The other rows were lost.
        for n in range(MEDIA):
            self.add_medium(blobids[n::MEDIA])
        kept = set(rows)
        with psycopg.connect(self.url, autocommit=True) as conn:
            conn.execute("delete from blobs where not blobid = any(%s)", [list(kept)])
            conn.execute("refresh materialized view duplicates")
        # Marked, and never sent: a third. Of the rest most lies there, marked or not.
        self._lay("remote", blobids[part[20] : part[55]], damaged=blobids[part[27] : part[29]])
        self._mark("remote", rows[: part[28]], failed=rows[part[46] :])
        for blobid in rows[part[44] : part[48]]:
            path_of(self.targets["remote"] / "by-hash", blobid).unlink()
        # The marks are those of a disk that was replaced.
        self._lay("external", blobids[: part[30]])
        self._mark("external", rows)
        # Copied in place from a listing, which was interrupted.
        self._lay("cold", blobids[: part[58]], damaged=blobids[part[57] : part[58]])
        for name, target in self.targets.items():
            self.absent[name] = set(blobids) - self.right(name)
            dumps = target / "pgdump"
            dumps.mkdir()
            (dumps / "copyjob.pgdump").write_bytes(b"PGDMP of the other program")
            (dumps / "copyjob.pgdump-prior").write_bytes(b"PGDMP of the day before")

    def add_medium(self, blobids: Sequence[str]) -> None:
        """Adds a medium with its two partitions, and what a copier inserts for its files."""
        self._media += 1
        name = f"{self._media:08x}" * 4
        with psycopg.connect(self.url) as conn:
            conn.execute(sql.SQL("set role {}").format(sql.Identifier(self.owner)))
            conn.execute("insert into medium values (%s)", [name])
            for table in ("inode", "path"):
                create = "create table {} partition of {} for values in ({})"
                partition = sql.Identifier(f"{table}_p_{self._media:08x}")
                parts = partition, sql.Identifier(table), sql.Literal(name)
                conn.execute(sql.SQL(create).format(*parts))
            cursor = conn.cursor()
            cursor.executemany(
                "insert into inode values (%s, 1, %s, 1, 1, 1, %s, true, 'f')",
                [(name, n, blobid) for n, blobid in enumerate(blobids)],
            )
            cursor.executemany(
                "insert into path values (%s, 1, %s, %s)",
                [(name, n, b"/caf\xe9/%d" % n) for n, _ in enumerate(blobids)],
            )
            cursor.executemany(
                "insert into blobs (blobid, n_hardlinks) values (%s, 1) on conflict do nothing",
                [(blobid,) for blobid in blobids],
            )

    def put(self, seed: int) -> str:
        """Puts one more blob into the store. Returns its blobid."""
        return self._put(random.Random(seed))

    def theirs(self) -> list[object]:
        """Returns the contents of all tables of the other program, and its indexes."""
        with psycopg.connect(self.url) as conn:
            return [conn.execute(query.encode()).fetchall() for query in _THEIRS]

    def right(self, target: str) -> set[str]:
        """Returns the blobids that the target has right."""
        top = self.targets[target] / "by-hash"
        names = (path.relative_to(self.store) for path in self.store.rglob("*") if path.is_file())
        return {
            name.name
            for name in names
            if (top / name).is_file()
            and (top / name).read_bytes() == (self.store / name).read_bytes()
        }

    def missing_bytes(self, target: str) -> int:
        """Returns the size of all that the target lacked, or had wrong, at the beginning."""
        return sum(path_of(self.store, one).stat().st_size for one in self.absent[target])

    def _execute(self, text: str) -> None:
        with psycopg.connect(self.url) as conn:
            conn.execute(f"create extension {EXTENSION}".encode())
            conn.execute(f'grant create on schema public to "{self.owner}"'.encode())
            available = "select 1 from pg_available_extensions where name = 'pg_trgm'"
            if conn.execute(available).fetchall():
                conn.execute("create extension pg_trgm")
            conn.execute(sql.SQL("set role {}").format(sql.Identifier(self.owner)))
            conn.execute(text.encode())

    def _put(self, chance: random.Random) -> str:
        return put(self.store, chance.randbytes(chance.randrange(2_000, 10_000))).blobid

    def _lay(self, target: str, blobids: Iterable[str], damaged: Iterable[str] = ()) -> None:
        """Lays blobs there as another program would; of the damaged ones each has its own fault."""
        top = self.targets[target] / "by-hash"
        top.mkdir()
        for blobid in blobids:
            place = path_of(top, blobid)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path_of(self.store, blobid), place)
        for number, blobid in enumerate(damaged):
            place = path_of(top, blobid)
            content = place.read_bytes()
            flipped = bytes([content[0] ^ 1]) + content[1:]
            place.write_bytes((flipped, content[: len(content) // 2], b"")[number % 3])

    def _mark(self, target: str, copied: list[str], failed: Sequence[str] = ()) -> None:
        marks = f"{target}_copied = true, {target}_last_checked = %s"
        with psycopg.connect(self.url, autocommit=True) as conn:
            text = f"update blobs set {marks} where blobid = any(%s)"
            conn.execute(text.encode(), [_CHECKED, copied])
            text = f"update blobs set {target}_copy_failed = true where blobid = any(%s)"
            conn.execute(text.encode(), [list(failed)])
