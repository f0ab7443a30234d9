"""A places file lists the files that go by their paths, for the day when there is no catalog.

The file lies beside a dump, and the record of the dump has its size and SHA-256. It is text, one
JSON object per line, compressed by zstd: zstd and jq can read it without this program. The lines
are in the order of the blobids, so that equal files follow each other; files without a blob come
last. The format is in docs/stores.md.

Anybody may have written a places file that is read here: the length of a line is bounded, and the
file may not expand to more than some thousand times its size.
"""

from __future__ import annotations

import json
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import IO, Annotated, Final

import zstandard
from pydantic import Field, TypeAdapter, ValidationError

from ntt_backup.config import RemoteConfig
from ntt_backup.config.signing_key import Origin, SigningKeys
from ntt_backup.dump.record import Stored
from ntt_backup.dump.restore import nobody_vouches
from ntt_backup.dump.store import list_dumps, open_dumps
from ntt_backup.errors import ConfigError, DumpFailed
from ntt_backup.filestore.contract import (
    FileMissing,
    FileUnreadable,
    Range,
    ReadableStore,
    StoredFileDamaged,
)
from ntt_backup.formatting import printable
from ntt_backup.model import ListedFile
from ntt_backup.wire.framing import MAX_BLOB
from ntt_backup.wire.stored_names import PLACES, dump_begun, has_form

LATEST: Final = "latest"
PlacesFile = BufferedReader | BufferedRandom

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_LEVEL: Final = 3
_MAX_WINDOW: Final = 8 << 20
_PIECE: Final = 1 << 18
# So many bytes of a frame expand to 8 MiB at most.
_STEP: Final = 256
_FETCHED: Final = 8 << 20
_LONGEST_LINE: Final = 1 << 16
# Lines with long paths that are alike expand to two thousand times their size.
_MOST_TIMES: Final = 8000
_NS: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class _Line:
    blobid: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None
    path: str | None = None
    path_base64: str | None = None
    size: Annotated[int, Field(ge=0, le=MAX_BLOB)] | None = None
    mtime_ns: Annotated[int, Field(ge=-_NS, lt=_NS)] | None = None
    mode: Annotated[str, Field(pattern=r"^[0-7]{1,6}$")] | None = None
    origin: str = ""
    gone: bool = False


_LINE: Final = TypeAdapter(_Line)


