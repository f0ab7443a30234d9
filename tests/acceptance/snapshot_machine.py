"""A machine that takes snapshots, by its commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ntt_backup.config.signing_key import make_signing_key
from tests.helpers import program
from tests.helpers.blobs import tree
from tests.helpers.waiting import PATIENCE


class Machine:
    """A machine without catalog and store, whose set `etc` is the directory `files`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = root / "files"
        self.target = root / "target"
        for one in (self.files, self.target):
            one.mkdir()
        self.limits: dict[str, Any] = {}
        self.configure(keep_last=100)

    def configure(self, **set: object) -> None:
        rule = {"keep_daily": 0, "keep_weekly": 0, **set}
        self.write_config(etc={"paths": [str(self.files)], **rule})

    def write_config(self, **sets: dict[str, Any]) -> None:
        tables = {"remote": {"url": f"file://{self.target}"}, "run": self.limits}
        tables["log"] = {"jsonl": str(self.root / "log.jsonl")}
        tables["lock"] = {"file": f"{self.root}/lock-{{target}}"}
        tables |= {f"snapshots.{name}": said for name, said in sets.items()}
        lines = []
        for name, said in tables.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(one)}" for key, one in said.items())]
        (self.root / "config.toml").write_text("\n".join(lines))

    def args(self, *args: str) -> list[str]:
        return ["--config", str(self.root / "config.toml"), "snapshot", *args]

    def argv(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "ntt_backup", *self.args(*args)]

    @property
    def environ(self) -> dict[str, str]:
        own = {"XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config"}
        return {**os.environ, **{name: str(self.root / one) for name, one in own.items()}}

    def make_signing_key(self) -> None:
        """Makes a host key, as `init-db` does."""
        assert make_signing_key(self.root / "config" / "ntt-backup" / "host.key").startswith("made")

    def run(self, *args: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = program.run(self.args(*args), self.environ, PATIENCE)
        assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
        return done

    def call(self, *args: str, expect: int = 0) -> str:
        """Returns what is printed."""
        done = self.run(*args, expect=expect)
        return done.stdout + done.stderr

    def json(self, *args: str, expect: int = 0) -> Any:
        return json.loads(self.run(*args, "--json", expect=expect).stdout)

    def take(self, *args: str) -> str:
        """Returns the new version's name."""
        return str(self.json("take", "etc", *args)["version"])

    def versions(self) -> list[str]:
        """Those that are whole."""
        rows = self.json("list", "etc")["versions"]
        return [row["version"] for row in rows if row["finished"]]

    def restored(self, version: str) -> dict[str, bytes]:
        """The files of a version, by their names below `files`."""
        back = self.root / "back"
        self.call("restore", f"etc@{version}", "--to", str(back))
        found = tree(back / str(self.files)[1:])
        shutil.rmtree(back)
        return found

    @contextmanager
    def running(self, *args: str) -> Iterator[subprocess.Popen[bytes]]:
        child = subprocess.Popen(
            self.argv(*args),
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield child
        finally:
            child.kill()
            child.wait()
