"""In the demo's drill store and database are lost, and the remote gives them back.

The demo's store and database are nobody's, so they can be lost on purpose. Every file and row is
noted, everything is removed, and it is brought back by the commands that docs/restore-drill.md
tells an operator to type. The result is compared with the note, which the commands do not know.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Final

from ntt_backup.demo.postgres import Postgres
from ntt_backup.demo.scratch import Scratch
from ntt_backup.demo.screen import say, show_differences, step, tabulate
from ntt_backup.demo.store import Comparison, Listing, list_tree
from ntt_backup.errors import SOME_FAILED
from ntt_backup.formatting import duration, many

# After commands with these exit codes there is something to compare.
_GO_ON: Final = (0, SOME_FAILED)

# Rows as runs, people and other programs leave them in a catalog, besides the copied ones.
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
# Not the history of checks: the commands of the drill note themselves there.
_TABLES: Final = (
    "select format('%I.%I', schemaname, tablename) from pg_tables"
    " where schemaname not in ('pg_catalog', 'information_schema')"
    " and (schemaname, tablename) <> ('ntt_backup', 'checks') order by 1"
)
# Every column of every row, as text, in an order that the rows themselves make.
_ROWS: Final = (
    "select count(*) || ' rows, ' || coalesce(md5(string_agg(md5(t::text), '' order by"
    " md5(t::text) collate \"C\")), 'none') from {table} as t"
)


def drill(
    scratch: Scratch,
    postgres: Postgres,
    on_remote: Callable[[], Listing],
    command: Callable[..., int],
) -> int:
    """Deletes the store and the database, and restores them from the remote.

    Args:
        scratch: The directories of the demo.
        postgres: The server of the catalog.
        on_remote: Lists the remote.
        command: Runs ntt-backup-remote, and returns its exit code.

    Returns:
        0 if all is as it was, else 7, or the exit code of a dump that failed.

    Raises:
        BackupError: A step of the drill has failed.
    """
    step("The drill: a catalog that has seen something goes to the remote, too")
    postgres.query(_PAST)
    store, remote, before = list_tree(scratch.source), on_remote(), _tables(postgres)
    if code := command("dump", "--force"):
        return code
    step("The store and the database are lost")
    shutil.rmtree(scratch.source)
    postgres.drop()
    say(f"lost: {scratch.source} with {many(len(store), 'file')}")
    say(f"lost: the database with {many(len(before), 'table')}")
    step("Back from the remote alone")
    steps, code = _come_back(scratch, postgres, command)
    step("Is all of it back?")
    trees = {
        "store": Comparison.of_listings(store, list_tree(scratch.source)),
        "remote": Comparison.of_listings(remote, on_remote()),
    }
    after = _tables(postgres)
    rows = {name: duration(seconds) for name, seconds in steps.items()}
    rows["in all"] = duration(sum(steps.values()))
    rows |= {name: str(tree) for name, tree in trees.items()}
    for table in sorted(before.keys() | after.keys()):
        was, now = before.get(table, "none"), after.get(table, "missing")
        same = f"{was.partition(',')[0]}, all equal"
        rows[table] = same if was == now else f"NOT equal: {was}; now {now}"
    tabulate(rows)
    for tree in trees.values():
        show_differences(tree)
    if code or before != after or not all(one.identical and one.same for one in trees.values()):
        say("NOT everything came back as it was.", style="bold red")
        return SOME_FAILED
    say("Everything came back, byte for byte and row by row.", style="bold green")
    return 0


def _come_back(
    scratch: Scratch, postgres: Postgres, command: Callable[..., int]
) -> tuple[dict[str, float], int]:
    """Restores everything from the remote alone, as docs/restore-drill.md says.

    Returns:
        The duration of each step in seconds, and the exit code of the first step that failed.
    """
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
    return steps, first_code


def _tables(postgres: Postgres) -> dict[str, str]:
    names = postgres.query(_TABLES).splitlines()
    return {name: postgres.query(_ROWS.format(table=name)) for name in names}
