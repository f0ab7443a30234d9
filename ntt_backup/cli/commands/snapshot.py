"""The commands `snapshot` keep versions of files and trees that change in place."""

from __future__ import annotations

import json
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ntt_backup import rollback_detection
from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common
from ntt_backup.cli.options import JSON, PART, RESULT, flag, repeated, unless, value
from ntt_backup.config import RemoteConfig
from ntt_backup.config.signing_key import Origin
from ntt_backup.dump.retention import Retention
from ntt_backup.errors import SOME_FAILED, ConfigError, LockHeld, RemoteUnreachable, Unsupported
from ntt_backup.filestore.contract import Area, ReadableStore
from ntt_backup.filestore.open import open_store, open_to_read
from ntt_backup.filestore.pins import pin_words, put_pin, read_pins, remove_pins
from ntt_backup.filestore.reconnecting import ReconnectingStore
from ntt_backup.formatting import duration, many, moment, printable, size, utc
from ntt_backup.snapshot.format.entry import DIRECTORY, FIFO, FILE, HARD_LINK, SYMLINK, Entry
from ntt_backup.snapshot.names import SNAPSHOTS, SnapshotDamaged, require_set
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.retention import ForgetPlan, plan_of
from ntt_backup.snapshot.versions import (
    EntryDifference,
    Kind,
    Version,
    VersionFacts,
    choose,
    differences,
    facts,
    newest_of_host,
    open_manifest,
    versions,
)
from ntt_backup.wire.stored_names import begun

if TYPE_CHECKING:
    # What takes, restores or verifies is loaded by the command that does so.
    from ntt_backup.snapshot.restore.version import RestoredVersion
    from ntt_backup.snapshot.take.new_version import Taken
    from ntt_backup.snapshot.verify import VersionFindings

R = TypeVar("R", bound=ReadableStore)
_version_argument = click.argument(
    "wanted", metavar="SET[@VERSION]", shell_complete=options.set_names
)
_set_argument = click.argument("set_name", metavar="SET", shell_complete=options.set_names)


def _patient(
    opener: Callable[[RemoteConfig, Area], R], settings: RemoteConfig, line: results.ProgressLine
) -> closing[ReconnectingStore[R]]:
    """Returns the repository of the target, which waits out outages, and says so."""
    opened = partial(opener, settings, SNAPSHOTS)
    return closing(ReconnectingStore(opened, settings.run, line.outage))


# --- take -----------------------------------------------------------------------------------------


@options.command(*RESULT, name="take")
@_set_argument
@click.argument("paths", type=click.Path(), nargs=-1, metavar="[PATH]...")
@repeated("--exclude", "PATTERN", "With PATH: leave out paths that match: '*.tmp', '/srv/cache/**'")
@flag("--full", "Store everything, so that the version needs no other one.")
@flag("--paranoid", "Also read files that seem unchanged.")
def snapshot_take(
    common: Common, /, set_name: str, paths: tuple[str, ...], exclude: tuple[str, ...], **how: bool
) -> None:
    """Make a version of a set on the target.

    The paths of SET are in [snapshots.SET] of the configuration; without that table, they are given
    as PATHs with each call. Only files that have changed since the last version (in size, time,
    inode, mode or owner) are read, and only the parts that differ are stored. Neither the catalog
    nor the store is needed. The exit code is 7 if a file could not be read.
    """
    from ntt_backup.snapshot.job import take_version
    from ntt_backup.snapshot.take.new_version import Report
    from ntt_backup.snapshot.take.walk import find_set

    settings = common.load(RemoteConfig)
    chosen = find_set(settings, set_name, paths, exclude)
    began = time.monotonic()
    with results.progress_line() as line:
        unread = results.first_only(line)

        def progress(files: int, _: int, read: int, stored: int) -> None:
            rate = results.pace(read, time.monotonic() - began)
            line.show(lambda: f"{many(files, 'file')}, {rate} read, {size(stored)} stored")

        told = Report(progress, lambda path, why: unread(f"{path}: {why}"))
        try:
            done = take_version(settings, chosen, report=told, **how)
        except RemoteUnreachable as error:
            again = "the next take begins again, and removes what this one has sent"
            error.hint = "; ".join(filter(None, (error.hint, again)))
            raise
    results.report_on(done, _taken(done), done.exit_code, target=common.target)


