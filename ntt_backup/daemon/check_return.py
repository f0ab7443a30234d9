"""`check` asks whether the backup can be restored, and names the commands that will not work.

A remote may take blobs for years that none of our commands can read there: sending by `tar` needs
no Python, reading does. A finding here is a warning and never an error: the blobs are plain files,
which other programs can restore, and a check that fails would stop the backup itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from ntt_backup.catalog import check_history, connection, selection
from ntt_backup.catalog.check_history import CheckRun
from ntt_backup.client.connection import Connection, SessionSpec
from ntt_backup.client.greeting import Banner
from ntt_backup.config import Settings, identity
from ntt_backup.config.host_key import HostKeys
from ntt_backup.daemon.preflight import Step
from ntt_backup.errors import CatalogError, Unsupported
from ntt_backup.format import moment
from ntt_backup.wire import read_messages

# What a receiver must allow, with the commands that need it.
_NEEDED: Final = {
    "list": "reconcile, restore and drill",
    "get": "restore, drill and verify --download",
    "verify": "verify",
}
_READERS: Final = "verify, reconcile, restore, drill and snapshot"


def remote_reads(settings: Settings) -> Step:
    """Starts a receiver as `restore` does, and says which commands can read the remote.

    Args:
        settings: of a target that is reached, and is no bucket.

    Returns:
        A step with a warning where some cannot.

    Raises:
        BackupError: It cannot be started, and not for what the remote lacks.
    """
    try:
        spec = SessionSpec.of(settings, f"check-{os.getpid()}", "read")
        receiver = Connection(spec, read_messages.TO_CLIENT)
    except Unsupported as error:
        return Step("", warning=nothing_reads(f"{error}", settings.remote.where))
    receiver.abort()
    return of_banner(receiver.banner)


def nothing_reads(why: str, where: str) -> str:
    """Returns which commands will not work where no receiver can run, for people.

    Args:
        why: What the remote lacks.
        where: The target's directory, as rsync takes it.
    """
    return (
        f"{_READERS} will not work and end with {Unsupported.exit_code}: {why}; install python3"
        " (3.8 or newer, with all of its standard library) on the remote. Without it only other"
        f" programs bring the blobs back: rsync -a {where}/by-hash/ DIRECTORY"
    )


def of_banner(banner: Banner) -> Step:
    """Returns the step for what a receiver says of itself."""
    text = f"Python {banner.python} on the remote"
    by = "" if banner.checking == "blake3" else f" by the program {banner.checking}"
    text += f", BLAKE3{by}" if banner.can_hash else ", no BLAKE3"
    if lacking := [word for word in _NEEDED if word not in banner.allowed]:
        commands = "; ".join(f"{_NEEDED[word]} need `{word}`" for word in lacking)
        return Step(
            "",
            warning=f"{text}; --allow in the line of our key in the remote's authorized_keys lacks"
            f" {', '.join(lacking)}: {commands}. Add it, or have another key at hand that may read",
        )
    if not banner.can_hash:
        return Step(
            "",
            warning=f"{text}: verify will not work and end with {Unsupported.exit_code}; install"
            " BLAKE3 there, on Debian by `apt-get install b3sum`, or fetch each blob to check it:"
            " `ntt-backup-remote verify --download`. restore and drill need no BLAKE3 there",
        )
    return Step("", f"{text}: verify, restore and drill can read there")


def last_drill(settings: Settings) -> Step:
    """Says when a drill last proved that everything comes back, and warns where the last one did
    not.
    """
    try:
        with connection.connect(settings.catalog.url, identity.application("check")) as conn:
            checks = check_history.last_checks(conn, settings.target)
            copied = selection.any_copied(conn, settings.target)
    except CatalogError as error:
        return Step("", warning=f"when the last drill was is not known: {error}")
    return of_drills([one for one in checks if one.command == "drill"], copied=copied)


def of_drills(drills: Sequence[CheckRun], *, copied: bool) -> Step:
    """Returns the step for the last drills.

    Args:
        drills: Some of the last ones, the newest first.
        copied: Whether any blob is copied to the target.
    """
    if not drills:
        none = "no drill has proved yet that everything comes back: `ntt-backup-remote drill`"
        return Step("", none if copied else "nothing is copied yet that could come back")
    last = drills[0]
    if last.exit_code == 0:
        return Step("", f"the last drill, of {moment(last.ended_at)}: PROVED")
    proved = [one for one in drills if one.exit_code == 0]
    before = f"the last one that did: {moment(proved[0].ended_at)}" if proved else "none ever did"
    detail = f" ({last.detail})" if last.detail else ""
    return Step(
        "",
        warning=f"the last drill, of {moment(last.ended_at)}, ended with {last.exit_code}{detail}:"
        f" NOT PROVED; {before}; look at what it says: `ntt-backup-remote drill`",
    )


def host_key(settings: Settings) -> Step:
    """Says which key signs dumps, versions and packs, and warns where there is none."""
    keys = HostKeys.of(settings)
    if not keys:
        return Step("", warning=keys.missing_key)
    said = f"key {keys.name} in {keys.path}; keep a copy off this host and off the target"
    return Step("", said, warning=keys.problem)
