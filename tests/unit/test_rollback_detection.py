"""What was newest on a target is missed where the target shows an older state of itself."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ntt_backup import rollback_detection
from ntt_backup.config import CatalogConfig
from ntt_backup.config.sections import HostSettings
from ntt_backup.config.signing_key import SigningKeys, make_signing_key
from ntt_backup.rollback_detection import (
    Kind,
    compare,
    lost_key,
    missed,
    record,
    recorded,
    removed,
)

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
OLD, LAST, LATER = (f"2026030{day}T000000Z-00000000" for day in (1, 2, 3))
KEY: tuple[Kind, str] = ("version", "etc")


@pytest.fixture
def settings(tmp_path: Path) -> CatalogConfig:
    return of(tmp_path)


def of(tmp_path: Path, url: str = "ssh://vault/srv", target: str = "remote") -> CatalogConfig:
    tables: dict[str, Any] = {"remote": {"url": url}, "log": {"jsonl": tmp_path / "log.jsonl"}}
    return CatalogConfig.model_validate({"target": target, **tables})


@pytest.mark.parametrize(
    ("there", "away"),
    [
        ({KEY: [OLD, LAST]}, False),
        ({KEY: [OLD]}, True),
        ({KEY: []}, True),
        # Past retention: something newer of this host is there.
        ({KEY: [OLD, LATER]}, False),
        # Nobody has looked.
        ({}, False),
        ({("version", "home"): []}, False),
        ({("dump", ""): []}, False),
    ],
    ids=str,
)
def test_what_was_newest_is_missed_where_nothing_newer_is_there(
    settings: CatalogConfig, there: Any, away: bool
) -> None:
    record(settings, "version", LAST, "etc")
    assert [one.missed for one in compare(settings, there)] == [LAST] * away


def test_what_is_missed_stays_known_until_it_is_there_again(
    settings: CatalogConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(settings, "version", OLD, "etc")
    record(settings, "version", LAST, "etc")
    record(settings, "dump", "20260302T000000Z-00000000.dump")
    assert {(one.kind, one.of, one.name) for one in recorded(settings)} == {
        ("version", "etc", LAST),
        ("dump", "", "20260302T000000Z-00000000.dump"),
    }
    assert (compare(settings, {KEY: [LAST]}), missed(settings)) == ([], [])
    (found,) = compare(settings, {KEY: [OLD]})
    assert f"version etc@{LAST}" in str(found)
    assert missed(settings) == [found]
    assert compare(settings, {KEY: [OLD]}) == [found]
    # A newer one does not make it good.
    record(settings, "version", LATER, "etc")
    (still,) = missed(settings)
    assert (still.name, still.missed, still.missed_at) == (LATER, LAST, found.missed_at)
    assert [one.missed for one in compare(settings, {KEY: [OLD, LATER]})] == [LAST]
    assert compare(settings, {KEY: [OLD, LAST, LATER]}) == missed(settings) == []
    # Nor is it told for ever.
    compare(settings, {KEY: []})
    record(settings, "version", "20260304T000000Z-00000000", "etc")
    assert len(missed(settings)) == 1
    monkeypatch.setattr(rollback_detection, "_TOLD_FOR", -timedelta(seconds=1))
    assert compare(settings, {KEY: ["20260304T000000Z-00000000"]}) == missed(settings) == []


def test_a_key_is_lost_where_the_settings_name_it_or_it_signed_before(tmp_path: Path) -> None:
    file, settings = tmp_path / "host.key", of(tmp_path)
    named = settings.model_copy(update={"host": HostSettings(key_file=file)})
    never = SigningKeys((), file, "there is no host key", expected=False)
    record(settings, "version", OLD, "etc")
    assert lost_key(settings, never) == ""
    assert f"no host key {file}" in lost_key(named, SigningKeys.of(named))
    file.mkdir()
    assert "cannot be read" in lost_key(named, SigningKeys.of(named))
    file.rmdir()
    make_signing_key(file)
    keys = SigningKeys.of(named)
    assert lost_key(named, keys) == ""
    record(settings, "version", LAST, "etc", keys.name)
    assert "nothing that this host sends is signed" in lost_key(settings, never)
    # A key that is there signs, whatever signed before.
    assert lost_key(settings, keys) == ""


def test_what_this_host_has_removed_is_not_missed(settings: CatalogConfig) -> None:
    record(settings, "version", LAST, "etc")
    removed(settings, "version", [OLD], "etc")
    removed(settings, "version", [LAST], "home")
    assert len(recorded(settings)) == 1
    removed(settings, "version", [LAST], "etc")
    assert (recorded(settings), compare(settings, {KEY: []})) == ([], [])


def test_another_target_another_place_and_what_is_no_note_are_left_alone(tmp_path: Path) -> None:
    record(of(tmp_path), "version", LAST, "etc")
    (note,) = tmp_path.glob("newest-*")
    for other in (of(tmp_path, url="ssh://other/srv"), of(tmp_path, target="remote-version")):
        assert compare(other, {KEY: []}) == recorded(other) == []
    assert len(recorded(of(tmp_path))) == 1
    for bad in (b"", b"[]", json.dumps({**json.loads(note.read_bytes()), "kind": "x"}).encode()):
        note.write_bytes(bad)
        assert recorded(of(tmp_path)) == []


def test_where_nothing_can_be_written_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    settings = of(tmp_path / "file" / "below")
    record(settings, "version", LAST, "etc")
    assert recorded(settings) == []
