"""The commands `config`, `check` and `notify` tell whether everything is set as it should be."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common
from ntt_backup.cli.options import JSON
from ntt_backup.config import (
    CatalogConfig,
    Examined,
    RemoteConfig,
    SendConfig,
    examine,
    misspelt,
    shared_files,
    shared_places,
    sources,
)
from ntt_backup.config.display import SettingInEffect, settings_in_effect
from ntt_backup.errors import ConfigError
from ntt_backup.formatting import many, printable


@options.command(JSON, name="check")
def config_check(common: Common) -> None:
    """Check the configuration, for all targets.

    With --target, which may name several, only these targets are checked. All problems are reported
    together. A configuration that has only snapshot sets needs no store. The exit code is 2 if
    there is a problem.
    """
    file, environ = common.config, os.environ
    path = sources.path_of(file, environ)
    targets: list[str] = []
    problems: dict[str, str] = {}
    sound: dict[str, CatalogConfig] = {}
    try:
        targets = sources.targets(file, environ)
        if not common.default_target:
            targets = common.names()
    except ConfigError as error:
        problems[str(error)] = error.hint
    for target in targets:
        found: Examined[Any] = examine(SendConfig, environ=environ, file=file, target=target)
        if "source.root" not in found.layer and sources.snapshot_sets(file, environ):
            found = examine(RemoteConfig, environ=environ, file=file, target=target)
        problems |= dict(found.problems)
        if found.settings is not None:
            sound[target] = found.settings
    problems |= dict(shared_files(sound) + shared_places(sound))
    for warning in misspelt(environ):
        click.echo(f"warning: {warning}", err=True)
    lines = []
    for text, hint in problems.items():
        lines += [f"FAILED  {printable(text)}", *([f"        {printable(hint)}"] if hint else [])]
    end = f"{many(len(problems), 'problem')} in" if problems else "ok     "
    end += f" {printable(str(path))}"
    if targets:  # Else nothing in it could be read.
        end += " (there is no such file)" * (not path.exists())
        end += f": {many(len(targets), 'target')} ({', '.join(targets)})"
    told = [{"text": text, "hint": hint} for text, hint in problems.items()]
    fields = {"file": str(path), "targets": targets, "problems": told}
    results.report(fields, [*lines, end], ConfigError.exit_code if problems else 0)


@options.command(JSON, name="show")
def config_show(common: Common) -> None:
    """Show every setting with its value, and the source of the value.

    Sizes are in bytes, times in seconds. Passwords and the addresses for notices are not shown.
    """
    settings = common.load(CatalogConfig)
    found = examine(CatalogConfig, environ=os.environ, file=common.config, target=settings.target)
    path = sources.path_of(common.config, os.environ)
    rows = list(settings_in_effect(settings, found.layer))
    there = "" if path.exists() else " (there is no such file)"
    said = [f"target {settings.target}, configuration {printable(str(path))}{there}"]
    key_width = max(len(row.key) for row in rows)
    value_width = min(40, max(len(_text(row)) for row in rows))
    for row in rows:
        # The name that stands in the file is nearly always that of the key.
        origin = printable(row.origin.removeprefix(f"{row.key} in "))
        said.append(f"{row.key:<{key_width}}  {_text(row):<{value_width}}  {origin}")
    fields = {
        "target": settings.target,
        "file": str(path) if path.exists() else None,
        "settings": {row.key: {"value": row.value, "origin": row.origin} for row in rows},
    }
    results.tell(fields, said)


def _text(row: SettingInEffect) -> str:
    if row.value is None or row.value == "":
        return "-"
    return printable(row.value if isinstance(row.value, str) else json.dumps(row.value))


@options.command(JSON)
def check(common: Common) -> None:
    """Check everything that a run needs.

    A real transfer is tried; it leaves nothing behind. The exit code is that of the first problem.
    """
    from ntt_backup.report.check import check as check_all

    settings = common.load(SendConfig)
    code, steps = 0, []
    for step in check_all(settings):
        code = code or (step.error.exit_code if step.error else 0)
        verdict = "FAILED" if step.error else "warning" if step.warning else "ok"
        text = str(step.error) if step.error else step.warning or step.text
        error = step.error.fields if step.error else None
        found = {"name": step.name, "verdict": verdict.lower(), "text": text, "error": error}
        steps.append(found)
        if not options.wants("as_json"):  # Each step is told when it is done: some take long.
            click.echo(f"{verdict:<8}{step.name:<10}{printable(text)}")
            if step.error and step.error.hint:
                click.echo(f"{'':<18}{printable(step.error.hint)}")
    results.report({"target": settings.target, "steps": steps}, [], code)


@options.command()
@click.argument("text", default="this is a test")
def notify(common: Common, text: str) -> None:
    """Send a test notice.

    The notice goes to notify.command, notify.webhook_url and notify.ping_url, where they are set.
    """
    from ntt_backup.report.notices import Notice, send, told

    settings = common.load(CatalogConfig)
    if not told(settings):
        raise ConfigError(
            "no notice can be sent",
            hint="set notify.command, notify.webhook_url or notify.ping_url",
        )
    if not (ways := told(settings, "test")):
        raise ConfigError("notify.on leaves out the notice 'test'", hint='add "test" to notify.on')
    if problems := send(settings, Notice("test", settings.target, text, {})):
        raise ConfigError(
            "; ".join(problems),
            hint="correct that under [notify], or at the other end; a URL is not shown, since"
            " whoever knows it can post there",
        )
    click.echo(f"sent by {', '.join(ways)}")
