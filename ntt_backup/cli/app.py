"""The program: global options, streams, signals, errors, exit codes.

A command may be started with closed output, on a full disk, or with signals ignored, and may end by
any error or signal. In each case the program prints one line that says what happened and one that
says what to do, and ends with the exit code of the contract. Commands need not care.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TextIO

import click

from ntt_backup import __version__
from ntt_backup.cli import options
from ntt_backup.cli.command_tree import PROGRAM, SECTIONS, LazyGroup
from ntt_backup.cli.global_options import Common
from ntt_backup.errors import BackupError, remember_global_options
from ntt_backup.formatting import printable, render_error, use_iec
from ntt_backup.model import DEFAULT_TARGET

_BUFFER: Final = 1 << 16


class _Program(LazyGroup):
    """All commands. A command that fails prints its error as JSON, too, if --json is given."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BackupError, click.ClickException) as error:
            if options.wants("as_json"):
                from ntt_backup.cli import results

                if isinstance(error, click.ClickException):
                    said = BackupError(error.format_message(), exit_code=error.exit_code)
                else:
                    said = error
                click.echo(json.dumps(results.failed(ctx.obj.target, said)))
            raise


@click.group(
    cls=_Program, sections=SECTIONS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--config",
    type=options.PATH,
    help="Configuration file (TOML); default: NTT_CONFIG, else"
    " ~/.config/ntt-backup/backup-remote.toml of an ordinary user, else"
    " /etc/ntt/backup-remote.toml.",
)
@click.option(
    "--target",
    default=DEFAULT_TARGET,
    show_default=True,
    shell_complete=options.target_names,
    help="Name of the target to work with. The commands run, status, why, heal, serve, config"
    " check, and those for a running daemon (pause, resume, bwlimit, now, stop) also accept several"
    " names (a,b) or all.",
)
@click.option(
    "--sizes",
    type=click.Choice(["si", "iec"]),
    default="si",
    envvar="NTT_SIZES",
    help="Units in the output: si for MB (10^6 bytes), iec for MiB; default: NTT_SIZES, else si.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an unforeseen error.")
@click.version_option(__version__, prog_name=PROGRAM)
@click.pass_context
def cli(
    context: click.Context, config: Path | None, target: str, sizes: str, verbose: bool
) -> None:
    """Back up a content-addressed store: over ssh, to a disk, or to a bucket.

    \b
    First:      `demo` shows a whole backup, `check` says what a `run` needs.
    Every day:  `run` sends what is pending, `status` has the figures.
    Trouble:    `why` says what is wrong with which target, and what to do.

    Exit codes: 0 done, 1 unforeseen error, 2 usage or configuration, 3 another coordinator is
    running, 4 catalog, 5 remote unreachable, 6 remote cannot store, 7 finished but something failed
    or was found wrong, 8 no daemon is running, 130/143 stopped by a signal.
    """  # noqa: D301  click reads the character
    context.obj = Common(config, target)
    use_iec(iec=sizes == "iec")
    remember_global_options(context.obj.words)
    if not verbose:
        sys.excepthook = _say_unforeseen


def main() -> int:
    """Runs the command line. Returns the exit code."""
    _prepare_streams()
    _prepare_signals()
    try:
        return _run()
    except OSError:  # Where the reader of a pipe has gone, click ends with 1 and says nothing.
        problem = _flush(sys.stdout)
        if problem is None:
            raise
        _complain(f"cannot write to standard output: {problem.strerror}")
        return 1
    finally:
        _flush(sys.stdout)
        _flush(sys.stderr)


def _say_unforeseen(
    kind: type[BaseException], error: BaseException, _traceback: TracebackType | None
) -> None:
    """Prints an unforeseen error without its traceback."""
    click.echo(
        f"unforeseen {kind.__name__}: {printable(str(error))}\n"
        "hint: this is a defect of the program; the same command with -v shows where it happened",
        err=True,
    )


def _prepare_streams() -> None:
    """Prevents failures by closed streams, and by characters that the encoding lacks.

    A closed stream becomes /dev/null. Otherwise the next file or socket would get its descriptor,
    and with the descriptor everything that is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        if isinstance(sys.stdout.buffer, io.RawIOBase | io.BufferedWriter):
            # `main` tells a failed print from another OSError by what is left in the buffer, so
            # there is one also with PYTHONUNBUFFERED, and it holds the longest help. What must be
            # seen before the end is flushed anyway.
            encoding, terminal = sys.stdout.encoding, sys.stdout.isatty()
            under = sys.stdout.detach()
            raw = under.detach() if isinstance(under, io.BufferedWriter) else under
            buffer = io.BufferedWriter(raw, _BUFFER)
            sys.stdout = io.TextIOWrapper(buffer, encoding, line_buffering=terminal)
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it anyway


def _prepare_signals() -> None:
    """Makes SIGTERM and SIGHUP end a command as Ctrl-C does, so that temporary files are removed.

    `run` and `demo` set their own handlers. The default for SIGCHLD is restored: if the parent
    process ignores SIGCHLD, the exit status of every child process would be lost.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(signum, lambda number, _frame: sys.exit(128 + number))


def _run() -> int:
    try:
        cli.main(prog_name=PROGRAM, standalone_mode=False)
    except BackupError as error:
        _complain(render_error(error))
        return error.exit_code
    except click.ClickException as error:
        with suppress(OSError):
            _clearer(error).show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted")
        return 130
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        raise
    return 0


def _clearer(error: click.ClickException) -> click.ClickException:
    """Returns the error, or a clearer one if an option stands on the wrong side of the command."""
    if not isinstance(error, click.NoSuchOption):
        return error
    name, context = error.option_name, click.Context(cli)
    commands = {one: cli.get_command(context, one) for one in cli.list_commands(context)}
    having = [
        one
        for one, command in {"": cli, **commands}.items()
        if command and any(name in option.opts for option in command.params)
    ]
    if not having:
        return error
    text = f"{name} stands after the command: {', '.join(having)}"
    if not having[0]:
        called = error.ctx.command_path.partition(" ")[2] if error.ctx is not None else "COMMAND"
        text = f"{name} stands before the command: {PROGRAM} {name} ... {called}"
    return click.UsageError(text, error.ctx)


def _complain(text: str) -> None:
    """Prints to stderr. If that fails, the exit code must do."""
    with suppress(OSError):
        click.echo(text, err=True)


def _flush(stream: TextIO) -> OSError | None:
    """Flushes a stream. If that fails, discards the buffer and returns the error.

    Otherwise the interpreter would flush again at its end, fail, and turn every exit code into 120.
    """
    try:
        stream.flush()
    except OSError as problem:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return problem
    return None
