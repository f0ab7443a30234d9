"""Sessions of a receiver, mutated: no traceback, no right that `--allow` does not list, no litter.

Each session begins as one that the program itself would have: it sends blobs, packs, dumps or files
of snapshots, or asks for them. Then frames are lost, doubled, exchanged, taken from other kinds of
session, and changed inside with a right checksum, so that the change is not refused at the door.
The remote has a blob that is right and one that is not, a pack, a dump, a version, and a file
outside.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import zlib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from blake3 import blake3

from ntt_backup.receiver.terms import ALLOWED
from ntt_backup.wire import framing, messages
from ntt_backup.wire.framing import FORMAT
from ntt_backup.wire.stored_names import DUMPS, PACKS, SNAPSHOTS, require_name
from tests.fuzz.mutations import mutated
from tests.helpers.receivers import (
    BYE,
    PING,
    PLACE,
    ScriptedSession,
    a_dump,
    a_file,
    a_record,
    abort,
    an_unnamed_file,
    ask_hashes,
    commit,
    digest_of,
    place_of,
)

# What each word of --allow lets pass; without it no such frame may come back.
_ANSWERS: dict[str, set[int]] = {
    "list": {messages.NAMES, messages.STRAY, messages.LISTED},
    "verify": {messages.SUMS, messages.HASHED},
    "get": {messages.CONTENTS, messages.BLOB, messages.PIECE, messages.GIVEN},
}
_RIGHT, _WRONG, _NEW = b"right and secret", b"rotten", b"a new blob"
_DUMP, _MANIFEST = b"a dump and secret", b"a manifest and secret"
_DUMP_NAME, _NEW_DUMP = "20260102T030405Z-01234567.dump", "20260103T030405Z-01234567.dump"
_VERSION, _NEW_VERSION = "etc/20260102T030405Z-01234567", "etc/20260103T030405Z-01234567"
_LARGE = bytes(range(256)) * 300
_STORED_PACK, _MARKER = b"a pack and secret", b'{"format": 1}'
_PACK, _NEW_PACK = (f"packs/ab/ab{'0' * 14}-ab{'f' * 14}-{one * 32}.tar" for one in "12")
_LARGE_BLOB, _TRIAL = f"blobs/ab/cd/abcd{'0' * 60}", "packs/trial-0badcafe"


class Remote:
    """A remote as it stands before each session, and what must hold after it."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.root = parent / "root"
        self.outside = parent / "outside"
        self.build()

    def build(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        for path, content in {
            place_of(self.root, digest_of(_RIGHT)): _RIGHT,
            place_of(self.root, digest_of(b"what it was")): _WRONG,
            self.root / "pgdump" / _DUMP_NAME: _DUMP,
            self.root / "pgdump" / f"{_DUMP_NAME}.json": a_record(_DUMP) + b"\n",
            self.root / "snapshots" / _VERSION / "manifest": _MANIFEST,
            self.root / _PACK: _STORED_PACK,
            self.root / FORMAT: _MARKER,
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self.outside.mkdir(exist_ok=True)
        (self.outside / "precious").write_bytes(b"precious")
        (self.root / "link").symlink_to(self.outside)
        self.before = self.tree()

    def tree(self) -> dict[str, bytes]:
        found = {}
        for directory, _, names in os.walk(self.parent):
            for name in names:
                path = Path(directory, name)
                found[str(path.relative_to(self.parent))] = (
                    os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
                )
        return found

    def harm(self, allow: frozenset[str], kinds: set[int]) -> Iterator[str]:
        """Yields what a session with these rights may not have done."""
        for word, answers in _ANSWERS.items():
            if word not in allow and kinds & answers:
                yield f"it answered without {word}: {sorted(kinds & answers)}"
        after = self.tree()
        # An upload that was interrupted may be resumed for as long as it is kept.
        changed = {
            name
            for name in self.before.keys() | after.keys()
            if self.before.get(name) != after.get(name)
            and not name.startswith("root/.ntt-incoming/partial/")
        }
        # A name is free again once its file was removed.
        may_remove = allow >= {"prune", "replace"}
        for name in sorted(changed):
            content = after.get(name)
            below = name.split("/")[1]
            if below == "by-hash":
                if content is None and may_remove:
                    continue
                right = content is not None and blake3(content).hexdigest() == Path(name).name
                if "put" not in allow or not right or self.before.get(name) == _RIGHT:
                    yield f"a blob changed: {name}"
            elif below == "pgdump":
                kept = name in self.before and "replace" not in allow
                if "dump" not in allow or kept:
                    yield f"a dump changed: {name}"
            elif below == "snapshots":
                kept = name in self.before and "replace" not in allow
                if "snapshot" not in allow or kept:
                    yield f"a version changed: {name}"
            elif below in ("packs", "blobs", FORMAT):
                try:
                    require_name(PACKS, name.removeprefix("root/"))
                except ValueError:
                    yield f"it left {name}"
                kept = name in self.before and not may_remove
                if "packs" not in allow or kept:
                    yield f"a file of packs changed: {name}"
            else:
                yield f"it left or changed {name}"
        if changed:
            self.build()


def _plans(client: ScriptedSession) -> list[tuple[dict[str, Any], list[bytes]]]:
    """Returns the purpose of each session, as HELLO tells it, and its frames."""
    right, wrong = digest_of(_RIGHT), digest_of(b"what it was")
    low, high = bytes(32), b"\xff" * 32
    blobs = [
        client.batch(1, [_NEW, b"another", b""]),
        client.batch(2, [_NEW, _RIGHT, b"what it was"], compress=zlib.compress, codec=1),
        client.batch(3, [_LARGE], large=True),
        messages.BATCH.frame(4, 1, len(_NEW)) + client.pack([_NEW]) + abort(4),
        messages.ASK_OFFSET.frame(digest_of(_LARGE), len(_LARGE)),
        commit(5),
    ]
    reads = [
        messages.LIST.frame(low, high, 100),
        ask_hashes([right, wrong]),
        messages.VERIFY.frame(messages.SHA256, bytes(32), [right, wrong]),
        messages.GET.frame(0, [right, wrong]),
    ]
    dumps = [
        messages.FILES.frame(""),
        a_dump(b"a new dump", _NEW_DUMP),
        a_file(b"a sealed dump", f"{_DUMP_NAME}.age", slot=2),
        messages.READ.frame(0, 100, _DUMP_NAME),
        messages.READ.frame(0, 100, f"{_DUMP_NAME}.json"),
        messages.REMOVE.frame([f"{_DUMP_NAME}.json"]),
        messages.REMOVE.frame(
            name + end for name in (_DUMP_NAME, _NEW_DUMP) for end in ("", ".age", ".json")
        ),
    ]
    snapshots = [
        messages.FILES.frame(""),
        messages.FILES.frame("etc/"),
        a_file(b"a new manifest", f"{_NEW_VERSION}/manifest"),
        a_file(b"a new pack", f"{_NEW_VERSION}/pack-00001", slot=1),
        an_unnamed_file(b"a map", slot=3),
        messages.DISCARD.frame(3),
        messages.READ.frame(0, 100, f"{_VERSION}/manifest"),
        messages.REMOVE.frame([f"{_VERSION}/manifest", f"{_NEW_VERSION}/manifest"]),
    ]
    packs = [
        messages.FILES.frame(""),
        messages.FILES.frame("packs/ab/"),
        messages.FILES.frame(FORMAT),
        a_file(b"a new pack", _NEW_PACK),
        a_file(b"another pack", _PACK, slot=1),
        a_file(_LARGE, _LARGE_BLOB, slot=2),
        a_file(b"{}", FORMAT, slot=3),
        a_file(b"a trial", _TRIAL),
        messages.READ.frame(0, 100, _PACK),
        messages.READ.frame(0, 100, FORMAT),
        *(messages.PROVE.frame(kind, _PACK) for kind in messages.HASHES.values()),
        messages.REMOVE.frame([_TRIAL]),
        messages.REMOVE.frame([_TRIAL, _PACK]),
    ]
    return [
        ({}, blobs),
        ({"reading": 1}, reads),
        ({"files": DUMPS}, dumps),
        ({"files": SNAPSHOTS}, snapshots),
        ({"files": PACKS}, packs),
    ]


def _is_told(kind: int, payload: bytes) -> bool:
    """Returns whether a frame is a piece of what whoever may list may read: records, the marker."""
    if kind != messages.PIECE:
        return False
    piece = messages.PIECE.read(memoryview(payload))
    secrets = (_RIGHT, _WRONG, _DUMP, _MANIFEST, _STORED_PACK)
    told = a_record(_DUMP) + _MARKER
    return not any(bytes(piece) in one for one in secrets) or bytes(piece) in told


def _frames(data: bytes) -> list[bytes]:
    """Returns the frames that data consists of."""
    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("!I", data, at)
        found.append(data[at : at + framing.HEADER.size + length])
        at += framing.HEADER.size + length
    return found


def _changed(frame: bytes, chance: random.Random) -> bytes:
    """Returns a frame whose payload is mutated, with a right length and checksum."""
    if len(frame) < framing.HEADER.size:  # It was cut before.
        return frame
    kind = frame[4]
    end = len(frame) if kind in framing.CONTENT else len(frame) - framing.CRC_BYTES
    payload = mutated(frame[framing.HEADER.size : end], chance)
    return framing.frame(kind, payload)


def _mutated(frames: list[bytes], others: list[bytes], chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(frames) + 1)
        way = chance.randrange(7)
        if way == 0 or at == len(frames):
            frames.insert(at, chance.choice(others))
        elif way == 1:
            del frames[at]
        elif way == 2:
            frames.insert(chance.randrange(len(frames)), frames[at])
        elif way == 3:
            frames[at] = mutated(frames[at], chance)
        else:
            frames[at] = _changed(frames[at], chance)
    data = b"".join(frames)
    return data[: chance.randrange(len(data) + 1)] if chance.random() < 0.1 else data


def play(parent: Path, seed: int, rounds: int) -> Iterator[str]:
    """Plays sessions in this process; yields each harm that was done, with what repeats it."""
    remote = Remote(parent)
    words = [frozenset(some) for n in range(4) for some in combinations(ALLOWED, n)]
    for number in range(rounds):
        chance = random.Random(f"{seed}/{number}")
        allow = chance.choice(words)
        hash = chance.choice(("sha256", "blake3"))
        client = ScriptedSession(remote.root, allow, hash=hash)
        plans = _plans(client)
        others = [frame for _, parts in plans for part in parts for frame in _frames(part)]
        others += [BYE, PING, PLACE, client.hello_frame()]
        purpose, parts = chance.choice(plans)
        said = [frame for part in chance.sample(parts, len(parts)) for frame in _frames(part)]
        hello = client.hello_frame(sync="fsync", **purpose)
        if chance.random() < 0.1:
            hello = _changed(hello, chance)
        data = hello + _mutated(said, others, chance)
        try:
            client.send(data)
            kinds = {kind for kind, payload in client.answers if not _is_told(kind, payload)}
            if client.status not in (0, 1):
                yield f"seed {seed}, session {number}: exit status {client.status}"
        except Exception as error:  # noqa: BLE001  Whatever escapes is what is looked for.
            yield f"seed {seed}, session {number}: {error!r} with --allow {sorted(allow)}"
            remote.build()
            continue
        for harm in remote.harm(allow, kinds):
            yield f"seed {seed}, session {number}: {harm} with --allow {sorted(allow)}"
