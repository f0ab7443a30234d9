"""Dumps of the catalog by the receiver, by the remote's shell, and where neither takes them."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ntt_backup.client.connection import SessionSpec
from ntt_backup.config.models import RunSettings
from ntt_backup.dump.by_receiver import DumpsByReceiver
from ntt_backup.dump.by_shell import DumpsByShell
from ntt_backup.dump.record import DumpRecord
from ntt_backup.dump.remote_dir import RemoteDir, connect
from ntt_backup.errors import DumpImpossible, RemoteUnreachable
from tests.contract.harness import PATIENT, Machine
from tests.lying_receiver import LYING_RECEIVER
from tests.receiver_driver import PROJECT

NAME = "20260304T120000Z-0badcafe.dump"


def record_of(content: bytes, number: int = 1) -> DumpRecord:
    return DumpRecord(
        format=1,
        number=number,
        target="remote",
        database="copyjob",
        server_version="16.4",
        program="16.4",
        host="alpha",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        fingerprint="",
        duration_s=1.5,
    )


def send_dump(place: RemoteDir, content: bytes, name: str = NAME) -> DumpRecord:
    """A dump with this content and name; its record."""
    upload, record = place.upload(), record_of(content)
    upload.send(content)
    assert upload.finish() == (record.bytes, record.sha256)
    upload.name(name, record)
    return record


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "by-hash").mkdir(parents=True)
    return root


@pytest.fixture
def spec(root: Path, machine: Machine) -> SessionSpec:
    return SessionSpec(machine, str(root), "0" * 12, "run", "dump", RunSettings(**PATIENT))


@pytest.mark.parametrize("way", [DumpsByReceiver, DumpsByShell])
def test_a_dump_goes_comes_back_and_is_dropped(
    root: Path, spec: SessionSpec, way: type[DumpsByReceiver | DumpsByShell]
) -> None:
    content = bytes(range(256)) * 20_000
    place = way(spec)
    place.try_out()
    place.close()
    place = way(spec)
    assert not (root / "pgdump").exists()
    send_dump(place, content)
    assert {path.name for path in (root / "pgdump").iterdir()} == {NAME, f"{NAME}.json"}
    assert {path.stat().st_mode & 0o777 for path in (root / "pgdump").iterdir()} == {0o600}
    assert (root / "pgdump").stat().st_mode & 0o777 == 0o700
    (found,) = place.contents().dumps
    assert (found.name, found.size, found.record) == (NAME, len(content), record_of(content))
    assert b"".join(place.fetch(NAME)) == content
    assert place.drop([NAME]) == 1
    assert list((root / "pgdump").iterdir()) == []
    place.close()


def test_a_dump_beside_one_that_is_only_tried_out_keeps_its_directory(spec: SessionSpec) -> None:
    trying, place = DumpsByReceiver(spec), DumpsByReceiver(spec)
    trying.try_out()
    assert place.contents().dumps == ()
    trying.close()
    send_dump(place, b"content")
    assert [one.name for one in place.contents().dumps] == [NAME]
    place.close()


@pytest.mark.parametrize(
    "answer",
    [
        "say(dump('20260304T120000Z-0badcafe.dump', 1, b'{}')); say(given(1))",
        "say(frame(DUMP, bytes(38)))",
        "say(head(DUMP, 1 << 30))",
        "say(dump_sum(1, bytes(32)))",
        "os._exit(0)",
    ],
)
def test_dumps_that_cannot_be_end_the_session(
    spec: SessionSpec, machine: Machine, tmp_path: Path, answer: str
) -> None:
    program = tmp_path / "lying.py"
    program.write_text(LYING_RECEIVER.replace("{answer}", answer))
    machine.tool("python3", f"PYTHONPATH={PROJECT} exec {sys.executable} {program}")
    place = connect(spec)
    with pytest.raises(RemoteUnreachable):
        place.contents()


def test_a_remote_without_a_new_python_takes_dumps_by_its_shell(
    spec: SessionSpec, machine: Machine
) -> None:
    machine.tool("python3", "printf '\\nNTT-LOADER 1 python=3.7.1\\n'; exit 1")
    assert isinstance(connect(spec), DumpsByShell)


def test_a_receiver_that_takes_no_dumps_is_named_before_it_is_asked(
    root: Path, spec: SessionSpec, machine: Machine
) -> None:
    """One of before dumps would take the HELLO for that of a session that writes."""
    words = "NTT-RECEIVE 1 version=0 hash=sha256 allow=put,list,verify,get,replace"
    forced = replace(machine, startup=f"printf '\\n{words}\\n'; head -c 1 >{root}/said; exit 1")
    with pytest.raises(DumpImpossible) as caught:
        connect(replace(spec, transport=forced))
    assert "forced command" in caught.value.message
    assert "add dump to --allow" in caught.value.hint
    assert not (root / "said").exists() or (root / "said").read_bytes() == b""
