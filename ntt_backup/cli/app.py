"""A command as a process: its streams, its signals, its last words, and its exit code.

A command may be started with its output closed, or on a full disk, or with signals ignored, and
may end by any error, or by a signal: whatever happens, it ends with one line of what happened, one
of what to do, and the exit code of the contract. Commands themselves need not think of it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NoReturn, TextIO

import click

from ntt_backup.config import misspelt
from ntt_backup.errors import BackupError
from ntt_backup.format import printable
from ntt_backup.ui.run_view import render_error


def unforeseen(
    kind: type[BaseException], error: BaseException, _traceback: TracebackType | None
) -> None:
    """Shows what nobody has thought of to somebody who did not ask for a traceback."""
    click.echo(
        f"unforeseen {kind.__name__}: {printable(str(error))}\n"
        "hint: this is a defect; the same command with -v shows where it happened",
        err=True,
    )


def main(command: click.Command) -> int:
    """All of a command, from its first signal handler to the exit code."""
    _mind_streams()
    _mind_signals()
    try:
        return _run(command)
    except OSError:  # A reader who went away is click's to deal with, and ends with 1 in silence.
        problem = _flush(sys.stdout)
        if problem is None:
            raise
        _complain(f"cannot write to standard output: {problem.strerror}")
        return 1
    finally:
        _flush(sys.stdout)
        _flush(sys.stderr)


def _mind_streams() -> None:
    """Have a command not end over a stream that is closed, or a letter that its encoding lacks.

    What is closed becomes /dev/null. Else the next file or socket would get its descriptor, and
    with it what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        if isinstance(sys.stdout.buffer, io.RawIOBase):
            # PYTHONUNBUFFERED: what cannot be written would be gone, and `main` could not tell
            # that it was output. Whoever prints in the middle of things flushes anyway.
            encoding, terminal = sys.stdout.encoding, sys.stdout.isatty()
            buffer = io.BufferedWriter(sys.stdout.detach())
            sys.stdout = io.TextIOWrapper(buffer, encoding, line_buffering=terminal)
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it anyway


def _mind_signals() -> None:
    """Have SIGTERM and SIGHUP end a command as Ctrl-C does, which takes its temporary files along.

    `run` and `demo` have handlers of their own, as has the time before this. And have the kernel
    tell how children end: a starter may have left that ignored, and every status would be lost.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(signum, _stop)


def _stop(signum: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


def _run(command: click.Command) -> int:
    """Do what the command line says; the exit code."""
    for warning in misspelt(os.environ):
        _complain(f"warning: {warning}")
    try:
        command.main(prog_name="ntt-backup-remote", standalone_mode=False)
    except BackupError as error:
        _complain(render_error(error))
        return error.exit_code
    except click.ClickException as error:
        with suppress(OSError):
            _explained(error, command).show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted")
        return 130
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        raise
    return 0


def _explained(error: click.ClickException, root: click.Command) -> click.ClickException:
    """The error, or a better one for an option that stands on the wrong side of the command."""
    if isinstance(error, click.NoSuchOption) and (place := _placed(error, root)):
        return click.UsageError(place, error.ctx)
    return error


def _placed(error: click.NoSuchOption, root: click.Command) -> str:
    """Where an option belongs that stands where it does not; nothing for one of no command."""
    name, context = error.option_name, click.Context(root)
    if _takes(root, name):
        return f"{name} stands before the command: ntt-backup-remote {name} ... {_said(error)}"
    if not isinstance(root, click.Group):
        return ""
    commands = {one: root.get_command(context, one) for one in root.list_commands(context)}
    takers = [one for one, command in commands.items() if command and _takes(command, name)]
    return f"{name} stands after the command: {', '.join(takers)}" if takers else ""


def _takes(command: click.Command, name: str) -> bool:
    return any(name in option.opts for option in command.params)


def _said(error: click.NoSuchOption) -> str:
    """The command that was called."""
    return error.ctx.command_path.partition(" ")[2] if error.ctx is not None else "COMMAND"


def _complain(text: str) -> None:
    """Print to stderr. Where that cannot be, the exit code says enough."""
    with suppress(OSError):
        click.echo(text, err=True)


def _flush(stream: TextIO) -> OSError | None:
    """Hand over what was printed; why that cannot be, and then nothing is left to hand over. Left
    to the interpreter's end, a full disk or a closed pipe would turn every exit code into 120.
    """
    try:
        stream.flush()
    except OSError as problem:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return problem
    return None