def _taken(done: Taken) -> Iterator[str]:
    kind = f"on {done.parent}" if done.parent else "full"
    yield (
        f"took {done.set}@{done.version} ({kind}): {many(done.files, 'file')}, {size(done.bytes)};"
        f" {done.changed:,} changed, {size(done.read)} read, {size(done.stored)} stored, in"
        f" {duration(done.duration_s)}"
    )
    if done.forgotten:
        yield f"removed {many(done.forgotten, 'version')} past retention"
    if done.unsettled:
        yield f"UNSETTLED: {many(done.unsettled, 'file')} changed while being read"
    if done.unreadable:
        yield f"NOT taken: {done.unreadable:,} that could not be read"


# --- list and show --------------------------------------------------------------------------------


@options.command(JSON, name="list")
@click.argument("set_name", metavar="[SET]", default="", shell_complete=options.set_names)
def snapshot_list(common: Common, set_name: str) -> None:
    """List the versions of a set, or of all.

    For versions that cannot be read, since they are sealed or the ssh key has no right to read
    them, only names and sizes are listed. A version that is not signed by a key of this host is
    `not of this host`; a version with a wrong signature is FORGED. The exit code is 7 if a manifest
    is damaged.
    """
    if set_name:
        require_set(set_name)
    settings = common.load(RemoteConfig)
    origins = Origins.of(settings)
    with closing(open_store(settings, SNAPSHOTS)) as repository:
        found, known = versions(repository, set_name), dict[Version, VersionFacts]()
        try:
            known |= {one.version: one for one in facts(repository, found, origins)}
        except (ConfigError, Unsupported) as error:  # It is sealed, or this key may not read it.
            click.echo(f"warning: only names and sizes can be told: {error}", err=True)
        names = [name for one in found for name in one.pins]
        pins = read_pins(repository, SNAPSHOTS, names, origins.keys)
    rows = [
        {**_version_fields(one, known.get(one)), "pinned": one.path in pins}
        | ({"pin_reason": pins[one.path]} if one.path in pins else {})
        for one in found
    ]
    said = [
        _version_line(one, known.get(one)) + printable(pin_words(pins.get(one.path)))
        for one in found
    ]
    nothing = f"no snapshots{' of ' * bool(set_name)}{set_name}"
    results.tell({"target": common.target, "versions": rows}, said or [nothing])
    if any(one.problem for one in known.values()):
        sys.exit(SOME_FAILED)


@options.command(JSON, name="show")
@_version_argument
@flag("--files", "List the files of the version.")
def snapshot_show(common: Common, wanted: str, files: bool) -> None:
    """Show a version; without VERSION the newest.

    With --files and --json there is one JSON object for each file.
    """
    settings = common.load(RemoteConfig)
    origins = Origins.of(settings)
    with closing(open_store(settings, SNAPSHOTS)) as repository:
        chosen = choose(repository, wanted, origins, results.warn)
        if files:
            as_json = options.wants("as_json")
            for entry in open_manifest(repository, chosen).entries():
                click.echo(json.dumps(_entry_fields(entry)) if as_json else _entry_line(entry))
            return
        known = next(facts(repository, [chosen], origins))
    if known.header is None:
        raise SnapshotDamaged(known.problem)
    more = {"roots": known.header.roots, "chain_versions": known.header.chain}
    fields = {"target": common.target, **_version_fields(chosen, known), **more}
    host = f" on {printable(known.header.host)}" if known.header.host else ""
    said = [_version_line(chosen, known)]
    said += [f"  of {printable(root)}{host}" for root in known.header.roots]
    said += [f"  needs {known.header.set}@{needed}" for needed in known.header.chain[:-1]]
    results.tell(fields, said)


