"""The campaign's judge: each thing that must hold is broken on purpose, and it sees that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.environment import Site
from tests.faults.environment import FaultEnvironment
from tests.faults.model import Model


@contextmanager
def another_content(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(content)
    yield
    path.write_bytes(before)


@contextmanager
def without(path: Path) -> Iterator[None]:
    before = path.read_bytes()
    path.unlink()
    yield
    path.write_bytes(before)


@contextmanager
def marked(site: Site, column: str, value: bool, blobid: str) -> Iterator[None]:
    set_to = f"update blobs set {column} = %s where blobid = %s"
    site.query(set_to, value, blobid)
    yield
    site.query(set_to, not value, blobid)


@pytest.mark.parametrize("environment", ["stream"], indirect=True)
def test_the_model_sees_each_invariant_that_is_broken(environment: FaultEnvironment) -> None:
    site, model = environment.site, Model()
    site.write_config(run={"skip_pgdump": False})
    environment.add(3)
    assert site.run("run").returncode == 0
    environment.await_quiet()
    assert model.violations(environment, 0, "") == []
    assert model.complete(environment) == []

    by_hash = site.remote.local / "by-hash"
    there = sorted(path for path in by_hash.rglob("*") if path.is_file())
    one = next(path for path in there if path.stat().st_size)
    (dump,) = (site.remote.local / "pgdump").glob("2*.dump")
    unsent = site.put_in_store(b"never sent")
    site.register([unsent])

    def after_a_round() -> list[str]:
        return model.violations(environment, 0, "")

    def at_the_end() -> list[str]:
        return model.complete(environment)

    broken: list[tuple[object, Callable[[], list[str]], str]] = [
        (another_content(one, one.read_bytes()[:-1]), after_a_round, "not what its name says"),
        (without(one), after_a_round, "are gone"),
        (marked(site, "remote_copied", True, unsent), after_a_round, "marked and not there"),
        (marked(site, "remote_copy_failed", True, one.name), after_a_round, "good blobs are fail"),
        (another_content(dump, b"half"), after_a_round, "not what its record says"),
        (without(dump.with_name(f"{dump.name}.json")), after_a_round, "has no record"),
        (without(one), at_the_end, "blobs are lost"),
        (another_content(one, b"another"), at_the_end, "files differ"),
        (another_content(site.path(one.name), b"another"), at_the_end, "the source has changed"),
        (marked(site, "remote_copied", False, one.name), at_the_end, "are not marked"),
    ]
    site.query("delete from blobs where blobid = %s", unsent)
    site.path(unsent).unlink()
    for breaking, look, what in broken:
        if what == "marked and not there":
            site.register([unsent])
        with breaking:  # type: ignore[attr-defined]
            assert any(what in said for said in look()), what
        site.query("delete from blobs where blobid = %s", unsent)
        assert look() == [], f"after {what}"

    (site.remote.local / "stray").touch()
    assert any("litter" in said for said in at_the_end())
    (site.remote.local / "stray").unlink()

    misplaced = by_hash / "00" / one.name
    misplaced.parent.mkdir(exist_ok=True)
    misplaced.write_bytes(one.read_bytes())
    assert any("wrong place" in said for said in after_a_round())
    misplaced.unlink()

    for status, output in ((1, ""), (42, ""), (0, "Traceback (most recent call last)")):
        assert model.violations(environment, status, output)
    with site.log.open("a") as log:
        log.write(json.dumps({"event": "run_stop", "level": "info"}) + "\n")
    assert any("breaks the schema" in said for said in after_a_round())
