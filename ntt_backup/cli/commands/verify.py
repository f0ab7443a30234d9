"""The commands `verify`, `reconcile` and `scan` compare catalog, store and remote."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click

from ntt_backup.audit.reconcile import SERIOUS, Adoption, Comparison, Difference
from ntt_backup.audit.reconcile import reconcile as compare
from ntt_backup.audit.register import register_files
from ntt_backup.audit.scan import scan as scan_store
from ntt_backup.audit.verify import Findings, Question, Way, verify_remote, verify_store
from ntt_backup.audit.verify_packs import verify_packs
from ntt_backup.blobdir.walk import Stray
from ntt_backup.catalog.history import require_no_prune
from ntt_backup.catalog.origin_passes import Registration
from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common, NamedFile, open_catalog, writing
from ntt_backup.cli.options import IDENTITY, JSON, PART, PATH, RESULT, SIZE, TIME, flag, value
from ntt_backup.config import RemoteConfig, Settings, StoreConfig
from ntt_backup.errors import SOME_FAILED, BackupError, ConfigError
from ntt_backup.formatting import amount, duration, many, moment, printable, size
from ntt_backup.model import WHOLE, Reason
from ntt_backup.source.store import Store

# A lock in compliance mode that is longer by a mistake costs its storage that long.
_LONGEST_LOCK: Final = timedelta(days=3660)


@options.command(IDENTITY, *RESULT)
@value("--sample", PART, "Check a random part, such as 1%.", "fraction")
@value("--max-duration", TIME, "Stop after this time: 90s, 2h, 1d.")
@value("--max-bytes", SIZE, "Stop before more than this is read: 10GB, 1TiB.")
@value("--older-than", TIME, "Check only blobs whose last check is older than this, such as 30d.")
@options.prefix("Check")
@options.shard("Check")
@flag("--local", "Check the local store instead of the remote.")
@flag("--download", "Fetch every blob, and hash it locally instead of on the remote.")
@flag(
    "--trust-remote",
    "Trust the hashes that the remote computes, and do not read the store to have them proved.",
)
@options.bwlimit("that --download fetches")
@options.sessions(default=2)
def verify(common: Common, /, local: bool, download: bool, **chosen: Any) -> None:
    """Check the content of the blobs on the remote.

    Only names and sums go over the link. The remote proves each blob by a sum under a new key,
    which can only be computed from the content; the same sums are computed from the store. Packs
    are hashed as a whole. A bucket cannot hash, so size and checksum of each object are compared
    with what was sent, and --download reads the objects. Blobs whose last check is oldest come
    first, and every check is recorded. A missing or wrong blob becomes pending again, and the next
    run repairs it. The exit code is 7 if a blob was wrong.
    """
    if local and download:
        raise click.UsageError("give only one of --local and --download")
    if chosen["bwlimit"] and not download:
        raise click.UsageError("--bwlimit is for --download: nothing else goes over the link")
    if chosen["trust_remote"] and (local or download):
        raise click.UsageError("--trust-remote is for hashes that the remote computes")
    options.require_whole_space(chosen["prefix"], chosen["shard"])
    chosen["shard"] = chosen["shard"] or WHOLE
    way: Way = "local" if local else "download" if download else "there"
    question = Question(way, **chosen)
    sample = f"{question.fraction:.3%}" if question.fraction else None
    asked = {
        "way": "download" if download else "",
        "prefix": question.prefix,
        "shard": str(question.shard),
        "sample": sample,
    }
    command = "verify --local" if local else "verify"
    missed: list[str] | None = None  # Not looked for, or not known.
    with results.noted(common, command, **asked) as note, results.progress_line() as line:

        def progress(found: Findings) -> None:
            note.saw(found.checked, found.bytes, len(found.wrong), found.exit_code)
            done, seconds = found.checked / max(found.total, 1), found.duration_s
            line.show(
                lambda: (
                    f"{found.checked:,} of {found.total:,} checked,"
                    f" {results.pace(found.bytes, seconds)}, {len(found.wrong):,} wrong"
                    f"{results.time_left(done, seconds)}"
                )
            )

        if local:
            store = common.load(StoreConfig)
            with open_catalog(store, "verify --local", application="verify") as conn:
                found = verify_store(conn, store, question, on_progress=progress)
            said = [*lines(found, question), *store.part.words]
            if found.wrong:
                names = " ".join(f"--blobid {one.blobid}" for one in found.wrong.first[:3])
                said.append(f"to bring them back from a target: ntt-backup-remote heal {names}")
        else:
            from ntt_backup.report.check import NOT_LOOKED, look

            remote = common.load(RemoteConfig)
            packs = remote.remote.packs
            with open_catalog(remote, "verify") as conn:
                check = verify_packs if packs else verify_remote
                found = check(conn, remote, question, on_progress=progress, on_outage=line.outage)
            said = [*lines(found, question), *remote.part.words]
            if found.requeued:
                pending = many(found.requeued, "blob is", "blobs are")
                said.append(f"{pending} pending again; to repair this: ntt-backup-remote run")
            if found.wrong.counts[Reason.REMOTE_UNREADABLE]:
                said.append(
                    "blobs that cannot be read were left as they are: look at the disk and the"
                    " kernel log of the remote"
                )
            try:
                missed = [str(one) for one in look(remote)]
            except BackupError as error:
                said.append(NOT_LOOKED.format(error))
            said += [f"MISSED: {one}" for one in missed or ()]
            if not remote.remote.runs_receiver and way == "there":
                said.append(
                    "only sizes and checksums were asked for; to prove the contents:"
                    " ntt-backup-remote verify --download"
                )
        progress(found)
        note.detail = "; ".join(filter(None, [note.detail, found.doubts]))
        code = found.exit_code or (SOME_FAILED if missed else 0)
        if missed:
            note.exit_code, note.detail = code, "; ".join([*filter(None, [note.detail]), *missed])
    results.report_on(found, said, code, target=common.target, way=way, missed=missed)


def lines(found: Findings, question: Question) -> list[str]:
    """Returns how many blobs were checked, and which are wrong."""
    where = "in the store" if question.way == "local" else "on the remote"
    said = [
        f"checked {found.checked:,} of {many(found.total, 'blob')} {where}, {size(found.bytes)} in"
        f" {duration(found.duration_s)}"
    ]
    if not found.complete:
        said.append("not all were checked: the next call begins with those checked longest ago")
    if found.left_out:
        many_are = many(found.left_out, "blob is", "blobs are")
        said.append(f"{many_are} never checked so: larger than --max-bytes, or in a pack that is")
    if found.lost_packs:
        said.append(f"LOST: {many(found.lost_packs, 'pack')}, missing or damaged as a whole")
    said += results.strangers(found.strangers)
    if found.by_remote_hash:
        said.append(
            f"{many(found.by_remote_hash, 'blob')} of them by the remote's word alone: "
            + (
                "it was asked for no proof (--trust-remote)"
                if question.trust_remote
                else "there is nothing in the store here to compare them with"
            )
        )
    if found.unchecked:
        said.append(
            f"NOT checked: {many(found.unchecked, 'blob')} that the store does not have; the remote"
            " has no BLAKE3 to hash them. `ntt-backup-remote verify --download` checks them"
        )
    if found.by_size:
        said.append(
            f"{many(found.by_size, 'blob')} of them by the size of their files alone: the target"
            " has no checksum of these that can be compared, and another file of the same size is"
            " not noticed; --download reads them"
        )
    if found.wrong:
        count = len(found.wrong)
        said.append(f"WRONG: {count:,} of them ({count / found.checked:.3%})")
        return [*said, *results.wrong_lines(found.wrong)]
    if not found.checked:
        return [*said, "there was nothing to check"] if found.complete else said
    if found.lost_packs:
        return [*said, "all their blobs are in other packs, or not copied any more"]
    if found.by_size == found.checked:
        return [*said, "none is missing, and none has another size"]
    said.append("all of them are right")
    if question.fraction is not None:
        # The rule of three: if a part p were wrong, n of n would be right with (1-p)^n < e^(-pn).
        bound = min(1.0, 3 / found.checked)
        said.append(f"with 95% confidence fewer than {bound:.3%} of all blobs are wrong")
    return said


_ANOTHER: Final = "name another directory with --out"
_ADVICE: Final = {
    Difference.LOST: "`ntt-backup-remote reconcile --apply` makes them pending, and the next run"
    " sends them",
    Difference.REMOTE_SIZE: "`ntt-backup-remote reconcile --apply` makes them pending; the next run"
    " replaces them",
    Difference.UNREADABLE: "look at their directories on the remote; nothing is known about them",
    Difference.PACK_LOST: "whether blobs are lost with it is said beside; --apply forgets the pack",
    Difference.UNMARKED: "`ntt-backup-remote reconcile --adopt` marks the right ones without"
    " sending them; the next run sends the others",
    Difference.UNPROVED: "not marked; the next run sends what the store has",
    Difference.UNRECORDED: "`ntt-backup-remote reconcile --apply` records it",
    Difference.UNKNOWN: "their rows were deleted, or they belong to another catalog; left alone",
    Difference.UNREGISTERED: "`ntt-backup-remote scan` registers them",
    Difference.SOURCELESS: "`ntt-backup-remote heal --all` brings back what is copied; find the"
    " others, or delete their rows",
    Difference.STORE_SIZE: "for copied blobs `ntt-backup-remote verify --local` tells whether the"
    " store is right",
    Difference.BAD_BLOBID: "correct or delete the rows",
    Difference.STRAY_STORE: "not blobs; never sent",
    Difference.STRAY_REMOTE: "not blobs; never touched",
}
_ADVICE_FOR_PACKS: Final = _ADVICE | {
    Difference.REMOTE_SIZE: "`ntt-backup-remote reconcile --apply` makes them pending; the next run"
    " sends them in another pack",
    Difference.UNMARKED: "`ntt-backup-remote reconcile --apply` marks them as copied, but for what"
    " `verify` has found damaged; the next run sends the rest again, in another pack",
}


@options.command(IDENTITY, *RESULT)
@value(
    "--out",
    options.GivenPath("dir", file_okay=False),
    "Write all differences into DIR, one file for each kind.",
)
@flag("--apply", "Make copied blobs pending again if the remote lacks them, or their size differs.")
@flag(
    "--adopt",
    "Mark blobs that another program has put on the remote as copied, once the remote has proved"
    " their content.",
)
@flag(
    "--trust-size",
    "With --adopt: mark blobs by their size, without a proof. The next verify begins with them.",
)
@options.sessions(default=2)
def reconcile(
    common: Common, out: Path | None, apply: bool, adopt: bool, trust_size: bool, workers: int
) -> None:
    """Compare catalog, store and remote by name and size.

    Contents are read only with --adopt; `verify` checks copied blobs. The exit code is 7 if the
    remote lacks blobs that the catalog calls copied.
    """
    if trust_size and not adopt:
        raise click.UsageError("--trust-size is for --adopt")
    settings = common.load(Settings)
    adoption = Adoption.NO
    if adopt:
        adoption = Adoption.BY_SIZE if trust_size else Adoption.BY_PROOF
    option = " --adopt" if adopt else " --apply" if apply else ""
    with ExitStack() as stack:
        note = stack.enter_context(results.noted(common, "reconcile"))
        line = stack.enter_context(results.progress_line())
        files: dict[Difference, NamedFile] = {}
        if out is not None:
            with writing(out, _ANOTHER):
                out.mkdir(exist_ok=True)
                # All kinds, so that no file of an earlier call is left beside the new ones.
                for what in Difference:
                    file = NamedFile(out / f"{what}.txt", _ANOTHER)
                    files[what] = stack.enter_context(file)

        def note_difference(what: Difference, name: str, remark: str) -> None:
            if files:
                files[what].write(f"{printable(name)}\t{printable(remark)}")

        conn = stack.enter_context(
            open_catalog(settings, f"reconcile{option}", application="reconcile")
        )
        if apply or adopt:
            require_no_prune(conn, settings.target)
        seen = compare(
            conn,
            settings,
            apply=apply,
            adoption=adoption,
            workers=workers,
            on_progress=lambda seen: line.show(lambda: _compared_so_far(seen)),
            on_difference=note_difference,
            on_outage=line.outage,
        )
        wrong = sum(seen.differences[what] for what in SERIOUS)
        note.saw(seen.rows, 0, wrong, seen.exit_code)
    said = _comparison(seen, applied=apply, adoption=adoption, packs=settings.remote.packs)
    said += [*settings.part.words, *_outside(seen.outside)]
    results.report_on(seen, said, seen.exit_code, target=settings.target)


def _outside(blobids: list[str]) -> list[str]:
    """Returns a line about blobs that the store has and other hosts are to hold, if any."""
    below = many(len(blobids), "other prefix has", "other prefixes have")
    hint = f"NOTE: {below} blobs in the store here, such as {{}}: they were left alone"
    return [hint.format(one) for one in blobids[:1]]


def _compared_so_far(seen: Comparison) -> str:
    return (
        f"{seen.part:.0%}, {many(seen.rows, 'row')}, {seen.in_store:,} in the store,"
        f" {seen.on_remote:,} on the remote{results.time_left(seen.part, seen.duration_s)}"
    )


def _comparison(seen: Comparison, *, applied: bool, adoption: Adoption, packs: bool) -> list[str]:
    """Returns what was compared and what differs, for a terminal."""
    said = [
        f"{many(seen.rows, 'row')} in the catalog, {many(seen.in_store, 'blob')} in the store,"
        f" {seen.on_remote:,} on the remote, compared in {duration(seen.duration_s)}",
        f"{many(seen.agreed, 'row agrees', 'rows agree')} with both",
    ]
    advice = _ADVICE_FOR_PACKS if packs else _ADVICE
    if adoption is not Adoption.NO:
        advice = {**advice, Difference.UNMARKED: "the last line says how many are marked now"}
    for what in Difference:
        if count := seen.differences[what]:
            said.append(f"{count:>12,} {what}: {advice[what]}")
            said += [f"{'':>14}{printable(example)}" for example in seen.examples[what]]
    said += results.strangers(seen.strangers)
    if applied:
        pending = many(seen.requeued, "blob is", "blobs are")
        said.append(f"{pending} pending again; `ntt-backup-remote run` sends what is pending")
    if seen.marked or adoption is not Adoption.NO:
        marked = f"{many(seen.marked, 'blob counts', 'blobs count')} as copied now"
        if adoption is Adoption.BY_SIZE and not packs:
            marked += " by the size alone; `ntt-backup-remote verify` proves the content"
        said.append(marked)
    return said


@options.command(JSON, options.ONLY_ERRORS)
@flag("--restart", "Start from the beginning, even if an earlier scan did not finish.")
@value(
    "--strays",
    PATH,
    "Write every stray to this file, one JSON object a line. A scan that continues an"
    " interrupted one adds to the file, and may write a stray twice.",
)
def scan(common: Common, restart: bool, strays: Path | None) -> None:
    """Register blobs of the store that the catalog lacks.

    Rows without a size get their size. Everything else (another name, another place, a symlink) is
    a stray, which is reported and never registered. The exit code is 7 if something could not be
    read.

    For a store whose files go by their paths ([catalog.from], [files.NAME]), the command registers
    the listed files. A run does that, too, and then reads them. --restart reads all rows again.
    """
    settings = common.load(StoreConfig)
    if settings.by_path:
        _register_files(settings, whole=restart)
        return
    with ExitStack() as stack:
        conn = stack.enter_context(open_catalog(settings, "scan"))
        line = stack.enter_context(results.progress_line())
        more = "more strays are not shown; --strays FILE has them all"
        shown = results.first_only(line, "stray ", more=more, silent=True)
        file: NamedFile | None = None
        if strays is not None:
            hint = "what was registered so far stays; name another file"
            file = stack.enter_context(NamedFile(strays, hint, "a"))

        def begin(resumed_from: str | None) -> None:
            # A scan that goes on where an earlier one ended adds to the file.
            if file is not None and resumed_from is None:
                file.clear()

        def note_stray(stray: Stray) -> None:
            # Written before the scan notes that it is past it.
            if file is not None:
                text = {"path": stray.path, "kind": stray.kind.value, "detail": stray.detail}
                file.write(json.dumps(text))
            shown(f"{stray.path}: {stray.kind.value} {stray.detail}")

        result = scan_store(
            conn,
            Store.of(settings.source),
            restart=restart,
            on_begin=begin,
            on_progress=lambda done: line.show(
                lambda: f"{done.registered:,} registered, {done.known:,} known, at {done.directory}"
            ),
            on_stray=note_stray,
        )
    resumed = f", continued after {result.resumed_from}" if result.resumed_from else ""
    registered = many(result.registered, "blob")
    if not result.registered or result.young < result.registered:
        registered = amount(result.registered, result.bytes)
    if result.young:
        registered += f", {result.young:,} of them without a size yet (changed within source.grace)"
    said = [
        f"registered {registered}; {result.known:,} known before"
        + (f", the size of {result.sized:,} of them noted" if result.sized else ""),
        f"looked at {many(result.directories, 'directory', 'directories')} in"
        f" {duration(result.duration_s)}{resumed}",
    ]
    for kind, count in sorted(result.strays.items()):
        said.append(f"not registered: {many(count, 'stray')}, {kind.value}")
    said += [*settings.part.words, *_outside(result.outside)]
    if result.exit_code:
        said.append("NOT known: which blobs are in what could not be read; let this user read it")
    results.report_on(result, said, result.exit_code, target=settings.target)


def _register_files(settings: StoreConfig, *, whole: bool) -> None:
    with (
        open_catalog(settings, "files by path", application="scan") as conn,
        results.progress_line() as line,
    ):
        more = "more that cannot be read is not shown"
        shown = results.first_only(line, "error ", more=more)
        done = Registration()

        def progress(found: Registration) -> None:
            nonlocal done
            done += found
            line.show(lambda: f"{done.rows:,} rows, {done.registered:,} files registered")

        result = register_files(
            conn,
            settings,
            whole=whole,
            problem=lambda path, why: shown(f"{path}: {why}"),
            on_progress=progress,
        )
    said = [
        f"registered {many(result.registered, 'file')} of {many(result.rows, 'row')} in"
        f" {duration(result.duration_s)}"
    ]
    if result.back:
        said.append(f"listed again: {many(result.back, 'file')}")
    if result.changed:
        said.append(f"changed since it was read: {many(result.changed, 'file')}")
    if result.gone:
        said.append(f"no longer listed: {many(result.gone, 'file')}; what was copied stays")
    if result.strays:
        said.append(f"not registered: {many(result.strays, 'stray')}, no file and no directory")
    if result.unreadable:
        where = many(result.unreadable, "directory", "directories")
        said.append(f"NOT known: what is in {where}; let this user read it, or mount its disk")
    results.report_on(result, said, SOME_FAILED if result.unreadable else 0, target=settings.target)


# --- protect --------------------------------------------------------------------------------------


@options.command(*RESULT)
@click.option(
    "--until", type=click.DateTime(["%Y-%m-%d"]), metavar="DAY", help="Lock until this day (UTC)."
)
@value("--for", TIME, "Lock for this time from now on, such as 90d.", "term")
def protect(common: Common, until: datetime | None, term: float | None) -> None:
    """Renew the object locks of everything in a bucket.

    A locked object cannot be removed or overwritten before its lock ends, and no lock is shortened.
    Packs, large blobs, dumps, versions of snapshots and the marker of the store are locked, each in
    its present mode, else in the default mode of the bucket, else in governance mode. `status` and
    `check` warn before the locks end. Repeat the command before that, from a timer: objects that
    were stored in the meantime only have the default lock of the bucket.
    """
    from ntt_backup.audit.object_locks import Protected
    from ntt_backup.audit.object_locks import protect as lock_all
    from ntt_backup.objects.s3 import open_bucket

    if (until is None) == (term is None):
        raise click.UsageError("give one of --until and --for")
    now = datetime.now(UTC)
    end = until.replace(tzinfo=UTC) if until is not None else now + timedelta(seconds=term or 0)
    if not timedelta(0) < end - now <= _LONGEST_LOCK:
        raise click.UsageError("a lock ends in the future, and within ten years")
    settings = common.load(RemoteConfig)
    if settings.remote.kind != "s3":
        raise ConfigError(
            f"{settings.remote.url} has no object locks", hint="they are a bucket's: s3://..."
        )
    with results.progress_line() as line:

        def progress(done: Protected) -> None:
            line.show(lambda: f"{many(done.objects, 'object')}, {done.renewed:,} locks renewed")

        done = lock_all(settings, open_bucket(settings.remote), end, progress)
    said = [
        f"locked {many(done.objects, 'object')}, {size(done.bytes)}, until {moment(done.until)}:"
        f" {done.renewed:,} renewed, in {duration(done.duration_s)}"
    ]
    if not done.default_days:
        said.append(
            "NOTE: the bucket has no default retention: what arrives is not locked before the next"
            " call"
        )
    results.report_on(done, said, 0, target=common.target)
