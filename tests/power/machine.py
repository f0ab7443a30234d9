"""This machine in the lab: a catalog that loses no power, and the program with its settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg
from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.config.signing_key import make_signing_key
from tests.helpers.blobs import put
from tests.helpers.postgres_server import Postgres

Tables = dict[str, dict[str, Any]]
Done = subprocess.CompletedProcess[bytes]

_ROOT: Final = Path(__file__).parents[2]
_SECONDS: Final = 900


class Catalog:
    """A database of the server, made anew."""

    def __init__(self, server: Postgres, name: str) -> None:
        self._server = server
        self._name = name.replace("-", "_")
        self.url = server.url_of(self._name)
        self.drop()
        server.query(f"create database {self._name}", server.url_of("postgres"))

    def query(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as conn:
            cursor = conn.execute(text.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def register(self, blobs: dict[str, int]) -> None:
        with (
            psycopg.connect(self.url, autocommit=True) as conn,
            conn.cursor() as cursor,
            cursor.copy("copy blobs (blobid, size) from stdin") as out,
        ):
            for one in blobs.items():
                out.write_row(one)

    def copied(self) -> set[str]:
        return {row[0] for row in self.query("select blobid from blobs where remote_copied")}

    def set_copied(self, blobids: Iterable[str]) -> None:
        """Give the catalog the marks of what had receipts, and no others."""
        marks = "remote_copied = (blobid = any(%s)), remote_copy_failed = false"
        self.query(f"update blobs set {marks}", list(blobids))

    def drop(self) -> None:
        drop = f"drop database if exists {self._name} with (force)"
        self._server.query(drop, self._server.url_of("postgres"))


class Program:
    """The program with a configuration and a store of its own, for a target on this machine."""

    def __init__(
        self, home: Path, catalog: Catalog | None, remote: Path, pg_dump: Path | None = None
    ) -> None:
        self.home = home
        self.store = home / "store"
        self.notes = home / "notes"
        self.environ: dict[str, str] = {}
        for place in (self.store, self.notes):
            place.mkdir()
        self.tables: Tables = {
            "catalog": {"url": catalog.url if catalog is not None else "dbname=none"},
            "source": {"root": str(self.store)},
            "remote": {"url": f"file://{remote}"},
            "run": {"workers": 2, "batch_size": 40, "backoff_base": 0.05, "skip_pgdump": True},
            "log": {"jsonl": str(home / "log/backup-remote.jsonl")},
            "lock": {"file": str(home / "lock")},
            "host": {"key_file": str(home / "host.key")},
        }
        make_signing_key(home / "host.key")
        if pg_dump is not None:
            self.tables["dump"] = {"bin": str(pg_dump)}
        self.configure({})

    def configure(self, tables: Tables) -> None:
        """Lay settings over those that there are."""
        for name, values in tables.items():
            self.tables.setdefault(name, {}).update(values)
        text = "".join(
            f"[{name}]\n" + "".join(f"{key} = {json.dumps(one)}\n" for key, one in values.items())
            for name, values in self.tables.items()
        )
        (self.home / "config.toml").write_text(text)

    @contextmanager
    def catalog_at(self, url: str) -> Iterator[None]:
        """Another catalog for a while."""
        before = self.tables["catalog"]["url"]
        self.configure({"catalog": {"url": url}})
        try:
            yield
        finally:
            self.configure({"catalog": {"url": before}})

    def _argv(self, words: Iterable[object]) -> list[str]:
        module = [sys.executable, "-m", "tests.power.promising"]
        return [*module, "--config", str(self.home / "config.toml"), *map(str, words)]

    @property
    def _environ(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "NTT_POWER_NOTES": str(self.notes),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "LC_ALL": "C.UTF-8",
            **self.environ,
        }

    def __call__(self, *words: object, ok: bool = True) -> Done:
        """Run a command to its end. ok: it must end with 0."""
        done = subprocess.run(
            self._argv(words), capture_output=True, env=self._environ, timeout=_SECONDS, check=False
        )
        if ok and done.returncode != 0:
            raise RuntimeError(f"{words}: {ended(done)}")
        return done

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._argv(words), env=self._environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def put(self, content: bytes) -> tuple[str, int]:
        """Put a blob into the store."""
        blob = put(self.store, content)
        return blob.blobid, blob.expected

    def noted(self, what: str) -> list[tuple[int, list[str]]]:
        """The times of promises of a kind, with what was promised: blobids, named, removed."""
        found = []
        for path in self.notes.iterdir():
            lines = path.read_text().splitlines() if path.name.isdigit() else ()
            for note in map(json.loads, lines):
                if what in note:
                    found.append((note["time"], note[what]))
        return sorted(found)

    def last_sync(self) -> int:
        """When a `snapshot restore` had synced all that it wrote."""
        return int((self.notes / "synced").read_text().split()[-1])


def ended(done: Done) -> str:
    """How a command ended, in one line."""
    return f"exit {done.returncode} {done.stdout[-300:]!r} {done.stderr[-500:]!r}"


def blobs_of(by_hash: Path) -> tuple[dict[str, str], list[str]]:
    """The BLAKE3 of what has each blobid as its name, and the paths of what has a strange name."""
    found, strange = {}, []
    for path in by_hash.rglob("*"):
        relative = str(path.relative_to(by_hash))
        if path.is_dir():
            if len(path.name) != 2:
                strange.append(relative)
        elif len(path.name) != 64 or relative != relative_path(path.name):
            strange.append(relative)
        else:
            found[path.name] = blake3(path.read_bytes()).hexdigest()
    return found, strange
