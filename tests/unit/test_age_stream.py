"""A dump that is sealed and opened piece by piece: all of it, less, or the reason why not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ntt_backup.config.sealing import Keyring
from ntt_backup.dump.age_stream import Sealing, opened
from ntt_backup.errors import ConfigError, RemoteUnreachable
from tests.environment import wait_until
from tests.files import noise
from tests.packs import Person

PIECES = [noise(70_000, number) for number in range(4)]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def sealed(owner: Person) -> list[bytes]:
    sealing = Sealing([owner.public])
    try:
        return [*map(sealing.add, PIECES), sealing.end()]
    finally:
        sealing.close()


def keyring(owner: Person, directory: Path) -> Keyring:
    return Keyring(lambda: owner.file(directory / "key"))


def test_what_was_sealed_comes_back(tmp_path: Path) -> None:
    owner = Person.new()
    made = sealed(owner)
    assert not any(piece[:1000] in b"".join(made) for piece in PIECES)
    assert b"".join(opened(iter(made), keyring(owner, tmp_path))) == b"".join(PIECES)


def test_of_what_is_cut_comes_less(tmp_path: Path) -> None:
    owner = Person.new()
    made = b"".join(sealed(owner))[:-1]
    found = b"".join(opened(iter([made]), keyring(owner, tmp_path)))
    assert len(found) < sum(map(len, PIECES))
    assert b"".join(PIECES).startswith(found)


def test_whoever_seals_and_opens_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    owner, before = Person.new(), descriptors()
    made = sealed(owner)
    half = Sealing([owner.public])
    half.add(PIECES[0])
    half.close()
    for some in opened(iter(made), keyring(owner, tmp_path)):
        assert some
        break
    assert b"".join(opened(iter(made), keyring(owner, tmp_path))) == b"".join(PIECES)
    wait_until(lambda: descriptors() == before, "the end of the threads that seal and open")


def broken(made: Sequence[bytes]) -> Iterator[bytes]:
    yield b"".join(made)[:1000]
    raise RemoteUnreachable("the link was lost")


def test_an_error_of_where_it_comes_from_is_that_error(tmp_path: Path) -> None:
    owner = Person.new()
    with pytest.raises(RemoteUnreachable, match="the link was lost"):
        list(opened(broken(sealed(owner)), keyring(owner, tmp_path)))


def test_what_is_sealed_for_others_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        list(opened(iter(sealed(Person.new())), keyring(Person.new(), tmp_path)))
