"""The command `mount` shows packs as a directory of blobs, or a snapshot as a tree."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import click

from ntt_backup.cli.common import Common, GivenPath, prefix_option, result_options
from ntt_backup.cli.completion import set_names
from ntt_backup.cli.results import FirstLines, fields_of, report, warn
from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import Origin
from ntt_backup.errors import SOME_FAILED, ConfigError
from ntt_backup.format import amount, duration, many, size
from ntt_backup.mount.image import Built, Options
from ntt_backup.mount.packs_or_snapshot import mount_bucket, mount_packs
from ntt_backup.objects.cache import cache_of
from ntt_backup.report.lines import ProgressLine, time_left


@click.command()
@click.argument("directory", type=GivenPath(), metavar="DIR")
@click.option(
    "--packs",
    type=GivenPath(),
    metavar="DIR",
    help="Mount the packs in this directory, not those of the target.",
)
@prefix_option("Mount")
@click.option(
    "--snapshot",
    "version",
    metavar="SET[@VERSION]",
    shell_complete=set_names,
    help="Mount the tree of a snapshot: the newest version of a set, or the one that is named.",
)
@click.option(
    "--scratch",
    type=GivenPath(),
    metavar="DIR",
    help="Directory for the image: 150 bytes a blob, and what all blobs below 16 KiB have; of a"
    " snapshot some 200 bytes a file.  [default: TMPDIR, else /var/tmp]",
)
@result_options
@click.pass_obj
def mount(
    common: Common,
    directory: Path,
    packs: Path | None,
    prefix: str,
    version: str | None,
    scratch: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Mount packs as a directory of blobs, or a snapshot as a tree of files.

    A blob is shown as DIR/aa/bb/BLOBID. The packs are those in a directory, or those in the
    target's bucket. Root and Linux 6.12 are needed (6.4 for a bucket). umount DIR ends it. What is
    read from DIR is not compared with its name: that is what verify does. Exit code 7 when a pack
    or a blob is damaged and was left out.

    Of a snapshot a file is shown as DIR/PATH, without unpacking anything. FUSE is needed, and root
    is not; fusermount3 -u DIR ends it, too.
    """
    if version is not None and (packs is not None or prefix):
        raise click.UsageError("--snapshot goes with neither --packs nor --prefix")
    where = (scratch or Path(os.environ.get("TMPDIR") or "/var/tmp")).absolute()  # noqa: S108
    began = time.monotonic()
    if version is not None:
        _mount_version(common, version, directory.absolute(), where, as_json=as_json)
    work = partial(mount_packs, packs.absolute()) if packs is not None else _mount_bucket(common)
    with ProgressLine(sys.stderr, quiet=quiet) as line:
        options = Options(
            where,
            prefix,
            on_left_out=FirstLines(line, quiet=quiet, begin="left out ").say,
            on_progress=lambda built: line.show(lambda: _progress(built, began)),
        )
        built = work(directory.absolute(), options)
    built.duration_s = time.monotonic() - began
    said = f"mounted on {directory}; umount {directory} ends it"
    report_built(built, said, as_json=as_json)


def _progress(built: Built, began: float) -> str:
    left = time_left(built.part, time.monotonic() - began)
    return f"{many(built.packs, 'pack')} read, {built.part:.1%}{left}"


def _mount_bucket(common: Common) -> Callable[..., Built]:
    """Returns what mounts the target's bucket. Raises ConfigError."""
    from ntt_backup.config.sealing import SealPolicy
    from ntt_backup.objects.s3 import open_bucket

    settings = common.load(RemoteConfig)
    remote = settings.remote
    if remote.kind != "s3":
        raise ConfigError(
            f"{remote.where} is no bucket: there is nothing to mount",
            hint="its blobs are files below by-hash/; packs in a directory are mounted by --packs",
        )
    policy = SealPolicy.of(settings)
    return partial(mount_bucket, lambda: open_bucket(remote), cache=cache_of(remote), policy=policy)


def _mount_version(
    common: Common, wanted: str, directory: Path, scratch: Path, *, as_json: bool
) -> NoReturn:
    from ntt_backup.mount.packs_or_snapshot import mount_version
    from ntt_backup.snapshot.origins import Origins
    from ntt_backup.snapshot.repository.open import open_repository

    settings = common.load(RemoteConfig)
    began = time.monotonic()
    origins = Origins.of(settings)
    made = mount_version(
        lambda: open_repository(settings), wanted, directory, origins, scratch=scratch, tell=warn
    )
    took = time.monotonic() - began
    said = f"{made.set}@{made.version}, {many(made.files, 'file')}, {size(made.bytes)}, in"
    end = "umount" if os.geteuid() == 0 else "fusermount3 -u"
    lines = [f"{said} {duration(took)}: mounted on {directory}; {end} {directory} ends it"]
    if made.origin != Origin.OURS:
        lines.append(f"this version is {Origin(made.origin).text}: {Origin(made.origin).why}")
    report({**fields_of(made), "duration_s": round(took, 3)}, lines, 0, as_json=as_json)


def report_built(built: Built, done: str, *, as_json: bool) -> NoReturn:
    """Prints what an image shows, and ends the process. done: what was done with it."""
    lines = [
        f"{amount(built.blobs, built.bytes)}, of {many(built.packs, 'pack')}, in"
        f" {duration(built.duration_s)}: {done}",
        f"the image has {size(built.image_bytes)}, with the content of"
        f" {many(built.copied, 'blob')}; the others lie in their packs",
    ]
    if built.left_out:
        damaged = many(built.left_out, "damaged pack or blob", "damaged packs or blobs")
        lines.append(f"LEFT OUT: {damaged}")
    code = SOME_FAILED if built.left_out else 0
    report(fields_of(built), lines, code, as_json=as_json)
