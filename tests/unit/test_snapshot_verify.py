"""Versions are checked and compared: every damage is found, and told of with what it harms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.errors import ConfigError, RemoteUnreachable
from ntt_backup.snapshot.format.entry import DIRECTORY, Entry, Extent
from ntt_backup.snapshot.format.manifest import ManifestReader
from ntt_backup.snapshot.format.super_blocks import read_super_block
from ntt_backup.snapshot.names import FileName
from ntt_backup.snapshot.take.last_version import Copies
from ntt_backup.snapshot.verify import VersionFindings, verify
from ntt_backup.snapshot.versions import differences, open_manifest, versions
from tests.fuzz.manifests import written
from tests.helpers.blobs import noise
from tests.unit.taker import BLOCK, KEYS, OTHERS, Taker, rewrite

MIB = 1 << 20


@pytest.fixture
def taker(tmp_path: Path) -> Taker:
    return Taker(tmp_path / "tree", tmp_path / "cache")


@pytest.fixture
def taken(taker: Taker) -> Taker:
    """A full version and two increments: of a large file, and small ones."""
    large = taker.write("large", noise(5 * MIB) + bytes(3 * MIB) + b"end")
    for number in range(20):
        taker.write(f"small/{number:02}", noise(50_000, number + 2))
    taker.take()
    rewrite(large, 40 * BLOCK + 7, b"changed")
    taker.write("small/03", noise(60_000, 99))
    taker.take()
    (taker.root / "small/04").chmod(0o600)
    (taker.root / "small/05").unlink()
    taker.write("new", b"new")
    taker.take()
    return taker


def check(taker: Taker, which: str = "s", share: float = 0.0, since: str = "") -> VersionFindings:
    return verify(taker.repository, which, share, since)


def name(taker: Taker, version: int, file: str) -> str:
    return str(FileName("s", versions(taker.repository, "s")[version].name, file))


def harmed(found: VersionFindings, taker: Taker) -> set[str]:
    """The paths that were told of, below the root."""
    below = f"{str(taker.root)[1:]}/"
    return {one.path.removeprefix(below) for one in found.wrong if one.path}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_set_in_order_is_right(taken: Taker, share: float) -> None:
    found = check(taken, share=share)
    assert (found.wrong, found.exit_code, found.versions, found.files) == ([], 0, 3, 9)
    assert share or not found.bytes
    if share == 1:  # Each super block once, and maps.
        assert 0 < found.bytes < taken.repository.size


def test_a_map_that_is_not_what_was_written_is_told(taken: Taker) -> None:
    file = name(taken, 1, "map")
    data = bytearray(taken.repository.files[file])
    data[len(data) // 2] ^= 1
    taken.repository.files[file] = bytes(data)
    found = check(taken, share=1.0)
    assert ("its content was altered", file) in {(one.detail, one.file) for one in found.wrong}


def test_an_outage_ends_the_check(taken: Taker) -> None:
    def lose(verb: str, of: str) -> None:
        if verb == "read" and of.endswith("/map"):
            raise RemoteUnreachable("the link was lost")

    taken.repository.before = lose
    with pytest.raises(RemoteUnreachable, match="the link was lost"):
        check(taken, share=1.0)


def test_versions_that_are_not_of_this_host_are_told_and_forged_ones_are_damaged(
    taker: Taker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker.keys = KEYS
    taker.write("file", b"content")
    with monkeypatch.context() as forging:
        forging.setattr(SigningKeys, "sign", lambda keys, *_: f"{keys.name}:{'0' * 64}")
        names = [f"s@{taker.take(full=True).version}"]
    names.append(f"s@{taker.take(full=True).version}")

    def found() -> VersionFindings:
        return verify(taker.repository, "s", origins=taker.origins)

    assert (found().foreign, found().damaged) == ([], [])  # By their sums.
    taker.copies = Copies(tmp_path)
    assert (found().foreign, found().damaged) == ([], names[:1])
    assert "FORGED" in found().wrong[0].detail
    taker.keys = OTHERS
    assert (found().foreign, found().damaged) == (names, [])


def test_a_check_of_all_content_says_how_far_it_is(taken: Taker) -> None:
    told: list[int] = []
    found = verify(taken.repository, "s", 1.0, on_progress=lambda one: told.append(one.bytes))
    assert told == sorted(told)
    assert len(told) > 5, len(told)
    assert told[-1] == found.bytes


def test_a_sample_is_another_part_each_time(taken: Taker) -> None:
    # A part of so few super blocks may be none of them, or all.
    assert len({check(taken, share=0.3).bytes for _ in range(20)}) > 1


def test_only_the_versions_that_are_asked_for_are_checked(taken: Taker) -> None:
    last, files = versions(taken.repository, "s")[-1][1:]
    # The versions that it needs are looked up as well, and not counted.
    assert check(taken, f"s@{last}").files == len(files)
    assert check(taken, f"s@{last}").versions == check(taken, since=last[:15]).versions == 1
    assert check(taken, since="2026-03-05").versions == 0
    assert check(taken, "").versions == check(taken, since="2026-03-04").versions == 3
    with pytest.raises(ConfigError):
        check(taken, since="yesterday")
    with pytest.raises(ConfigError):
        check(taken, "other")


@pytest.mark.parametrize(
    ("version", "file", "damage", "versions_harmed"),
    [
        (0, "pack-00001", None, {0, 1, 2}),
        (0, "pack-00001", lambda data: data[:-1], {0, 1, 2}),
        (1, "pack-00001", None, {1, 2}),
        (2, "pack-00001", None, {2}),
        (1, "map", None, {1}),
        # Content that others need is there all the same.
        (1, "manifest", lambda data: data[:-1], {1}),
        (1, "manifest", lambda data: data[:600] + bytes([data[600] ^ 1]) + data[601:], {1}),
        (1, "manifest", lambda data: b"", {1}),
        (0, "manifest", None, set()),
    ],
)
def test_what_is_missing_or_cut_is_told_with_the_versions_that_it_harms(
    taken: Taker,
    version: int,
    file: str,
    damage: Callable[[bytes], bytes] | None,
    versions_harmed: set[int],
) -> None:
    names = [str(one) for one in versions(taken.repository, "s")]
    damaged = name(taken, version, file)
    data = taken.repository.files.pop(damaged)
    if damage is not None:
        taken.repository.files[damaged] = damage(data)
    found = check(taken)
    assert set(found.damaged) == {names[one] for one in versions_harmed}
    assert found.exit_code == (7 if versions_harmed else 0)
    if file != "manifest":
        assert damaged in {one.file for one in found.wrong}


def replace_frame(taker: Taker, extent: Extent, new: Callable[[bytes, int], bytes]) -> None:
    """Puts another frame of the same size in the place of one, with another byte in the extent."""
    pack = name(taker, extent.version, f"pack-{extent.pack:05}")
    data, end = taker.repository.files[pack], extent.offset + extent.stored
    frame = new(data[extent.offset : end], extent.skip + extent.length // 2)
    assert len(frame) == extent.stored
    taker.repository.files[pack] = data[: extent.offset] + frame + data[end:]


def flipped(frame: bytes, _: int) -> bytes:
    return frame[:-40] + bytes([frame[-40] ^ 1]) + frame[-39:]


def other_content(frame: bytes, at: int) -> bytes:
    """A frame that is whole, of content that is not what was taken."""
    content = bytearray(read_super_block(frame))
    content[at] ^= 1
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(bytes(content))


@pytest.mark.parametrize("damage", [flipped, other_content])
@pytest.mark.parametrize("path", ["large", "small/07"])
def test_damaged_content_is_found_by_reading_with_every_version_that_needs_it(
    taken: Taker, path: str, damage: Callable[[bytes, int], bytes]
) -> None:
    replace_frame(taken, taken.entries()[path].extents[-1], damage)
    assert check(taken).exit_code == 0
    found = check(taken, share=1.0)
    assert found.damaged == [str(one) for one in versions(taken.repository, "s")]
    assert path in harmed(found, taken)
    alone = check(taken, found.damaged[-1], share=1.0)
    assert path in harmed(alone, taken)
    # What lies elsewhere is not accused.
    assert "new" not in harmed(found, taken) | harmed(alone, taken)


@pytest.mark.parametrize("reads", [1, 2])
def test_a_version_that_retention_removes_meanwhile_is_not_damaged(
    taken: Taker, reads: int
) -> None:
    """Before its manifest is read, or between its end and the whole of it."""
    last, files = name(taken, 2, "manifest"), taken.repository.files

    def forget(_: str, asked: str) -> None:
        nonlocal reads
        reads -= asked == last
        for one in list(files) if not reads else ():
            if one.startswith(last.removesuffix("manifest")):
                del files[one]

    taken.repository.before = forget

    found = check(taken)

    assert (found.versions, found.damaged, found.wrong, found.wrong_total) == (2, [], [], 0)


@pytest.mark.parametrize(("old", "new"), [("ab", "abcd"), ("", "ab"), ("bd", "abcde"), ("a", "b")])
def test_a_diff_goes_to_the_end_of_both_versions(old: str, new: str) -> None:
    def manifest(paths: str) -> ManifestReader:
        return ManifestReader([written([Entry(path, DIRECTORY) for path in paths])])

    for one, two in ((old, new), (new, old)):
        found = {(d.entry.path, str(d.kind)) for d in differences(manifest(one), manifest(two))}
        gone, added = set(one) - set(two), set(two) - set(one)
        assert found == {(path, "removed") for path in gone} | {(path, "added") for path in added}


def test_a_diff_tells_what_is_new_gone_and_other(taken: Taker) -> None:
    first, second, third = versions(taken.repository, "s")

    def changes(old: int, new: int) -> dict[str, str]:
        all_ = versions(taken.repository, "s")
        manifests = (open_manifest(taken.repository, all_[one]) for one in (old, new))
        below = f"{str(taken.root)[1:]}/"
        return {
            one.entry.path.removeprefix(below): str(one.kind) for one in differences(*manifests)
        }

    assert first.size > third.size > 0 < second.size
    assert changes(0, 1) == {"large": "changed", "small/03": "changed"}
    assert changes(1, 2) == {"new": "added", "small/04": "attributes", "small/05": "removed"}
    assert changes(2, 2) == {}
