"""The command `init-db` creates the catalog, or adds what an existing one lacks."""

from __future__ import annotations

import json

import click

from ntt_backup.catalog import schema, schema_plan
from ntt_backup.catalog.schema_check import PRINT_SQL
from ntt_backup.catalog.schema_steps import Who
from ntt_backup.cli.common import Common, connect, json_option
from ntt_backup.config import CatalogConfig
from ntt_backup.config.host_key import key_file, make_host_key
from ntt_backup.errors import complete


@click.command("init-db")
@click.option(
    "--notify", is_flag=True, help="Add a trigger: inserts into blobs wake a watching daemon."
)
@click.option(
    "--print-sql",
    "script",
    type=click.Choice(["all", *(who.value for who in Who)]),
    is_flag=False,
    flag_value="all",
    help="Change nothing. Print the missing SQL for psql: one script for each role that must run"
    " it, or only the named one.",
)
@click.option(
    "--role",
    metavar="ROLE",
    help="Print the SQL, with no more rights than this role needs to back up; default: the user of"
    " catalog.url.",
)
@click.option(
    "--monitor",
    multiple=True,
    metavar="ROLE",
    help="Print the SQL, also for a role that may only read the figures; may be repeated.",
)
@json_option
@click.pass_obj
def init_db(
    common: Common,
    notify: bool,
    script: str | None,
    role: str | None,
    monitor: tuple[str, ...],
    as_json: bool,
) -> None:
    """Create the catalog, or add what an existing one lacks.

    Existing rows are not changed. It is safe to call this again. The first call on a host also
    makes its host key, which signs what the host writes to a target.
    """
    if role or monitor:
        script = script or "all"
    settings = common.load(CatalogConfig)
    with connect(settings, "init-db", no_tables=True) as conn:
        if script is not None:
            plan = schema_plan.make_plan(
                conn, settings.target, role=role, monitors=monitor, notify=notify
            )
            click.echo(plan.script(None if script == "all" else Who(script)))
            return
        said: list[str] = []
        report = said.append if as_json else click.echo
        not_yet = schema.init_db(conn, settings.target, notify=notify, report=report)
        who = conn.info.user
    if made := make_host_key(key_file(settings)):
        report(made)
    if as_json:
        click.echo(json.dumps({"target": settings.target, "done": said, "not_yet": not_yet}))
        return
    if not_yet:
        click.echo(f"{who} may not use all commands yet: {'; '.join(not_yet)}")
        click.echo(complete(PRINT_SQL))
    click.echo(
        f"the catalog is ready for target {settings.target}"
        + (", for all other commands" if not_yet else "")
    )
