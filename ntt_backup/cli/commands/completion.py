"""The command `completion` prints what makes a shell complete commands, options and names."""

from __future__ import annotations

import click

from ntt_backup.cli.examples import PROGRAM

_VARIABLE = f"_{PROGRAM}_COMPLETE".replace("-", "_").upper()


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the code that lets a shell complete commands, options and names.

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