def _version_fields(version: Version, known: VersionFacts | None) -> dict[str, Any]:
    """Returns a version for programs."""
    said: dict[str, Any] = {
        "set": version.set,
        "version": version.name,
        "begun": utc(_begun(version, known)),
        "finished": version.whole,
        "arrived": utc(version.arrived),
        "stored": version.size,
    }
    if known is not None and known.header is not None and known.trailer is not None:
        header, trailer = known.header, known.trailer
        said |= {"full": not header.parent, "parent": header.parent, "chain": len(header.chain)}
        said |= {"files": trailer.files, "bytes": trailer.bytes, "host": header.host}
        said |= {"unsettled": trailer.unsettled, "skipped": trailer.skipped}
        said["origin"] = str(known.origin)
    elif known is not None:
        said["damage"] = known.problem
    return said


def _version_line(version: Version, known: VersionFacts | None) -> str:
    """Returns a version for people."""
    begin = f"{version}  {moment(_begun(version, known))}"
    if known is None:
        return f"{begin}  {'' if version.whole else 'never finished, '}{size(version.size)} stored"
    if known.header is None or known.trailer is None:
        return f"{begin}  DAMAGED: {printable(known.problem)}"
    trailer, number = known.trailer, len(known.header.chain) - 1
    said = [
        f"increment {number}" if number else "full",
        f"{many(trailer.files, 'file')}, {size(trailer.bytes)}",
        f"{size(version.size)} stored",
    ]
    if trailer.unsettled:
        said.append(f"{trailer.unsettled:,} UNSETTLED")
    if trailer.skipped:
        said.append(f"{trailer.skipped:,} skipped")
    if known.origin != Origin.OURS:
        said.append(known.origin.text)
    return f"{begin}  {', '.join(said)}"


def _begun(version: Version, known: VersionFacts | None) -> datetime:
    header = known.header if known is not None else None
    return header.begun if header is not None else begun(version.name)


# --- the files of a version -----------------------------------------------------------------------

_TYPES: Final = {
    FILE: stat.S_IFREG,
    HARD_LINK: stat.S_IFREG,
    DIRECTORY: stat.S_IFDIR,
    SYMLINK: stat.S_IFLNK,
    FIFO: stat.S_IFIFO,
}


def _entry_fields(entry: Entry) -> dict[str, object]:
    """Returns a file for programs."""
    return {
        "path": entry.path,
        "kind": entry.kind,
        "mode": f"{entry.mode:04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "mtime": entry.mtime / 1e9,
        "size": entry.size,
        **({"target": entry.target} if entry.target else {}),
        **({"blake3": entry.digest} if entry.digest else {}),
        **({"unsettled": True} if entry.unsettled else {}),
    }


def _entry_line(entry: Entry) -> str:
    """Returns a file as `ls -l` shows it, with what was hard to take behind it."""
    mode = stat.filemode(_TYPES[entry.kind] | entry.mode)
    seconds = entry.mtime // 10**9
    try:
        when = moment(datetime.fromtimestamp(seconds, UTC), zone=False)
    except (ValueError, OverflowError, OSError):
        when = f"{seconds:>16}"
    arrow = {SYMLINK: " -> ", HARD_LINK: " = "}.get(entry.kind, "")
    name = printable(entry.path) + (arrow + printable(entry.target) if arrow else "")
    end = "  (UNSETTLED)" if entry.unsettled else ""
    return f"{mode} {entry.uid:>5} {entry.gid:>5} {entry.size:>13} {when} {name}{end}"


# --- diff -----------------------------------------------------------------------------------------

_SIGNS: Final = {Kind.ADDED: "+", Kind.REMOVED: "-", Kind.CHANGED: "M", Kind.ATTRIBUTES: "a"}


