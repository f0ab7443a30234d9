"""`check` looks at the work beside the workers, too: the dump, and the snapshots.

Each returns what it found, and a warning. reached: the remote lets us in, so it can be asked.
"""

from __future__ import annotations

import os
from contextlib import closing

from ntt_backup.config import Settings
from ntt_backup.dump.rehearsal import rehearse
from ntt_backup.errors import SOME_FAILED, CatalogError, DumpImpossible, SourceError
from ntt_backup.format import many


def dump(settings: Settings, reached: bool) -> tuple[str, str]:
    """Says whether a dump can be made. Raises what `rehearse` raises."""
    if settings.run.skip_pgdump:
        return "the catalog is not dumped (run.skip_pgdump)", ""
    try:
        return rehearse(settings, remote_too=reached), ""
    except CatalogError as error:
        return "", f"whether the catalog can be dumped is not known: {error}"
    except DumpImpossible as error:
        return "", f"the catalog will not be dumped: {error}; {error.hint}"


def snapshots(settings: Settings, reached: bool) -> tuple[str, str]:
    """Says whether the sets can be taken: this user can read what they name, and the target lets us
    see and keep versions. Raises SourceError, and what a repository raises.
    """
    from ntt_backup.objects.s3 import open_bucket
    from ntt_backup.snapshot.open import open_repository
    from ntt_backup.snapshot.retention import life
    from ntt_backup.snapshot.versions import versions

    for name, wanted in settings.snapshots.items():
        for path in wanted.paths:
            if not os.access(path, os.R_OK):
                raise SourceError(
                    f"{path} of the snapshot set {name} is missing, or may not be read",
                    hint="mount its disk, allow this user to read it, or correct its paths",
                    exit_code=SOME_FAILED,
                )
    said = many(len(settings.snapshots), "set")
    if not reached:
        return f"{said} can be read here", ""
    with closing(open_repository(settings)) as repository:
        whole = sum(one.whole for name in settings.snapshots for one in versions(repository, name))
    by_hand = sorted(settings.snapshots.keys() - settings.scheduled.keys())
    hand = f"; a run takes none of {', '.join(by_hand)}: `every` is not set" if by_hand else ""
    text = f"{said}, {many(whole, 'version')} on the target{hand}"
    if settings.remote.kind == "s3" and (lock := open_bucket(settings.remote).facts().lock_days):
        lives = {name: life(wanted).days for name, wanted in settings.snapshots.items()}
        if short := [f"{name} ({days})" for name, days in lives.items() if days > lock]:
            return "", (
                f"{text}; the bucket's object lock ends after {many(lock, 'day')}, and versions are"
                f" needed for longer (days): {', '.join(short)}; make it longer, or full_every and"
                " keep_* shorter"
            )
    return text, ""
