"""The command `completion` prints what makes a shell complete commands, options and names.

A shell asks at each press of a key, so only the configuration is read: neither the catalog nor the
remote is asked, and what cannot be read completes to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import click

from ntt_backup.cli.examples import PROGRAM
from ntt_backup.errors import ConfigError

_VARIABLE = f"_{PROGRAM}_COMPLETE".replace("-", "_").upper()


def target_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Returns the targets of the configuration that begin so, and the word for all of several."""
    from ntt_backup.config import ALL_TARGETS, sources

    found = _known(sources.targets, ctx, incomplete)
    several = len(_known(sources.targets, ctx, "")) > 1 and ALL_TARGETS.startswith(incomplete)
    return [*found, *([ALL_TARGETS] if several else [])]


def set_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Returns the snapshot sets of the configuration that begin so."""
    from ntt_backup.config import sources

    return _known(sources.snapshot_sets, ctx, incomplete)


def _known(
    names: Callable[[Path | None, Mapping[str, str]], list[str]], ctx: click.Context, begin: str
) -> list[str]:
    with suppress(ConfigError):
        found = names(ctx.find_root().params.get("config"), os.environ)
        return [name for name in found if name.startswith(begin)]
    return []


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete our commands, options and names.

    bash: eval "$(ntt-backup-remote completion bash)" in ~/.bashrc. zsh: the same with zsh, after
    compinit, in ~/.zshrc. fish: ntt-backup-remote completion fish | source, in
    ~/.config/fish/config.fish.
    """
    from click.shell_completion import ShellComplete, get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    # That of bash would start a bash, to look at its version.
    script = ShellComplete.source(found(click.Command(PROGRAM), {}, PROGRAM, _VARIABLE))
    click.echo(script.rstrip("\n"))
