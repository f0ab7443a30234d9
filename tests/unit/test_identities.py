"""The identities in the operator's file, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ntt_backup.config.sealing import Keyring
from ntt_backup.errors import ConfigError
from tests.helpers.blobs import Person

OWNER = Person.new()


@pytest.mark.parametrize(
    "text",
    [
        f"{OWNER.secret}",
        f"# created: today\r\n{OWNER.secret}\r\n",
        f"\ufeff# created: today\n\n  {OWNER.secret}\n",
    ],
    ids=["bare", "CRLF", "byte order mark"],
)
def test_a_file_is_read_as_editors_write_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text, newline="")
    assert [*Keyring(lambda: file).identities] == [OWNER.secret]


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", OWNER.public, "age-encryption.org/v1\n-> scrypt", OWNER.secret[:-5]],
    ids=["empty", "comments", "public", "encrypted", "cut off"],
)
def test_what_is_no_identity_is_told_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        _ = Keyring(lambda: file).identities
    assert str(file) in refused.value.message
    assert OWNER.secret[20:40] not in f"{refused.value} {refused.value.hint}"


def test_keys_that_can_be_read_once_are_there_for_all_that_a_command_reads(tmp_path: Path) -> None:
    """As with `--identity <(age -d FILE)`: a drill reads the catalog, and then the blobs."""
    file = OWNER.file(tmp_path / "key")
    for _ in range(2):
        assert [*Keyring(lambda: file).identities] == [OWNER.secret]
        file.unlink(missing_ok=True)
