"""Settings that are read again: what takes effect, what needs a new start, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ntt_backup import events
from ntt_backup.config import Settings
from ntt_backup.daemon.events import SettingsRead, SettingsRefused
from ntt_backup.daemon.run_control import read_again
from ntt_backup.errors import ConfigError
from tests.unit.test_side_jobs import Job

BASE: dict[str, Any] = {"source": {"root": "/s"}, "remote": {"host": "h", "path": "/p"}}


def settings(**changes: Any) -> Settings:
    return Settings(**{**BASE, **changes})


def fine(_settings: Settings) -> None: ...


def test_what_is_safe_takes_effect_and_what_is_not_is_named() -> None:
    new = settings(
        catalog={"url": "postgresql://u:secret@h/db"},
        run={"workers": 7, "skip_pgdump": True},
        log={"jsonl": "/l", "progress_interval": 5},
        dump={"keep_last": 9},
        snapshots={"etc": {"paths": ["/etc"], "every": 3600}},
    )
    now, (read, warning) = read_again(settings(), lambda: new, fine)
    assert isinstance(read, SettingsRead)
    assert read.changed == [
        "dump.keep_last",
        "log.jsonl",
        "log.progress_interval",
        "run.skip_pgdump",
        "snapshots.etc",
    ]
    assert isinstance(warning, events.Warning)
    assert warning.reason.endswith("has changed: catalog.url, run.workers")
    assert (now.log, now.dump, now.snapshots) == (new.log, new.dump, new.snapshots)
    assert (now.run.skip_pgdump, now.run.workers) == (True, 4)
    assert now.catalog == settings().catalog
    # What needs a new start is told again, until there was one.
    assert [one.kind for one in read_again(now, lambda: new, fine)[1]] == [
        "settings_read",
        "warning",
    ]


def test_other_media_of_a_target_need_a_new_start() -> None:
    new = settings(media=("usb_a", "usb_b"))
    *_, warning = read_again(settings(media=("usb_a", "usb_c")), lambda: new, fine)[1]
    assert isinstance(warning, events.Warning)
    assert warning.reason.endswith("has changed: media")


def test_another_part_of_the_store_needs_a_new_start() -> None:
    new = settings(source={"root": "/s", "prefixes": ["0-7f"]})
    now, (_, warning) = read_again(settings(), lambda: new, fine)
    assert isinstance(warning, events.Warning)
    assert warning.reason.endswith("has changed: source.prefixes")
    assert now.part.whole


def test_settings_that_are_the_same_are_read_without_a_warning() -> None:
    _, (read,) = read_again(settings(), settings, fine)
    assert isinstance(read, SettingsRead)
    assert read.changed == []


def test_a_size_of_batches_that_keeps_them_from_growing_needs_a_new_start() -> None:
    new = settings(run={"batch_size": settings().run.batch_size})
    _, (_, warning) = read_again(settings(), lambda: new, fine)
    assert warning.fields["reason"].endswith("has changed: run.batch_size")


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (["remote"], []),
        (["remote", "usb"], ["target usb (new)"]),
        (["usb"], ["target usb (new)", "target remote (gone)"]),
    ],
)
def test_targets_that_are_new_or_gone_need_a_new_start(now: list[str], told: list[str]) -> None:
    _, (_, *warnings) = read_again(settings(), settings, fine, lambda: now)
    end = f"has changed: {', '.join(told)}"
    assert [one.fields["reason"].endswith(end) for one in warnings] == [True] * bool(told)


def refuse(*_: object) -> Settings:
    raise ConfigError("run.workers: must be 1 or more", hint="correct it")


def try_nothing(_settings: Settings) -> None:
    refuse()


@pytest.mark.parametrize(("load", "try_out"), [(refuse, fine), (settings, try_nothing)])
def test_settings_that_are_wrong_change_nothing(
    load: Callable[[], Settings], try_out: Callable[[Settings], None]
) -> None:
    old = settings()
    holding, (refused,) = read_again(old, load, try_out)
    assert isinstance(refused, SettingsRefused)
    assert (refused.message, refused.hint) == ("run.workers: must be 1 or more", "correct it")
    assert holding is old


@pytest.mark.parametrize(
    ("before", "after", "look", "due"),
    [
        (3600, 3600, False, False),
        (3600, 3600, True, True),
        (3600, 60, False, True),
        (None, 60, False, True),
        (3600, None, True, False),
    ],
)
def test_a_side_job_with_a_new_schedule_is_due_by_it(
    before: float | None, after: float | None, look: bool, due: bool
) -> None:
    one = Job(before)
    one._next += 1000.0
    one.every, one.looks = after, look  # type: ignore[misc]
    one.adopt(settings())
    assert (one._next <= 0.0) == due
