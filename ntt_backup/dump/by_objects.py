"""A bucket keeps `pgdump/`; see `remote_dir`.

A dump goes up in parts as pg_dump writes it, and the bucket compares each part with its SHA-256. It
becomes an object, under its name, only when it is asked to: until then its parts are
visible to nobody.

Where there are recipients it is sealed by age on its way, and called `NAME.age`. Its record is not:
what is in that tells the names of host and database, and when it was made.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from ntt_backup.config.sealing import NOT_SEALED, Keyring, SealPolicy
from ntt_backup.dump.age_stream import Sealing, opened
from ntt_backup.dump.record import Contents, DumpRecord, Stored, read
from ntt_backup.errors import NameTaken, ProtocolViolation, RemoteDenied
from ntt_backup.objects import store_format
from ntt_backup.objects.bucket import (
    DEAD_SECONDS,
    Bucket,
    ObjectArchived,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    sweep,
)
from ntt_backup.objects.keys import DUMPS
from ntt_backup.objects.upload import ObjectUpload
from ntt_backup.wire.dump_messages import MAX_DUMPS, MAX_RECORD, is_name

_RECORD: Final = ".json"
_SEALED: Final = ".age"
_PIECE: Final = 8 * 1024**2
# Each dump has two.
_MOST_OBJECTS: Final = 4 * MAX_DUMPS


@dataclass(frozen=True, slots=True)
class DumpsByObjects:
    """Has the methods of `DumpsByReceiver`, except those of an upload. recipients: whom dumps are
    sealed for. keyring opens those that are sealed; policy says which need not be. Of two dumps of
    one name the sealed one counts.
    """

    bucket: Bucket
    part_size: int
    recipients: Sequence[str] = ()
    keyring: Keyring = field(default_factory=Keyring)
    policy: SealPolicy = field(default_factory=SealPolicy)

    def contents(self) -> Contents:
        infos: dict[str, ObjectInfo] = {}
        for info in self.bucket.list(DUMPS):
            infos[info.key.removeprefix(DUMPS)] = info
            if len(infos) > _MOST_OBJECTS:
                raise ProtocolViolation(
                    "the bucket lists more dumps than there can be",
                    detail=f"{_MOST_OBJECTS:,} objects below {DUMPS}",
                    hint="somebody else has written there; look at the bucket",
                )
        names = {name.removesuffix(_RECORD).removesuffix(_SEALED) for name in infos}
        if len(names) > MAX_DUMPS:  # The record of each is asked for.
            raise RemoteDenied(
                f"there are more than {MAX_DUMPS:,} dumps in the bucket",
                detail=f"{len(names):,} names below {DUMPS}",
                hint="remove what no host of yours has put there, by the tools of the object store",
            )
        dumps = []
        for name in filter(is_name, names):
            record = self._record(name) if name + _RECORD in infos else None
            # What somebody else has put beside a dump, with the other ending, does not count.
            sealed = record.sealed > 0 if record is not None else name + _SEALED in infos
            found = infos.get(name + _SEALED if sealed else name)
            size, arrived = (found.size, found.modified) if found is not None else (None, None)
            refused = ""
            if found is not None and not found.key.endswith(_SEALED):
                refused = NOT_SEALED if self.policy.refuses(arrived) else ""
            dumps.append(Stored(name, size, record, arrived, refused))
        return Contents.of(dumps, placed=store_format.read(self.bucket) is not None)

    def try_out(self) -> None:
        trial = UploadByObjects(self.bucket, f"{DUMPS}trial", self.part_size, self.recipients)
        trial.send(b"0")
        trial.finish()
        trial.give_up()

    def upload(self, name: str) -> UploadByObjects:
        sweep(self.bucket, (DUMPS,), time.time() - DEAD_SECONDS)
        return UploadByObjects(self.bucket, DUMPS + name, self.part_size, self.recipients)

    def drop(self, names: Sequence[str]) -> int:
        for name in names:
            record = self._record(name)
            # What somebody has put beside a dump, with the other ending, is no part of it.
            content = ("", _SEALED) if record is None else (_SEALED if record.sealed else "",)
            # In this order: what has a record is found again.
            for kind in (*content, _RECORD):
                self.bucket.delete(DUMPS + name + kind)
        return len(names)

    def fetch(self, name: str) -> Generator[bytes, None, None]:
        if (record := self._record(name)) is not None:
            sealed = record.sealed > 0
        else:
            sealed = self.bucket.head(DUMPS + name + _SEALED) is not None
        key = DUMPS + name + (_SEALED if sealed else "")
        plain = None if sealed else self.bucket.head(key)
        if plain is not None and self.policy.refuses(plain.modified):
            raise RemoteDenied(
                f"the dump {name} {NOT_SEALED}",
                hint="where it is yours, set pack.unsealed_until to a day after it was made",
            )
        pieces = _pieces(self.bucket, key)
        try:
            yield from opened(pieces, self.keyring) if sealed else pieces
        except (ObjectMissing, ObjectArchived) as error:
            why = "gone" if isinstance(error, ObjectMissing) else "in an archive class: thaw it"
            raise RemoteDenied(
                "a dump cannot be read",
                detail=f"{key} is {why}",
                hint="`ntt-backup-remote dumps` lists the others; --dump NAME takes one",
            ) from error

    def close(self) -> None:
        """Does nothing: no connection outlives its question."""

    def _record(self, name: str) -> DumpRecord | None:
        try:
            text = self.bucket.get_range(DUMPS + name + _RECORD, 0, MAX_RECORD)
        except (ObjectMissing, ObjectArchived):
            return None
        return read(text.decode("utf-8", "replace"))


class UploadByObjects:
    """Has the methods of `DumpsByReceiver` for an upload."""

    def __init__(
        self, bucket: Bucket, key: str, part_size: int, recipients: Sequence[str] = ()
    ) -> None:
        self._bucket = bucket
        self._sealing = Sealing(recipients) if recipients else None
        self._record = key + _RECORD
        self._upload = ObjectUpload(
            bucket, key + (_SEALED if recipients else ""), part_size, "a dump"
        )
        self._given = sha256()
        self._bytes = 0
        self.poll = self._upload.poll

    def send(self, data: bytes) -> None:
        self._given.update(data)
        self._bytes += len(data)
        self._upload.add(data if self._sealing is None else self._sealing.add(data))

    def finish(self) -> tuple[int, str]:
        """Sends the rest; returns the size and the SHA-256 of what the bucket has taken, before
        it was sealed.
        """
        if self._sealing is not None:
            self._upload.add(self._sealing.end())
        self._upload.flush()
        return self._bytes, self._given.hexdigest()

    @property
    def sealed(self) -> int:
        """Returns the size of the dump once it is sealed, after `finish`; 0 where it is not."""
        return self._upload.size if self._sealing is not None else 0

    def name(self, record: DumpRecord) -> None:
        """Gives the dump its name. The record comes first: a dump without one would stay. Raises
        NameTaken: the name of an upload can be listed, so somebody else may be first.
        """
        text = record.to_json().encode()
        try:
            self._bucket.put(self._record, text, sha256(text).digest())
        except ObjectExists as error:
            # Or the answer to the first request for it was lost.
            if not self._is_record(text):
                raise NameTaken(self._record, "a dump") from error
        try:
            self._upload.finish()
        except NameTaken:
            # Else the record would vouch for the content of somebody else. Who may not remove it
            # removes no older dumps either.
            with suppress(RemoteDenied):
                self._bucket.delete(self._record)
            raise

    def give_up(self) -> None:
        """Drops the parts. Never raises."""
        if self._sealing is not None:
            self._sealing.close()
        self._upload.give_up()

    def _is_record(self, text: bytes) -> bool:
        try:
            return self._bucket.get_range(self._record, 0, len(text) + 1) == text
        except (ObjectMissing, ObjectArchived):
            return False


def _pieces(bucket: Bucket, key: str) -> Iterator[bytes]:
    at = 0
    while data := bucket.get_range(key, at, _PIECE):
        yield data
        at += len(data)
