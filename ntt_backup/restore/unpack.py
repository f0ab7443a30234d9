"""Unpacks pack files into a directory, in several processes.

It needs no catalog and no remote. Each process has a slice of a pack's table, which is in the order
of blobids, and a stage of its own in the scratch space of the target directory; what is staged is
synced before it is published. So every name that is seen is complete, and a call that was
interrupted is made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from ntt_backup.config.sealing import Keyring
from ntt_backup.errors import SOME_FAILED, ConfigError, DestinationError
from ntt_backup.model import Failure, Failures, Reason
from ntt_backup.name_hash import HashOfNames
from ntt_backup.pack.age_encryption import SealedForOthers
from ntt_backup.pack.format import Entry, PackError
from ntt_backup.pack.reader import PackFile, Salvage
from ntt_backup.packstore.contents import give_blobs
from ntt_backup.process.child import run_helpers
from ntt_backup.restore.destination import Found, RestoreTarget, TargetWriter, destination

# Opening a file takes as long as writing so many bytes.
_COST_OF_A_BLOB: Final = 1 << 16
# 32,768 small blobs are published at once, or fewer large ones.
_COST_OF_A_STEP: Final = 1 << 31
_FEWEST_A_PROCESS: Final = 256

Pack = PackFile | Salvage
Slice = Sequence[Entry]
# How many blobs were unpacked, how many were right before; the bytes of the former; what is wrong
# with others, by their blobids.
Step = dict[str, Any]


@dataclass(slots=True)
class UnpackedAll:
    """The counts of `unpack` so far.

    Attributes:
        unpacked: Blobs that were written, with so many `bytes` of content.
        right: Blobs that the directory had already.
        part: How much of the work is done, from 0 to 1.
        wrong: The blobs that are damaged in their pack.
        damaged: Descriptions of packs that are damaged as a whole.
    """

    unpacked: int = 0
    right: int = 0
    bytes: int = 0
    part: float | None = None
    duration_s: float = 0.0
    wrong: Failures = field(default_factory=Failures)
    damaged: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.wrong or self.damaged else 0


def unpack(
    files: Sequence[Path],
    to: Path,
    *,
    jobs: int,
    verify: bool,
    on_progress: Callable[[UnpackedAll], None],
    keyring: Keyring | None = None,
) -> UnpackedAll:
    """Unpacks all files; keyring opens those that are sealed. One that is sealed for other
    identities is damaged. Raises ConfigError for a file that cannot be read, and where nothing
    sealed could be opened and there was nothing else; DestinationError, and LockHeld.
    """
    keyring = keyring or Keyring()
    began = time.monotonic()
    done = UnpackedAll()
    with closing(RestoreTarget(to)) as target:
        for number, path in enumerate(files):
            with ExitStack() as stack:
                opened = _open(path, keyring, done)
                if opened is None:
                    continue
                pack, entries = opened
                stack.callback(pack.close)
                slices = _shares(entries, jobs)
                checked = verify or isinstance(pack, Salvage)
                names = pack.names  # Found out here, and not by each process.
                settled = 0
                for step in _work(target, pack, slices, str(number), checked, names):
                    done.unpacked += step["unpacked"]
                    done.right += step["right"]
                    done.bytes += step["bytes"]
                    for blobid, text in step["wrong"].items():
                        done.wrong.add(Failure(blobid, Reason.CORRUPT_SOURCE, text))
                    settled += step["unpacked"] + step["right"] + len(step["wrong"])
                    done.part = (number + settled / max(len(entries), 1)) / len(files)
                    done.duration_s = time.monotonic() - began
                    on_progress(done)
        target.sync_names()
    if not (done.unpacked or done.right):
        keyring.require_fit()
    done.duration_s = time.monotonic() - began
    return done


def _open(path: Path, keyring: Keyring, done: UnpackedAll) -> tuple[Pack, Slice] | None:
    """Returns a pack and its blobs; those that can still be found where it is damaged, None where
    it is sealed for other identities.
    """
    try:
        try:
            pack = PackFile(path, keyring.unseal)
            return pack, list(pack.table)
        except SealedForOthers as error:
            done.damaged.append(f"{path}: {error}")
            return None
        except PackError as error:
            salvage = Salvage(path)
            found = salvage.entries()
            done.damaged.append(f"{path}: {error}")
            return salvage, found
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}", detail=error.strerror or str(error), hint="name a pack file"
        ) from error


def _shares(entries: Slice, jobs: int) -> list[Slice]:
    """Returns at most as many parts as there are processes, which take about equally long."""
    jobs = max(1, min(jobs, len(entries) // _FEWEST_A_PROCESS))
    return list(_cut(entries, sum(_COST_OF_A_BLOB + one.raw for one in entries) / jobs))


def _cut(entries: Slice, cost: float) -> Iterator[Slice]:
    """Yields parts of the same cost in bytes; the last one may cost less."""
    start, found = 0, 0
    for number, one in enumerate(entries, 1):
        found += _COST_OF_A_BLOB + one.raw
        if found >= cost:
            yield entries[start:number]
            start, found = number, 0
    if start < len(entries):
        yield entries[start:]


def _work(
    target: RestoreTarget,
    pack: Pack,
    slices: Sequence[Slice],
    stage: str,
    verify: bool,
    names: HashOfNames,
) -> Iterator[Step]:
    """Yields what was done, step by step. A single slice takes no other process. stage: how the
    names of the stages begin.
    """
    unpack_slice = partial(_unpack_slice, target, pack, verify, names)
    if len(slices) == 1:
        yield from unpack_slice(stage, slices[0])
        return
    bodies = [
        partial(_help, target, pack, partial(unpack_slice, f"{stage}-{number}", entries))
        for number, entries in enumerate(slices)
    ]
    yield from run_helpers(bodies, "ntt-unpack", DestinationError)


def _help(
    target: RestoreTarget, pack: Pack, unpack_slice: Callable[[], Iterator[Step]]
) -> Iterator[Step]:
    pack.open()
    target.open()
    yield from unpack_slice()


def _unpack_slice(
    target: RestoreTarget, pack: Pack, verify: bool, names: HashOfNames, stage: str, entries: Slice
) -> Iterator[Step]:
    # Nothing resumes what was unpacked in part.
    writer = TargetWriter(
        target, stage, where="in the pack", verify=verify, keep_parts=False, names=names
    )
    with closing(writer), destination(target.root):
        for some in _cut(entries, _COST_OF_A_STEP):
            lacking = [
                one
                for one in some
                if writer.find(one.digest, one.raw, trust_size=False) is Found.NOT_RIGHT
            ]
            give_blobs(str(pack.path), pack, sorted(lacking, key=attrgetter("offset")), writer)
            writer.publish()
            wrong = {one.blobid: one.detail for one in writer.failures}
            wrong.update((digest.hex(), text) for digest, text in writer.refused)
            writer.failures.clear()
            writer.refused.clear()
            new = [one.raw for one in lacking if one.digest.hex() not in wrong]
            right = len(some) - len(lacking)
            yield {"unpacked": len(new), "right": right, "bytes": sum(new), "wrong": wrong}
