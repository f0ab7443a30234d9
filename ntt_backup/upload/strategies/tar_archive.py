"""A batch becomes a tar archive, whose length is known before the local tar makes it.

With the GNU format and names under 100 characters, an archive is a 512-byte header a file, the
content padded to 512, two empty blocks, and padding to records of 10 KiB. So its length follows
from the sizes alone, provided that tar is told every option that could change it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO, Final

from ntt_backup.blobdir.layout import BY_HASH_LAYOUT, Layout

_BLOCK: Final = 512
_RECORD: Final = 20 * _BLOCK


def archive_length(sizes: Iterable[int]) -> int:
    """Returns the bytes of the archive that tar_argv writes for files of these sizes (bytes)."""
    blocks = sum(1 + -(-size // _BLOCK) for size in sizes)
    return -(-(blocks + 2) * _BLOCK // _RECORD) * _RECORD


def tar_argv(root: Path, layout: Layout = BY_HASH_LAYOUT) -> list[str]:
    """Returns the argv of the local tar: NUL-separated names, relative to root, come from stdin.

    Every option that would change the length or what arrives is named: hard links are sent as
    content, owners and modes are fixed, and no name is read as an option. In the archive the blobs
    lie as they do on every target.
    """
    return [
        "tar",
        "--create",
        "--file=-",
        "--format=gnu",
        "--blocking-factor=20",
        "--no-recursion",
        "--hard-dereference",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "--mode=0644",
        *_renaming(layout),
        f"--directory={root}",
        "--null",
        "--verbatim-files-from",
        "--files-from=-",
    ]


def _renaming(layout: Layout) -> list[str]:
    """Returns the option by which tar makes aa/bb/<blobid> of a path in a layout."""
    if layout.text == BY_HASH_LAYOUT.text:
        return []
    # The digits in groups, each of which is in one directory of both layouts.
    ends = {*accumulate(layout.widths)} if layout.file_at else set()
    cuts = sorted({2, 4, *ends})
    pattern = "^" if layout.file_at else "^.*/"
    for begin, end in pairwise([0, *cuts]):
        pattern += f"\\({'.' * (end - begin)}\\)" + ("/" if end in ends else "")
    above, below = (
        "".join(f"\\{number}" for number, end in enumerate(cuts, 1) if low < end <= low + 2)
        for low in (0, 2)
    )
    return [f"--transform=s,{pattern}\\(.*\\)$,{above}/{below}/{_all(len(cuts) + 1)},"]


def _all(groups: int) -> str:
    return "".join(f"\\{number}" for number in range(1, groups + 1))


def name_list(paths: Iterable[str]) -> BinaryIO:
    """Returns the stdin for tar_argv, an anonymous file: nothing is left to clean up."""
    names = os.fdopen(os.memfd_create("ntt-names", os.MFD_CLOEXEC), "wb")
    names.write(b"".join(path.encode() + b"\0" for path in paths))
    names.seek(0)
    return names


def tar_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns environ without TAR_OPTIONS and the like, and with messages in plain English."""
    hidden = {"TAR_OPTIONS", "POSIXLY_CORRECT", "TAPE"}
    return {**{k: v for k, v in environ.items() if k not in hidden}, "LC_ALL": "C"}
