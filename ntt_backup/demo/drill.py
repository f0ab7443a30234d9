"""The worst day, in the demo: the store and the database are lost, and the remote gives them back.

A backup that was never restored is a hope. To believe one, somebody would have to lose everything
on purpose, which nobody does to what he needs. The demo's store and database are nobody's: every
file and row is noted, all is removed, seen to be gone, and brought back by the commands that
docs/restore-drill.md tells an operator to type. What came back is compared with the note, of which
the commands know nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.demo.postgres import Postgres
from ntt_backup.demo.scratch import Scratch
from ntt_backup.demo.screen import say, show_differences, step, tabulate
from ntt_backup.demo.store import Comparison, Listing, list_tree
from ntt_backup.errors import SOME_FAILED, BackupError
from ntt_backup.format import duration, many

# After these there is something to compare.
_GO_ON: Final = (0, SOME_FAILED)

# A catalog has more than copied rows: these are what runs, people and other programs leave in it.
_PAST: Final = """
with numbered as (select blobid, row_number() over (order by blobid) as number from blobs),
pending as (
    update blobs set remote_copied = case number % 3 when 0 then null else false end
    from numbered where numbered.blobid = blobs.blobid and number % 97 = 1 returning blobs.blobid
)
insert into ntt_backup.failures (target, blobid, reason, detail)
select 'remote', blobid, 'remote-missing', E'a check found\\tnothing, \\'there\\'' from pending;

with numbered as (select blobid, row_number() over (order by blobid) as number from blobs)
update blobs set created_at = created_at - number * interval '1 day 0.000001 s',
    remote_last_checked = case number % 2 when 0 then 'infinity'::timestamptz end
from numbered where numbered.blobid = blobs.blobid and number % 89 = 2;

insert into blobs (blobid, size, remote_copied, remote_copy_failed)
select md5('lost ' || number) || md5('before ' || number), nullif(number, 3) << 40, false, true
from generate_series(1, 7) as number;
insert into ntt_backup.failures (target, blobid, reason, detail, attempts)
select 'remote', blobid, 'missing', 'not in the store', 3 from blobs where remote_copy_failed;

create table albums (id serial primary key, title text not null, cover text references blobs);
insert into albums (title, cover) select E'Caf\\u00e9 "' || blobid || E'"\\n', blobid
from blobs order by blobid limit 50;
"""
_TABLES: Final = (
    "select format('%I.%I', schemaname, tablename) from pg_tables"
    " where schemaname not in ('pg_catalog', 'information_schema') order by 1"
)
# Every column of every row, as text, in an order that the rows themselves make.
_ROWS: Final = (
    "select count(*) || ' rows, ' || coalesce(md5(string_agg(md5(t::text), '' order by"
    " md5(t::text) collate \"C\")), 'none') from {table} as t"
)


@dataclass(frozen=True, slots=True)
class Note:
    """All that there is: files to their hashes, and each table's rows as one line."""

    store: Listing
    remote: Listing
    tables: dict[str, str]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came back. before and after: the tables; code: of the first command that failed.

    steps: what was done, and how many seconds it took.
    """

    before: dict[str, str]
    after: dict[str, str]
    store: Comparison
    remote: Comparison
    steps: dict[str, float]
    code: int

    @property
    def good(self) -> bool:
        return (
            self.code == 0
            and all(tree.identical and tree.same for _, tree in self._trees())
            and self.before == self.after
        )

    def _trees(self) -> Iterator[tuple[str, Comparison]]:
        yield "store", self.store
        yield "remote", self.remote

    def show(self) -> None:
        tabulate(
            [
                *((name, duration(seconds)) for name, seconds in self.steps.items()),
                ("in all", duration(sum(self.steps.values()))),
                *((name, str(tree)) for name, tree in self._trees()),
                *self._catalog(),
            ]
        )
        for _, tree in self._trees():
            show_differences(tree)
        if self.good:
            say("Everything came back, byte for byte and row by row.", style="bold green")
        else:
            say("NOT everything came back as it was.", style="bold red")

    def _catalog(self) -> Iterator[tuple[str, str]]:
        for table in sorted(self.before.keys() | self.after.keys()):
            was, now = self.before.get(table, "none"), self.after.get(table, "gone")
            same = f"{was.partition(',')[0]}, all equal"
            yield table, same if was == now else f"NOT equal: {was}; now {now}"


def drill(scratch: Scratch, postgres: Postgres, command: Callable[..., int]) -> int:
    """Lose everything and bring it back; 0 if it is all as it was, else 7, or what dump ended with.

    command runs ntt-backup-remote, and returns its exit code. Raises BackupError.
    """
    step("The drill: a catalog that has seen something goes to the remote, too")
    postgres.query(_PAST)
    before = note(scratch, postgres)
    if code := command("dump", "--force"):
        return code
    step("The store and the database are lost")
    lose(scratch, postgres)
    say(f"gone: {scratch.source} with {many(len(before.store), 'file')}")
    say(f"gone: the database with {many(len(before.tables), 'table')}")
    step("Back from the remote alone")
    found = come_back(scratch, postgres, command, before)
    step("Is all of it back?")
    found.show()
    return 0 if found.good else SOME_FAILED


def note(scratch: Scratch, postgres: Postgres) -> Note:
    """Read every file of both sides and every row of all tables."""
    return Note(list_tree(scratch.source), list_tree(scratch.destination), _tables(postgres))


def lose(scratch: Scratch, postgres: Postgres) -> None:
    """Remove the store and the database, and see that they are gone. Raises BackupError."""
    shutil.rmtree(scratch.source)
    postgres.drop()
    if scratch.source.exists() or postgres.exists():
        raise BackupError("what should be lost is still there")


def come_back(
    scratch: Scratch, postgres: Postgres, command: Callable[..., int], before: Note
) -> Recovery:
    """Bring everything back from the remote alone, as docs/restore-drill.md says, and compare."""
    steps: dict[str, float] = {}
    first_code = 0
    postgres.create()
    for name, arguments in (
        ("catalog back", ("restore", "--catalog")),
        ("store back", ("restore", "--to", str(scratch.source))),
        ("verify --local", ("verify", "--local")),
        ("reconcile", ("reconcile",)),
    ):
        started = time.monotonic()
        code = command(*arguments)
        steps[name] = time.monotonic() - started
        first_code = first_code or code
        if code not in _GO_ON:
            break
    return Recovery(
        before=before.tables,
        after=_tables(postgres),
        store=_compared(before.store, scratch.source),
        remote=_compared(before.remote, scratch.destination),
        steps=steps,
        code=first_code,
    )


def _compared(before: Listing, root: Path) -> Comparison:
    return Comparison.of_listings(before, list_tree(root))


def _tables(postgres: Postgres) -> dict[str, str]:
    names = postgres.query(_TABLES).splitlines()
    return {name: postgres.query(_ROWS.format(table=name)) for name in names}
