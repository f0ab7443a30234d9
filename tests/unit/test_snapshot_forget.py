"""`forget` may be interrupted anywhere: what is there can be restored, the rest goes later."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ntt_backup.cli.commands.snapshot_forget import lines
from ntt_backup.dump.retention import Retention
from ntt_backup.errors import RemoteDenied, RemoteError, RemoteUnreachable
from ntt_backup.format import moment
from ntt_backup.snapshot.forget import expire
from ntt_backup.snapshot.verify import Question, verify
from ntt_backup.snapshot.versions import Version, facts, versions
from tests.files import noise
from tests.unit.taker import Taker

RULE = Retention(1, 0, 0)


@pytest.fixture
def taken(tmp_path: Path) -> Taker:
    """Two chains, a day apart: of three versions, and of two."""
    taker = Taker(tmp_path / "tree", tmp_path / "cache")
    for number in range(5):
        taker.write("file", noise(70_000, number))
        taker.take(full=number in (0, 3))
        taker.now += timedelta(hours=12)
    return taker


def whole(taker: Taker) -> list[Version]:
    return [one for one in versions(taker.repository, "s") if one.whole]


def test_forget_removes_a_chain_that_no_kept_version_needs(taken: Taker) -> None:
    before = taken.repository.size
    gone = expire(taken.repository, "s", RULE, taken.now)
    assert len(gone.gone) == 3
    assert before - taken.repository.size == gone.size > 0
    assert len(versions(taken.repository, "s")) == 2
    assert verify(taken.repository, Question("s", 1.0)).exit_code == 0
    assert expire(taken.repository, "s", RULE, taken.now).names == []


def test_versions_after_one_of_a_clock_that_was_ahead_count_as_their_own_days(
    tmp_path: Path,
) -> None:
    """Their names come behind its own, so all of them name its day."""
    taker = Taker(tmp_path / "tree", tmp_path / "cache")
    taker.write("file", b"content")
    for day in (400, -399, *[1] * 9):
        taker.now += timedelta(days=day)
        taker.take()
    found = whole(taker)
    headers = [one.header for one in facts(taker.repository, found) if one.header is not None]
    gone = expire(taker.repository, "s", Retention(1, 4, 0), taker.now)

    assert [one.name for one in gone.kept] == [one.name for one in found[-4:]]
    assert len({one.name[:8] for one in found}) == 1
    # The first of true days began a chain, which the others went on with.
    assert [bool(one.parent) for one in headers] == [False, False, *[True] * 9]
    told = lines(gone)
    for one, header in zip(found, headers, strict=True):
        assert any(f"{one}  {moment(header.begun)}," in line for line in told)


def test_forget_interrupted_anywhere_leaves_only_versions_that_can_be_restored(
    taken: Taker,
) -> None:
    files = dict(taken.repository.files)
    steps = len(expire(taken.repository, "s", RULE, taken.now).names)
    for step in range(steps):
        taken.repository.files = dict(files)
        left = step

        def stop(verb: str, _: str) -> None:
            nonlocal left
            left -= verb == "remove"
            if left < 0:
                raise RemoteUnreachable("the link is down")

        taken.repository.before = stop
        with pytest.raises(RemoteUnreachable):
            expire(taken.repository, "s", RULE, taken.now)
        taken.repository.before = lambda *_: None
        assert len(taken.repository.files) == len(files) - step
        assert verify(taken.repository, Question("s", 1.0)).exit_code == 0
        assert len(whole(taken)) == max(2, 5 - step)
        # The next one removes what this one has left.
        expire(taken.repository, "s", RULE, taken.now + timedelta(days=1))
        assert len(versions(taken.repository, "s")) == len(whole(taken)) == 2


def test_forget_removes_nothing_of_an_append_only_target(taken: Taker) -> None:
    taken.repository.append_only = True
    files = dict(taken.repository.files)
    with pytest.raises(RemoteDenied):
        expire(taken.repository, "s", RULE, taken.now)
    assert taken.repository.files == files


def test_forget_removes_nothing_where_a_manifest_cannot_be_read(taken: Taker) -> None:
    manifest = whole(taken)[1].manifest
    assert manifest is not None
    taken.repository.files[manifest.name] = b"of a newer program"
    files = dict(taken.repository.files)
    with pytest.raises(RemoteError, match="nothing is removed") as raised:
        expire(taken.repository, "s", RULE, taken.now)
    assert taken.repository.files == files
    # What its hint says costs no other version its packs.
    assert "remove the file manifest" in raised.value.hint
    del taken.repository.files[manifest.name]
    expire(taken.repository, "s", RULE, taken.now)
    newest = whole(taken)[-1]
    assert verify(taken.repository, Question(str(newest), 1.0)).exit_code == 0
