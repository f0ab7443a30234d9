"""The commands `pack` and `unpack`: what they make, what they say, with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.helpers.blobs import Person, noise, put, put_as, text, tree
from tests.helpers.program import run
from tests.helpers.waiting import PATIENCE

CONTENTS = [b"", *(text(n, 2000) for n in range(300)), noise(30_000, 1), noise(9_000_000, 2)]


def program(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    with chdir(cwd or "."):
        return run([*map(str, words)], os.environ, PATIENCE)


def call(*words: object) -> dict[str, Any]:
    """The JSON of a command that succeeds."""
    done = program(*words)
    assert (done.returncode, done.stderr) == (0, "")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for content in CONTENTS:
        put(tmp_path / "store", content)
    return tmp_path / "store"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_store_goes_through_one_file(store: Path, tmp_path: Path, jobs: str) -> None:
    file, to = tmp_path / "a.tar", tmp_path / "to"
    packed = call("pack", file, "--from", store, "--json")
    assert packed["blobs"] == len(CONTENTS)
    assert packed["size"] == file.stat().st_size < packed["bytes"]
    assert call("pack", file, "--check", "--json")["wrong"] == {}
    listed = call("pack", file, "--list-blobs", "--json")
    assert listed["pack_id"] == packed["pack_id"]
    assert {one["blobid"]: one["size"] for one in listed["blobs"]} == {
        blake3(one).hexdigest(): len(one) for one in CONTENTS
    }
    unpacked = call("unpack", file, "--to", to, "--jobs", jobs, "--json")
    assert unpacked["unpacked"] == len(CONTENTS)
    assert tree(to) == tree(store)
    again = tmp_path / "b.tar"
    call("pack", again, "--from", to, "--json")
    assert again.read_bytes() == file.read_bytes()


def test_a_sealed_file_is_opened_by_an_identity_alone(store: Path, tmp_path: Path) -> None:
    file, to, owner = tmp_path / "a.tar.age", tmp_path / "to", Person.new()
    identity = ("--identity", owner.file(tmp_path / "key"))
    packed = call("pack", file, "--from", store, "--recipient", owner.public, "--json")
    assert packed["size"] == file.stat().st_size
    for words in (("pack", file, "--check"), ("unpack", file, "--to", to)):
        refused = program(*words)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "no identity is given that opens it" in refused.stderr
        other = program(*words, "--identity", Person.new().file(tmp_path / "other"))
        assert (other.returncode, other.stdout) == (2, "")
        assert "for other identities than those in" in other.stderr
    assert "cannot be mounted" in program("pack", file, "--image", tmp_path / "image").stderr
    listed = call("pack", file, "--list-blobs", "--json", *identity)
    assert (listed["sealed"], listed["pack_id"]) == (True, packed["pack_id"])
    assert len(listed["blobs"]) == len(CONTENTS)
    assert call("pack", file, "--check", "--json", *identity)["wrong"] == {}
    assert call("unpack", file, "--to", to, "--jobs", "2", "--json", *identity)["wrong"] == {}
    assert tree(to) == tree(store)


def test_more_recipients_than_a_pack_has_room_for_are_refused(store: Path, tmp_path: Path) -> None:
    many = [word for _ in range(200) for word in ("--recipient", Person.new().public)]
    refused = program("pack", tmp_path / "a.tar.age", "--from", store, *many)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "200 recipients are too many" in refused.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["store"]


def test_a_file_is_replaced_only_by_force(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(b"mine")
    refused = program("pack", file, "--from", store)
    assert (refused.returncode, file.read_bytes()) == (2, b"mine")
    assert "--force" in refused.stderr
    assert program("pack", file, "--from", store, "--force").returncode == 0
    assert program("pack", file, "--check").returncode == 0
    assert {one.name for one in tmp_path.iterdir()} == {"a.tar", "store"}


def test_a_pipe_is_no_pack_and_nothing_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "a.tar")
    for words, code in (
        (("pack", pipe, "--check"), 7),
        (("pack", tmp_path, "--image", tmp_path / "image"), 2),
        (("unpack", pipe, "--to", tmp_path / "to"), 7),
    ):
        done = program(*words)
        assert (done.returncode, "too short" in done.stdout + done.stderr) == (code, True)


def test_an_image_replaces_another_file_only_by_force_and_a_pack_never(
    store: Path, tmp_path: Path
) -> None:
    pack, other = tmp_path / "a.tar", tmp_path / "other"
    call("pack", pack, "--from", store, "--json")
    content = pack.read_bytes()
    other.write_bytes(b"mine")
    for image, forced in ((other, ()), (pack, ()), (pack, ("--force",))):
        refused = program("pack", pack, "--image", image, *forced)
        assert (refused.returncode, refused.stderr.count("error:")) == (2, 1)
    assert (other.read_bytes(), pack.read_bytes()) == (b"mine", content)
    call("pack", pack, "--image", other, "--force", "--json")
    assert other.read_bytes() != b"mine"
    assert {one.name for one in tmp_path.iterdir()} == {"a.tar", "other", "store"}


def test_a_list_names_what_is_packed_and_what_is_missing_is_told(
    store: Path, tmp_path: Path
) -> None:
    gone, bad = blake3(b"not there").hexdigest(), "00" * 32
    put_as(store, bad, b"other content")
    wanted = [blake3(one).hexdigest() for one in CONTENTS[:3]]
    (tmp_path / "list").write_text("\n".join([*wanted, gone, bad, wanted[0]]) + "\n")
    file = tmp_path / "a.tar"
    done = program("pack", file, "--from", store, "--list", tmp_path / "list", "--json")
    assert done.returncode == 7
    assert json.loads(done.stdout)["wrong"] == {"missing": 1, "corrupt-source": 1}
    assert program("pack", file, "--list-blobs").stdout.split() == sorted(wanted)


def test_a_prefix_chooses_what_is_packed(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    program("pack", file, "--from", store, "--prefix", "a")
    names = {path.rpartition("/")[2] for path in tree(store)}
    listed = program("pack", file, "--list-blobs").stdout.split()
    assert listed == sorted(name for name in names if name.startswith("a"))


def test_a_damaged_pack_ends_with_7(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    program("pack", file, "--from", store, "--no-compress")
    data = bytearray(file.read_bytes())
    data[4_000_000] ^= 1
    file.write_bytes(data)
    checked = program("pack", file, "--check")
    assert checked.returncode == 7
    assert "WRONG: 1 of them" in checked.stdout
    file.write_bytes(data[:-2000])
    assert program("pack", file, "--check").returncode == 7
    unpacked = program("unpack", file, "--to", tmp_path / "to")
    assert unpacked.returncode == 7
    assert "DAMAGED" in unpacked.stdout
    assert list(tree(tmp_path / "to").values()) == [CONTENTS[-2]]


@pytest.mark.parametrize(
    "words",
    [
        ["pack", "FILE"],
        ["pack", "FILE", "--check", "--list-blobs"],
        ["pack", "FILE", "--from", "DIR", "--check"],
        ["pack", "FILE", "--from", "MISSING"],
        ["pack", "MISSING/FILE", "--from", "DIR"],
        ["pack", "MISSING", "--check"],
        ["unpack", "MISSING", "--to", "DIR"],
        ["unpack", "FILE"],
    ],
    ids=" ".join,
)
def test_a_mistake_ends_with_2(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "DIR/00").mkdir(parents=True)
    done = program(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) < 5
