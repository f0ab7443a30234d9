"""Results: the JSON fields that scripts read, and the lines that people read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from ntt_backup.audit.reconcile import Comparison, Difference
from ntt_backup.audit.verify import Findings
from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common
from ntt_backup.cli.results import fields_of, report, wrong_lines
from ntt_backup.model import Failure, Failures, Reason
from ntt_backup.restore.blobs import Restored


def many_failures(count: int) -> Failures:
    failures = Failures()
    for number in range(count):
        failures.add(Failure(f"{number:064x}", Reason.REMOTE_CORRUPT, "bad\x1b[2J"))
    return failures


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (
            Findings(),
            "total checked bytes complete duration_s wrong requeued lost_packs left_out failures"
            " by_size by_remote_hash unchecked strangers",
        ),
        (
            Restored(part=0.5),
            "restored right bytes archived archived_bytes thawing not_needed duration_s wrong"
            " failures strangers names",
        ),
        (
            Comparison(),
            "rows in_store on_remote agreed differences examples requeued marked duration_s"
            " strangers outside",
        ),
    ],
)
def test_the_json_has_the_fields_that_scripts_read(record: Any, names: str) -> None:
    @options.command(options.JSON)
    def command(_: object) -> None:
        report(fields_of(record), [], 7)

    done = CliRunner().invoke(command, ["--json"])
    assert done.exit_code == 7
    found = json.loads(done.output)
    assert found.keys() == {*names.split(), "exit_code"}
    assert found["duration_s"] == 0
    assert found.get("differences", {}) in ({}, {str(what): 0 for what in Difference})


def test_failures_are_counted_by_reason_and_the_first_thousand_listed() -> None:
    fields = fields_of(Restored(wrong=many_failures(1002)))
    assert fields["wrong"] == {"remote-corrupt": 1002}
    assert len(fields["failures"]) == 1000
    assert fields["failures"][1]["blobid"] == f"{1:064x}"


def test_people_see_counts_and_the_first_failures_without_control_characters() -> None:
    failures = many_failures(22)
    lines = wrong_lines(failures)
    assert lines[0].split() == ["22", "remote-corrupt"]
    assert lines[-1] == "  and 2 more; --json lists the first 1000"
    assert len(lines) == 22
    assert "\x1b" not in "".join(lines)


def test_a_check_that_ends_by_an_unforeseen_error_is_not_noted_as_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[results.CheckNote] = []
    monkeypatch.setattr(results, "_note_check", lambda _common, note, _lasted: notes.append(note))

    def check() -> None:
        with results.noted(Common(None, "remote"), "verify") as note:
            note.saw(5, 5, 0, 0)
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        check()
    assert [(note.exit_code, note.detail) for note in notes] == [(1, "[Errno 32] Broken pipe")]
