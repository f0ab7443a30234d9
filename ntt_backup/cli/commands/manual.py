"""The commands `man` and `completion` print what is made from the commands themselves."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from ntt_backup import __version__
from ntt_backup.cli.command_tree import EXAMPLES, PROGRAM
from ntt_backup.cli.global_options import writing
from ntt_backup.cli.options import DIR, value
from ntt_backup.process.durable import durable_file

_PAGE = f"{PROGRAM}.1"
_VARIABLE = f"_{PROGRAM}_COMPLETE".replace("-", "_").upper()


@click.command()
@value("--to", DIR, f"Write {_PAGE} into this directory.", "directory")
@click.pass_context
def man(context: click.Context, directory: Path | None) -> None:
    """Print the man page, or write it into a directory."""
    text = page(context.find_root().command)
    if directory is None:
        click.echo(text, nl=False)
        return
    path = directory / _PAGE
    with writing(path, "make the directory, or name another one"), durable_file(path) as file:
        file.write(text.encode())
    click.echo(f"wrote {path}")


def page(program: click.Command) -> str:
    """Returns the whole page in the language of man."""
    from ntt_backup.config.command_settings import ENVIRONMENT, CatalogConfig
    from ntt_backup.config.sources import CONFIG_VARIABLE, DEFAULT_FILE

    day = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    said, *_, exit_codes = _paragraphs(program)
    settings = CatalogConfig()
    files = {
        str(DEFAULT_FILE): f"the configuration, where neither --config nor {CONFIG_VARIABLE} is",
        str(settings.log.jsonl): "the log, one JSON object a line: log.jsonl",
        str(settings.lock.file): "the lock of a run for the target: lock.file",
    }
    variables = {CONFIG_VARIABLE: "the configuration file"}
    variables |= {name: f"the setting {key}" for name, key in ENVIRONMENT.items()}
    lines = [
        f'.TH {PROGRAM.upper()} 1 {time.strftime("%Y-%m-%d", day)} "ntt-backup {__version__}"',
        ".SH NAME",
        _roff(f"{PROGRAM} - {said[0].lower()}{said[1:].rstrip('.')}"),
        ".SH SYNOPSIS",
        f".B {_roff(PROGRAM)}",
        "[OPTIONS] COMMAND [ARGS]...",
        ".SH DESCRIPTION",
        *_text(
            "The store keeps each blob at aa/bb/BLOBID, and the table blobs of a PostgreSQL"
            " database knows them all. What is pending there is sent by several workers, and"
            " is marked as copied after the remote has said that it is on stable storage. The"
            " first steps are init-db, check and run; status says how it stands."
        ),
        ".SH OPTIONS",
        *_parts(program, PROGRAM, ""),
        ".SH COMMANDS",
        *_commands(program, PROGRAM, ""),
        ".SH EXIT STATUS",
        *_terms(re.findall(r"(\d[\d/]*) ([^,.]+)", exit_codes)),
        ".SH ENVIRONMENT",
        *_text("A variable wins over the file, and an option over a variable."),
        *_terms(variables.items()),
        ".SH FILES",
        *_terms(files.items()),
        ".SH SEE ALSO",
        *_text("docs/operations.md of the program leads to every setting, event and error."),
        "",
    ]
    # No space stands between a heading and its text.
    return re.sub(r"(?m)^(\.S[HS] .*)\n\.P$", r"\1", "\n".join(lines))


def _commands(group: click.Command, path: str, words: str) -> Iterator[str]:
    """Yields a section of each command that does something, in the order of the alphabet."""
    assert isinstance(group, click.Group)
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command, below = group.get_command(context, name), f"{words} {name}".strip()
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, path, below)
            continue
        pieces = command.collect_usage_pieces(click.Context(command))
        yield f".SS {_roff(' '.join([below, *pieces]))}"
        for paragraph in _paragraphs(command):
            yield from _text(paragraph)
        yield from _parts(command, path, below)


def _parts(command: click.Command, path: str, words: str) -> Iterator[str]:
    """Yields the options and the examples of a command."""
    context = click.Context(command)
    records = [one.get_help_record(context) for one in command.get_params(context)]
    yield from _terms([one for one in records if one and "--help" not in one[0]])
    if lines := EXAMPLES.get(words):
        yield from [".P", "Examples:", ".P", ".EX"]
        yield from (_roff(f"    {path} {line}") for line in lines)
        yield ".EE"


def _paragraphs(command: click.Command) -> list[str]:
    text = inspect.cleandoc(command.help or "")
    return [" ".join(one.split()) for one in text.split("\n\n")]


def _terms(terms: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, said in terms:
        yield from [".TP", f".B {_roff(term)}", *_filled(said)]


def _text(paragraph: str) -> list[str]:
    return [".P", *_filled(paragraph)]


def _filled(text: str) -> list[str]:
    return [_roff(line) for line in textwrap.wrap(text, 78, break_on_hyphens=False)]


def _roff(text: str) -> str:
    """Returns one line of text, in which nothing is a command of roff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the shell code that completes commands, options and names.

    \b
    In ~/.bashrc:  eval "$(ntt-backup-remote completion bash)"
    In ~/.zshrc, below compinit:  eval "$(ntt-backup-remote completion zsh)"
    In ~/.config/fish/config.fish:  ntt-backup-remote completion fish | source
    """  # noqa: D301  click reads the character
    from click.shell_completion import ShellComplete, get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    # That of bash would start a bash, to look at its version.
    script = ShellComplete.source(found(click.Command(PROGRAM), {}, PROGRAM, _VARIABLE))
    click.echo(script.rstrip("\n"))
