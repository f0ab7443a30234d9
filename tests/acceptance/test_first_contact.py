"""A table that another program has marked: each command that meets it says so."""

from __future__ import annotations

import json

from tests.helpers.environment import Environment

TOLD = "rows are marked by another program"


def test_foreign_marks_are_told_of_until_verify_has_proved_them(env: Environment) -> None:
    count = len(set(env.fill_both(200)))
    env.query("delete from ntt_backup.contacts")

    init_db = env.call("init-db", expect=0).stdout
    steps = {one["name"]: one for one in json.loads(env.call("check", "--json").stdout)["steps"]}
    run = env.call("run", expect=0).stdout
    status = env.status()

    assert f"{count} {TOLD}" in init_db
    assert steps["marks"]["verdict"] == "warning"
    assert TOLD in steps["marks"]["text"]
    assert f"{count} {TOLD}" in run
    assert status["health"]["level"] == "action_required"
    assert TOLD in status["health"]["points"][0]["what"]
    assert status["unproved"]["blobs"] == status["unproved"]["foreign"] == count

    env.call("reconcile", expect=0)
    after = env.status()
    env.call("verify", expect=0)
    proved = env.status()

    assert after["health"]["level"] == "healthy"
    assert any("never checked" in one["what"] for one in after["health"]["points"])
    assert proved["unproved"]["blobs"] == 0
    assert TOLD not in env.call("run", expect=0).stdout
