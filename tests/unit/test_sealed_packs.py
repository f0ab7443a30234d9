"""Sealed packs: what opens them, what they do not tell, and that nothing in them can be altered.

A sealed pack is a file of age, see test_age_encryption.py; here it is read as a pack.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ntt_backup.config.signing_key import OF_PACKS, Origin, SigningKey, SigningKeys
from ntt_backup.pack.age_encryption import CHUNK, HEAD, SealedForOthers, SealUnusable
from ntt_backup.pack.format import TAIL_BYTES, PackError, read_trailer, write_trailer
from ntt_backup.pack.reader import PackReader
from tests.helpers.blobs import MIX, Person, noise, pack, ranges, reader, seal, sealed, text

OWNER, OTHER, STRANGER = Person.new(), Person.new(), Person.new()
FEW = [noise(20_000, 1), *(text(n, 1500) for n in range(100)), b"", noise(200_000, 2)]
PLAIN = pack(FEW)
SEALED = seal(PLAIN, [OWNER.public])


def contents(data: bytes, who: Person) -> set[bytes]:
    found = reader(data, who.opens)
    return {found.read_blob(entry) for entry in found.table}


@pytest.mark.parametrize("who", [OWNER, OTHER])
def test_each_recipient_reads_all_of_it(who: Person) -> None:
    data = sealed(MIX, [OWNER.public, OTHER.public])

    assert contents(data, who) == set(MIX)
    found = reader(data, who.opens)
    assert found.sealed
    for entry in found.table:
        found.check(entry)


@pytest.mark.skipif(which("age") is None, reason="the program age is not installed")
def test_age_and_tar_open_it_without_this_program(tmp_path: Path) -> None:
    (tmp_path / "pack.tar.age").write_bytes(SEALED)
    command = ["age", "-d", "-i", str(OWNER.file(tmp_path / "key")), str(tmp_path / "pack.tar.age")]
    plain = subprocess.run(command, check=True, capture_output=True).stdout
    assert plain == PLAIN
    with tarfile.open(fileobj=BytesIO(plain)) as archive:
        assert any(name.startswith("by-hash/") for name in archive.getnames())


def test_others_are_told_that_it_is_not_for_them() -> None:
    with pytest.raises(SealedForOthers, match="other identities"):
        reader(SEALED, STRANGER.opens)
    with pytest.raises(SealedForOthers, match="no identity is given"):
        reader(SEALED)


@pytest.mark.parametrize("content", [PLAIN, pack([b"small"])])
def test_two_reads_open_a_small_pack_and_what_they_brought_opens_it_again(content: bytes) -> None:
    data = seal(content, [OWNER.public])
    reads: list[tuple[int, int]] = []

    def read(start: int, length: int) -> bytes:
        reads.append((start, length))
        return data[start : start + length]

    first = PackReader(read, len(data), OWNER.opens)
    assert len(reads) == 2

    again = PackReader(read, len(data), OWNER.opens, first.end)
    assert len(reads) == 2
    assert again.end == first.end
    assert {again.read_blob(entry) for entry in again.table} == contents(data, OWNER)


def test_nothing_of_the_content_or_the_names_is_seen() -> None:
    mix = MIX[::3]
    data = sealed(mix, [OWNER.public])

    for content in mix:
        digest = blake3(content).digest()
        assert digest[:8] not in data
        assert digest.hex().encode() not in data
        assert len(content) < 16 or content[:16] not in data
    assert b"by-hash" not in data
    assert b".ntt" not in data


def test_without_its_library_nothing_is_sealed_or_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["cryptography", *(one for one in sys.modules if one.startswith("cryptography."))]:
        monkeypatch.setitem(sys.modules, name, None)
    for use in (lambda: seal(PLAIN, [OWNER.public]), lambda: reader(SEALED, OWNER.opens)):
        with pytest.raises(SealUnusable, match=r"ntt-backup\[seal\]"):
            use()


# --- hostile packs --------------------------------------------------------------------------------


def read_all(data: bytes) -> None:
    found = PackReader(ranges(data), len(data), OWNER.opens)
    for at in range(0, len(PLAIN), CHUNK):
        found.range(at, min(CHUNK, len(PLAIN) - at))


def refused(data: bytes) -> None:
    with pytest.raises(PackError):
        read_all(data)


@given(st.integers(0, len(SEALED) - 1), st.integers(0, 7))
@settings(deadline=None, max_examples=300)
def test_a_bit_that_is_flipped_anywhere_is_noticed(place: int, bit: int) -> None:
    data = bytearray(SEALED)
    data[place] ^= 1 << bit
    refused(bytes(data))


def test_every_byte_of_the_header_counts() -> None:
    for place in range(HEAD):
        data = bytearray(SEALED)
        data[place] ^= 0x10
        with pytest.raises(PackError) as caught:
            OWNER.opens(bytes(data[:HEAD]), len(data)).open(0, 1, data[HEAD : HEAD + CHUNK + 16])
        # A damaged pack is not taken for one of somebody else.
        assert not isinstance(caught.value, SealedForOthers)


@given(st.integers(0, len(SEALED) - 1))
@settings(deadline=None)
def test_what_is_cut_at_its_end_or_its_beginning_is_refused(length: int) -> None:
    refused(SEALED[:length])
    refused(SEALED[len(SEALED) - length :])


def test_what_is_within_is_read_as_any_hostile_pack() -> None:
    """Who knows a public key can seal whatever he likes."""
    for within in (b"x" * 2000, PLAIN[:-1], PLAIN[512:], SEALED, b""):
        with pytest.raises(PackError):
            reader(seal(within, [OWNER.public]), OWNER.opens)


def test_a_pack_that_ends_with_a_full_chunk_is_read_to_its_end() -> None:
    blobs, data = [b"small"], b""
    for size in range(100_000, 200_000, 512):
        blobs = [b"small", noise(size, 3)]
        data = pack(blobs)
        if len(data) % CHUNK == 0:
            break
    assert len(data) == 2 * CHUNK
    assert contents(seal(data, [OWNER.public]), OWNER) == set(blobs)


# --- who made it ----------------------------------------------------------------------------------

OURS, THEIRS = (SigningKeys([SigningKey.of(bytes([n]) * 32)], Path("/host.key")) for n in (1, 2))


def origin(data: bytes, keys: SigningKeys = OURS) -> Origin:
    trailer = reader(data, OWNER.opens).trailer
    return keys.origin(OF_PACKS, trailer.signed, trailer.signature)


def signed(keys: SigningKeys, purpose: str = OF_PACKS) -> bytes:
    return seal(pack(FEW, sign=partial(keys.sign, purpose)), [OWNER.public])


def test_a_sealed_pack_says_who_made_it() -> None:
    data = signed(OURS)
    assert contents(data, OWNER) == set(FEW)
    assert origin(data) is Origin.OURS
    assert origin(data, SigningKeys([], Path("/none"))) is Origin.UNKNOWN
    for other in (SEALED, signed(THEIRS)):
        assert origin(other) is Origin.UNKNOWN
    assert origin(signed(OURS, "dump")) is Origin.FORGED


@pytest.mark.parametrize("field", ["table_sum", "pack_id", "store_id"])
def test_a_signature_of_another_pack_is_forged(field: str) -> None:
    plain = pack(FEW, sign=partial(OURS.sign, OF_PACKS))
    ours = read_trailer(plain[-TAIL_BYTES:], len(plain))
    assert OURS.origin(OF_PACKS, ours.signed, ours.signature) is Origin.OURS
    other: dict[str, Any] = {field: bytes(len(getattr(ours, field)))}
    moved = replace(ours, **other)
    again = read_trailer(write_trailer(moved) + bytes(1024), len(plain))
    assert again.signature == ours.signature
    assert OURS.origin(OF_PACKS, again.signed, again.signature) is Origin.FORGED
