"""What a terminal shows of a run, as an SVG that rich exports, without fonts from elsewhere."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final
from unittest import mock

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType

from ntt_backup import events
from ntt_backup.report import live, status
from ntt_backup.report.live import Screen, daemon_picture
from tests.pictures import scene

NOW: Final = datetime(2026, 11, 14, 9, 41, 30, tzinfo=UTC)
_COLUMNS: Final = 104
# That of rich, without fonts from elsewhere: each piece of text says how long it is, so others fit.
_FORMAT: Final = (
    re.sub(r"@font-face \{\{.*?\n    \}\}|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    .replace("Fira Code, monospace", "ui-monospace, 'DejaVu Sans Mono', monospace")
    .replace("arial", "system-ui, sans-serif")
)


class _Then(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return NOW


@contextmanager
def _at_that_time() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        with (
            mock.patch.object(status, "datetime", _Then),
            mock.patch.object(live, "datetime", _Then),
        ):
            yield
    finally:
        os.environ.pop("TZ")
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


def _drawn(title: str, name: str, *parts: RenderableType) -> str:
    console = Console(
        file=io.StringIO(),
        record=True,
        width=_COLUMNS,
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(*parts, sep="\n")
    made = console.export_svg(title=title, code_format=_FORMAT, unique_id=name)
    return "\n".join(filter(None, map(str.rstrip, made.splitlines()))) + "\n"


def live_view() -> str:
    """Returns the live view of a run."""
    with _at_that_time():
        (facts, *_), report = scene.targets(NOW), scene.daemon(NOW)
        screen = Screen(io.StringIO())
        view = screen.add("")
        remote = facts.settings.remote
        assert remote is not None
        view.event(
            events.RunStart(
                version="1.0.0", target="offsite", strategy="stream", workers=4, watch=True,
                source="/srv/store", remote=remote.where, prefixes="",
            )
        )  # fmt: skip
        view.event(events.OutageEnd(worker=0, what="remote", duration_s=242.0))
        view.event(events.BlobFailed(worker=2, blobid=scene.NAMES[0], reason="missing", detail=""))
        view.refresh(report.state)
        return _drawn("ntt-backup-remote run --watch", "live", view.picture())


def watched() -> str:
    """Returns what `status --watch` shows."""
    with _at_that_time():
        facts = scene.targets(NOW)[0]
        assert facts.daemon is not None
        facts.runs, facts.dumps = facts.runs[:1], facts.dumps[:1]
        picture = daemon_picture(facts.daemon, NOW, _COLUMNS, 30)
        table = status.Status(facts).table()
        return _drawn("ntt-backup-remote status --watch", "watch", picture, table)
