"""Files of age: other programs open what is written here, and what was altered is not opened."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pyrage
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.pack import age_encryption
from ntt_backup.pack.age_encryption import (
    CHUNK,
    HEAD,
    SEALED_CHUNK,
    AgeContent,
    AgeWriter,
    SealedForOthers,
    SealUnusable,
    plain_size,
    read_identity,
    read_recipient,
    sealed_size,
)
from ntt_backup.pack.format import PackError
from tests.helpers.blobs import Person, noise

OWNER, OTHER = Person.new(), Person.new()
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 300_000]
LOW_ORDER = bytes(32)


def sealed(
    content: bytes, recipients: Sequence[str] = (OWNER.public,), step: int = 70_001
) -> bytes:
    written = bytearray()
    writer = AgeWriter(written.extend, recipients)
    for at in range(0, len(content), step):
        writer.write(memoryview(content)[at : at + step])
    writer.close()
    return bytes(written)


def opened(data: bytes, identity: str = OWNER.secret, size: int | None = None) -> bytes:
    """All that is in a file, as far as it goes. size: of the file, where another one is said."""
    content = AgeContent(data[:HEAD], len(data) if size is None else size, [identity])
    low, length = content.place(0, content.size)
    return content.open(0, content.size, data[low : low + length])


def by_pyrage(data: bytes, person: Person = OWNER) -> bytes:
    return bytes(pyrage.decrypt(data, [pyrage.x25519.Identity.from_str(person.secret)]))


def chunks(data: bytes) -> list[bytes]:
    return [data[at : at + SEALED_CHUNK] for at in range(HEAD, len(data), SEALED_CHUNK)]


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1 << 20, CHUNK, CHUNK + 1, 4099])
@pytest.mark.parametrize("size", SIZES)
def test_others_open_what_is_written_and_its_size_is_known(size: int, step: int) -> None:
    content = noise(size, size)
    data = sealed(content, step=step)
    assert by_pyrage(data) == content
    assert opened(data) == content
    assert (len(data), plain_size(len(data))) == (sealed_size(size), size)


@pytest.mark.parametrize("program", ["age", "rage"])
@pytest.mark.parametrize("size", SIZES)
def test_the_program_opens_what_is_written(tmp_path: Path, program: str, size: int) -> None:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    people = [Person.new() for _ in range(40)]
    content = noise(size, 1)
    (tmp_path / "file.age").write_bytes(sealed(content, [one.public for one in people]))
    for one in (people[0], people[39]):
        command = [found, "-d", "-i", str(one.file(tmp_path / "key")), str(tmp_path / "file.age")]
        assert subprocess.run(command, capture_output=True, check=True).stdout == content


@pytest.mark.parametrize("count", [1, 2, 40])
def test_each_recipient_opens_a_file_and_nobody_else(count: int) -> None:
    people = [Person.new() for _ in range(count)]
    data = sealed(b"content", [one.public for one in people])
    assert len(data) == sealed_size(7)
    for one in [*people[::13], people[-1]]:
        assert by_pyrage(data, one) == opened(data, one.secret) == b"content"
    with pytest.raises(SealedForOthers):
        opened(data, OTHER.secret)
    assert AgeContent(data[:HEAD], len(data), [OTHER.secret, people[-1].secret]).size == 7


def test_recipients_for_whom_there_is_no_room_are_refused() -> None:
    with pytest.raises(SealUnusable, match="41 recipients are too many: 40 have room"):
        sealed(b"", [OWNER.public] * 41)


def test_no_two_files_have_the_same_key() -> None:
    first, second = sealed(b"content"), sealed(b"content")
    assert first[HEAD:] != second[HEAD:]
    with pytest.raises(PackError, match="was altered"):
        opened(first[:HEAD] + second[HEAD:])


@given(st.integers(0, 1 << 40))
def test_a_size_comes_back_from_the_sealed_one(size: int) -> None:
    assert plain_size(sealed_size(size)) == size
    # No other sealed size is taken for it.
    assert sealed_size(size + 1) > sealed_size(size)


@pytest.mark.parametrize("sealed_bytes", [0, 1, HEAD, HEAD + 1, HEAD + 16, HEAD + SEALED_CHUNK + 1])
def test_a_size_that_no_file_has_is_never_below_zero(sealed_bytes: int) -> None:
    assert plain_size(sealed_bytes) >= 0


# --- ranges ---------------------------------------------------------------------------------------

CONTENT = noise(3 * CHUNK + 100, 9)
SEALED = sealed(CONTENT)


@given(st.integers(0, len(CONTENT) + 10), st.integers(0, len(CONTENT) + 10))
def test_any_range_is_opened_by_itself(start: int, length: int) -> None:
    content = AgeContent(SEALED[:HEAD], len(SEALED), [OWNER.secret])
    low, size = content.place(start, length)
    assert (low - HEAD) % SEALED_CHUNK == 0
    assert size <= (length // CHUNK + 2) * SEALED_CHUNK
    found = content.open(start, length, SEALED[low : low + size])
    assert found == CONTENT[start : start + length]


def test_a_range_of_which_less_came_is_refused() -> None:
    content = AgeContent(SEALED[:HEAD], len(SEALED), [OWNER.secret])
    low, size = content.place(CHUNK, 10)
    for data in (SEALED[low : low + size - 1], SEALED[low : low + size + 1], b""):
        with pytest.raises(PackError, match="it is cut off"):
            content.open(CHUNK, 10, data)


# --- what was altered -----------------------------------------------------------------------------


def test_chunks_can_neither_be_altered_nor_reordered_nor_left_out() -> None:
    head, parts = SEALED[:HEAD], chunks(SEALED)
    bad = [
        [*parts[1::-1], *parts[2:]],
        [parts[0], *parts[2:]],
        parts[1:],
        parts[:-1],
        [*parts[:-1], parts[-1][:-1]],
        [*parts[:-1], parts[-1], parts[-1]],
        [parts[0], *parts],
        [],
    ]
    bad += [
        [*parts[:at], part[:byte] + bytes([part[byte] ^ 1]) + part[byte + 1 :], *parts[at + 1 :]]
        for at, part in enumerate(parts)
        for byte in (0, len(part) // 2, len(part) - 1)
    ]
    for some in bad:
        with pytest.raises(PackError):
            opened(head + b"".join(some))
    # Also where a server lies about the size, or cuts what it sends.
    with pytest.raises(PackError):
        opened(head + b"".join(parts[:-1]), size=len(SEALED))
    with pytest.raises(PackError):
        opened(SEALED, size=len(SEALED) - len(parts[-1]))


def test_of_each_chunk_that_is_right_the_content_comes_back() -> None:
    data = bytearray(SEALED)
    data[HEAD + SEALED_CHUNK + 5] ^= 1
    content = AgeContent(SEALED[:HEAD], len(SEALED), [OWNER.secret])
    for number in range(4):
        low, size = content.place(number * CHUNK, 100)
        if number == 1:
            with pytest.raises(PackError, match="was altered"):
                content.open(number * CHUNK, 100, data[low : low + size])
        else:
            found = content.open(number * CHUNK, 100, data[low : low + size])
            assert found == CONTENT[number * CHUNK :][:100]


@pytest.mark.parametrize("seed", range(5))
def test_a_header_that_was_altered_opens_nothing_else(seed: int) -> None:
    """At whatever byte: of the stanza, the padding, the MAC or the nonce."""
    data, chance = sealed(b"content"), random.Random(seed)
    for at in chance.sample(range(HEAD), 150):
        altered = data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
        with pytest.raises(PackError):
            opened(altered)


@pytest.mark.parametrize("length", [0, 1, 22, 100, HEAD - 17, HEAD - 1, HEAD, HEAD + 15])
def test_a_file_that_is_cut_within_its_head_opens_nothing(length: int) -> None:
    with pytest.raises(PackError):
        opened(sealed(b"content")[:length])


def header(*stanzas: bytes, dashes: bytes = b" " + b"A" * 43 + b"\n") -> bytes:
    """A header of these lines, padded as ours are, without a right MAC. dashes: what follows the
    three dashes.
    """
    begin = b"age-encryption.org/v1\n" + b"".join(one + b"\n" for one in stanzas)
    filling = b"-> ntt-backup " + sha256(begin).hexdigest().encode() + b" "
    room = HEAD - 16 - len(begin + filling) - len(b"\n\n---" + dashes)
    return begin + filling + b"x" * room + b"\n\n---" + dashes


def share(data: bytes = bytes(31) + b"\1") -> bytes:
    return age_encryption._encode(data)


HOSTILE = {
    "nothing": b"",
    "zeros": bytes(HEAD),
    "no version": header()[1:] + b"\n",
    "another version": header().replace(b"v1", b"v2"),
    "no stanza": header(),
    "a wrong sum": header().replace(b"-> ntt-backup ", b"-> ntt-backup 0", 1),
    "no MAC": header(dashes=b" " * 44 + b"\n"),
    "no dashes": header().replace(b"---", b"xxx"),
    "a MAC of another length": header(dashes=b" AAAA\n"),
    "no base64": header(b"-> X25519 " + b"*" * 43, b"*" * 43),
    "a share that is too short": header(b"-> X25519 AAAA", share()),
    "a share of low order": header(b"-> X25519 " + share(LOW_ORDER), share()),
    "a body that is missing": header(b"-> X25519 " + share()),
    "a body that is too long": header(b"-> X25519 " + share(), share(bytes(33))),
    "a body of the right length": header(b"-> X25519 " + share(), share()),
    "more words": header(b"-> X25519 " + share() + b" more", share()),
    "as many stanzas as fit": header(*[b"-> X25519 " + share(), share()] * 40),
    "only newlines": b"age-encryption.org/v1\n" + b"\n" * (HEAD - 22),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused_as_what_it_is(kind: str) -> None:
    data = (HOSTILE[kind] + bytes(100)).ljust(sealed_size(1000), b"\0")
    with pytest.raises(PackError):
        opened(data)


def test_a_stanza_of_ours_under_another_header_is_refused() -> None:
    """Whoever knows a recipient seals for him: the MAC needs the key of the file."""
    data = sealed(b"content")
    stanza = data.split(b"\n")[1:3]
    mac = data[: HEAD - 16].rpartition(b"---")[2]
    forged = header(b"-> other", *stanza, dashes=mac)
    assert len(forged) == HEAD - 16
    with pytest.raises(PackError, match="its header was altered"):
        opened(forged + data[HEAD - 16 :])


def test_a_header_that_was_altered_is_not_taken_for_one_for_others() -> None:
    """Whose pack or dump is damaged must not be told to look for another key."""
    data = sealed(b"content")
    for at in (30, 60, 100):
        altered = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(PackError, match="its header was altered") as caught:
            opened(altered)
        assert not isinstance(caught.value, SealedForOthers)


def test_what_another_program_has_sealed_is_no_file_of_ours() -> None:
    """Its header has another length, so nothing in it is where it is looked for."""
    recipient = pyrage.x25519.Recipient.from_str(OWNER.public)
    for size in (0, 10, 5000, 200_000):
        with pytest.raises(PackError):
            opened(pyrage.encrypt(noise(size, 1), [recipient]))


# --- keys -----------------------------------------------------------------------------------------


def test_keys_are_read_as_others_write_them() -> None:
    for one in (OWNER, OTHER):
        identity = read_identity(one.secret)
        assert read_identity(one.secret.lower()) == identity
        assert len(read_recipient(one.public)) == len(identity) == 32
    assert read_recipient(OWNER.public) != read_recipient(OTHER.public)


BAD_KEYS = [
    "",
    "1",
    "age1",
    OWNER.public[:-1],
    OWNER.public + "q",
    OWNER.public[:-1] + ("q" if OWNER.public[-1] != "q" else "p"),
    OWNER.public.replace("age1", "bge1"),
    OWNER.public.upper(),
    OWNER.public.capitalize(),
    OWNER.public[:20] + "b" + OWNER.public[21:],
    OWNER.public[:20] + "\u0661" + OWNER.public[21:],
    f" {OWNER.public}",
    "age1" + "q" * 58,
    "age1" + "q" * 10_000,
    "ssh-ed25519 AAAA",
]


@pytest.mark.parametrize("text", [*BAD_KEYS, OWNER.secret], ids=range(len(BAD_KEYS) + 1))
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(SealUnusable) as caught:
        sealed(b"", [text])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
    assert OWNER.secret[:25] not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [*BAD_KEYS, OWNER.public, OWNER.secret[:-1], OWNER.secret.title()],
    ids=range(len(BAD_KEYS) + 3),
)
def test_what_is_no_secret_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(SealUnusable, match="no secret key of age") as caught:
        read_identity(text)
    assert text[-20:] not in str(caught.value) or len(text) < 20


def test_each_character_of_a_key_is_proved() -> None:
    for at, (one, _) in enumerate(pairwise(OWNER.public)):
        other = "q" if one != "q" else "p"
        with pytest.raises(SealUnusable):
            read_recipient(OWNER.public[:at] + other + OWNER.public[at + 1 :])


def test_a_public_key_of_low_order_is_refused() -> None:
    """What is sealed for it, anybody opens."""
    text = bech32("age", LOW_ORDER)
    assert read_recipient(text) == LOW_ORDER
    with pytest.raises(SealUnusable, match="key of age is invalid"):
        sealed(b"", [text])


def bech32(prefix: str, data: bytes) -> str:
    """A key as BIP 173 writes it: the first checksum that fits, since six zeros make none."""
    value = int.from_bytes(data, "big") << 4
    numbers = [value >> 5 * at & 31 for at in range(51, -1, -1)]
    expanded = [*(ord(char) >> 5 for char in prefix), 0, *(ord(char) & 31 for char in prefix)]
    checksum = 1
    for number in [*expanded, *numbers, *[0] * 6]:
        top, checksum = checksum >> 25, (checksum & 0x1FFFFFF) << 5 ^ number
        for bit, generator in enumerate(age_encryption._GENERATORS):
            checksum ^= generator if top >> bit & 1 else 0
    numbers += [(checksum ^ 1) >> 5 * (5 - at) & 31 for at in range(6)]
    return f"{prefix}1" + "".join(age_encryption._BECH32[number] for number in numbers)


def test_the_tests_own_keys_are_right() -> None:
    assert bech32("age", read_recipient(OWNER.public)) == OWNER.public