@options.command(JSON, name="diff")
@click.argument("old", metavar="SET[@OLD]", shell_complete=options.set_names)
@click.argument("new", metavar="[SET][@NEW]", default="")
def snapshot_diff(common: Common, old: str, new: str) -> None:
    """Show what differs between two versions.

    SET alone compares its last two versions; a single version is compared with the newest. A line
    begins with `+` for a new file, `-` for a removed file, `M` for changed content, and `a` if only
    mode, owner, time or attributes have changed. With --json there is one JSON object per file.
    """
    name = old.partition("@")[0]
    settings = common.load(RemoteConfig)
    origins = Origins.of(settings)
    as_json = options.wants("as_json")
    with closing(open_store(settings, SNAPSHOTS)) as repository:
        if not new and old == name:
            after = choose(repository, name, origins, results.warn)
            all_of_it = versions(repository, name)
            older = [one for one in all_of_it if one.whole and one.name < after.name]
            if not older:
                raise ConfigError(
                    f"{name} has no version before {after}",
                    hint=f"make another one: ntt-backup-remote snapshot take {name}",
                )
            before = newest_of_host(repository, older, origins) or older[-1]
        else:
            before = choose(repository, old, origins, results.warn)
            whole = new and not new.startswith("@")
            after = choose(repository, new if whole else name + new, origins, results.warn)
        for known in facts(repository, [before, after], origins):
            if known.origin != Origin.OURS:
                click.echo(f"warning: {known.version} is {known.origin.text}", err=True)
        counts: Counter[Kind] = Counter()
        grown = 0
        for one in differences(open_manifest(repository, before), open_manifest(repository, after)):
            counts[one.kind] += 1
            grown += (one.new.size if one.new else 0) - (one.old.size if one.old else 0)
            click.echo(json.dumps(_difference_fields(one)) if as_json else _difference_line(one))
    if not as_json:
        said = ", ".join(f"{counts[kind]:,} {kind}" for kind in Kind if counts[kind])
        change = f"; {size(abs(grown))} {'more' if grown > 0 else 'less'}" if grown else ""
        click.echo(f"{before} and {after}: {said or 'nothing differs'}{change}", err=True)


def _difference_fields(one: EntryDifference) -> dict[str, object]:
    was = {"was": _entry_fields(one.old)} if one.old is not None and one.new is not None else {}
    return {"difference": str(one.kind), **_entry_fields(one.entry), **was}


def _difference_line(one: EntryDifference) -> str:
    before, after = one.old, one.new
    what = f"{_SIGNS[one.kind]} {printable(one.entry.path)}"
    if one.kind == Kind.CHANGED and before is not None and after is not None:
        if before.kind != after.kind:
            return f"{what}  (was {before.kind}, is {after.kind})"
        if before.size != after.size:
            return f"{what}  ({size(before.size)}, now {size(after.size)})"
    return what


# --- restore --------------------------------------------------------------------------------------


@options.command(*RESULT, name="restore")
@_version_argument
@options.destination("Directory for the files: /etc/hosts becomes DIR/etc/hosts.")
@repeated(
    "--path",
    "GLOB",
    "Restore only paths that match, with everything below them: '/etc/ssh', '*.conf', '/srv/**/a?'",
    "patterns",
)
@flag("--delta", "Hash existing files, and fetch only the parts of them that differ.")
@flag(
    "--in-place",
    "With --delta: write into the files to save space; an interruption leaves a file half changed.",
)
@options.jobs(", each with its own connection")
@flag("--trust-target", "Restore the version even if nothing proves that this host made it.")
@unless(
    "--no-privileges",
    "Give all files to this user, without set-user-ID and set-group-ID bits and without"
    " capabilities: for a version whose maker is not trusted.",
    "privileges",
)
@unless("--no-verify", "Do not compare new files with their hashes.", "verify")
def snapshot_restore(
    common: Common,
    /,
    wanted: str,
    destination: Path,
    patterns: tuple[str, ...],
    jobs: int,
    trust_target: bool,
    **how: bool,
) -> None:
    """Restore a version, or a part of it, into a directory.

    Without VERSION, the newest version of this host is restored. A version that the host key does
    not prove to be of this host is refused without --trust-target. Each file is compared with its
    hash. A file in DIR that has the size and time of the file in the version is assumed to be
    equal, and is hashed if an earlier restore did not finish. So the same command continues after
    an interruption or a power cut. A file that differs is replaced, and a file that the version
    lacks is left alone. The exit code is 7 if a file could not be restored.
    """
    from ntt_backup.catalog.identities import identified_if_known
    from ntt_backup.snapshot.restore.files import RestoreOptions
    from ntt_backup.snapshot.restore.tree import confine
    from ntt_backup.snapshot.restore.version import restore as restore_version

    ways = RestoreOptions(**how)
    if ways.in_place and not ways.delta:
        raise click.UsageError("--in-place is a way of --delta: give that, too")
    settings = identified_if_known(common.load(RemoteConfig), "restore")
    destination = destination.absolute()
    with results.progress_line() as line:
        done = restore_version(
            lambda: ReconnectingStore(
                partial(open_to_read, settings, SNAPSHOTS), settings.run, line.outage
            ),
            wanted,
            destination,
            ways,
            jobs=jobs,
            patterns=patterns,
            origins=Origins.of(settings),
            trust=trust_target,
            on_progress=lambda done: line.show(lambda: _restored_so_far(done)),
            before_writing=lambda: confine([destination]),
            tell=results.warn,
        )
    said = _restored(done, destination)
    results.report_on(done, said, done.exit_code, target=common.target)


