"""The archive's length, said before tar has run, is what the local tar really writes."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntt_backup.blobdir.layout import Layout, relative_path
from ntt_backup.upload.strategies.tar import archive_length, tar_argv, tar_environment


def fill(root: Path, sizes: Sequence[int]) -> list[str]:
    """Files of these sizes where blobs of the same number would be; their relative paths."""
    names = []
    for number, size in enumerate(sizes):
        name = relative_path(f"{number * 7919 % 65536:04x}{number:060x}")
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
        names.append(name)
    return names


def tar(root: Path, names: Sequence[str], environ: Mapping[str, str] = os.environ) -> bytes:
    """What the local tar writes, as the strategy calls it."""
    listed = "".join(f"{name}\0" for name in names).encode()
    done = subprocess.run(
        tar_argv(root), input=listed, env=tar_environment(environ), capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


EDGES = [0, 1, 511, 512, 513, 1023, 1024, 1025, 9 * 512, 10240, 10241, 100_000, 3_000_000]


@pytest.mark.parametrize("size", EDGES)
def test_the_length_is_right_for_one_file_of_any_size(tmp_path: Path, size: int) -> None:
    assert len(tar(tmp_path, fill(tmp_path, [size]))) == archive_length([size])


@settings(max_examples=40)
@given(sizes=st.lists(st.sampled_from(EDGES[:11]) | st.integers(0, 20_000), max_size=60))
def test_the_length_is_right_for_many_files(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    root = tmp_path_factory.mktemp("store")
    assert len(tar(root, fill(root, sizes))) == archive_length(sizes)


def test_the_length_is_right_around_the_end_of_a_record(tmp_path: Path) -> None:
    # A record is twenty blocks: 17 headers and two empty blocks leave one block free.
    names = fill(tmp_path, [0] * 40)
    for count in range(15, 41):
        assert len(tar(tmp_path, names[:count])) == archive_length([0] * count)


def test_the_length_is_right_for_a_size_beyond_the_octal_field(tmp_path: Path) -> None:
    """From 8 GiB on the GNU format writes sizes in base 256. To /dev/null tar only counts."""
    sizes = [9 * 1024**3 + 5, 1]
    names = fill(tmp_path, sizes)
    to_nowhere = {"--file=-": "--file=/dev/null"}
    argv = [*(to_nowhere.get(word, word) for word in tar_argv(tmp_path)), "--totals"]
    listed = "".join(f"{name}\0" for name in names).encode()
    done = subprocess.run(
        argv, input=listed, env=tar_environment(os.environ), capture_output=True, check=True
    )
    assert f"Total bytes written: {archive_length(sizes)} " in done.stderr.decode()


@pytest.mark.parametrize(
    "hostile",
    [
        {"TAR_OPTIONS": "--blocking-factor=1 --format=posix --exclude=*"},
        {"POSIXLY_CORRECT": "1"},
        {"TAPE": "/nowhere/tape", "TAR_OPTIONS": "-z"},
        {"LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8"},
    ],
)
def test_the_environment_changes_nothing(tmp_path: Path, hostile: dict[str, str]) -> None:
    names = fill(tmp_path, [0, 1, 100_000])
    assert tar(tmp_path, names, {**os.environ, **hostile}) == tar(tmp_path, names)


def test_an_archive_holds_fixed_owners_and_modes(tmp_path: Path) -> None:
    names = fill(tmp_path, [5, 6])
    (tmp_path / names[0]).chmod(0o4755)
    (tmp_path / names[1]).chmod(0o400)
    with tarfile.open(fileobj=io.BytesIO(tar(tmp_path, names))) as members:
        for member in members:
            assert (member.uid, member.gid, stat.S_IMODE(member.mode)) == (0, 0, 0o644)


def test_hard_linked_and_sparse_files_are_archived_as_content(tmp_path: Path) -> None:
    names = fill(tmp_path, [70_000])
    twin = relative_path("f" * 64)
    (tmp_path / twin).parent.mkdir(parents=True)
    os.link(tmp_path / names[0], tmp_path / twin)
    data = tar(tmp_path, [*names, twin])
    assert len(data) == archive_length([70_000, 70_000])
    with tarfile.open(fileobj=io.BytesIO(data)) as members:
        assert [(member.isreg(), member.size) for member in members] == [(True, 70_000)] * 2


def test_a_root_with_odd_characters_is_only_a_root(
    tmp_path: Path,
) -> None:
    root = tmp_path / "--help 'x' \"y\" $(touch z)\n%s"
    root.mkdir()
    assert len(tar(root, fill(root, [1, 2, 3]))) == archive_length([1, 2, 3])


@pytest.mark.parametrize("text", ["0:2/2:4/4:", "0:2/2:", "0:3/3:6/6:", "0:4/4:8/8:", "0:3/0:"])
def test_in_the_archive_every_layout_is_that_of_targets(tmp_path: Path, text: str) -> None:
    layout, blobid = Layout(text), "0123456789abcdef" * 4
    path = tmp_path / layout.path_of(blobid)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"content")
    done = subprocess.run(
        tar_argv(tmp_path, layout),
        input=f"{layout.path_of(blobid)}\0".encode(),
        env=tar_environment(os.environ),
        capture_output=True,
        check=True,
    )
    assert len(done.stdout) == archive_length([7])
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        assert archive.getnames() == [relative_path(blobid)]
