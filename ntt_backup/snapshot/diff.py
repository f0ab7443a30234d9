"""A diff tells what differs between two versions: their manifests are merged line by line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from ntt_backup.snapshot.format.entry import DIRECTORY, Entry, order
from ntt_backup.snapshot.format.manifest import ManifestReader


class Kind(StrEnum):
    """Says how an entry differs."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    # Its content is the same, its mode, owner, time or attributes are not.
    ATTRIBUTES = "attributes"


class Difference(NamedTuple):
    """An entry that differs. old or new is None where there is none."""

    kind: Kind
    old: Entry | None
    new: Entry | None

    @property
    def entry(self) -> Entry:
        """Returns the new entry; the old one of what was removed."""
        one = self.new or self.old
        assert one is not None
        return one


def differences(old: ManifestReader, new: ManifestReader) -> Iterator[Difference]:
    """Yields what differs, in the order of paths. Both manifests are proved at the end. Raises
    SnapshotDamaged.
    """
    befores, afters = old.entries(), new.entries()
    before, after = next(befores, None), next(afters, None)
    while before is not None or after is not None:
        left = order(before.path) if before is not None else None
        right = order(after.path) if after is not None else None
        if right is None or (left is not None and left < right):
            yield Difference(Kind.REMOVED, before, None)
            before = next(befores, None)
        elif left is None or right < left:
            yield Difference(Kind.ADDED, None, after)
            after = next(afters, None)
        else:
            assert before is not None
            assert after is not None
            if kind := _kind(before, after):
                yield Difference(kind, before, after)
            before, after = next(befores, None), next(afters, None)


def _kind(old: Entry, new: Entry) -> Kind | None:
    if _content(old) != _content(new):
        return Kind.CHANGED
    return None if _attributes(old) == _attributes(new) else Kind.ATTRIBUTES


def _content(one: Entry) -> tuple[object, ...]:
    return one.kind, one.size, one.digest, one.target


def _attributes(one: Entry) -> Entry:
    # Of a directory, the time says no more than that something in it is new or gone.
    time = 0 if one.kind == DIRECTORY else one.mtime
    return replace(one, mtime=time, ctime=0, inode=0, block=0, extents=[], unsettled=False)
