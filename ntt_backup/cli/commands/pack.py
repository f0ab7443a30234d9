"""The command `pack` packs blobs into one file, or looks into one."""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NoReturn, TextIO

import click

from ntt_backup.cli.common import (
    Common,
    GivenPath,
    identity_option,
    list_option,
    prefix_option,
    read_blobids,
    result_options,
    writing,
)
from ntt_backup.cli.results import FirstLines, count_lines, failure_lines, fields_of, report
from ntt_backup.config import StoreConfig
from ntt_backup.config.sealing import Keyring, require_sealing
from ntt_backup.errors import SOME_FAILED, ConfigError
from ntt_backup.format import amount, duration, many, printable, size
from ntt_backup.pack.format import MAX_ENTRIES, PackError
from ntt_backup.pack.reader import PackFile
from ntt_backup.pack.seal import SealedForOthers
from ntt_backup.report.lines import ProgressLine, pace, time_left
from ntt_backup.source.packing import Packed, list_store, pack_blobs

_ANOTHER = "name another file, or replace this one by --force"


@click.command()
@click.argument("file", type=GivenPath())
@click.option(
    "--from",
    "--source",
    "source",
    type=GivenPath(),
    metavar="DIR",
    help="Directory that holds aa/bb/<blobid>; by default source.root, where --list is given.",
)
@list_option("Pack")
@prefix_option("Pack")
@click.option("--no-compress", is_flag=True, help="Store small blobs as they are.")
@click.option("--force", is_flag=True, help="Replace FILE, or IMAGE.")
@click.option("--check", is_flag=True, help="Check FILE instead: hash every blob in it.")
@click.option("--list-blobs", is_flag=True, help="Print the blobids in FILE instead.")
@click.option(
    "--image",
    type=GivenPath(),
    metavar="IMAGE",
    help="Write a file system instead, which shows the blobs of FILE, a pack or a directory of"
    " packs; see docs/mount.md.",
)
@click.option(
    "--recipient",
    "recipients",
    multiple=True,
    metavar="AGE1...",
    help="Seal FILE for this public key of age; may be repeated.",
)
@identity_option
@result_options
@click.pass_obj
def pack(
    common: Common,
    file: Path,
    source: Path | None,
    names: TextIO | None,
    prefix: str,
    no_compress: bool,
    force: bool,
    check: bool,
    list_blobs: bool,
    image: Path | None,
    recipients: tuple[str, ...],
    identity: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Pack blobs into one file, or look into one.

    FILE is a tar archive with an index at its end (docs/pack-format.md). It appears whole or not at
    all. Every blob is compared with its name; one that is missing or wrong is left out. No catalog
    and no remote is needed. Exit code 7 when a blob was wrong.
    """
    making = source is not None or names is not None
    if making + check + list_blobs + (image is not None) != 1:
        raise click.UsageError("give one of --from or --list, --check, --list-blobs, and --image")
    if recipients and not making:
        raise click.UsageError("--recipient is for a new pack")
    if image is not None:
        _write_image(file, image, prefix, force, as_json, quiet)
    if list_blobs:
        _list_blobs(_open(file, common.keyring(identity)), as_json)
    if check:
        _check(_open(file, common.keyring(identity)), as_json, quiet)
    if names is not None and prefix:
        raise click.UsageError("give only one of --list and --prefix")
    require_sealing(recipients)
    root = source or common.load(StoreConfig).source.root
    with ProgressLine(sys.stderr, quiet=quiet) as line:
        if names is not None:
            blobids = sorted(set(read_blobids(names)))
        else:  # One more than fits says that they do not.
            blobids = list(islice(list_store(root, prefix), MAX_ENTRIES + 1))
        with writing(file, _ANOTHER):
            done = pack_blobs(
                root,
                blobids,
                file.absolute(),
                recipients,
                compress=not no_compress,
                replace=force,
                on_progress=lambda done: line.show(lambda: _progress_text(done)),
            )
    said = [
        f"packed {amount(done.blobs, done.bytes)} into {file}, {size(done.size)}, in"
        f" {duration(done.duration_s)}"
    ]
    if done.wrong:
        said.append(f"NOT packed: {many(len(done.wrong), 'blob')}")
        said += [*count_lines(done.wrong.counts), *failure_lines(done.wrong)]
    report(fields_of(done), said, done.exit_code, as_json=as_json)


def _write_image(
    packs: Path, image: Path, prefix: str, force: bool, as_json: bool, quiet: bool
) -> NoReturn:
    from ntt_backup.cli.commands.mount import report_built
    from ntt_backup.mount.image import Options
    from ntt_backup.mount.packs_or_snapshot import write_image

    began = time.monotonic()
    with writing(image, _ANOTHER), ProgressLine(sys.stderr, quiet=quiet) as line:
        left_out = FirstLines(line, quiet=quiet, begin="left out ").say
        options = Options(image.absolute().parent, prefix, left_out)
        built = write_image(packs.absolute(), image.absolute(), options, replace=force)
    built.duration_s = time.monotonic() - began
    report_built(built, f"written to {image}", as_json=as_json)


def _progress_text(done: Packed) -> str:
    part = done.part or 0
    return (
        f"{done.blobs:,} packed, {pace(done.bytes, done.duration_s)}, {part:.1%}"
        f"{time_left(part, done.duration_s)}"
    )


def _list_blobs(pack: PackFile, as_json: bool) -> NoReturn:
    with pack as found:
        lines = [one.digest.hex() for one in found.table]
        blobs = [{"blobid": one.digest.hex(), "size": one.raw} for one in found.table]
        report({**_about(found), "blobs": blobs}, lines, 0, as_json=as_json)


def _check(pack: PackFile, as_json: bool, quiet: bool) -> NoReturn:
    wrong: dict[str, str] = {}
    with pack as found, ProgressLine(sys.stderr, quiet=quiet) as line:
        checked = 0
        for number, one in enumerate(found.table, 1):
            try:
                found.check(one)
            except (PackError, OSError) as error:
                wrong[one.digest.hex()] = str(error)
            checked += one.raw
            line.show(partial("{:,} of {:,} checked".format, number, len(found.table)))
        fields = {**_about(found), "checked": len(found.table), "bytes": checked, "wrong": wrong}
        said = [f"checked {amount(len(found.table), checked)} in {pack.path}"]
    if wrong:
        said.append(f"WRONG: {len(wrong):,} of them")
        said += [f"  {printable(text)}" for text in list(wrong.values())[:20]]
        said.append("unpack takes out what is right: ntt-backup-remote unpack")
    else:
        said.append("all of them are right")
    report(fields, said, SOME_FAILED if wrong else 0, as_json=as_json)


def _open(file: Path, keyring: Keyring) -> PackFile:
    try:
        return PackFile(file, keyring.open)
    except OSError as error:
        raise ConfigError(f"cannot read {file}", detail=error.strerror or str(error)) from error
    except SealedForOthers:
        raise keyring.foreign() from None
    except PackError as error:
        raise ConfigError(
            f"{file} is no whole pack",
            detail=str(error),
            hint="what is left of one: ntt-backup-remote unpack FILE --to DIR",
            exit_code=SOME_FAILED,
        ) from error


def _about(found: PackFile) -> dict[str, object]:
    return {
        "pack_id": found.trailer.pack_id.hex(),
        "store_id": found.trailer.store_id.hex(),
        "size": found.size,
        "sealed": found.sealed,
    }
