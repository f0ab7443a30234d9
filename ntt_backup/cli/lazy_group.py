"""A group of commands loads each of them when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click

from ntt_backup.cli.examples import with_examples

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_PACKAGE: Final = "ntt_backup.cli.commands"


class LazyGroup(click.Group):
    """Loads a command when it is asked for.

    helps: the commands, each with the first sentence of its help. Each is a function of its name
    in a module of that name, with _ for -, behind the prefix; homes: the modules of those that
    share one; sections: the same commands below the headings that `--help` shows.
    """

    def __init__(
        self,
        *,
        helps: Mapping[str, str],
        prefix: str = "",
        homes: Mapping[str, str] = MappingProxyType({}),
        sections: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        **attributes: Any,
    ) -> None:
        super().__init__(**attributes)
        self.helps = helps
        self._prefix = prefix
        self._homes = homes
        self._sections = sections or {"Commands": helps}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.helps)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.helps:
            return None
        name = cmd_name.replace("-", "_")
        module = import_module(f"{_PACKAGE}.{self._prefix}{self._homes.get(cmd_name, name)}")
        command: click.Command = getattr(module, name)
        return with_examples(command, self._prefix.replace("_", " ") + cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name[:1].isalnum() and name not in self.helps and not ctx.resilient_parsing:
            near = get_close_matches(name, self.helps, n=1)
            ctx.fail(f"No such command {name!r}." + "".join(f" Did you mean {a}?" for a in near))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns what fits, without loading the commands."""
        from click.shell_completion import CompletionItem

        fitting = [
            CompletionItem(name, help=said)
            for name, said in self.helps.items()
            if name.startswith(incomplete)
        ]
        return fitting + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.helps))
        for heading, helps in self._sections.items():
            with formatter.section(heading):
                rows = [(name.ljust(width), said) for name, said in helps.items()]
                formatter.write_dl(rows)
