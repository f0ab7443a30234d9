"""The command `prune` removes from a target the blobs whose files are gone."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from ntt_backup.audit.prune import Pruned, require_by_path
from ntt_backup.audit.prune import prune as prune_target
from ntt_backup.catalog.history import note_check
from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common, open_catalog
from ntt_backup.cli.options import IDENTITY, PART, RESULT, TIME, flag, value
from ntt_backup.config import Settings
from ntt_backup.daemon.event_log import EventLog
from ntt_backup.errors import BackupError
from ntt_backup.events import BlobsPruned
from ntt_backup.formatting import amount, duration, many

_note = partial(note_check, command="prune", detail="")
_SHARE = "Remove nothing if more than this part of the target would be removed."


@options.command(IDENTITY, *RESULT)
@value(
    "--gone-for",
    TIME,
    "Remove blobs whose files are gone, or were replaced, for at least this time, such as 90d.",
    required=True,
)
@value("--max-share", PART, _SHARE, default="10%")
@flag("--apply", "Remove the blobs. Without --apply they are only counted.")
def prune(common: Common, gone_for: float, max_share: float, apply: bool) -> None:
    """Remove from a target the blobs whose files are gone.

    This is for a store whose files go by their paths ([catalog.from], [files.NAME]). A blob is
    removed only if all of its files were found to be gone, or replaced, at least --gone-for ago.
    Blobs that a pinned dump lists are kept. A file that comes back is sent again.

    A pack is rewritten if less than half of it is needed; else these blobs stay in it. The key of
    the target must allow prune and replace. The exit code is 7 if blobs are left for the next call,
    or a pack is damaged.
    """
    settings = common.load(Settings)
    require_by_path(settings)
    with results.progress_line() as line, open_catalog(settings, "prune") as conn:
        done = prune_target(
            conn,
            settings,
            gone_for,
            max_share=max_share,
            apply=apply,
            warn=results.warn,
            on_progress=lambda done: line.show(
                lambda: f"{done.removed:,} of {many(done.blobs, 'blob')} removed"
            ),
        )
        if apply:
            # An attempt that was refused is no trouble of the target. Nobody else's log is made.
            with suppress(BackupError):
                blobs, size, code = done.removed, done.removed_bytes, done.exit_code
                lasted, name = done.duration_s, settings.target
                _note(conn, name, lasted=lasted, exit_code=code, blobs=blobs, bytes=size, wrong=0)
                if settings.log.jsonl.exists():
                    event = BlobsPruned(blobs=blobs, bytes=size, exit_code=code, duration_s=lasted)
                    EventLog(settings.log, str(uuid.uuid4()), name).event(event)
    said = [*_lines(done, gone_for, max_share, applied=apply)]
    results.report_on(done, said, done.exit_code, target=settings.target, applied=apply)


def _lines(done: Pruned, gone_for: float, max_share: float, *, applied: bool) -> Iterator[str]:
    """Yields what was removed, or would be, for a terminal."""
    what = amount(done.blobs, done.bytes)
    yield f"{what}, {done.share:.1%} of the target: their files are gone for {duration(gone_for)}"
    yield from (f"  {path}" for path in done.paths)
    if done.packs:
        yield f"of {many(done.packs, 'pack')} less than half is needed: rewritten or removed"
    if not applied:
        if done.share > max_share:
            yield f"that is more than --max-share {max_share:.1%}: --apply would remove nothing"
        yield "nothing was removed; --apply removes them"
    else:
        yield f"removed {amount(done.removed, done.removed_bytes)} in {duration(done.duration_s)}"
    for count, said in (
        (done.pinned, "stay: a pinned dump lists their files"),
        (done.in_packs, "stay in packs of which at least half is needed"),
        (done.elsewhere, "of the removed ones are on another target: prune that one, too"),
        (done.back, "pending again: a file of that content came back"),
        (done.left, "left to the next call: another session has held them"),
    ):
        if count:
            yield f"{many(count, 'blob')} {said}"
    yield from (f"DAMAGED, and left as it is: {key}; `verify` looks at it" for key in done.damaged)
    if done.removed:
        yield "earlier dumps still list them: `ntt-backup-remote dump` makes one for the next drill"
    if done.old_dumps:
        dumps = many(done.old_dumps, "dump is", "dumps are")
        yield f"{dumps} older than that: not all files that they list can be restored any more"
