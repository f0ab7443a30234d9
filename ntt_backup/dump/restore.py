"""The catalog's database comes back from the remote, into an empty one.

The obvious way, a dump copied here and given to pg_restore, needs room for it on the day on which a
disk has died. So what the remote sends goes straight into pg_restore; and since nothing proves the
bytes before the last of them has come, the whole is one transaction, and the end of the input is
held back until its SHA-256 is right. A damaged dump is reported, and the one before it is
taken.

Owners and grants are left out: the roles of the lost server may not exist here, and one that is
missing would end the whole restore. They stand in the dump as SQL, and are handed out as such.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.catalog import connection
from ntt_backup.config import RemoteConfig, identity
from ntt_backup.dump import pg_programs
from ntt_backup.dump.chain import ChainBroken, DumpText, chain_of
from ntt_backup.dump.record import Stored
from ntt_backup.dump.remote_dir import open_remote_dir
from ntt_backup.errors import DumpFailed
from ntt_backup.format import many
from ntt_backup.process.pipeline import Child, start, wait_for, write

# More than pg_restore needs to see that there is more to come: a dump ends within its last table.
_HELD: Final = 64 * 1024
_RIGHT: Final = re.compile(r"(ALTER .+ OWNER TO |ALTER DEFAULT PRIVILEGES |GRANT |REVOKE ).+;$")
_WAIT_SECONDS: Final = 1.0
_SHOWN: Final = 500


@dataclass(frozen=True, slots=True)
class Recalled:
    """The dump that came back, as user. rights: the SQL that gives back the owners and grants which
    others had in it. others: further databases of which the target has dumps.
    """

    dump: Stored
    user: str
    rights: tuple[str, ...]
    others: tuple[str, ...]


def restore_catalog(
    settings: RemoteConfig, warn: Callable[[str], None], *, name: str | None = None
) -> Recalled:
    """Fills the database of catalog.url from the newest dump of the target that is good; from the
    one called name, where that is given.

    warn is told of each that is damaged. Raises BackupError; the database is as it was then.
    """
    application = identity.application("restore")
    with connection.connect(settings.catalog.url, application) as conn:
        version, user = conn.info.server_version, conn.info.user
    pg_restore = pg_programs.find(settings.dump.bin, version).pg_restore
    url, secret = connection.for_program(settings.catalog.url, application)
    with closing(open_remote_dir(settings)) as remote_dir:
        ours = [
            one
            for one in remote_dir.contents().dumps
            if one.record is not None and one.record.target == settings.target
        ]
        known, damaged = {one.name: one for one in ours}, ""
        tried = [one for one in reversed(ours) if name in (None, one.name)]
        for one in tried:
            if not one.whole:
                warn(f"{one.name} {one.torn}")
                continue
            try:
                chain = chain_of(one, known)
            except ChainBroken as error:
                warn(f"{one.name} cannot be read: {error}")
                continue
            if damaged in (member.name for member in chain):
                warn(f"{one.name} cannot be read: {damaged} is damaged")
                continue
            text = DumpText(remote_dir, chain)
            head = _pour(text, one, pg_restore, url, secret)
            if head is not None:
                of = {two.name: two.record.database for two in ours if two.record is not None}
                others = tuple(sorted({*of.values()} - {of[one.name]}))
                return Recalled(one, user, _rights(pg_restore, head, user, warn), others)
            damaged = text.damaged or one.name
            why = "" if damaged == one.name else f" cannot be read: {damaged}"
            warn(f"{one.name}{why} is damaged: {text.why or 'its SHA-256 is another'}")
    if name is not None:
        raise DumpFailed(
            f"the dump {name} is damaged" if tried else f"there is no dump {name} on the remote",
            detail=f"there are {', '.join(known) or 'none'}",
            hint="restore another one; without --dump it is the newest that is good",
        )
    raise DumpFailed(
        "there is no good dump of the catalog on the remote",
        detail=f"looked at {many(len(ours), 'dump')} of target {settings.target} in"
        f" {settings.remote.path}/pgdump",
        hint="blobs are restored without a catalog: ntt-backup-remote restore --to DIR;"
        " ntt-backup-remote init-db; ntt-backup-remote scan",
    )


def _pour(
    text: DumpText, one: Stored, pg_restore: Path, url: str, secret: dict[str, str]
) -> bytes | None:
    """Restores the dump into the database; returns its beginning, or None, and nothing done, where
    its content is not right.
    """
    argv = [str(pg_restore), "--single-transaction", "--exit-on-error", "--no-password"]
    argv += ["--no-owner", "--no-privileges", f"--dbname={url}"]
    pieces = iter(text)
    child = start(argv, env={**os.environ, **secret, "LC_ALL": "C"})
    try:
        held, failure, head = b"", None, bytearray()
        for data in _proved(pieces, one):
            if data is None:
                return None
            head += data[: max(0, pg_programs.HEAD_BYTES - len(head))]
            if failure is None:
                held += data
                # What pg_restore stumbles over may be damage: the end will tell.
                try:
                    _feed(child, held[:-_HELD])
                except DumpFailed as error:
                    failure = error
                held = held[-_HELD:]
        if failure is not None:
            raise failure
        _feed(child, held)
        child.close_stdin()
        while (status := child.wait(_WAIT_SECONDS)) is None:
            continue  # Building the indexes of millions of rows takes as long as it takes.
        if status != 0:
            raise _failed(child)
        return bytes(head)
    finally:
        child.kill()
        pieces.close()


def _rights(
    pg_restore: Path, head: bytes, user: str, warn: Callable[[str], None]
) -> tuple[str, ...]:
    """Returns the statements on owners and grants in a dump, except for user as the owner."""
    try:
        script = pg_programs.read_head(pg_restore, head, "--schema-only", "--file=-")
    except DumpFailed as error:
        warn(f"owners and grants could not be read from the dump: {error}")
        return ()
    lines = script.decode("utf-8", "backslashreplace").splitlines()
    owned = (f" OWNER TO {user};", f' OWNER TO "{user}";')
    return tuple(line for line in lines if _RIGHT.match(line) and not line.endswith(owned))


def _proved(pieces: Iterator[bytes], one: Stored) -> Iterator[bytes | None]:
    """Yields the pieces; after the last one None, where all of them together are not what was
    dumped.
    """
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        yield piece
    if (size, digest.hexdigest()) != one.text:
        yield None


def _feed(child: Child, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        child.drain_stderr()
        wait_for(reading=child.fds, writing=[child.stdin_fd], timeout=_WAIT_SECONDS)
        try:
            rest = rest[write(child.stdin_fd, rest) :]
        except BrokenPipeError:
            raise _failed(child) from None


def _failed(child: Child) -> DumpFailed:
    status = child.wait(_WAIT_SECONDS)
    said = "; ".join(child.stderr.text.splitlines())[-_SHOWN:]
    return DumpFailed(
        "pg_restore failed, and the database is as it was",
        detail=said or f"status {status}",
        hint="it needs an empty database: createdb one, and name it in catalog.url",
    )
