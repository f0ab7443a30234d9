"""The commands `pack`, `unpack` and `mount` work on pack files; `mount` shows snapshots, too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import click

from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common, read_blobids, refuse_paths, writing
from ntt_backup.cli.options import DIR, IDENTITY, PATH, RESULT, flag, repeated, unless, value
from ntt_backup.config import CatalogConfig, RemoteConfig, StoreConfig
from ntt_backup.config.sealing import Keyring, SealPolicy, require_sealing
from ntt_backup.config.signing_key import Origin
from ntt_backup.errors import SOME_FAILED, ConfigError
from ntt_backup.formatting import amount, duration, many, printable, size
from ntt_backup.pack.age_encryption import SealedForOthers
from ntt_backup.pack.format import MAX_ENTRIES, PackError
from ntt_backup.pack.reader import PackFile
from ntt_backup.source.pack_file import Packed, list_store, pack_blobs
from ntt_backup.source.store import Store

if TYPE_CHECKING:
    # What mounts takes longer to load than a pack to look into.
    from ntt_backup.mount.image import Built, Options

_ANOTHER = "name another file, or replace this one by --force"


@options.command(IDENTITY, *RESULT)
@click.argument("file", type=PATH)
@click.option(
    "--from",
    "--source",
    "source",
    type=DIR,
    help="Directory that contains aa/bb/<blobid>; with --list the default is source.root.",
)
@options.blob_list("Pack")
@options.prefix("Pack")
@unless("--no-compress", "Do not compress small blobs.", "compress")
@flag("--force", "Replace an existing FILE or IMAGE.")
@flag("--check", "Check FILE instead: hash every blob in it.")
@flag("--list-blobs", "Print the blobids in FILE instead.")
@value(
    "--image",
    PATH,
    "Instead, write IMAGE, a file system that shows the blobs of FILE. FILE may be a directory of"
    " packs; see docs/mount.md.",
    metavar="IMAGE",
)
@repeated("--recipient", "AGE1...", "Seal FILE for this age public key", "recipients")
def pack(
    common: Common,
    file: Path,
    source: Path | None,
    names: TextIO | None,
    prefix: str,
    compress: bool,
    force: bool,
    check: bool,
    list_blobs: bool,
    image: Path | None,
    recipients: tuple[str, ...],
) -> None:
    """Pack blobs into one file, or examine such a file.

    FILE is a tar archive with an index at its end (docs/pack-format.md). FILE appears complete or
    not at all. Every blob is compared with its name; missing and wrong blobs are left out. Neither
    a catalog nor a remote is needed. The exit code is 7 if a blob was wrong.
    """
    making = source is not None or names is not None
    if making + check + list_blobs + (image is not None) != 1:
        raise click.UsageError("give one of --from or --list, --check, --list-blobs, and --image")
    if recipients and not making:
        raise click.UsageError("--recipient is for a new pack")
    if image is not None:
        from ntt_backup.mount.packs_or_snapshot import write_image

        def write(place: Path, ways: Options) -> Built:
            with writing(place, _ANOTHER):
                return write_image(file.absolute(), place, ways, replace=force)

        _build_image(write, image, image.absolute().parent, prefix, f"written to {image}")
    if list_blobs:
        _list_blobs(_open(file, common.keyring()))
    if check:
        _check(_open(file, common.keyring()))
    if names is not None and prefix:
        raise click.UsageError("give only one of --list and --prefix")
    require_sealing(recipients)
    if source is None:
        settings = common.load(StoreConfig)
        refuse_paths(settings, "a target with remote.layout = packs takes its files")
        store = Store.of(settings.source)
    else:
        store = _store_at(common, source)
    with results.progress_line() as line:
        if names is not None:
            blobids = sorted(set(read_blobids(names)))
        else:  # One more than fits says that they do not.
            blobids = list(islice(list_store(store, prefix), MAX_ENTRIES + 1))
        with writing(file, _ANOTHER):
            done = pack_blobs(
                store,
                blobids,
                file.absolute(),
                recipients,
                compress=compress,
                replace=force,
                on_progress=lambda done: line.show(lambda: _packed_so_far(done)),
            )
    said = [
        f"packed {amount(done.blobs, done.bytes)} into {file}, {size(done.size)}, in"
        f" {duration(done.duration_s)}"
    ]
    if done.wrong:
        said += [f"NOT packed: {many(len(done.wrong), 'blob')}", *results.wrong_lines(done.wrong)]
    results.report_on(done, said, done.exit_code)


def _store_at(common: Common, root: Path) -> Store:
    """Returns the store in a directory; that of the settings, if they are at hand and name it."""
    with suppress(ConfigError):
        known = common.load(CatalogConfig).source
        if known is not None and known.root == root.absolute():
            return Store.of(known)
    return Store(root)


def _packed_so_far(done: Packed) -> str:
    return f"{done.blobs:,} packed, {results.so_far(done.bytes, done.duration_s, done.part)}"


def _list_blobs(pack: PackFile) -> NoReturn:
    with pack as found:
        blobs = [{"blobid": one.digest.hex(), "size": one.raw} for one in found.table]
        lines = [one.digest.hex() for one in found.table]
        results.report({**_about(found), "blobs": blobs}, lines, 0)


def _check(pack: PackFile) -> NoReturn:
    wrong: dict[str, str] = {}
    with pack as found, results.progress_line() as line:
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
        said.append("to save the right ones: ntt-backup-remote unpack FILE --to DIR")
    else:
        said.append("all of them are right")
    results.report(fields, said, SOME_FAILED if wrong else 0)


def _open(file: Path, keyring: Keyring) -> PackFile:
    try:
        return PackFile(file, keyring.unseal)
    except OSError as error:
        raise ConfigError(f"cannot read {file}", detail=error.strerror or str(error)) from error
    except SealedForOthers:
        raise keyring.foreign() from None
    except PackError as error:
        raise ConfigError(
            f"{file} is not a complete pack",
            detail=str(error),
            hint="to save what is left: ntt-backup-remote unpack FILE --to DIR",
            exit_code=SOME_FAILED,
        ) from error


def _about(found: PackFile) -> dict[str, object]:
    return {
        "pack_id": found.trailer.pack_id.hex(),
        "store_id": found.trailer.store_id.hex(),
        "size": found.size,
        "sealed": found.sealed,
    }


@options.command(IDENTITY, *RESULT)
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@options.destination("Directory for the blobs.")
@options.jobs()
@unless("--no-verify", "Trust the packs: hash no blob.", "verify")
def unpack(
    common: Common, files: tuple[Path, ...], destination: Path, jobs: int, verify: bool
) -> None:
    """Unpack pack files into a directory.

    Blobs are unpacked into DIR/aa/bb/, and each blob is hashed before its file gets its name.
    Correct files in DIR are kept. From a damaged pack, every correct blob that can be found is
    unpacked. The exit code is 7 if a pack was damaged, or a blob was wrong.
    """
    from ntt_backup.restore.unpack import unpack as unpack_files

    with results.progress_line() as line:
        done = unpack_files(
            files,
            destination.absolute(),
            jobs=jobs,
            verify=verify,
            keyring=common.keyring(),
            on_progress=lambda done: line.show(
                lambda: (
                    f"{done.unpacked:,} unpacked, {done.right:,} already there,"
                    f" {results.so_far(done.bytes, done.duration_s, done.part)}"
                )
            ),
        )
    said = [
        f"unpacked {amount(done.unpacked, done.bytes)} in {duration(done.duration_s)}, into"
        f" {destination}; {done.right:,} were already there and right"
    ]
    for text in done.damaged:
        said.append(f"DAMAGED: {printable(text)}")
        said.append("  only blobs of 16 KiB and more can be found without its table")
    if done.wrong:
        said.append(f"NOT unpacked: {len(done.wrong):,} that are damaged in their pack")
        said += results.wrong_lines(done.wrong)
    results.report_on(done, said, done.exit_code)


@options.command(*RESULT)
@click.argument("directory", type=PATH, metavar="DIR")
@value("--packs", DIR, "Mount the packs in this directory, not those of the target.")
@options.prefix("Mount")
@value(
    "--snapshot",
    "SET[@VERSION]",
    "Mount the tree of a snapshot: the newest version of a set, or the named version.",
    "version",
    shell_complete=options.set_names,
)
@value(
    "--scratch",
    DIR,
    "Directory for the image, which takes 150 bytes per blob and the content of all blobs"
    " below 16 KiB; for a snapshot, about 200 bytes per file.  [default: TMPDIR, else"
    " /var/tmp]",
)
def mount(
    common: Common,
    directory: Path,
    packs: Path | None,
    prefix: str,
    version: str | None,
    scratch: Path | None,
) -> None:
    """Mount packs as a directory of blobs, or a snapshot as a tree of files.

    Each blob appears as DIR/aa/bb/BLOBID. The packs are those of the target, or those in a
    directory (--packs). The command needs root and Linux 6.12 (6.4 for a target). `umount DIR` ends
    the mount. What is read from DIR is not compared with its name; `verify` does that. The exit
    code is 7 if a pack or a blob is damaged and was left out.

    A file of a snapshot appears as DIR/PATH; nothing is unpacked. This needs FUSE, but not root;
    `fusermount3 -u DIR` also ends the mount.
    """
    from ntt_backup.mount.packs_or_snapshot import mount_packs

    if version is not None and (packs is not None or prefix):
        raise click.UsageError("--snapshot goes with neither --packs nor --prefix")
    where = (scratch or Path(os.environ.get("TMPDIR") or "/var/tmp")).absolute()  # noqa: S108
    if version is not None:
        _mount_version(common, version, directory.absolute(), where)
    work = partial(mount_packs, packs.absolute()) if packs is not None else _mount_target(common)
    done = f"mounted on {directory}; umount {directory} ends it"
    _build_image(work, directory, where, prefix, done)


def _mount_target(common: Common) -> Callable[..., Built]:
    """Returns what mounts the target's packs. Raises ConfigError."""
    from ntt_backup.catalog.identities import identified_if_known
    from ntt_backup.filestore.local_cache import cache_of
    from ntt_backup.filestore.open import open_packs
    from ntt_backup.mount.packs_or_snapshot import mount_target

    settings = identified_if_known(common.load(RemoteConfig), "mount")
    remote = settings.remote
    if not remote.packs:
        raise ConfigError(
            f"{remote.where} has no packs: there is nothing to mount",
            hint="its blobs are files below by-hash/; packs in a directory are mounted by --packs",
        )
    policy = SealPolicy.of(settings)
    return partial(
        mount_target, partial(open_packs, settings), cache=cache_of(remote), policy=policy
    )


