"""The program, which notes what it promises, and may be broken on purpose.

Started in place of `ntt-backup-remote`. The receiver's source travels with each connection. What is
added to it here notes each receipt, and each file of dumps and snapshots that was named, right
behind the promise, with CLOCK_MONOTONIC. Without a receiver (`tar`) the client notes what it hears.
NTT_POWER_NOTES: the directory for notes. NTT_POWER_SYNC: how the receiver syncs.
NTT_POWER_LARGE_BLOB: from how many bytes on a blob is in no pack. NTT_POWER_BROKEN: what is broken,
see `BROKEN`; the lab has to find it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, Final

_NOTES: Final = os.environ.get("NTT_POWER_NOTES", "")
_BROKEN: Final = os.environ.get("NTT_POWER_BROKEN", "")

_NOTE: Final = f"""

def _note(**what):
    import json, time
    what["time"] = time.monotonic_ns()
    with open("%s/%d" % ({_NOTES!r}, os.getpid()), "a") as file:
        file.write(json.dumps(what) + "\\n")
"""
_RECEIPTS: Final = f"""{_NOTE}

_noted = {{}}

def _noting_add(method):
    def add(self, batch):
        _noted[batch.number] = batch
        method(self, batch)
    return add

def _noting_answer(method):
    def answer(self, receipt):
        method(self, receipt)
        batch = _noted.pop(receipt.number, None)
        trial = ".ntt-check-" in os.readlink("/proc/self/fd/%d" % self._workspace.stage)
        if receipt.outcome == SETTLED and not trial:
            bad = {{one[0] for one in receipt.exceptions if one[1] not in {{kept}}}}
            good = (at for at in range(batch.blobs) if at not in bad)
            _note(blobids=[batch._digest(at).hex() for at in good])
    return answer

GroupCommit.add = _noting_add(GroupCommit.add)
WriteSession._answer = _noting_answer(WriteSession._answer)
"""
_FILES: Final = f"""{_NOTE}

def _paths(area, names):
    # Names of packs are relative to the root.
    return [name if area.called == "packs" else area.called + "/" + name for name in names]

def _noting_publish(method):
    def publish(self, incoming, name):
        method(self, incoming, name)
        _note(named=_paths(self, [name]))
    return publish

def _noting_remove(method):
    def remove(self, names, *more):
        names = list(names)
        _note(removed=_paths(self, names))
        return method(self, names, *more)
    return remove

FileArea.publish = _noting_publish(FileArea.publish)
FileArea.remove = _noting_remove(FileArea.remove)
"""

_EARLY_RECEIPT: Final = """

def _early(method):
    def publish(self, count):
        receipts = method(self, count)
        for batch in self._published:
            stored = batch.blobs - len(batch.exceptions)
            receipts.append(Receipt(batch.number, SETTLED, self._hash, stored, batch.exceptions))
        self._published = []
        return receipts
    return publish

GroupCommit._publish = _early(GroupCommit._publish)
"""
_EARLY_NAME: Final = """

class _ByFile:
    by_file = True
    def __init__(self, sync):
        self._sync = sync
    def __getattr__(self, name):
        return getattr(self._sync, name)

def _lying(method):
    def init(self, sync, *more):
        method(self, _ByFile(sync), *more)
    return init

GroupCommit.__init__ = _lying(GroupCommit.__init__)
"""
_NO_FSYNC: Final = """

class _Os:
    fsync = staticmethod(lambda fd: None)
    def __getattr__(self, name):
        import os
        return getattr(os, name)

