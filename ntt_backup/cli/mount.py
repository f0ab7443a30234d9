"""The command `mount`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import click

from ntt_backup.cli.common import Common, prefix_option, result_options
from ntt_backup.cli.results import fields_of, report
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import SOME_FAILED, ConfigError
from ntt_backup.format import amount, duration, many, printable, size
from ntt_backup.mount.image import Built
from ntt_backup.mount.mount import mount_bucket, mount_packs
from ntt_backup.objects.cache import cache_of
from ntt_backup.ui.progress_line import ProgressLine, time_left

_SHOWN: Final = 20


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--packs",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Mount the packs in this directory, not those of the target.",
)
@prefix_option("Mount")
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory for the image: 150 bytes a blob, and what all blobs below 16 KiB have."
    "  [default: TMPDIR, else /var/tmp]",
)
@result_options
@click.pass_obj
def mount(
    common: Common,
    directory: Path,
    packs: Path | None,
    prefix: str,
    scratch: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Mount packs as a directory of blobs, without unpacking them.

    A blob is shown as DIR/aa/bb/BLOBID. The packs are those in a directory, or those in the
    target's bucket. Root and Linux 6.12 are needed (6.4 for a bucket). umount DIR ends it. What is
    read from DIR is not compared with its name: that is what verify does. Exit code 7 when a pack
    or a blob is damaged and was left out.
    """
    where = (scratch or Path(os.environ.get("TMPDIR") or "/var/tmp")).absolute()  # noqa: S108
    began = time.monotonic()
    work = partial(mount_packs, packs.absolute()) if packs is not None else _mount_bucket(common)
    with ProgressLine(sys.stderr, quiet=quiet) as line:
        built = work(
            directory.absolute(),
            scratch=where,
            prefix=prefix,
            on_left_out=LeftOut(line, quiet=quiet).say,
            on_progress=lambda built: line.show(lambda: _progress(built, began)),
        )
    built.duration_s = time.monotonic() - began
    said = f"mounted on {directory}; umount {directory} ends it"
    report_built(built, said, as_json=as_json)


class LeftOut:
    """Shows the first of what is damaged, even where no progress is shown."""

    def __init__(self, line: ProgressLine, *, quiet: bool) -> None:
        self._show = partial(click.echo, err=True) if quiet else line.say
        self._number = 0

    def say(self, text: str) -> None:
        self._number += 1
        if self._number <= _SHOWN:
            self._show(f"left out {printable(text)}")
        elif self._number == _SHOWN + 1:
            self._show("more is left out, and not shown")


def _progress(built: Built, began: float) -> str:
    left = time_left(built.part, time.monotonic() - began)
    return f"{many(built.packs, 'pack')} read, {built.part:.1%}{left}"


def _mount_bucket(common: Common) -> Callable[..., Built]:
    """Returns what mounts the target's bucket. Raises ConfigError."""
    from ntt_backup.objects.s3 import open_bucket

    remote = common.load(RemoteConfig).remote
    if remote.kind != "s3":
        raise ConfigError(
            f"{remote.where} is no bucket: there is nothing to mount",
            hint="its blobs are files below by-hash/; packs in a directory are mounted by --packs",
        )
    return partial(mount_bucket, lambda: open_bucket(remote), cache=cache_of(remote))


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
