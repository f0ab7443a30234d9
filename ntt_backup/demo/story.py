"""The demo takes these steps, and shows something of each.

The commands are the real ones, run as processes of their own with nothing but the settings file
that is printed before. The figures at the end are taken from the files on both sides, from the
database by its own client and from the log, not from what the commands said.

In the drill, store and database are lost, and the remote gives them back: the demo's are nobody's,
so they can be lost on purpose. Every file and row is noted, everything is removed, and it is
brought back by the commands that docs/restore-drill.md tells an operator to type. The result is
compared with the note, which the commands do not know.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ntt_backup.demo import ssh
from ntt_backup.demo.bucket import Bucket, lose_half
from ntt_backup.demo.postgres import Postgres
from ntt_backup.demo.processes import Interrupts, end
from ntt_backup.demo.scratch import Scratch
from ntt_backup.demo.screen import say, show_differences, step, tabulate
from ntt_backup.demo.store import (
    DEFAULT_SOURCES,
    Comparison,
    Listing,
    Made,
    compare,
    list_tree,
    make_store,
    require_space,
)
from ntt_backup.errors import SOME_FAILED, ConfigError
from ntt_backup.formatting import duration, many, size
from ntt_backup.process.spawn import die_with_parent

Remote = Bucket | ssh.SshRemote

_TOOLS: Final = {"tar": "tar", "ssh": "openssh-client"}
_COUNTS: Final = (
    "select count(*), count(*) filter (where remote_copied),"
    " count(*) filter (where remote_copy_failed) from blobs"
)
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


@dataclass(frozen=True, slots=True)
class Story:
    """One demo.

    source: the directory from which the store's files are taken; some system directories for None.
    blobs: how many. directory: where to work, absent or empty; a new one below TMPDIR for None.
    keep: leave it, with a script that starts the servers again. s3: the remote is a bucket, and the
    store loses half of its blobs. drill: lose the store and the database afterwards, and bring them
    back from the remote.
    """

    source: Path | None = None
    blobs: int = 5000
    workers: int = 4
    keep: bool = False
    directory: Path | None = None
    ssh_server: ssh.Choice = "auto"
    s3: bool = False
    drill: bool = False

    def tell(self) -> int:
        """Runs the whole demo and cleans up.

        Returns:
            0 if all went well, 1 if the two sides differ, 7 if not everything was restored, or the
            exit code of the command that failed.
        """
        for tool, package in _TOOLS.items():
            if shutil.which(tool) is None:
                raise ConfigError(f"{tool} is not installed", hint=f"install {package}")
        if self.source is not None and not self.source.expanduser().is_dir():
            raise ConfigError(
                f"{self.source} is not a directory",
                hint="name one with some files in it, --from DIR",
            )
        interrupts = Interrupts()
        with interrupts.installed() as stack:
            return self._tell(stack, interrupts)

    def _tell(self, stack: ExitStack, interrupts: Interrupts) -> int:
        started = time.monotonic()
        with interrupts.held():
            scratch = Scratch.create(self.directory)
            stack.callback(self._leave, scratch)
        require_space(scratch.root)
        sources = [path for path in DEFAULT_SOURCES if path.is_dir()]
        if self.source is not None:
            sources = [self.source.expanduser().resolve()]
        step(f"A store made of files from {', '.join(map(str, sources))}")
        made = make_store(scratch.source, sources, self.blobs, avoid=scratch.root)
        say(f"{many(made.blobs, 'blob')}, {size(made.bytes)} in {scratch.source}")

        kind = "bucket" if self.s3 else "remote"
        step(f"A catalog and a {kind}, on this machine and only for this demo")
        if self.s3:
            scratch.s3.mkdir(mode=0o700)
        postgres, remote = start_servers(scratch, self.ssh_server, stack, interrupts)
        say(f"PostgreSQL: {postgres.url}")
        say(remote.name)

        step(f"The settings, {scratch.settings}")
        say(scratch.settings.read_text().strip())

        command = _Commands(scratch, interrupts)
        step("Create the catalog, register what the store has, check that everything is in place")
        if code := command("init-db") or command("scan") or command("check"):
            return code
        run = ("run", "--once", "--workers", str(self.workers))
        step("Back up")
        asked = remote.requests() if isinstance(remote, Bucket) else {}
        if code := command(*run):
            return code
        if isinstance(remote, Bucket):
            step("What lies in the bucket now")
            remote.show(asked)
        first = _events(scratch.log)
        step("Once more: there is nothing left to send")
        if code := command(*run) or command("status"):
            return code

        if isinstance(remote, Bucket):
            step("Every object is fetched, and every blob in it hashed")
            if code := command("verify", "--download"):
                return code
            comparison, code = lose_half(scratch.source, command)
            if code:
                return code
        else:
            comparison = compare(scratch.source, scratch.destination)
        step("Is it true?")
        later = _events(scratch.log)[len(first) :]
        say(f"The demo took {duration(time.monotonic() - started)}.")
        if not _show(made, first, later, comparison, postgres.query(_COUNTS)):
            return 1
        return _drill(scratch, postgres, remote.listing, command) if self.drill else 0

    def _leave(self, scratch: Scratch) -> None:
        """Removes the directory, or says what can be done with it."""
        if not self.keep:
            scratch.remove()
            return
        scratch.write_play()
        homes = shlex.join(map(str, scratch.homes()))
        step(f"The demo is kept in {scratch.root}")
        root = shlex.quote(str(scratch.root))
        say(f"sh {root}/play   starts the servers again and opens a shell to play in")
        say(f"rm -r {homes}   removes everything")


def start_servers(
    scratch: Scratch, choice: ssh.Choice, stack: ExitStack, interrupts: Interrupts
) -> tuple[Postgres, Remote]:
    """Starts the database and the remote, and writes the settings for them.

    The remote is a bucket if the directory for a bucket exists.

    Args:
        scratch: The directories of the demo.
        choice: The kind of ssh remote.
        stack: Stops both servers at its end.
        interrupts: The handler of the signals.

    Raises:
        BackupError: A server cannot be started.
    """
    remote: Remote
    if scratch.s3.is_dir():
        remote = bucket = Bucket(scratch.s3, interrupts)
        stack.callback(bucket.stop)
        bucket.start()
    else:
        remote = ssh.start(choice, scratch.ssh, scratch.remote, stack, interrupts)
    with interrupts.held():
        home = scratch.postgres_home()
    postgres = Postgres(home)
    stack.callback(postgres.stop)
    postgres.start()
    scratch.write_settings(postgres.setting, remote.settings)
    return postgres, remote


@dataclass(frozen=True, slots=True)
class _Commands:
    """Runs ntt-backup-remote as an operator does, on our terminal."""

    scratch: Scratch
    interrupts: Interrupts

    def __call__(self, *arguments: str) -> int:
        """Returns the exit code, 128 + N for a command that signal N ended."""
        options = ("--config", str(self.scratch.settings), *arguments)
        say("")
        say("$ " + shlex.join(("ntt-backup-remote", *options)), style="bold")
        with self.interrupts.held():
            # In a session of its own Ctrl-C reaches it through us, and not while Python starts.
            process = subprocess.Popen(
                [sys.executable, "-m", "ntt_backup", *options],
                stdin=subprocess.DEVNULL,
                env=self.scratch.environment(),
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        try:
            code = process.wait()
        finally:
            end(process)
        if code:
            say(f"exit code {code}", style="red")
        return code if code >= 0 else 128 - code


def _events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def _show(
    made: Made,
    first: list[dict[str, Any]],
    later: list[dict[str, Any]],
    comparison: Comparison,
    rows: str,
) -> bool:
    """Prints the findings, and returns whether all is as expected.

    Args:
        made: The store that was made.
        first: The log of the first run.
        later: The log after the first run.
        comparison: The differences between the two sides.
        rows: The numbers of all rows, copied rows and failed rows, with `|` between them.
    """
    run = next(event for event in reversed(first) if event["event"] == "run_stop")
    seconds, copied = max(run["duration_s"], 1e-3), run["copied"]
    sent_again = sum(event["blobs"] for event in later if event["event"] == "batch_complete")
    total, marked, failed = map(int, rows.split("|"))
    left_out = f"{many(made.duplicates, 'duplicate')}, {made.unreadable:,} unreadable,"
    sent = f"{many(copied, 'blob')}, {size(run['bytes'])} in {duration(seconds)}"
    rates = f"{run['bytes'] / 1e6 / seconds:.1f} MB/s, {copied / seconds:,.0f} files/s"
    lines = Counter(event["event"] for event in (*first, *later))
    tabulate(
        {
            "store": f"{many(made.blobs, 'blob')}, {size(made.bytes)}",
            "left out": f"{left_out} {made.too_large:,} too large for a demo",
            "first run": f"{sent}; {rates}",
            "second run": f"{many(sent_again, 'blob')} sent",
            "both sides": str(comparison),
            "catalog": f"{many(total, 'row')}, {marked:,} copied, {failed:,} failed",
            "log": ", ".join(f"{count} {event}" for event, count in lines.most_common()),
        }
    )
    show_differences(comparison)
    counted = (total, marked, failed) == (made.blobs, made.blobs, 0)
    good = comparison.identical and comparison.same == made.blobs and counted and not sent_again
    if good:
        say("Identical, and recorded as such.", style="bold green")
    else:
        say("NOT as it should be.", style="bold red")
    return good


# --- the drill ------------------------------------------------------------------------------------


def _drill(
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
    postgres.lose()
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
    postgres.start()
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
