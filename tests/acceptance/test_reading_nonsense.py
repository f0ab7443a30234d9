"""A remote that answers nonsense each time it is asked: told of once, and not asked for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.environment import Environment
from tests.helpers.receivers import LYING_RECEIVER

PROJECT = Path(__file__).resolve().parents[2]
ATTEMPTS = 3
NONSENSE = "say(GIVEN.frame(7))"
GIVES_UP = "say(ERROR.frame('internal', 'a defect'))"
HALF_AN_ANSWER = "say(NAMES.frame([(B, 1), (A, 1)]))"


@pytest.fixture
def lied_to(env: Environment) -> Environment:
    """A backup whose remote is, from now on, what `lie` makes of it."""
    env.fill(20, size=lambda chance: chance.randrange(100, 1000))
    env.query("update blobs set remote_copied = true")
    return env


def lie(env: Environment, answer: str) -> Path:
    """Have every connection lead to a receiver that lies; the file that has a line for each."""
    program, tools = env.root / "lying.py", env.root / "tools"
    program.write_text(LYING_RECEIVER.replace("{answer}", answer))
    tools.mkdir()
    connections = env.root / "connections"
    (tools / "ssh").write_text(
        f"#!/bin/sh\necho >>{connections}\nPYTHONPATH={PROJECT} exec {sys.executable} {program}\n"
    )
    (tools / "ssh").chmod(0o755)
    env.environ["PATH"] = f"{tools}:/usr/bin:/bin"
    return connections


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["verify"], NONSENSE),
        (["verify"], GIVES_UP),
        (["restore", "--to", "back"], HALF_AN_ANSWER),
        (["reconcile"], HALF_AN_ANSWER),
    ],
)
def test_a_remote_that_answers_nonsense_is_not_asked_for_ever(
    lied_to: Environment, command: list[str], answer: str
) -> None:
    connections = lie(lied_to, answer)
    lied_to.write_config(run={"attempts": ATTEMPTS})
    command = [str(lied_to.root / one) if one == "back" else one for one in command]

    done = lied_to.call(*command, expect=5)
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert f"{ATTEMPTS} times in a row" in told
    assert "Traceback" not in done.stderr
    # Each thread tries for itself until the first gives up.
    assert ATTEMPTS <= len(connections.read_text().splitlines()) <= 5 * ATTEMPTS + 1
    assert len(lied_to.copied()) == 20