os = _Os()
"""
_NO_SYNC: Final = f"{_NO_FSYNC}sync_directory = os.fsync\n"
# To forget content has the kernel write it.
_EARLY_PACK: Final = f"{_NO_FSYNC}forget = lambda fd: None\n"
# What is broken, by its name: modules of the receiver, and what is added to them.
BROKEN: Final = {
    "early-receipt": {"group_commit": _EARLY_RECEIPT},
    "early-name": {"group_commit": _EARLY_NAME},
    "no-sync": {"file_areas": _NO_SYNC},
    # Names are synced, and content is not.
    "early-pack": {"file_areas": _EARLY_PACK},
    # Of the program itself, see `break_program`.
    "no-marker": {},
    "no-fsync": {},
}


def additions() -> dict[str, str]:
    """What is added to the receiver, by module."""
    from ntt_backup.wire.messages import PRESENT, REPLACED

    added = {
        "write_session": _RECEIPTS.replace("{kept}", repr((PRESENT, REPLACED))),
        "file_areas": _FILES,
    }
    for module, text in BROKEN[_BROKEN].items() if _BROKEN else ():
        added[module] = text + added.get(module, "")
    return added


def note_receipts() -> None:
    from ntt_backup.client import bootstrap
    from ntt_backup.upload.strategies.in_flight import PipelinedSession

    sources = bootstrap._sources()
    for module, text in additions().items():
        sources[f"ntt_backup.receiver.{module}"] += text
    bootstrap._sources = lambda: sources
    confirm = PipelinedSession._confirm

    def noting(self: Any, flight: Any, stored: Iterable[Any]) -> None:
        stored = list(stored)
        if ".ntt-check-" not in self._spec.root:  # A preflight's trial, in its own directory.
            _note(blobids=[one.blobid for one in stored])
        confirm(self, flight, stored)

    PipelinedSession._confirm = noting  # type: ignore[method-assign]
    if large := os.environ.get("NTT_POWER_LARGE_BLOB"):
        from ntt_backup.pack import names

        names.LARGE_BLOB = int(large)  # type: ignore[misc]
    from ntt_backup.model import Receipt
    from ntt_backup.upload.strategies.packs import PacksSession

    outcome = PacksSession._outcome

    def noting_outcome(self: Any, flight: Any) -> Any:
        found = outcome(self, flight)
        if isinstance(found, Receipt):
            packs = [one.key for one in found.packs]
            _note(blobids=[one.blobid for one in found.stored], packs=packs)
        return found

    PacksSession._outcome = noting_outcome  # type: ignore[method-assign]


def _note(**what: object) -> None:
    with open(f"{_NOTES}/{os.getpid()}", "a", encoding="utf-8") as file:
        file.write(json.dumps({**what, "time": time.monotonic_ns()}) + "\n")


def note_last_sync() -> None:
    """Notes when a `snapshot restore` has synced: by then all of it must be on the disk."""
    from ntt_backup.snapshot.restore import files

    module: Any = files
    sync_below = module.sync_below
    # Opened now: later this process may write below its destination only.
    fd = os.open(f"{_NOTES}/synced", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def noting(directory: int) -> int:
        left_out: int = sync_below(directory)
        os.write(fd, f"{time.monotonic_ns()}\n".encode())
        return left_out

    module.sync_below = noting


def set_sync(how: str) -> None:
    """Has the receiver sync as where a system call is missing."""
    from ntt_backup.client.session_spec import SessionSpec

    of = SessionSpec.of
    SessionSpec.of = staticmethod(  # type: ignore[method-assign]
        lambda *words, **more: dataclasses.replace(of(*words, **more), sync=how)
    )


def break_program() -> None:
    if _BROKEN == "no-marker":
        from ntt_backup.snapshot.restore import version

        class Finished:
            doubt = False

            def __init__(self, *_: object) -> None:
                pass

            def end(self) -> None:
                pass

        module: Any = version
        module.Unfinished = Finished
    elif _BROKEN == "no-fsync":
        os.fsync = lambda fd: None


def main() -> None:
    if _NOTES:
        note_receipts()
        if {"snapshot", "restore"} <= set(sys.argv):
            note_last_sync()
    if how := os.environ.get("NTT_POWER_SYNC"):
        set_sync(how)
    break_program()
    from ntt_backup.__main__ import main as program

    sys.argv[0] = "ntt-backup-remote"
    sys.exit(program())


if __name__ == "__main__":
    main()
