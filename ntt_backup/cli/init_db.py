"""The command `init-db`."""

from __future__ import annotations

import click

from ntt_backup.catalog import schema, schema_plan
from ntt_backup.catalog.schema_check import PRINT_SQL
from ntt_backup.cli.common import Common, connect
from ntt_backup.config import CatalogConfig
from ntt_backup.errors import complete


@click.command("init-db")
@click.option(
    "--notify", is_flag=True, help="Add a trigger: inserts into blobs wake a watching daemon."
)
@click.option(
    "--print-sql",
    "script",
    type=click.Choice(["all", *(who.value for who in schema_plan.Who)]),
    is_flag=False,
    flag_value="all",
    help="Change nothing. Print the missing SQL for psql: one script for each role that must run"
    " it, or only the named one.",
)
@click.option(
    "--role",
    help="With --print-sql: the database role that will back up; default: the user of catalog.url.",
)
@click.option(
    "--monitor",
    multiple=True,
    metavar="ROLE",
    help="With --print-sql: a database role that may read the figures; may be repeated.",
)
@click.pass_obj
def init_db(
    common: Common, notify: bool, script: str | None, role: str | None, monitor: tuple[str, ...]
) -> None:
    """Create the catalog, or add what an existing one lacks.

    Existing rows are not changed. It is safe to call this again.
    """
    if script is None and (role or monitor):
        raise click.UsageError("--role and --monitor are for --print-sql")
    settings = common.load(CatalogConfig)
    with connect(settings, "init-db") as conn:
        if script is not None:
            plan = schema_plan.make_plan(
                conn, settings.target, role=role, monitors=monitor, notify=notify
            )
            click.echo(plan.script(None if script == "all" else schema_plan.Who(script)))
            return
        not_yet = schema.init_db(conn, settings.target, notify=notify, report=click.echo)
        who = conn.info.user
    if not_yet:
        click.echo(f"{who} may not use all commands yet: {'; '.join(not_yet)}")
        click.echo(complete(PRINT_SQL))
    click.echo(
        f"the catalog is ready for target {settings.target}"
        + (", for all other commands" if not_yet else "")
    )