def _mount_version(common: Common, wanted: str, directory: Path, scratch: Path) -> NoReturn:
    from ntt_backup.catalog.identities import identified_if_known
    from ntt_backup.filestore.open import open_store
    from ntt_backup.mount.packs_or_snapshot import mount_version
    from ntt_backup.snapshot.names import SNAPSHOTS
    from ntt_backup.snapshot.origins import Origins

    settings = identified_if_known(common.load(RemoteConfig), "mount")
    began = time.monotonic()
    origins = Origins.of(settings)
    made = mount_version(
        lambda: open_store(settings, SNAPSHOTS),
        wanted,
        directory,
        origins,
        scratch=scratch,
        tell=results.warn,
    )
    took = time.monotonic() - began
    said = f"{made.set}@{made.version}, {many(made.files, 'file')}, {size(made.bytes)}, in"
    end = "umount" if os.geteuid() == 0 else "fusermount3 -u"
    lines = [f"{said} {duration(took)}: mounted on {directory}; {end} {directory} ends it"]
    if made.origin != Origin.OURS:
        lines.append(f"this version is {Origin(made.origin).text}: {Origin(made.origin).why}")
    results.report_on(made, lines, 0, duration_s=round(took, 3))


def _build_image(
    work: Callable[[Path, Options], Built], place: Path, scratch: Path, prefix: str, done: str
) -> NoReturn:
    """Builds an image at a place, prints what the image shows, and ends the process.

    done: The words for what was done with the image.
    """
    from ntt_backup.mount.image import Options

    began = time.monotonic()

    def so_far(built: Built) -> str:
        left = results.time_left(built.part, time.monotonic() - began)
        return f"{many(built.packs, 'pack')} read, {built.part:.1%}{left}"

    with results.progress_line() as line:
        ways = Options(
            scratch,
            prefix,
            on_left_out=results.first_only(line, "left out "),
            on_progress=lambda built: line.show(lambda: so_far(built)),
        )
        built = work(place.absolute(), ways)
    built.duration_s = time.monotonic() - began
    lines = [
        f"{amount(built.blobs, built.bytes)}, of {many(built.packs, 'pack')}, in"
        f" {duration(built.duration_s)}: {done}",
        f"the image has {size(built.image_bytes)}, with the content of"
        f" {many(built.copied, 'blob')}; the others lie in their packs",
    ]
    if built.left_out:
        damaged = many(built.left_out, "damaged pack or blob", "damaged packs or blobs")
        lines.append(f"LEFT OUT: {damaged}")
    results.report_on(built, lines, SOME_FAILED if built.left_out else 0)
