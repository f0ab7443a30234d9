"""The commands `failed`, `requeue` and `show` tell of single blobs, and have them sent again."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import click

from ntt_backup.audit.one_blob import InStore, Place, look_in_packs, look_in_store
from ntt_backup.audit.register import open_store
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.catalog import ledger
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.failures import (
    UNKNOWN,
    FailedBlob,
    LedgerEntry,
    acknowledge,
    find_blob,
    is_mine,
    iter_failed,
    ledger_of,
)
from ntt_backup.catalog.history import parts_of_others, require_no_prune
from ntt_backup.catalog.listed_files import (
    FileAtPath,
    file_at,
    iter_failed_files,
    places_of,
    shown_path,
)
from ntt_backup.catalog.unread_files import requeue_files
from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common, open_catalog
from ntt_backup.cli.options import IDENTITY, JSON, JSON_LINES, TIME, flag, value
from ntt_backup.config import CatalogConfig, RemoteConfig
from ntt_backup.errors import BackupError, ConfigError, complete
from ntt_backup.formatting import many, moment, printable, size, utc
from ntt_backup.model import OF_CHECKS, Blob, FileReason, Reason

_REASONS: Final = list(
    dict.fromkeys(one.value for one in (*Reason, *FileReason) if one not in OF_CHECKS)
)
_PATHS: Final = 20
# The failures of each reason that `failed` shows.
_SHOWN: Final = 20
_CUT: Final = (
    "so much is pending that blobs which another program marked as failed were not found in time;"
    f" to look for them however long it takes: ntt-backup-remote failed --reason {UNKNOWN}"
)
# What the operator does about each reason; docs/first-aid.md says more.
ADVICE: Final[Mapping[str, str]] = {
    Reason.BAD_BLOBID: "correct the catalog's row (64 lowercase hex digits), or delete the row",
    Reason.MISSING: "`ntt-backup-remote heal` restores it if a target has it; else delete the row",
    Reason.UNREADABLE: "let this user read the file; if the disk reports errors: the kernel log",
    Reason.NOT_A_FILE: "remove what stands at the blob's path and put the file there",
    Reason.WRONG_SIZE: "replace the file if it was cut, or correct the size in the catalog",
    Reason.CORRUPT_SOURCE: "`ntt-backup-remote heal` replaces the damaged file if a target has the"
    " blob; else put the right file there, or delete the row",
    Reason.PRUNED: "its files are gone, and `ntt-backup-remote prune` has removed it, or was"
    " interrupted; `ntt-backup-remote requeue --reason pruned` has it sent again",
    Reason.REMOTE_REJECTED: "look at what stands at the blob's path on the remote",
    UNKNOWN: "another program marked the blob as failed; after requeue a run says why it fails",
}
# The same for files that go by their paths; docs/stores.md says more.
FILE_ADVICE: Final[Mapping[str, str]] = {
    FileReason.MISSING: "put the file back, or find out why it is still listed",
    FileReason.UNREADABLE: ADVICE[Reason.UNREADABLE],
    FileReason.NOT_A_FILE: "remove what stands at the path and put the file there",
    FileReason.WRONG_SIZE: "replace the file if it was cut, or correct the size that is listed",
    FileReason.WRONG_CHECKSUM: "replace the file, whose content is not what the list says",
    FileReason.BAD_PATH: "correct the list, or rename the file: the path cannot be stored",
    FileReason.CHANGED: 'restore the file, or set on_change = "version" if files may change',
}


@options.command(JSON_LINES)
@value(
    "--reason",
    click.Choice([*_REASONS, UNKNOWN]),
    f"Only blobs that failed for this reason; {UNKNOWN}: another program marked them.",
)
@value("--since", TIME, "Only blobs that failed, or failed again, within this time, such as 1d.")
@value("--limit", click.IntRange(1), "Show only the first N.", metavar="N")
@flag("--known", "Acknowledge the present failures: runs and mails no longer report them.")
def failed(
    common: Common, reason: str | None, since: float | None, limit: int | None, known: bool
) -> None:
    """List the failed blobs by reason, and what to do.

    The first 20 of each reason are shown; with --reason, all of that reason. `show BLOBID` shows
    more about one blob; `requeue` makes failed blobs pending again.
    """
    if known and (since is not None or limit is not None or reason == UNKNOWN):
        raise click.UsageError("--known goes with --reason, and with no other choice")
    settings = common.load(CatalogConfig)
    with open_catalog(settings, "failed --known" if known else "failed") as conn:
        if known:
            count = acknowledge(conn, settings.target, reason)
            blobs = many(count, "failed blob is known", "failed blobs are known")
            said = f"{blobs} from now on; what fails later is told of again"
            results.tell({"target": settings.target, "known": count}, [said])
            return
        counts: Counter[tuple[str, str]] = Counter()
        first: dict[tuple[str, str], list[str]] = defaultdict(list)
        cut: list[str] = []
        most = limit or _SHOWN

        def tell(key: tuple[str, str], fields: Mapping[str, Any], line: str) -> None:
            counts[key] += 1
            if options.wants("as_json"):
                click.echo(json.dumps(fields))
            elif reason is not None:  # However many: none is kept.
                click.echo(line)
            elif counts[key] <= most:
                first[key].append(line)

        found = iter_failed(
            conn, settings.target, reason=reason, since=since, on_cut=lambda: cut.append(_CUT)
        )
        for one in islice(found, limit):
            tell((one.reason, "blob"), results.fields_of(one), _line(one))
        files = iter_failed_files(conn, reason) if settings.by_path and since is None else ()
        for file in islice(files, None if limit is None else limit - counts.total()):
            path, at = shown_path(file.path), file.registered_at
            fields = {"path": path, "reason": file.reason, "detail": file.detail}
            said = printable(f"{path}  since {moment(at)}  {file.detail}".rstrip())
            tell((file.reason, "file"), {**fields, "registered_at": utc(at)}, said)
    if not options.wants("as_json"):
        for (why, noun), count in counts.items():
            advice = ADVICE if noun == "blob" else FILE_ADVICE
            lines = [f"{why}: {many(count, noun)}", f"  {advice.get(why, '')}".rstrip()]
            lines += [f"    {line}" for line in first[why, noun]]
            if reason is None and count > most:
                lines.append(
                    f"    and {count - most:,} more: ntt-backup-remote failed --reason {why}"
                )
            click.echo(complete("\n".join(filter(None, lines))))
        more = ", and perhaps more" if counts.total() == limit else ""
        what = ("blob or file", "blobs and files") if settings.by_path else ("blob", "blobs")
        again = "; once the causes are fixed: ntt-backup-remote requeue"
        all_of_them = f"{many(counts.total(), *what)} failed{more}{again}"
        click.echo(complete(all_of_them) if counts else "nothing failed")
    for text in cut:
        click.echo(complete(text), err=True)


def _line(one: FailedBlob) -> str:
    text = one.blobid
    if one.first_at is not None and one.attempts is not None:
        text += f"  since {moment(one.first_at)}, {many(one.attempts, 'attempt')}"
    if one.known_at is not None:
        text += ", known"
    return printable(f"{text}  {one.detail}".rstrip())


@options.command(JSON)
@click.argument("blobids", nargs=-1, metavar="[BLOBID]...")
@value("--reason", click.Choice(_REASONS), "Only blobs that failed for this reason.")
def requeue(common: Common, blobids: tuple[str, ...], reason: str | None) -> None:
    """Make failed blobs pending again. The next run sends them.

    Without BLOBID, all failed blobs become pending, except those that `prune` has removed. The
    first digits of each BLOBID are enough.
    """
    if blobids and reason is not None:
        raise click.UsageError("give blobs, or --reason")
    settings = common.load(CatalogConfig)
    with open_catalog(settings, "requeue") as conn:
        if reason == Reason.PRUNED:
            require_no_prune(conn, settings.target)
        names = {find_blob(conn, one) for one in blobids}
        count = ledger.requeue(conn, settings.target, reason, sorted(names) if names else None)
        files = requeue_files(conn, reason) if settings.by_path and not names else 0
    others = len(names) - count
    left = f"; {many(others, 'other was', 'others were')} not failed" if others > 0 else ""
    said = f"{many(count, 'blob')} pending again{left}"
    if files:
        said += f"; {many(files, 'file is', 'files are')} read again"
    fields = {"target": settings.target, "requeued": count}
    results.tell({**fields, "files": files} if settings.by_path else fields, [said])


@options.command(IDENTITY, JSON)
@click.argument("blob", metavar="BLOBID|PATH")
@flag("--verify", "Hash the content in the store.")
def show(common: Common, blob: str, verify: bool) -> None:
    """Show everything that is known about one blob.

    The first digits of BLOBID are enough if no other blob begins with them. PATH is the path of a
    file that a query or a walk lists, as it is listed or as it is in the store.
    """
    settings = common.load(CatalogConfig)
    with open_catalog(settings, "show") as conn:
        blob, file = _listed(conn, settings, blob)
        if file is not None and file.blobid is None:
            _tell(_fields_of_file(blob, file), [*_about_file(blob, file)])
            return
        if settings.by_path and file is None and "/" in blob:  # No blobid has one.
            raise ConfigError(
                f"the catalog has no file {shown_path(os.fsencode(blob))[:200]}",
                hint="give the path as the query or the walk lists it, or with source.root before"
                " it",
            )
        name = find_blob(conn, blob if file is None else str(file.blobid))
        targets = ledger_of(conn, name)
        known = next((one.size for one in targets), None)
        source: InStore | None = None
        mine = is_mine(conn, name)
        others = [] if mine or not is_blobid(name) else parts_of_others(conn, settings.target)
        if mine and settings.source is not None:
            store = open_store(settings, conn)
            source = look_in_store(store, Blob(name, known), verify=verify)
        paths = places_of(conn, [name], _PATHS).get(name, ()) if settings.by_path else ()
    rows = [("blob", name), ("size", "not known" if known is None else f"{known:,} bytes")]
    hosts = [host for part, host in others if part.has(name)]
    fields: dict[str, Any] = {"blobid": name, "size": known, "source": None}
    fields |= {"mine": mine, "hosts": hosts}
    if not mine:
        whose = (
            f"it is in that of {', '.join(hosts)}" if hosts else "no run of the last days had it"
        )
        rows.append(("store", f"not in the part of this host ({settings.part}): {whose}"))
    if file is not None:
        fields |= _fields_of_file(blob, file)
        rows[:0] = _about_file(blob, file)
    if settings.by_path:
        fields["paths"] = [shown_path(path) for path in paths]
        rows += [("path", path) for path in fields["paths"][:_PATHS]]
        if len(paths) >= _PATHS:
            rows.append(("", f"only {_PATHS} paths are shown"))
    if source is not None:
        fields["source"] = results.fields_of(source)
        rows.append(("store", _in_store(source)))
    fields["targets"] = []
    for one in targets:
        failure = results.fields_of(one.failure) if one.failure else None
        fields["targets"].append({**results.fields_of(one), "failure": failure})
        rows += _on_target(one)
    places: list[Place] | None = None
    problem = ""
    if settings.remote is not None and settings.remote.packs and is_blobid(name):
        try:
            places = look_in_packs(common.load(RemoteConfig), name)
        except BackupError as error:
            problem = str(error)
            rows.append(("object", f"not known: {problem}"))
    if places == []:
        rows.append(("object", "no pack of the target has it"))
    rows += [("object", _in_file(place)) for place in places or ()]
    fields["objects"] = None if places is None else [results.fields_of(place) for place in places]
    fields["problem"] = problem
    _tell(fields, rows)


def _tell(fields: Mapping[str, Any], rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(label) for label, _ in rows) + 2
    results.tell(fields, [printable(f"{label:<{width}}{text}") for label, text in rows])


def _listed(conn: Connection, settings: CatalogConfig, given: str) -> tuple[str, FileAtPath | None]:
    """Returns a path as it is listed, and its file; None if it is listed in no form.

    A query may list paths below the root of the store, or whole ones; people give either.
    """
    forms = [given] if settings.by_path else []
    if forms and settings.source is not None:
        root = os.path.join(settings.source.root, "")
        forms += [given.removeprefix(root), root + given]
    for form in forms:
        if (file := file_at(conn, os.fsencode(form))) is not None:
            return form, file
    return given, None


def _fields_of_file(path: str, file: FileAtPath) -> dict[str, Any]:
    fields = results.fields_of(file)
    return {
        "blobid": fields.pop("blobid"),
        "file": {"path": shown_path(os.fsencode(path)), **fields},
    }


def _about_file(path: str, file: FileAtPath) -> Iterator[tuple[str, str]]:
    read = f"read {moment(file.read_at)}" if file.read_at is not None else "not read yet"
    gone = f", not listed since {moment(file.gone_at)}" if file.gone_at is not None else ""
    yield "file", shown_path(os.fsencode(path))
    yield "", f"listed since {moment(file.registered_at)}, {read}{gone}"
    if file.reason is not None:
        yield "", f"{file.reason} {file.detail}".rstrip()


def _in_store(found: InStore) -> str:
    if found.problem:
        return f"{found.problem}: {found.detail}"
    proved = "its content hashes to its name" if found.verified else "--verify hashes its content"
    return f"{found.size or 0:,} bytes; {proved}"


def _on_target(one: LedgerEntry) -> Iterator[tuple[str, str]]:
    state = "copied" if one.copied else "failed" if one.failed else "pending"
    checked = f", last checked {moment(one.last_checked)}" if one.last_checked else ""
    yield f"target {one.target}", state + checked
    if (why := one.failure) is None:
        return
    yield "", f"{why.reason} {why.detail}".rstrip()
    if why.first_at is not None and why.last_at is not None and why.attempts is not None:
        times = f"since {moment(why.first_at)}, last {moment(why.last_at)}"
        known = f"; known since {moment(why.known_at)}" if why.known_at is not None else ""
        yield "", f"{times}, {many(why.attempts, 'attempt')}{known}"


def _in_file(place: Place) -> str:
    where = f", {place.stored:,} bytes from {place.offset:,} on" if place.pack else ""
    return f"{place.key} ({size(place.size)}){where}"