def _restored_so_far(done: RestoredVersion) -> str:
    wrong = f", {done.wrong:,} wrong" if done.wrong else ""
    text = f"{done.files:,} restored, {done.kept:,} already there{wrong}"
    return f"{text}, {results.so_far(done.bytes, done.duration_s, done.part)}"


def _restored(done: RestoredVersion, destination: Path) -> Iterator[str]:
    yield (
        f"restored {many(done.files, 'file')} of {done.version}, {size(done.bytes)} in"
        f" {duration(done.duration_s)}, into {destination}; {done.kept:,} were already there and"
        f" right; {size(done.fetched)} fetched"
    )
    yield from (f"NOTE: {printable(one)}" for one in done.notes)
    if done.origin != Origin.OURS:
        origin = Origin(done.origin)
        yield f"NOTE: by --trust-target: this version is {origin.text}: {origin.why}"
    if done.wrong:
        yield f"NOT restored: {many(done.wrong, 'file')}"
        yield from results.first_lines(
            (f"{path}: {why}" for path, why in done.problems), done.wrong
        )


# --- verify ---------------------------------------------------------------------------------------


@options.command(*RESULT, name="verify")
@click.argument("which", metavar="[SET[@VERSION]]", default="", shell_complete=options.set_names)
@value("--sample", PART, "Fetch a random part, such as 5%.", "part")
@flag("--download", "Fetch all content, and compare it.")
@value("--since", "DAY|VERSION", "Check only versions from this day or version on.", default="")
def snapshot_verify(
    common: Common, which: str, part: float | None, download: bool, since: str
) -> None:
    """Check that versions are complete and unchanged.

    Manifests are read completely, and the sizes of all files are compared. To prove contents,
    --sample fetches a part of them, and --download fetches all. The exit code is 7 if a version is
    damaged.
    """
    if part is not None and download:
        raise click.UsageError("give only one of --sample and --download")
    from ntt_backup.report.check import missed_versions
    from ntt_backup.snapshot.verify import verify as verify_versions

    share = 1.0 if download else part or 0.0
    settings = common.load(RemoteConfig)
    missed: list[str] | None = None  # Not looked for.
    with results.progress_line() as line, _patient(open_to_read, settings, line) as repository:

        def progress(found: VersionFindings) -> None:
            line.show(
                lambda: (
                    f"version {found.versions:,}, {many(found.entries, 'file')},"
                    f" {results.pace(found.bytes, found.duration_s)},"
                    f" {many(found.wrong_total, 'damage')}"
                )
            )

        found = verify_versions(
            repository, which, share, since, on_progress=progress, origins=Origins.of(settings)
        )
        if "@" not in which:
            missed = [str(one) for one in missed_versions(settings, repository, which)]
    wrong = [one._asdict() for one in found.wrong]
    said = [*_checked(found, share), *(f"MISSED: {one}" for one in missed or ())]
    code = found.exit_code or (SOME_FAILED if missed else 0)
    results.report_on(found, said, code, target=common.target, wrong=wrong, missed=missed)


