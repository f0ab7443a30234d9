"""Snapshots in a campaign: a tree that changes is taken, forgotten and restored under faults.

A command is let be, or killed with all that it started, or the remote and the way there are struck.
A version that is there must be what the tree was, byte for byte, whatever happened before and
after; and the two newest must be there.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from tests.faults.environment import FaultEnvironment
from tests.faults.kinds import KINDS, Missed, Undo
from tests.helpers.blobs import tree
from tests.helpers.waiting import PATIENCE

_KEPT = 2
# What a command that is struck may end with, and none that is not.
_STRUCK = {"take": {5, 6}, "forget": {5, 6}, "restore": {5}}
# Whatever may happen to a command: for the figures.
HAPPENS = [f"{verb}{how}" for verb in _STRUCK for how in ("", " killed", " struck")]
# The faults of the remote, and of the way there, that leave what is stored as it is.
_STRIKES = {
    "kill sshd sessions",
    "kill receiver",
    "cut link",
    "cut link after some bytes",
    "stall link",
    "fill remote disk",
    "remote disk read-only",
    "freeze object store",
    "kill object store",
    "500 of the store",
    "503 of the store",
    "lost answer to Complete",
    "lost answers",
    "closed connections",
    "short answers",
    "slow answers",
    "full store",
    "expired credentials",
    "store without checksums",
}


class ChangingTree:
    """A tree below the environment's root, and what it was in each version. possible: the kinds of
    faults. done and faults: what happened, for the figures.
    """

    def __init__(
        self,
        environment: FaultEnvironment,
        possible: Iterable[str],
        done: Counter[str],
        faults: Counter[str],
    ) -> None:
        self._environment = environment
        self._root = environment.env.root / "tree"
        self._contents: dict[str, dict[str, bytes]] = {}
        # So long a command takes that nothing happens to.
        self._took = dict.fromkeys(_STRUCK, 3.0)
        self._strikes = sorted(_STRIKES.intersection(possible))
        self._done = done
        self._faults = faults

    def begin_era(self) -> None:
        """The remote has no versions any more."""
        self._contents.clear()
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir()

    def play(self) -> list[str]:
        """Changes the tree and does everything with it; returns the violations."""
        chance = self._environment.chance
        self._change()
        said = self._call("take", "tree", str(self._root), *["--full"] * (chance.random() < 0.3))
        there = self._versions()
        for version in there - self._contents.keys():
            self._contents[version] = tree(self._root)
        if not said and there and chance.random() < 0.5:
            must = set(sorted(there)[-_KEPT:])
            said = self._call("forget", "tree", "--keep-last", str(_KEPT), "--yes")
            there = self._versions()
            if not must <= there:
                said.append(f"versions are gone that were to be kept: {must - there}")
        said += self._checked()
        for version in chance.sample(sorted(there), min(2, len(there))):
            said += [] if said else self._restored(version)
        return said

    def _change(self) -> None:
        """Writes some files anew, removes some, and changes a part of a large one."""
        chance = self._environment.chance
        for number in chance.sample(range(40), 12):
            path = self._root / f"{number % 4}" / f"{number}"
            path.parent.mkdir(exist_ok=True)
            if path.exists() and chance.random() < 0.3:
                path.unlink()
            else:
                path.write_bytes(chance.randbytes(chance.randrange(20_000)))
        large = self._root / "large"
        if not large.exists():
            large.write_bytes(chance.randbytes(3000) * 1000)
        with large.open("r+b") as file:
            file.seek(chance.randrange(3_000_000))
            file.write(chance.randbytes(1000))

    def _call(self, verb: str, *args: str) -> list[str]:
        """Runs a command; at some moment kills it with all that it started, or strikes, or not."""
        environment, env = self._environment, self._environment.env
        chance, pause, began = environment.chance, threading.Event(), time.monotonic()
        how = chance.choice(("", "", " killed", " killed", " struck"))
        moment = began + chance.uniform(0.2, 1.2) * self._took[verb]
        end = moment + chance.uniform(0.05, 2.0)
        kind, happened = chance.choice(self._strikes), ""
        undo: Undo = _nothing
        with env.running("snapshot", verb, *args) as child:
            while child.poll() is None:
                now = time.monotonic()
                if how == " killed" and now >= moment:
                    happened = how
                    env.kill_all(chance)
                    break
                if how == " struck" and now >= moment:
                    how = ""
                    with suppress(Missed):
                        undo = self._strike(kind)
                        happened = " struck"
                if happened and now >= end:
                    undo()
                    undo = _nothing
                if now > began + PATIENCE:
                    return [f"snapshot {verb} does not end: {env.output()[-1000:]}"]
                pause.wait(0.02)
            status = child.wait()
        undo()
        environment.peace()
        environment.await_quiet()
        self._done[f"{verb}{happened}"] += 1
        if not happened:
            self._took[verb] = time.monotonic() - began
        fine = {0, *(_STRUCK[verb] if happened == " struck" else ())}
        if happened == " killed" or status in fine:
            return []
        struck = f" under {kind}" if happened else ""
        return [f"snapshot {verb}{struck} ended with {status}: {env.output()}"]

    def _strike(self, kind: str) -> Undo:
        undo = KINDS[kind].strike(self._environment)
        self._faults[kind] += 1
        return undo or _nothing

    def _versions(self) -> set[str]:
        listed = self._environment.env.run("snapshot", "list", "tree", "--json", expect=0)
        rows = json.loads(listed.stdout)["versions"]
        return {row["version"] for row in rows if row["finished"]}

    def _checked(self) -> list[str]:
        if not self._contents:
            return []
        done = self._environment.env.run("snapshot", "verify", "--download")
        if done.returncode == 0:
            return []
        return [f"snapshot verify ended with {done.returncode}: {done.stdout}{done.stderr}"]

    def _restored(self, version: str) -> list[str]:
        env = self._environment.env
        back = env.root / "tree-back"
        args = ("restore", f"tree@{version}", "--to", str(back))
        said = self._call(*args)
        # What a killed one has left is gone on with.
        again = env.run("snapshot", *args)
        if again.returncode != 0:
            said.append(f"snapshot restore ended with {again.returncode}: {again.stderr}")
        elif tree(back / str(self._root)[1:]) != self._contents[version]:
            said.append(f"tree@{version} is not what was taken")
        shutil.rmtree(back, ignore_errors=True)
        return said


def _nothing() -> None: ...