class PlacesWriter:
    """Writes a places file.

    Args:
        write: Receives the content, in pieces.

    Attributes:
        files: The number of files so far.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._zstd = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
        self.files = 0

    def add(self, file: ListedFile) -> None:
        """Adds a file. Files come in the order of their blobids, those without one last."""
        self.files += 1
        if out := self._zstd.compress(_line(file)):
            self._write(out)

    def finish(self) -> None:
        """Ends the places file."""
        self._write(self._zstd.flush())


def _line(file: ListedFile) -> bytes:
    said: dict[str, object] = {"blobid": file.blobid}
    try:
        said["path"] = file.path.decode()
    except UnicodeDecodeError:
        said["path_base64"] = b64encode(file.path).decode()
    mode = None if file.mode is None else f"{file.mode:04o}"
    # An origin may give any size; where the file was read, the size is that of its blob.
    size = None if file.size is None or file.size > MAX_BLOB else file.size
    said |= {"size": size, "mtime_ns": file.mtime_ns, "mode": mode, "origin": file.origin}
    if file.gone:
        said["gone"] = True
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def read_places(file: PlacesFile, name: str) -> Iterator[ListedFile]:
    """Yields the files that a places file lists, which may also be text that is not compressed.

    Args:
        file: The places file, opened.
        name: Its name, for messages.

    Raises:
        DumpFailed: It is no places file, or damaged.
    """
    number, before = 0, ""
    try:
        for line in _lines(file):
            number += 1
            listed = _parse(line)
            # A file without a blob comes behind all that have one.
            if (order := listed.blobid or "~") < before:
                raise ValueError("its blobid is before that of the line above")
            before = order
            yield listed
    except (ValueError, zstandard.ZstdError) as error:
        why = str(error).splitlines()[0]
        raise DumpFailed(
            f"{printable(name)} is damaged, or no places file",
            detail=printable(f"near line {number}: {why[:200]}"),
            hint="use that of an older dump, which `ntt-backup-remote dumps` lists; lines that were"
            " edited must be in the order of LC_ALL=C sort",
        ) from error


def _lines(file: PlacesFile) -> Iterator[bytes]:
    packed = file.peek(len(_MAGIC))[: len(_MAGIC)] == _MAGIC
    rest = b""
    for piece in _expanded(file) if packed else iter(lambda: file.read(_PIECE), b""):
        *whole, rest = (rest + piece).split(b"\n")
        if max(map(len, (*whole, rest))) > _LONGEST_LINE:
            raise ValueError("a line is too long")
        yield from whole
    if rest:
        raise ValueError("its last line is not complete")


def _expanded(file: PlacesFile) -> Iterator[bytes]:
    """Yields what zstd frames expand to. Raises ValueError, ZstdError."""
    zstd = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    frame, taken, total, rest = zstd.decompressobj(), 0, 0, b""
    begun = False
    while data := rest or file.read(_STEP):
        begun, taken = True, taken + len(data)
        piece = frame.decompress(data)
        total += len(piece)
        if total > _MOST_TIMES * taken + _PIECE:
            raise ValueError(f"it expands to more than {_MOST_TIMES} times its size")
        yield piece
        rest = b""
        if frame.eof:
            begun, rest, frame = False, frame.unused_data, zstd.decompressobj()
            taken -= len(rest)
    if begun:
        raise ValueError("it is not complete")


def _parse(line: bytes) -> ListedFile:
    """Returns the file that a line lists. Raises ValueError."""
    try:
        said = _LINE.validate_json(line, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(" ".join(map(str, (*found["loc"], found["msg"])))) from error
    if (said.path is None) == (said.path_base64 is None):
        raise ValueError("it needs either path or path_base64")
    path = b64decode(said.path_base64 or "", validate=True)
    if said.path is not None:
        path = said.path.encode()
    mode = None if said.mode is None else int(said.mode, 8)
    return ListedFile(said.blobid, path, said.size, said.mtime_ns, mode, said.origin, said.gone)


def open_places(
    settings: RemoteConfig,
    which: str,
    directory: str,
    warn: Callable[[str], None],
    *,
    trust_target: bool,
) -> PlacesFile:
    """Returns a places file, opened: one of the target is fetched, and proved by its record.

    Args:
        settings: The settings of the target.
        which: "latest" for the newest good one of this host, the name of a dump, or a local file.
        directory: The directory for a temporary file.
        warn: Receives the name of each places file that cannot be used, and the reason.
        trust_target: Whether a file may be taken if nothing proves who made it.

    Raises:
        ConfigError: The local file cannot be read.
        DumpFailed: There is no good places file.
        BackupError: The target is unreachable, or refuses.
    """
    if which != LATEST and not has_form(dump_begun, which):
        try:
            return Path(which).open("rb")
        except OSError as error:
            raise ConfigError(
                f"cannot read {which}",
                detail=error.strerror or str(error),
                hint="--places takes latest, the name of a dump, or a file",
            ) from error
    keys = SigningKeys.of(settings)
    with closing(open_dumps(settings)) as store:
        dumps = [
            one
            for one in list_dumps(store)
            if one.record is not None
            and one.record.target == settings.target
            and one.record.places_bytes
            and which in (LATEST, one.name)
        ]
        ours = [one for one in dumps if one.origin(keys) is Origin.OURS]
        # A forged one is taken only where it was asked for by its name.
        others = [
            one
            for one in dumps
            if one not in ours and (which != LATEST or one.origin(keys) is not Origin.FORGED)
        ]
        for one in reversed([*(others if trust_target else ()), *ours]):
            file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - it is returned
            if not (why := _fetch(store, one, file)):
                file.seek(0)
                return file
            file.close()
            warn(f"the places file of {one.name} is damaged: {why}")
    if others and not ours and not trust_target:
        raise nobody_vouches(settings.target, keys, others, which, trust_target=False)
    raise DumpFailed(
        "there is no good places file on the remote",
        detail=f"of target {settings.target}, in {settings.remote.path}/pgdump",
        hint="dumps of a store whose files go by their paths have one beside them:"
        " `ntt-backup-remote dumps` lists the dumps",
    )


def _fetch(store: ReadableStore, dump: Stored, file: IO[bytes]) -> str:
    """Fetches a places file; returns in words what is wrong with it, "" for nothing."""
    assert dump.record is not None
    name, size, digest = dump.name + PLACES, dump.record.places_bytes, sha256()
    ranges = (Range(name, at, min(_FETCHED, size - at)) for at in range(0, size, _FETCHED))
    try:
        for data in store.read(ranges):
            digest.update(data)
            file.write(data)
            if not data:
                break
    except FileMissing:
        return "it is missing"
    except (FileUnreadable, StoredFileDamaged) as error:
        return error.detail or str(error)
    same = digest.hexdigest() == dump.record.places_sha256
    return "" if same else "its SHA-256 differs from its record"