def _checked(found: VersionFindings, share: float) -> Iterator[str]:
    """Yields what was checked, and what is damaged, for a terminal."""
    yield (
        f"checked {many(found.versions, 'version')} with {many(found.entries, 'file')}:"
        f" {many(found.files, 'stored file')}, {size(found.bytes)} of content, in"
        f" {duration(found.duration_s)}"
    )
    if found.unfinished:
        yield f"{many(found.unfinished, 'version was', 'versions were')} never finished"
    if found.foreign:
        yield f"{many(len(found.foreign), 'version')} NOT of this host: nothing proves the maker"
        yield from results.first_lines(found.foreign, len(found.foreign))
    if found.damaged:
        yield f"DAMAGED: {', '.join(found.damaged)}"
        wrong = (f"{one.version} {one.path or one.file}: {one.detail}" for one in found.wrong)
        yield from results.first_lines(wrong, found.wrong_total)
        for name in dict.fromkeys(one.partition("@")[0] for one in found.damaged):
            command = f"ntt-backup-remote snapshot take {name} --full"
            yield f"take a version that needs no other: {command}"
    elif not found.versions:
        yield "there was nothing to check"
    else:
        more = "" if share else "; to prove contents, add --sample 5% or --download"
        yield f"all of it is right{more}"


# --- pin and unpin --------------------------------------------------------------------------------


@options.command(JSON, name="pin")
@_version_argument
@value("--reason", "TEXT", "The reason, which the list shows.", default="")
def snapshot_pin(common: Common, wanted: str, reason: str) -> None:
    """Keep a version until it is unpinned, whatever the retention says.

    Without VERSION, the newest version of this host is pinned. The pin is a file beside the version
    on the target, signed by the host key. The versions that a pinned version needs are kept, too.
    """
    settings = common.load(RemoteConfig)
    origins = Origins.of(settings)
    with closing(open_store(settings, SNAPSHOTS)) as repository:
        chosen = choose(repository, wanted, origins, results.warn)
        new = put_pin(repository, SNAPSHOTS, chosen.path, origins.keys, reason)
    said = f"pinned {chosen}" if new else f"{chosen} is pinned already, and was not changed"
    fields = {"target": common.target, "set": chosen.set, "version": chosen.name, "new": new}
    results.tell(fields, [said])


@options.command(JSON, name="unpin")
@_version_argument
def snapshot_unpin(common: Common, wanted: str) -> None:
    """Remove the pins of a version; the retention applies to it again.

    An append-only target keeps pins, as it keeps versions.
    """
    settings = common.load(RemoteConfig)
    if "@" not in wanted:
        raise click.UsageError("name the version: SET@VERSION")
    with closing(open_store(settings, SNAPSHOTS)) as repository:
        chosen = choose(repository, wanted)
        removed = remove_pins(repository, chosen.pins)
    said = f"{chosen} is no longer pinned" if removed else f"{chosen} was not pinned"
    fields = {"target": common.target, "set": chosen.set, "version": chosen.name}
    results.tell({**fields, "removed": removed}, [said])


# --- forget ---------------------------------------------------------------------------------------

_COUNT: Final = click.IntRange(0, 100_000)


