"""Scan: what the store has and the catalog lacks is registered, however often it is stopped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ntt_backup.audit import scan as scan_module
from ntt_backup.audit.scan import ScanResult, scan
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.blobdir.walk import Stray, StrayKind
from ntt_backup.catalog import ledger
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import load_scan
from ntt_backup.errors import SourceError
from ntt_backup.model import Blob
from ntt_backup.source.store import Store
from tests.helpers.blobs import put


def rows(conn: Connection) -> dict[str, int | None]:
    return dict(conn.execute("select blobid, size from blobs").fetchall())


def sizes(blobs: list[Blob]) -> dict[str, int | None]:
    return {blob.blobid: blob.size for blob in blobs}


@pytest.fixture
def blobs(root: Path) -> list[Blob]:
    return [put(root, b"x" * number) for number in range(60)]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "BATCH_SIZE", 7)


class Interrupted(Exception):
    """What a test ends a scan with."""


def interrupt_after(batches: int) -> Callable[[ScanResult], None]:
    left = [batches]

    def on_progress(_: ScanResult) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Interrupted

    return on_progress


def test_what_is_missing_is_registered_with_its_size(
    catalog: Connection, root: Path, blobs: list[Blob]
) -> None:
    ledger.register_blobs(catalog, [Blob(blob.blobid, 10**6) for blob in blobs[:10]])
    result = scan(catalog, Store(root))
    assert rows(catalog) == sizes([Blob(blob.blobid, 10**6) for blob in blobs[:10]] + blobs[10:])
    assert (result.registered, result.known) == (50, 10)
    assert result.bytes == sum(range(10, 60))
    assert result.directories == len({relative_path(blob.blobid)[:5] for blob in blobs})
    assert result.strays == {}
    assert result.resumed_from is None


@pytest.mark.usefixtures("small_batches")
def test_known_rows_without_a_size_get_it(
    catalog: Connection, root: Path, blobs: list[Blob]
) -> None:
    ledger.register_blobs(catalog, [Blob(blob.blobid, None) for blob in blobs[:20]])
    ledger.register_blobs(catalog, [Blob("ab" * 32, None), Blob(blobs[20].blobid, 5)])
    result = scan(catalog, Store(root))
    assert (result.registered, result.known, result.sized) == (39, 21, 20)
    wanted = sizes([*blobs, Blob(blobs[20].blobid, 5), Blob("ab" * 32, None)])
    assert rows(catalog) == wanted
    # These are changes of ours, for which no dump is made.
    assert catalog.execute("select sum(marked) from ntt_backup.marks").fetchall() == [(20,)]
    assert scan(catalog, Store(root)).sized == 0


def test_a_file_that_may_still_be_written_has_no_size_yet(
    catalog: Connection, root: Path, blobs: list[Blob]
) -> None:
    old, known = blobs[:2]
    ledger.register_blobs(catalog, [Blob(known.blobid, None)])
    store = Store(root, grace=900)
    wanted = [Blob(blob.blobid, None) for blob in blobs]
    result = scan(catalog, store)
    assert (result.registered, result.young, result.sized) == (59, 59, 0)
    assert rows(catalog) == sizes(wanted)
    assert (scan(catalog, Store(root)).sized, rows(catalog)[old.blobid]) == (60, old.size)


@pytest.mark.usefixtures("small_batches")
def test_a_second_scan_walks_all_and_registers_only_what_is_new(
    catalog: Connection, root: Path, blobs: list[Blob]
) -> None:
    scan(catalog, Store(root))
    new = put(root, b"new")
    result = scan(catalog, Store(root))
    assert (result.registered, result.known) == (1, len(blobs))
    assert result.resumed_from is None
    assert rows(catalog) == sizes([*blobs, new])


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("batches", [1, 5])
def test_an_interrupted_scan_continues_where_it_was_saved(
    catalog: Connection, root: Path, blobs: list[Blob], batches: int
) -> None:
    with pytest.raises(Interrupted):
        scan(catalog, Store(root), on_progress=interrupt_after(batches))
    saved = load_scan(catalog, str(root))
    assert saved is not None
    assert not saved.finished
    done = len(rows(catalog))
    assert done == 7 * batches == saved.registered
    result = scan(catalog, Store(root))
    assert rows(catalog) == sizes(blobs)
    assert result.resumed_from == saved.directory
    assert result.registered == len(blobs) - done
    assert result.known < 7
    finished = load_scan(catalog, str(root))
    assert finished is not None
    assert finished.finished
    assert finished.registered == len(blobs)


@pytest.mark.usefixtures("small_batches")
def test_restart_begins_anew(catalog: Connection, root: Path, blobs: list[Blob]) -> None:
    with pytest.raises(Interrupted):
        scan(catalog, Store(root), on_progress=interrupt_after(3))
    earlier = min(blobs, key=lambda blob: blob.blobid)
    catalog.execute("delete from blobs where blobid = %s", (earlier.blobid,))
    result = scan(catalog, Store(root), restart=True)
    assert result.resumed_from is None
    assert result.directories == len({relative_path(blob.blobid)[:5] for blob in blobs})
    assert rows(catalog) == sizes(blobs)
    saved = load_scan(catalog, str(root))
    assert saved is not None
    assert saved.registered == result.registered


@pytest.mark.usefixtures("small_batches")
def test_a_directory_larger_than_a_batch_is_registered_whole(
    catalog: Connection, root: Path
) -> None:
    directory = root / "ab" / "cd"
    directory.mkdir(parents=True)
    names = {f"abcd{number:060x}" for number in range(50)}
    for name in names:
        (directory / name).touch()
    with pytest.raises(Interrupted):
        scan(catalog, Store(root), on_progress=interrupt_after(2))
    saved = load_scan(catalog, str(root))
    assert saved is not None
    assert saved.directory is None
    result = scan(catalog, Store(root))
    assert set(rows(catalog)) == names
    assert (result.registered, result.known) == (22, 28)


def test_a_blob_that_changes_between_listing_and_sizing(
    catalog: Connection, root: Path, blobs: list[Blob], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = ledger.missing_blobs

    def meanwhile(conn: Connection, blobids: list[str]) -> tuple[set[str], set[str]]:
        (root / relative_path(blobs[0].blobid)).unlink()
        replaced = root / relative_path(blobs[1].blobid)
        replaced.unlink()
        replaced.symlink_to("/etc/passwd")
        return look_up(conn, blobids)

    monkeypatch.setattr(ledger, "missing_blobs", meanwhile)
    strays: list[Stray] = []
    result = scan(catalog, Store(root), on_stray=strays.append)
    assert rows(catalog) == sizes(blobs[2:])
    assert result.registered == len(blobs) - 2
    assert strays == [Stray(relative_path(blobs[1].blobid), StrayKind.NOT_A_FILE)]


def test_an_unmounted_store_is_refused(
    catalog: Connection, root: Path, blobs: list[Blob], tmp_path: Path
) -> None:
    store = Store(root)
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    with pytest.raises(SourceError, match="is empty"):
        scan(catalog, store)
    assert load_scan(catalog, str(root)) is None
    assert rows(catalog) == {}


@pytest.mark.usefixtures("small_batches")
def test_a_store_that_fails_under_a_scan_leaves_it_to_be_continued(
    catalog: Connection, root: Path, blobs: list[Blob], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull_the_plug(_: ScanResult) -> None:
        def stale(*_: object) -> object:
            raise OSError(116, "Stale file handle")

        monkeypatch.setattr(os, "scandir", stale)

    with pytest.raises(SourceError, match="Stale"):
        scan(catalog, Store(root), on_progress=pull_the_plug)
    monkeypatch.undo()
    saved = load_scan(catalog, str(root))
    assert saved is not None
    assert not saved.finished
    assert scan(catalog, Store(root)).resumed_from == saved.directory
    assert rows(catalog) == sizes(blobs)


def test_scans_of_two_stores_do_not_mix(
    catalog: Connection, root: Path, blobs: list[Blob], tmp_path: Path
) -> None:
    other = put(tmp_path / "other", b"in the other store")
    scan(catalog, Store(root))
    assert scan(catalog, Store(tmp_path / "other")).registered == 1
    assert rows(catalog) == sizes([*blobs, other])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    contents=st.sets(st.binary(max_size=4), min_size=1, max_size=40),
    stops=st.lists(st.integers(1, 4), max_size=4),
    size=st.integers(1, 9),
)
def test_however_often_it_is_stopped_everything_is_registered_once(
    catalog: Connection,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    contents: set[bytes],
    stops: list[int],
    size: int,
) -> None:
    root = tmp_path_factory.mktemp("store")
    blobs = [put(root, content) for content in contents]
    catalog.execute("truncate blobs")
    monkeypatch.setattr(scan_module, "BATCH_SIZE", size)
    for batches in stops:
        try:
            scan(catalog, Store(root), on_progress=interrupt_after(batches))
        except Interrupted:
            continue
    scan(catalog, Store(root))
    assert rows(catalog) == sizes(blobs)
