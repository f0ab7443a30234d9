"""The types of option values, and the options that several commands share.

This module is loaded by `--help`, so it does not import anything that reads settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from ntt_backup.errors import ConfigError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class GivenPath(click.Path):
    """A path that is not empty. name: The word that stands for the path in the help.

    An empty path, as from an unset shell variable, would mean the current directory: a restore
    would write there.
    """

    def __init__(self, name: str = "path", **attributes: Any) -> None:
        super().__init__(**{"path_type": Path, **attributes})
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty: is a variable of the shell not set?", param, ctx)
        return super().convert(value, param, ctx)


def parsed(name: str, parse: Callable[[str], Any], needed: str) -> Callable[[str], Any]:
    """Returns a click type for values that `parse` reads from text, or refuses by a ValueError.

    name: The word that stands for the value in the help. needed: The end of "... is not".
    """

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not {needed}") from None

    convert.__name__ = name
    return convert


def _as_setting(module: str, parser: str) -> Callable[[str], Any]:
    """Returns a parser of the settings, which is imported only when there is a value to parse."""
    return lambda text: getattr(import_module(f"ntt_backup.config.{module}"), parser)(text)


def _part(text: str) -> float:
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", text.strip())
    if match is None or not 0 < float(match[1]) <= 100:
        raise ValueError(text)
    return float(match[1]) / 100


def _hex_prefix(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{0,64}", text):
        raise ValueError(text)
    return text


# The number of this task, the first number ("" for 0), and the number of tasks.
_SCHEDULERS: Final = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT"),
    ("JOB_COMPLETION_INDEX", "", "JOB_COMPLETIONS"),
)


def _shard(text: str) -> Any:
    from ntt_backup.model import Shard

    if text == "auto":
        return Shard(*_of_scheduler(os.environ))
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(text)
    return Shard(int(match[1]), int(match[2]))


def _of_scheduler(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns number and count of the shard of a scheduler's task. Raises BadParameter."""
    for names in _SCHEDULERS:
        if names[0] not in environ:
            continue
        said = [environ.get(name, "") if name else "0" for name in names]
        if not all(re.fullmatch("[0-9]{1,6}", one) for one in said):
            wrong = ", ".join(f"{name}={environ.get(name, '')!r}" for name in names if name)
            raise click.BadParameter(f"auto needs numbers of the scheduler, and not {wrong}")
        task, first, count = map(int, said)
        if not first <= task < first + count:
            raise click.BadParameter(
                f"auto needs tasks without gaps: {names[0]} is {task}, and there are {count} from"
                f" {first} on"
            )
        return task - first + 1, count
    tasks = " or ".join(names[0] for names in _SCHEDULERS)
    raise click.BadParameter(f"auto needs {tasks} in the environment")


PATH: Final = GivenPath()
DIR: Final = GivenPath("dir")
TIME: Final = parsed(
    "time", _as_setting("values", "parse_duration"), "a duration such as 90s, 15min, 2h or 30d"
)
SIZE: Final = parsed(
    "size", _as_setting("values", "parse_size"), "a size such as 500MB, 10GiB or 1TB"
)
PART: Final = parsed("percent", _part, "a part such as 1% or 0.1%")
RATE: Final = parsed(
    "rate",
    _as_setting("bandwidth_timetable", "parse_timetable"),
    "a rate such as 10MB, or a timetable such as 08:00 4MB, 19:00 off",
)
_PREFIX: Final = parsed("prefix", _hex_prefix, "the beginning of a blobid: 1 to 64 of 0-9a-f")


def flag(name: str, text: str, parameter: str = "") -> Decorator:
    """Returns an option without a value. parameter: The name of the function's parameter."""
    return click.option(name, *filter(None, [parameter]), is_flag=True, help=text)


def unless(name: str, text: str, parameter: str) -> Decorator:
    """Returns an option without a value that makes the parameter False, which is True without."""

    def negate(_context: click.Context, _option: click.Parameter, given: bool) -> bool:
        return not given

    return click.option(name, parameter, is_flag=True, callback=negate, help=text)


def value(name: str, kind: object, text: str, parameter: str = "", **attributes: Any) -> Decorator:
    """Returns an option with a value. The help shows the default, if there is one.

    kind: The type of the value; or, for a text, the word that stands for it in the help.
    parameter: The name of the function's parameter, if it is not that of the option.
    """
    attributes |= {"metavar": kind} if isinstance(kind, str) else {"type": kind}
    attributes.setdefault("show_default", bool(attributes.get("default")))
    return click.option(name, *filter(None, [parameter]), help=text, **attributes)


def repeated(name: str, word: str, text: str, parameter: str = "") -> Decorator:
    """Returns an option that may be given several times. word: What stands for one of its texts."""
    return value(name, word, f"{text}; may be repeated.", parameter, multiple=True)


def count(name: str, default: int, text: str) -> Decorator:
    """Returns an option for the number of connections, processes or workers."""
    return value(name, click.IntRange(1, 64), text, default=default)