@options.command(JSON, name="forget")
@_set_argument
@value("--keep-last", _COUNT, "Keep the newest N versions.", metavar="N")
@value("--keep-daily", _COUNT, "Keep one version of each of N days.", metavar="N")
@value("--keep-weekly", _COUNT, "Keep one version of each of N weeks.", metavar="N")
@value("--keep-monthly", _COUNT, "Keep one version of each of N months.", metavar="N")
@value("--keep-yearly", _COUNT, "Keep one version of each of N years.", metavar="N")
@flag(
    "--trust-target",
    "Count every version, whoever made it, by the time in its name: after the target was"
    " copied, or the host key was lost.",
)
@flag("--drop-doubtful", "Also remove all doubtful versions that no other version needs.")
@flag("--yes", "Do not ask.")
def snapshot_forget(
    common: Common,
    set_name: str,
    keep_last: int | None,
    keep_daily: int | None,
    keep_weekly: int | None,
    keep_monthly: int | None,
    keep_yearly: int | None,
    trust_target: bool,
    drop_doubtful: bool,
    yes: bool,
) -> None:
    """Remove versions that the retention does not keep.

    Without --keep-... the settings of the set apply. The newest version is always kept, and so is
    every version that a kept version needs: a full version is removed with the last of its
    increments.

    Versions count by the time of their arrival on the target. Doubtful versions do not count, and
    are kept: those that the host key does not prove to be of this host, that claim another time
    than that of their arrival, or that arrived many at once.
    """
    from ntt_backup.snapshot.job import set_lock

    settings = common.load(RemoteConfig)
    require_set(set_name)
    named = settings.snapshots.get(set_name)
    asked = (keep_last, keep_daily, keep_weekly, keep_monthly, keep_yearly)
    if any(one is not None for one in asked):
        rule = Retention(*(one or 0 for one in asked))
    elif named is not None:
        rule = Retention.of(named)
    else:
        raise click.UsageError(f"say what to keep: {set_name} is not in the configuration")
    with (
        results.progress_line() as line,
        set_lock(settings, set_name),
        _patient(open_store, settings, line) as repository,
    ):
        if named is None and not versions(repository, set_name):
            raise ConfigError(
                f"{set_name} has no version, and is not in the configuration",
                hint="see ntt-backup-remote snapshot list",
            )

        def ask() -> ForgetPlan:
            return plan_of(
                repository,
                set_name,
                rule,
                datetime.now(UTC),
                Origins.of(settings),
                every=named.every if named is not None else None,
                trust=trust_target,
                drop=drop_doubtful,
            )

        found = ask()
        if not options.wants("as_json"):
            click.echo("\n".join(forget_lines(found)))
        removes = bool(found.names)
        if removes and not yes:
            removes = _agreed()
            # Another host may have taken a version that builds on one of these.
            if removes and ask().names != found.names:
                raise LockHeld(
                    f"versions of {set_name} have changed since: nothing was removed",
                    hint="run the command again, and check what it would remove now",
                )
        if removes:
            repository.do(lambda remote: remote.remove(found.names))
            rollback_detection.removed(
                settings, "version", [one.name for one in found.gone], set_name
            )
    fields = {
        "target": common.target,
        "kept": [one.name for one in found.kept],
        "pinned": sorted(found.pinned),
        "needed": [{"version": one.name, "for": why} for one, why in found.needed],
        "gone": [one.name for one in found.gone],
        "unfinished": [one.name for one in found.dead],
        "doubtful": [{"version": one.name, "why": why} for one, why in found.doubtful],
        "bytes": found.size,
        "removed": removes,
    }
    results.report(fields, [f"removed {size(found.size)}" if removes else "nothing was removed"], 0)


def _agreed() -> bool:
    """Returns whether the operator wants it. Raises ConfigError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "nothing was removed: there is no terminal to ask for a confirmation",
            hint="confirm with --yes",
        )
    return click.confirm("Remove them?", err=True)


def forget_lines(found: ForgetPlan) -> list[str]:
    """Returns what is kept and what goes, for people, in the order of the versions."""

    def line(verb: str, one: Version, more: str = "") -> str:
        more = f", pinned{more}" if one.name in found.pinned else more
        return f"{verb:<6} {one}  {moment(found.begun(one))}, {size(one.size)}{more}"

    said = [line("keep", one) for one in found.kept]
    said += [line("keep", one, f", which {why} needs") for one, why in found.needed]
    said += [line("remove", one) for one in found.gone]
    said += [line("remove", one, ", which was never finished") for one in found.dead]
    said += [line("keep", one, f", DOUBTFUL: {printable(why)}") for one, why in found.doubtful]
    going = many(len(found.gone) + len(found.dead), "version")
    told = [*sorted(said, key=lambda one: one[7:]), f"{going} to remove, {size(found.size)}"]
    if found.doubtful:
        told.append(
            f"{many(len(found.doubtful), 'doubtful version')} neither counted nor removed: look at"
            " them, then add --drop-doubtful; or --trust-target, if they are right"
        )
    return told
