"""What a version stored is read by each later one: samples of all formats, in tests/samples.

`NTT_SAMPLES=0.1 bin/test tests/acceptance/test_stored_samples.py -k makes --long` makes
tests/samples/0.1 by the program of this checkout. The sample of a released version is never made
again: what a later version cannot read is a defect of that version.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import psycopg
import pytest
from blake3 import blake3

from tests.helpers import documents
from tests.helpers.blobs import Person, tree
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres

SAMPLES = Path(__file__).parents[1] / "samples"
VERSIONS = sorted(path.parent for path in SAMPLES.glob("*/sample.json"))
TARGETS = {"files": "files", "packs": "packs", "sealed": "packs"}
NOWHERE = "postgresql:///none?host=/nonexistent"


def digests(root: Path) -> dict[str, str]:
    """Returns the path below `root` of each file, and the BLAKE3 hash of its content."""
    return {name: blake3(content).hexdigest() for name, content in sorted(tree(root).items())}


def rows(url: str) -> list[list[Any]]:
    with psycopg.connect(url) as conn:
        return [list(one) for one in conn.execute("select blobid, size from blobs order by 1")]


def place_targets(env: Environment, root: Path, *, catalog: str, identity: str) -> None:
    """Has the environment's targets in directories of `root`; `remote` is the one of files."""
    layouts = {name: {"url": f"file://{root / name}", "layout": TARGETS[name]} for name in TARGETS}
    env.settings["remote"] = layouts["files"]
    others = {f"targets.{name}": layouts[name] for name in TARGETS}
    env.write_config(
        catalog={"url": catalog},
        pack={"identity_file": identity},
        lock={"file": str(env.root / "lock-{target}")},
        **others,
    )


def make(env: Environment, postgres: Postgres, by_path: str, to: Path) -> None:
    """Makes a sample of everything that this version stores, in the directory `to`.

    Args:
        env: An environment that nothing was done with yet.
        postgres: The server, whose programs make the dumps.
        by_path: The URL of an empty database, for files by their paths.
        to: The directory, which does not exist yet.
    """
    owner = Person.new()
    to.mkdir(parents=True)
    owner.file(to / "identity.txt")
    place_targets(env, to, catalog=env.url, identity=str(to / "identity.txt"))
    env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")
    env.write_config(dump={"bin": str(postgres.programs), "mode": "series"})
    for name in TARGETS:
        (to / name).mkdir()
        env.call("--target", name, "init-db", expect=0)
    chance = random.Random(1)
    for size in (0, 1, 511, 512, 513, 20_000):
        env.put(chance.randbytes(size))
    env.put(b"text that shrinks\n" * 1000)
    data = env.root / "data"
    (data / "below").mkdir(parents=True)
    (data / "below" / "image").write_bytes(bytes(90_000) + chance.randbytes(9_000))
    (data / "line\nend").symlink_to("below")
    states = []
    for number in range(2):
        (data / "changes").write_text("a line\n" * (1 + 500 * number))
        states.append(digests(data))
        for name in TARGETS:
            env.write_config(pack={"recipients": [owner.public] if name == "sealed" else []})
            if number == 0:
                env.call("--target", name, "run", expect=0)
            env.call("--target", name, "dump", "--force", expect=0)
            env.call("--target", name, "snapshot", "take", "data", str(data), expect=0)
        stored = rows(env.url)
        env.put(chance.randbytes(100 + number))
    status = env.call("--target", "packs", "status", "--json", expect=0).stdout
    for name, text in (("log.jsonl", env.log.read_text()), ("status.json", status)):
        (to / name).write_text(text.replace(str(to.parent), "/srv"))
    for recipient in ([], ["--recipient", owner.public]):
        name = "blobs.tar.age" if recipient else "blobs.tar"
        env.call("pack", str(to / name), "--from", str(env.store), *recipient, expect=0)

    uploads = env.root / "uploads"
    (uploads / "a").mkdir(parents=True)
    for lies in (b"a/one", b"a/same", b"line\nend", b"no\xffutf8"):
        file_path = os.fsencode(uploads) + b"/" + lies
        with open(file_path, "wb") as file:
            file.write(b"same" if lies.startswith(b"a/") else lies)
        os.utime(file_path, ns=(0, 1_500_000_000_123_456_789))
    env.settings["remote"] = {"url": f"file://{to / 'paths'}"}
    (to / "paths").mkdir()
    env.write_config(catalog={"url": by_path}, dump={"mode": "full"}, pack={"recipients": []})
    walked = {"files.uploads": {"paths": [str(uploads)]}}
    env.write_config(source={"root": str(uploads)}, **walked)
    env.call("init-db", expect=0)
    env.call("run", expect=0)
    env.call("dump", expect=0)
    shutil.copy(env.host_key, to / "host.key")
    sample = {
        "blobs": digests(to / "files" / "by-hash"),
        "rows": stored,
        "snapshots": {"of": str(data), "states": states},
        "uploads": {os.fsencode(name).hex(): one for name, one in digests(uploads).items()},
    }
    (to / "sample.json").write_text(json.dumps(sample, indent=1) + "\n")


