"""What travels to the remote: old enough for its Python, complete, and safe from its shell."""

from __future__ import annotations

import argparse
import ast
import errno
import gc
import os
import re
import select
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import ntt_backup
from ntt_backup.client.bootstrap import LOADER, bundle
from ntt_backup.receiver import __main__ as receiver
from ntt_backup.receiver import dispatcher
from ntt_backup.receiver.terms import Terms

PACKAGE = Path(ntt_backup.__file__).parent
TRAVELS = ("receiver", "wire", "blobdir")
MODULES = sorted(
    str(path.relative_to(PACKAGE))
    for place in TRAVELS
    for path in PACKAGE.glob(f"{place}/*.py")
    if path.name != "__init__.py"
)
FOREIGN = {"blake3", "compression.zstd", "backports.zstd", "zstandard"}


def test_the_loader_means_the_same_to_every_shell() -> None:
    # Within double quotes within single quotes, for sh, csh and fish: nothing that any of them,
    # or python3 as an argument, would take for its own.
    assert not set(LOADER) & set("'\"\\$`!\n\t{}*?~^")
    command, _ = bundle()
    assert command.count("'") == 2
    assert command.count('"') == 2
    # It is what `systemctl status` and `ps` show of each session.
    assert len(command) < 300


def test_the_loader_parses_on_a_python_too_old_to_run_it() -> None:
    ast.parse(LOADER, feature_version=(3, 4))
    assert not re.search(r":=|\bf\"|\basync\b|\bnonlocal\b", LOADER)
    # Python 2 has print and exec as statements.
    assert not re.search(r"\bprint\b|[^;]exec\b", LOADER)


def test_every_module_travels_and_the_loader_is_told_how_many_bytes_follow() -> None:
    command, data = bundle()
    assert f'" {len(data)} NTT-LOADER 1 python=' in command
    program = zlib.decompress(data)
    for name in MODULES:
        assert f"'ntt_backup.{name[:-3].replace('/', '.')}'".encode() in program


@pytest.mark.parametrize("name", MODULES)
def test_what_travels_is_python_3_8_and_needs_only_its_library(name: str) -> None:
    tree = ast.parse((PACKAGE / name).read_text("utf-8"), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for imported in names:
            ours = imported == "ntt_backup" or imported.split(".")[1:2] in [
                [one] for one in TRAVELS
            ]
            standard = imported.partition(".")[0] in sys.stdlib_module_names
            assert ours or standard or imported in FOREIGN, imported


@pytest.mark.parametrize("name", MODULES)
def test_types_with_parameters_are_never_evaluated(name: str) -> None:
    """Generator[bytes, None, None] is an error in Python 3.8, except where nobody reads it."""
    tree = ast.parse((PACKAGE / name).read_text("utf-8"))
    unread: set[ast.AST] = set()
    types = {"dict", "frozenset", "list", "set", "tuple", "type"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "collections.abc":
            types.update(alias.name for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            unread.update(ast.walk(node))
        for field in ("annotation", "returns"):
            if annotation := getattr(node, field, None):
                unread.update(ast.walk(annotation))
    read = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in types
        and node not in unread
    ]
    assert read == []


def test_a_session_that_writes_loads_nothing_of_the_others() -> None:
    # Source that travels is compiled each time.
    load = "from ntt_backup.receiver import __main__, dispatcher, write_session"
    argv = [sys.executable, "-c", f"{load}; import sys; print(*sys.modules)"]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    others = ("b3sum", "name_check", "stored_names", "datetime")
    assert [name for name in loaded if name.rpartition(".")[2] in others] == []


def test_a_receiver_allows_what_it_knows_and_nothing_else() -> None:
    assert receiver._allowed("put,list") == {"put", "list"}
    with pytest.raises(argparse.ArgumentTypeError, match=r"any of .*put"):
        receiver._allowed("put,everything")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("odd"), "ValueError: odd"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "/srv"), "EIO"),
    ],
)
def test_a_defect_of_a_receiver_is_told_to_its_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, text: str
) -> None:
    written: list[bytes] = []
    blocking = {0: True, 1: True}

    def write(fd: int, data: bytes) -> int:
        assert fd == 1
        assert blocking[1]
        written.append(bytes(data))
        return len(data)

    def run(_: object) -> int:
        assert not any(blocking.values())
        raise error

    monkeypatch.setattr(dispatcher.Receiver, "__init__", lambda *_: None)
    monkeypatch.setattr(dispatcher.Receiver, "run", run)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "set_blocking", blocking.__setitem__)
    monkeypatch.setattr(os, "umask", lambda _: 0)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(select, "select", lambda *_: ([0], [], []))
    assert receiver.serve() == 1
    banner, told = written
    assert banner.startswith(b"\nNTT-RECEIVE ")
    assert text.encode() in told
    assert "Traceback" in capsys.readouterr().err
    assert all(blocking.values())


def test_what_a_receiver_demands_and_lacks_is_said_at_its_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Terms, "lacking", "no BLAKE3 here")
    monkeypatch.setattr(receiver, "_banner", lambda _: sys.exit(9))
    monkeypatch.setattr(os, "umask", lambda _: 0)
    with pytest.raises(SystemExit):
        receiver.serve()
    assert capsys.readouterr().err == "ntt-backup-receive: no BLAKE3 here\n"
