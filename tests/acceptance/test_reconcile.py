"""`reconcile`: catalog, store and remote side by side, every kind of difference told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.audit.reconcile import Difference
from tests.environment import Site
from tests.sshd import Sshd

ABSENT = "ab" * 32


def compared(site: Site, *options: str, code: int = 0) -> dict[str, Any]:
    done = site.call("reconcile", "--json", *options)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def differing(found: dict[str, Any]) -> dict[str, int]:
    return {what: count for what, count in found["differences"].items() if count}


def backed_up(site: Site, count: int = 300) -> list[str]:
    return site.fill_both(count, size=lambda chance: chance.randrange(1, 5000))


def make_all_kinds(site: Site, blobids: list[str], out: Path) -> dict[Difference, set[str]]:
    """One or two of everything; what should be found, by kind."""
    lost, cut, unmarked, unknown, sourceless, resized = blobids[:6]
    site.remote_path(lost).unlink()
    content = site.remote_path(cut).read_bytes()
    site.remote_path(cut).write_bytes(content + b"x")
    site.query("update blobs set remote_copied = false where blobid = %s", unmarked)
    site.query("delete from blobs where blobid = %s", unknown)
    site.path(sourceless).unlink()
    site.query("update blobs set size = size + 1 where blobid = %s", resized)
    unregistered = site.put_in_store(b"never registered")
    site.register([ABSENT, "no blobid", "zz" * 32])
    strays = ["00/README", blobids[0][:2] + "/tmp"]
    for root in (site.store, site.remote.local / "by-hash"):
        (root / "00").mkdir(exist_ok=True)
        for name in strays:
            (root / name).write_text("x")
    return {
        Difference.LOST: {lost},
        Difference.REMOTE_SIZE: {cut},
        Difference.UNMARKED: {unmarked},
        Difference.UNKNOWN: {unknown},
        Difference.UNREGISTERED: {unregistered, unknown},
        Difference.SOURCELESS: {sourceless, ABSENT},
        Difference.STORE_SIZE: {resized},
        Difference.BAD_BLOBID: {"no blobid", "zz" * 32},
        Difference.STRAY_STORE: set(strays),
        Difference.STRAY_REMOTE: set(strays),
    }


def test_no_difference_is_reported_where_all_agree(site: Site) -> None:
    blobids = backed_up(site)
    found = compared(site)
    assert differing(found) == {}
    assert found["rows"] == found["agreed"] == found["in_store"] == len(blobids)
    assert found["on_remote"] == len(blobids)
    assert "300 rows agree with both" in site.call("reconcile").stdout


def test_every_kind_of_difference_is_reported_and_written(site: Site, tmp_path: Path) -> None:
    blobids = backed_up(site)
    out = tmp_path / "out"
    expected = make_all_kinds(site, blobids, out)

    found = compared(site, "--out", str(out), code=7)

    assert differing(found) == {str(what): len(names) for what, names in expected.items()}
    for what in Difference:
        lines = (out / f"{what}.txt").read_text().splitlines()
        assert {line.split("\t")[0] for line in lines} == expected.get(what, set()), what
    assert found["requeued"] == 0
    assert site.copied() == set(blobids) - {blobids[2], blobids[3]}
    shown = site.call("reconcile")
    assert shown.returncode == 7
    for what, names in expected.items():
        assert str(what) in shown.stdout
        assert any(name in shown.stdout for name in names)


def test_apply_only_makes_lost_blobs_pending(site: Site, tmp_path: Path) -> None:
    blobids = backed_up(site)
    make_all_kinds(site, blobids, tmp_path)
    before = site.copied()

    found = compared(site, "--apply", code=7)

    assert found["requeued"] == 2
    assert site.copied() == before - set(blobids[:2])
    reasons = dict(site.query("select blobid, reason from ntt_backup.failures"))
    assert reasons == {blobids[0]: "remote-missing", blobids[1]: "remote-corrupt"}
    site.query("delete from blobs where blobid = any(%s)", [ABSENT, "no blobid", "zz" * 32])
    assert site.run("run").returncode == 0
    again = differing(compared(site))
    assert not {Difference.LOST, Difference.REMOTE_SIZE, Difference.UNMARKED} & set(again)
    for blobid in blobids[:2]:
        assert site.remote_path(blobid).read_bytes() == site.path(blobid).read_bytes()


def test_a_disk_that_is_not_mounted_marks_nothing(site: Site) -> None:
    blobids = backed_up(site, 20)
    by_hash = site.remote.local / "by-hash"
    by_hash.rename(by_hash.with_name("aside"))
    by_hash.mkdir()
    done = site.call("reconcile", "--apply")
    assert done.returncode == 5, done.stdout
    assert "mounted" in done.stderr
    assert site.copied() == set(blobids)


def test_blobs_in_an_unreadable_remote_directory_are_not_taken_for_lost(
    site: Site, remote: Sshd
) -> None:
    blobids = backed_up(site, 50)
    directory = site.remote_path(blobids[0]).parent.parent
    hidden = {one for one in blobids if one.startswith(directory.name)}
    directory.chmod(0)
    try:
        if remote.run(f"ls {site.remote.path}/by-hash/{directory.name}").returncode == 0:
            pytest.skip("the remote's account reads everything")
        found = compared(site, "--apply", code=7)
    finally:
        directory.chmod(0o755)
    assert differing(found) == {
        str(Difference.UNREADABLE): len(hidden),
        str(Difference.STRAY_REMOTE): 1,
    }
    assert site.copied() == set(blobids)