@pytest.mark.long
def test_this_version_makes_a_sample_that_it_reads(
    env: Environment, postgres: Postgres, database_url: str
) -> None:
    made = env.root / "sample"
    make(env, postgres, database_url, made)
    if wanted := os.environ.get("NTT_SAMPLES"):
        shutil.copytree(made, SAMPLES / wanted)
    for target in TARGETS:
        read_blobs(env, made, target)
        read_snapshots(env, made, target)


@pytest.fixture(params=VERSIONS, ids=[path.name for path in VERSIONS])
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a version's sample."""
    return Path(shutil.copytree(request.param, tmp_path / "sample"))


def known(sample: Path) -> Any:
    return json.loads((sample / "sample.json").read_text())


def read(env: Environment, sample: Path, catalog: str = NOWHERE) -> None:
    """Has the environment restore from the targets of a sample, by the key of its host."""
    shutil.copy(sample / "host.key", env.host_key)
    env.host_key.chmod(0o600)
    env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")
    place_targets(env, sample, catalog=catalog, identity=str(sample / "identity.txt"))


def read_blobs(env: Environment, sample: Path, target: str) -> None:
    read(env, sample)
    env.call("--target", target, "restore", "--to", str(env.root / target), expect=0)
    assert digests(env.root / target) == known(sample)["blobs"]


def read_snapshots(env: Environment, sample: Path, target: str) -> None:
    read(env, sample)
    made = known(sample)["snapshots"]
    snapshot = ("--target", target, "snapshot")
    listed = json.loads(env.call(*snapshot, "list", "data", "--json", expect=0).stdout)
    versions = [one["version"] for one in listed["versions"]]
    for version, state in zip(versions, made["states"], strict=True):
        back = env.root / f"{target}-{version}"
        env.run(*snapshot, "restore", f"data@{version}", "--to", str(back), expect=0)
        assert digests(back / made["of"][1:]) == state


@pytest.mark.parametrize("target", list(TARGETS))
def test_blobs_snapshots_and_the_catalog_come_back(
    env: Environment, postgres: Postgres, database_url: str, sample: Path, target: str
) -> None:
    read_blobs(env, sample, target)
    read_snapshots(env, sample, target)
    read(env, sample, database_url)
    env.write_config(dump={"bin": str(postgres.programs)})
    env.call("--target", target, "restore", "--catalog", "--allow-superuser", expect=0)
    assert rows(database_url) == known(sample)["rows"]


def test_files_come_back_under_their_paths(env: Environment, sample: Path) -> None:
    read(env, sample)
    env.settings["remote"] = {"url": f"file://{sample / 'paths'}"}
    env.write_config()
    back = env.root / "back"
    env.call("restore", "--as-paths", "--places", "latest", "--to", str(back), expect=0)
    found = {os.fsencode(name).hex(): one for name, one in digests(back).items()}
    assert found == known(sample)["uploads"]


def test_pack_files_are_unpacked(env: Environment, sample: Path) -> None:
    blobs = known(sample)["blobs"]
    for name in ("blobs.tar", "blobs.tar.age"):
        back = env.root / f"{name}-back"
        pack, identity = str(sample / name), ("--identity", str(sample / "identity.txt"))
        env.call("unpack", pack, "--to", str(back), *identity, expect=0)
        assert blobs.items() <= digests(back).items()


def test_what_reads_the_log_knows_each_event_and_field(sample: Path) -> None:
    schema = json.loads(documents.EVENTS.read_text())
    described = {name: one.get("properties") for name, one in schema["$defs"].items()}
    for line in (sample / "log.jsonl").read_text().splitlines():
        event = json.loads(line)
        assert event.keys() <= described[event["event"]].keys()


def test_what_reads_the_status_knows_each_key(sample: Path) -> None:
    status = json.loads((sample / "status.json").read_text())
    assert status.keys() <= json.loads(documents.STATUS.read_text())["properties"].keys()
    assert status["copied"] > 0