def command(
    *last: click.Option, name: str | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Returns a decorator that makes a command of a function; `Common` is its first argument.

    last: Options that follow those of the function, and are not passed to it: see `given`.
    """

    def make(function: Callable[..., Any]) -> click.Command:
        made = click.command(name)(click.pass_obj(function))
        made.params += last
        return made

    return make


def _noted(text: str, *names: str, **attributes: Any) -> click.Option:
    def note(context: click.Context, option: click.Parameter, value: object) -> None:
        context.meta[f"ntt_backup.{option.name}"] = value

    return click.Option(names, expose_value=False, callback=note, help=text, **attributes)


def _json(text: str) -> click.Option:
    # Eager: a mistake in another option is told as JSON, too.
    return _noted(text, "--json", "as_json", is_flag=True, is_eager=True)


def _quiet(text: str) -> click.Option:
    return _noted(text, "-q", "--quiet", is_flag=True)


JSON: Final = _json("Print one JSON object.")
JSON_LINES: Final = _json("Print one JSON object per line.")
ONLY_ERRORS: Final = _quiet("Print only errors.")
# Of a command that prints a result at the end.
RESULT: Final = (JSON, _quiet("Print only the result at the end."))
IDENTITY: Final = _noted(
    "File with the age identity that opens sealed packs.  [default: pack.identity_file]",
    "--identity",
    type=GivenPath("file"),
)


def given(name: str) -> Any:
    """Returns the value of an option in `last` of `command`; None if it is not given."""
    context = click.get_current_context(silent=True)
    return context and context.meta.get(f"ntt_backup.{name}")


def wants(name: str) -> bool:
    """Returns whether --json (`as_json`) or --quiet (`quiet`) is given."""
    return bool(given(name))


def told() -> None:
    """Prevents that the error that ends the command is printed as JSON a second time."""
    click.get_current_context().meta["ntt_backup.as_json"] = False


def prefix(verb: str) -> Decorator:
    """Returns the option --prefix of a command that does something with blobs."""
    text = f"{verb} only blobids that begin with PREFIX; 00 is 1/256 of all."
    return value("--prefix", _PREFIX, text, default="")


def shard(verb: str) -> Decorator:
    """Returns the option --shard of a command that does something with blobs."""
    text = (
        f"{verb} only part I of N equal parts of all blobs; auto: as Slurm or Kubernetes assigns."
    )
    kind = parsed("shard", _shard, "a part of N, from 1/N to N/N, or auto")
    return value("--shard", kind, text, metavar="I/N")


def require_whole_space(prefix: str, shard: object) -> None:
    """Raises UsageError where both --prefix and --shard are given."""
    if prefix and shard is not None:
        raise click.UsageError("give --prefix or --shard: a shard is a part of all blobs")


def blob_list(verb: str) -> Decorator:
    """Returns the option --list of a command that does something with blobs."""
    text = f"{verb} the blobids in this file, one a line; - for stdin."
    return value("--list", click.File("r"), text, "names", metavar="FILE")


def sessions(default: int) -> Decorator:
    """Returns the option --workers of a command that reads the remote."""
    return count("--workers", default, "Number of connections that work in parallel.")


def jobs(more: str = "") -> Decorator:
    """Returns the option --jobs of a command that works in several processes."""
    return count("--jobs", 1, f"Number of processes that work in parallel{more}.")


def destination(text: str) -> Decorator:
    """Returns the option --to of a command that fills a directory."""
    return value("--to", DIR, text, "destination", required=True)


def bwlimit(what: str) -> Decorator:
    """Returns the option --bwlimit of a command that fetches blobs. what: What is limited."""
    text = f"Bytes a second {what}, such as 10MB, or a timetable as in run.bwlimit."
    return value("--bwlimit", RATE, text)


def of_dump(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --trust-target and --allow-superuser of a command that restores a dump."""
    trust_target = flag(
        "--trust-target",
        "If no dump is proved to be of this host, use a dump of unknown origin. Only rows of"
        " blobs and of our own tables are restored from it.",
    )
    allow_superuser = flag(
        "--allow-superuser",
        "Restore the dump as the user of the database, even if that is a superuser. Objects"
        " that only a superuser may create are restored, too, but code in the dump runs with"
        " the rights of that user.",
    )
    return trust_target(allow_superuser(command))


# A shell asks for completions at each key press, so only the configuration is read. If it cannot be
# read, there are no completions.


def target_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Completes the name of a target, and `all` where there are several."""
    from ntt_backup.config import ALL_TARGETS, sources

    found = _known(sources.targets, ctx, incomplete)
    several = len(_known(sources.targets, ctx, "")) > 1 and ALL_TARGETS.startswith(incomplete)
    return [*found, *([ALL_TARGETS] if several else [])]


def set_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Completes the name of a snapshot set."""
    from ntt_backup.config import sources

    return _known(sources.snapshot_sets, ctx, incomplete)


def _known(
    names: Callable[[Path | None, Mapping[str, str]], list[str]], ctx: click.Context, begin: str
) -> list[str]:
    with suppress(ConfigError):
        found = names(ctx.find_root().params.get("config"), os.environ)
        return [name for name in found if name.startswith(begin)]
    return []
