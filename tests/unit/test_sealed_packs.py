"""Sealed packs: what opens them, what they do not tell, and that nothing in them can be altered."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ntt_backup.config.host_key import OF_PACKS, HostKey, HostKeys, Origin
from ntt_backup.pack import seal as sealing
from ntt_backup.pack.format import SEALED_VERSION, TAIL_BYTES, PackError, write_block
from ntt_backup.pack.reader import PackReader
from ntt_backup.pack.seal import (
    PIECE,
    SEALED_PIECE,
    SealedForOthers,
    SealUnusable,
    SealWriter,
    Unsealed,
    open_key,
    read_seal,
    sealed_size,
)
from tests.files import noise
from tests.packs import MIX, STORE, Person, pack, ranges, reader, seal, sealed, text

OWNER, OTHER, STRANGER = Person.new(), Person.new(), Person.new()
FEW = [noise(20_000, 1), *(text(n, 1500) for n in range(100)), b"", noise(200_000, 2)]
PLAIN = pack(FEW)
SEALED = seal(PLAIN, [OWNER.public])
SEAL = read_seal(SEALED, len(SEALED))
assert SEAL is not None


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


def test_others_are_told_that_it_is_not_for_them() -> None:
    with pytest.raises(SealedForOthers, match="other identities"):
        reader(SEALED, STRANGER.opens)
    with pytest.raises(SealedForOthers, match="no identity is given"):
        reader(SEALED)


def test_what_is_no_key_is_told_without_showing_it() -> None:
    with pytest.raises(SealUnusable, match="no public keys"):
        seal(PLAIN, ["age1notakey"])
    with pytest.raises(SealUnusable) as told:
        open_key(SEALED, [OWNER.secret[:-3]])
    assert OWNER.secret[:20] not in str(told.value)


@given(
    st.integers(1, 3 * PIECE + 5)
    | st.sampled_from([1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 1]),
    st.integers(1, 3 * PIECE),
    st.data(),
)
@settings(deadline=None, max_examples=60)
def test_ranges_of_what_is_sealed_are_right(size: int, step: int, data: st.DataObject) -> None:
    content = os.urandom(size + TAIL_BYTES)
    whole = seal(content, [OWNER.public], step)
    found = read_seal(whole, len(whole))
    assert found is not None
    within = sealing.Unsealed.of(ranges(whole), found, OWNER.opens)

    start = data.draw(st.integers(0, len(content)))
    length = data.draw(st.integers(0, len(content) + 10))

    assert within.read(start, length) == content[start : start + length]


def test_one_read_of_the_end_opens_a_small_pack() -> None:
    reads: list[tuple[int, int]] = []

    def read(start: int, length: int) -> bytes:
        reads.append((start, length))
        return SEALED[start : start + length]

    PackReader(read, len(SEALED), OWNER.opens, first=sealing.LAST_PIECES)

    assert len(reads) == 1


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


def test_the_same_blobs_are_sealed_otherwise_each_time() -> None:
    one, two = (seal(PLAIN, [OWNER.public]) for _ in range(2))

    assert reader(one, OWNER.opens).trailer.pack_id != reader(two, OWNER.opens).trailer.pack_id
    assert one[:64] != two[:64]


def test_a_program_that_knows_no_sealed_packs_says_so() -> None:
    from ntt_backup.pack.format import read_trailer

    with pytest.raises(PackError, match="version 2"):
        read_trailer(SEALED[-TAIL_BYTES:], len(SEALED))


@pytest.mark.parametrize("lacking", ["pyrage", "cryptography.hazmat.primitives.ciphers.aead"])
def test_without_a_library_nothing_is_sealed(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    monkeypatch.setitem(sys.modules, lacking, None)
    with pytest.raises(SealUnusable, match=r"ntt-backup\[seal\]"):
        seal(PLAIN, [OWNER.public])


def test_more_recipients_than_have_room_are_refused() -> None:
    with pytest.raises(SealUnusable, match="1000 recipients are too many"):
        seal(PLAIN, [OWNER.public] * 1000)


def test_a_read_that_gives_less_than_was_asked_for_is_told() -> None:
    assert SEAL is not None
    whole = Unsealed.of(ranges(SEALED), SEAL, OWNER.opens)
    short = whole.over(lambda at, count: SEALED[at : at + count - 1])
    assert short.read(SEAL.size, 1) == b""
    with pytest.raises(PackError, match="it is cut off"):
        short.read(0, 1)


# --- hostile packs --------------------------------------------------------------------------------


def read_all(data: bytes) -> None:
    assert SEAL is not None
    found = reader(data, OWNER.opens)
    for at in range(0, SEAL.size, PIECE):
        found.range(at, min(PIECE, SEAL.size - at))


def refused(data: bytes) -> None:
    with pytest.raises(PackError):
        read_all(data)


@given(st.integers(0, len(SEALED) - 1), st.integers(0, 7))
@settings(deadline=None, max_examples=300)
def test_a_bit_that_is_flipped_anywhere_is_noticed(place: int, bit: int) -> None:
    data = bytearray(SEALED)
    data[place] ^= 1 << bit
    refused(bytes(data))


def test_every_bit_behind_the_content_counts() -> None:
    assert SEAL is not None
    for place in range(SEAL.sealed_bytes, len(SEALED)):
        data = bytearray(SEALED)
        data[place] ^= 0x10
        refused(bytes(data))


@given(st.integers(0, len(SEALED) - 1))
@settings(deadline=None)
def test_what_is_cut_at_its_end_or_its_beginning_is_refused(length: int) -> None:
    refused(SEALED[:length])
    refused(SEALED[len(SEALED) - length :])


def altered(change: Callable[[list[bytes]], object]) -> bytes:
    """The pack with its pieces changed."""
    assert SEAL is not None
    end = SEAL.sealed_bytes
    pieces = [SEALED[at : min(at + SEALED_PIECE, end)] for at in range(0, end, SEALED_PIECE)]
    change(pieces)
    return b"".join(pieces) + SEALED[end:]


def swap(pieces: list[bytes]) -> None:
    pieces[0], pieces[1] = pieces[1], pieces[0]


def repeat(pieces: list[bytes]) -> None:
    pieces[1] = pieces[0]


def take_from_another_pack(pieces: list[bytes]) -> None:
    pieces[0] = seal(PLAIN, [OWNER.public])[:SEALED_PIECE]


@pytest.mark.parametrize("change", [swap, repeat, take_from_another_pack])
def test_pieces_stay_where_they_are(change: Callable[[list[bytes]], None]) -> None:
    refused(altered(change))


def with_trailer(data: bytes, **changed: object) -> bytes:
    """The pack with another trailer, whose sum is right."""
    assert SEAL is not None
    said = {name: getattr(SEAL, name) for name in SEAL.__slots__} | changed
    block = write_block(SEALED_VERSION, sealing._TRAILER.pack(*said.values()))
    return data[:-TAIL_BYTES] + block + bytes(1024)


def test_a_pack_that_ends_a_piece_early_is_refused() -> None:
    """The piece that would be the last then is not sealed as such."""
    assert SEAL is not None
    short = SEAL.size // PIECE * PIECE
    keys = SEALED[SEAL.sealed_bytes :]
    refused(with_trailer(SEALED[: sealed_size(short)] + keys, size=short))


def test_the_key_of_another_pack_is_refused() -> None:
    other = seal(PLAIN, [OWNER.public])
    theirs = read_seal(other, len(other))
    assert theirs is not None
    assert SEAL is not None
    keys = other[theirs.sealed_bytes :][: theirs.keys_bytes]
    said = {"keys_bytes": len(keys), "keys_sum": theirs.keys_sum}
    data = SEALED[: SEAL.sealed_bytes] + keys + bytes(TAIL_BYTES)
    refused(with_trailer(data, **said))
    refused(with_trailer(data, **said, pack_id=theirs.pack_id))


@pytest.mark.parametrize(
    "lie",
    [
        {"size": 2**60},
        {"size": 0},
        {"keys_bytes": 2**31},
        {"keys_bytes": 0},
        {"pack_id": bytes(16)},
        {"store_id": bytes(16)},
        {"keys_sum": bytes(32)},
    ],
)
def test_a_trailer_that_lies_is_refused(lie: dict[str, object]) -> None:
    refused(with_trailer(SEALED, **lie))


@given(st.binary(max_size=2000))
@settings(deadline=None)
def test_keys_that_are_no_file_of_age_are_refused(keys: bytes) -> None:
    assert SEAL is not None
    data = SEALED[: SEAL.sealed_bytes] + keys + bytes(TAIL_BYTES)
    refused(with_trailer(data, keys_bytes=len(keys), keys_sum=blake3(keys).digest()))


def test_a_key_of_another_length_is_refused() -> None:
    import pyrage

    keys = pyrage.encrypt(b"short", [pyrage.x25519.Recipient.from_str(OWNER.public)])
    with pytest.raises(PackError, match="length"):
        open_key(keys, [OWNER.secret])


def test_what_is_within_is_read_as_any_hostile_pack() -> None:
    """Who knows a public key can seal whatever he likes."""
    for within in (b"x" * 2000, PLAIN[:-1], PLAIN[512:], SEALED):
        with pytest.raises(PackError):
            reader(seal(within, [OWNER.public]), OWNER.opens)


def test_a_full_last_piece_is_the_last() -> None:
    told: list[bytes] = []
    writer = SealWriter(lambda data: told.append(bytes(data)), STORE, [OWNER.public])
    writer.write(bytes(2 * PIECE))
    writer.close()
    assert [len(one) for one in told[:2]] == [SEALED_PIECE, SEALED_PIECE]
    assert told[2] == writer.keys


def test_a_pack_that_ends_with_a_full_piece_is_read_to_its_end() -> None:
    blobs, data = [b"small"], b""
    for size in range(100_000, 200_000, 512):
        blobs = [b"small", noise(size, 3)]
        data = pack(blobs)
        if len(data) % PIECE == 0:
            break
    assert len(data) == 2 * PIECE
    told = seal(data, [OWNER.public])
    seal_of = read_seal(told, len(told))
    assert seal_of is not None
    assert seal_of.sealed_bytes == 2 * SEALED_PIECE

    assert contents(told, OWNER) == set(blobs)

    key = OWNER.opens(told[seal_of.sealed_bytes :][: seal_of.keys_bytes])
    within = Unsealed(ranges(told), seal_of, key)
    assert within.read(0, len(data)) == data
    for at in (PIECE - 1, PIECE, len(data) - 1, len(data), len(data) + PIECE):
        assert within.read(at, 10) == data[at : at + 10]


def test_a_pack_of_another_bucket_is_refused() -> None:
    """Its key names the store that it was sealed for, and so does the pack within."""
    other = bytes(16)
    file = io.BytesIO()
    writer = SealWriter(file.write, other, [OWNER.public])
    writer.write(PLAIN)
    writer.close()
    with pytest.raises(PackError, match="another bucket than its seal says"):
        reader(file.getvalue(), OWNER.opens)


# --- who made it ----------------------------------------------------------------------------------

OURS, THEIRS = (HostKeys([HostKey.of(bytes([n]) * 32)], Path("/host.key")) for n in (1, 2))


def origin(data: bytes, keys: HostKeys = OURS) -> Origin:
    found = read_seal(data, len(data))
    assert found is not None
    return keys.origin(OF_PACKS, found.signed, found.signature)


def signed(keys: HostKeys, purpose: str = OF_PACKS) -> bytes:
    return seal(PLAIN, [OWNER.public], sign=partial(keys.sign, purpose))


def test_a_sealed_pack_says_who_made_it() -> None:
    data = signed(OURS)
    assert contents(data, OWNER) == set(FEW)
    assert origin(data) is Origin.OURS
    assert origin(data, HostKeys([], Path("/none"))) is Origin.UNKNOWN
    for other in (SEALED, signed(THEIRS)):
        assert origin(other) is Origin.UNKNOWN
    assert origin(signed(OURS, "dump")) is Origin.FORGED


def test_a_signature_of_another_pack_is_forged() -> None:
    mine, other = signed(OURS), signed(OURS)
    taken, of = read_seal(mine, len(mine)), read_seal(other, len(other))
    assert taken is not None
    assert of is not None
    for name in ("keys_sum", "pack_id", "store_id", "size"):
        moved = replace(of, key_name=taken.key_name, mac=taken.mac)
        assert OURS.origin(OF_PACKS, moved.signed, moved.signature) is Origin.FORGED
        lie: dict[str, Any] = {name: getattr(of, name) if name != "size" else 7}
        changed = replace(taken, **lie)
        same = getattr(changed, name) == getattr(taken, name)
        wanted = Origin.OURS if same else Origin.FORGED
        assert OURS.origin(OF_PACKS, changed.signed, changed.signature) is wanted


def test_content_that_is_not_the_signed_packs_does_not_open() -> None:
    """The signed trailer and keys of one pack behind the pieces of another one."""
    mine, other = signed(OURS), seal(PLAIN, [OWNER.public])
    found = read_seal(mine, len(mine))
    assert found is not None
    mixed = other[: found.sealed_bytes] + mine[found.sealed_bytes :]
    assert origin(mixed) is Origin.OURS
    with pytest.raises(PackError, match="was altered"):
        reader(mixed, OWNER.opens)
