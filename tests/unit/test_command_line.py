"""What the command line says of itself: help, examples, the man page, completion, configuration."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from ntt_backup.cli import options
from ntt_backup.cli.app import cli
from ntt_backup.cli.command_tree import EXAMPLES, PROGRAM, LazyGroup
from ntt_backup.cli.commands.install import next_steps
from ntt_backup.cli.commands.manual import page
from ntt_backup.errors import ConfigError, DestinationError

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SECRET = "hunter2"
NEXT = next_steps("ntt-backup")


def below(group: click.Command, words: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands with their words, groups before what is in them."""
    yield words, group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from below(command, f"{words} {name}".strip())


ALL = dict(below(cli))


def call(*args: str, **environ: str) -> Result:
    return CliRunner().invoke(cli, args, prog_name=PROGRAM, env={"COLUMNS": "100", **environ})


# --- results for programs -------------------------------------------------------------------------

WITH_JSON = [
    words for words, one in ALL.items() if any(param.name == "as_json" for param in one.params)
]


@pytest.mark.parametrize("words", WITH_JSON)
def test_a_command_that_fails_says_so_in_json(words: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    needed = ["--json"] + [
        "absent" for one in ALL[words].params if isinstance(one, click.Argument) and one.required
    ]

    done = call("--config", str(broken), *words.split(), *needed)

    found = json.loads(done.stdout)
    assert found["exit_code"] in (ConfigError.exit_code, DestinationError.exit_code)
    if words == "config check":
        assert [one["text"] for one in found["problems"]] == [found["problems"][0]["text"]]
        assert "line 1" in found["problems"][0]["text"]
    else:
        assert (found["target"], found["error"]["exit_code"]) == ("remote", found["exit_code"])
        assert found["error"]["message"]


# --- examples -------------------------------------------------------------------------------------


def on_the_pages() -> Iterator[str]:
    """The arguments of every command line of ours that is written down: on the pages, in blocks of
    shell and in the text, and in what `install-service` says.
    """
    yield from (found.strip() for found in re.findall(rf"{PROGRAM} ([^#\n]*)#", NEXT))
    for path in PAGES:
        text = path.read_text()
        for inline in re.findall(rf"`{PROGRAM} ([^`|\\]*)", text):
            yield inline.strip()
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            yield from (
                found[1].strip()
                for line in lines
                for found in re.finditer(rf"\b{PROGRAM} ([^/|;&>)#`][^|;&>)#`]*)", line)
                if not line.startswith("#")
            )


@pytest.mark.parametrize("words", ALL)
def test_the_help_of_each_command_ends_with_two_or_three_examples(words: str) -> None:
    shown = call(*words.split(), "--help").output
    lines = shown.partition("\n  Examples:\n")[2].splitlines()
    assert [line.strip() for line in lines] == [f"{PROGRAM} {one}" for one in EXAMPLES[words]]
    assert 2 <= len(lines) <= 3


@pytest.mark.parametrize(
    "line", sorted({*(one for lines in EXAMPLES.values() for one in lines), *on_the_pages()})
)
def test_an_example_is_a_right_command_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FILE", "blobids.txt"):
        (tmp_path / name).touch()
    for command in ALL.values():
        if not isinstance(command, click.Group):
            monkeypatch.setattr(command, "callback", lambda **_: None)
    done = call(*shlex.split(line))
    assert done.exit_code == 0, done.output


def test_what_comes_after_the_installation_is_in_order() -> None:
    words = re.findall(rf"{PROGRAM} (init-db|scan|check)\b", NEXT)
    assert words == ["init-db", "scan", "check"]
    assert NEXT.index("createuser") < NEXT.index("createdb") < NEXT.index("init-db")
    assert NEXT.index(" check") < NEXT.index("systemctl enable")


@pytest.mark.parametrize(
    "line",
    [
        *("restore ''", "unpack FILE --to ''", "snapshot restore etc --to ''", "mount ''"),
        "install-service --root ''",
    ],
)
def test_an_empty_path_is_not_the_directory_of_the_shell(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*shlex.split(line))
    assert (done.exit_code, "variable of the shell" in done.output) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "guess"),
    [
        ("statsu", "Did you mean status?"),
        ("snapshot lits", "Did you mean list?"),
        ("run --wrokers 3", "--workers"),
        ("bench strategies --only stream,rsync", "none of stream, tar,"),
    ],
)
def test_what_is_misspelt_is_guessed(line: str, guess: str) -> None:
    done = call(*line.split())
    assert done.exit_code == 2
    assert guess in done.output


@pytest.mark.parametrize("words", [words for words, one in ALL.items() if type(one) is LazyGroup])
def test_the_list_of_commands_says_of_each_what_its_own_help_says_first(words: str) -> None:
    group = ALL[words]
    assert isinstance(group, LazyGroup)
    shown = call(*words.split(), "-h").output
    for name, said in group.helps.items():
        assert said == ALL[f"{words} {name}".strip()].get_short_help_str(100)
        assert f" {name} {said}" in " ".join(shown.split())


def test_the_program_lists_its_commands_by_when_they_are_needed() -> None:
    shown = call("-h").output
    headings = re.findall(r"^([A-Z][A-Za-z ]+):$", shown, re.MULTILINE)
    rows = re.findall(r"^  ([a-z-]+)  +[A-Z]", shown.partition("\nEvery day:\n")[2], re.MULTILINE)
    assert headings == [
        "Options",
        "Every day",
        "When something is wrong",
        "Set up",
        "A running daemon",
        "Files and formats",
    ]
    assert rows[0] == "run"
    first = re.findall(r"^  (First|Every day|Trouble): .*`([a-z-]+)`", shown, re.MULTILINE)
    assert len(first) == 3
    assert {name for _, name in first} <= set(rows)
    assert sorted(rows) == [words for words in sorted(ALL) if words and " " not in words]


# --- the man page ---------------------------------------------------------------------------------


def test_the_man_page_has_every_command_exit_code_and_variable(tmp_path: Path) -> None:
    written = call("man", "--to", str(tmp_path))
    assert written.exit_code == 0
    text = (tmp_path / f"{PROGRAM}.1").read_text().replace("\\-", "-")
    for words, command in ALL.items():
        if not isinstance(command, click.Group):
            assert f"\n.SS {words}" in text
    for code in (0, 1, 2, 3, 4, 5, 6, 7, "130/143"):
        assert f"\n.TP\n.B {code}\n" in text
    assert "\n.B NTT_DB_URL\n" in text
    assert call("man", "--to", str(tmp_path / "none")).exception is not None


@pytest.mark.parametrize(
    "lint", ["groff -man -ww -z", "mandoc -T lint -W warning"], ids=["groff", "mandoc"]
)
def test_the_man_page_is_clean(lint: str, tmp_path: Path) -> None:
    if shutil.which(lint.split()[0]) is None:
        pytest.skip("it is not installed")
    path = tmp_path / "page.1"
    path.write_text(page(cli))
    done = subprocess.run([*lint.split(), path], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


# --- completion -----------------------------------------------------------------------------------

NAMES = """
[targets.disk]
url = "file:///mnt/disk"
[targets.offsite]
url = "file:///mnt/usb"
[snapshots.etc]
paths = ["/etc"]
"""


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("stat", ["status"]),
        ("status --e", ["--exact"]),
        ("--target ", ["all", "disk", "offsite"]),
        ("--target o", ["offsite"]),
        ("snapshot ta", ["take"]),
        ("snapshot take e", ["etc"]),
        ("requeue --reason un", ["unreadable"]),
        ("completion ", ["bash", "fish", "zsh"]),
    ],
)
def test_a_word_is_completed(typed: str, completed: list[str], tmp_path: Path) -> None:
    config = tmp_path / "ntt.toml"
    config.write_text(NAMES)
    assert completions(typed, config) == completed


def completions(typed: str, config: Path) -> list[str]:
    words = f"{PROGRAM} --config {config} {typed}"
    done = call(
        _NTT_BACKUP_REMOTE_COMPLETE="bash_complete",
        COMP_WORDS=words,
        COMP_CWORD=str(words.count(" ")),
        NTT_CONFIG="",
    )
    assert done.exit_code == 0
    return sorted(line.partition(",")[2] for line in done.output.splitlines() if line)


@pytest.mark.parametrize("content", ["nonsense", "targets = 3\nsnapshots = 4\n", None])
def test_names_complete_to_nothing_without_a_configuration(
    content: str | None, tmp_path: Path
) -> None:
    config = tmp_path / "ntt.toml"
    if content is not None:
        config.write_text(content)
    assert completions("snapshot take ", config) == []


# --- the configuration ----------------------------------------------------------------------------

CONFIG = f"""
[catalog]
url = "postgresql://me:{SECRET}@db/copyjob?sslpassword={SECRET}"
[source]
root = "/srv/store"
[remote]
url = "ssh://vault@host:22/srv/backup"
[run]
workers = 8
bwlimit = "08:00 4MB/s, 19:00 off"
[notify]
command = ["/bin/tell", "--token={SECRET}"]
ping_url = "https://hc.example.org/{SECRET}"
webhook_url = "https://example.org/{SECRET}"
[targets.disk]
url = "file:///mnt/usb"
[snapshots.etc]
paths = ["/etc"]
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ntt.toml"
    path.write_text(CONFIG)
    return str(path)


def test_every_setting_is_shown_with_its_origin_and_without_secrets(config: str) -> None:
    shown = call("--config", config, "config", "show", NTT_BATCH_SIZE="7")
    as_json = call("--config", config, "config", "show", "--json", NTT_BATCH_SIZE="7")
    assert shown.exit_code == as_json.exit_code == 0, shown.output
    assert SECRET not in shown.output + as_json.output
    assert re.search(rf"^run.workers +8 +{re.escape(config)}$", shown.output, re.MULTILINE)
    assert re.search(r"^run.batch_size +7 +NTT_BATCH_SIZE$", shown.output, re.MULTILINE)
    found = json.loads(as_json.output)
    assert (found["target"], found["file"]) == ("remote", config)
    settings = {key: (one["value"], one["origin"]) for key, one in found["settings"].items()}
    assert settings["run.bwlimit"][0] == "08:00 4MB/s, 19:00 off"
    assert settings["run.window"] == (4, "default")
    assert settings["remote.port"] == (22, f"remote.url in {config}")
    assert settings["catalog.url"][0] == "postgresql://me:***@db/copyjob?sslpassword=***"
    assert settings["notify.command"][0] == ["/bin/tell", "(hidden)"]
    assert settings["notify.ping_url"] == ("(hidden)", f"notify.ping_url in {config}")
    assert settings["snapshots.etc.paths"] == (["/etc"], f"snapshots.etc.paths in {config}")


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@host/db",
        f"postgresql://me:{SECRET}@more@host/db",
        f"postgresql://me@realm:{SECRET}@host/db",
        f"postgresql://host/db?user=me&password={SECRET}",
        f"host=db password={SECRET} user=me",
        f"host=db password = 'a \\' {SECRET}' user=me",
        f"host=db sslpassword='{SECRET}'",
        f"host=db oauth_client_secret={SECRET}",
        f"host=db scram_client_key = '{SECRET}' user=me",
        f"postgresql://host/db?scram_server_key={SECRET}&user=me",
        f"postgresql://host/db?%70assword={SECRET}",
        f"host=db some-later-parameter={SECRET}",
        f"host=db user='{SECRET}=1",
        f"host=db password=two {SECRET}",
        f"me:{SECRET}@host/db",
        f"postgresql://me:a/b?c {SECRET}@host/db",
    ],
)
def test_a_password_in_the_url_of_the_catalog_is_not_shown(url: str, tmp_path: Path) -> None:
    shown = call("config", "show", NTT_DB_URL=url, NTT_CONFIG=str(_empty(tmp_path)))
    assert shown.exit_code == 0, shown.output
    assert SECRET not in shown.output
    assert "host" in shown.output


def _empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.toml"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("target", "exit_code", "said"),
    [
        ("disk", 0, "ok      {}: 1 target (disk)\n"),
        ("remote,bare", 2, "1 problem in {}: 2 targets (remote, bare)\n"),
        ("remote", 0, "ok      {}: 1 target (remote)\n"),
        ("remote,disk", 0, "ok      {}: 2 targets (remote, disk)\n"),
        ("all", 2, "1 problem in {}: 3 targets (remote, disk, bare)\n"),
        ("usb", 2, "target 'usb' is not in {}"),
    ],
)
def test_a_check_is_of_the_targets_that_are_named(
    target: str, exit_code: int, said: str, config: str
) -> None:
    Path(config).write_text(CONFIG + "[targets.bare]\n")  # It has no URL.
    done = call("--config", config, "--target", target, "config", "check")
    if isinstance(done.exception, ConfigError):
        assert str(done.exception).startswith(said.format(config))
        assert (done.exception.exit_code, done.output) == (exit_code, "")
    else:
        assert done.output.endswith(said.format(config))
        assert done.exit_code == exit_code


def test_all_problems_of_all_targets_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(
        "[run]\nworkers = 0\nwrokers = 3\n[logs]\n"
        "[targets.one]\nurl = 'file://x/y'\n[targets.two]\nport = 5\n"
    )
    done = call("--config", str(path), "config", "check")
    told = re.findall(r"^FAILED  (.*)$", done.output, re.MULTILINE)
    assert done.exit_code == ConfigError.exit_code
    for name in (
        "run.workers",
        "workers?",
        "logs",
        "targets.one.url",
        "targets.two.url",
        "source.root",
    ):
        assert any(name in one for one in told), (name, told)
    assert done.output.endswith(f"{len(told)} problems in {path}: 2 targets (one, two)\n")
    as_json = json.loads(call("--config", str(path), "config", "check", "--json").output)
    assert [one["text"] for one in as_json["problems"]] == told


def test_a_test_that_notify_on_leaves_out_is_not_said_to_be_sent(config: str) -> None:
    Path(config).write_text("[notify]\ncommand = ['/bin/true']\non = ['failure']\n")
    done = call("--config", config, "notify")
    assert isinstance(done.exception, ConfigError)
    assert done.output == ""


PLACE = "[source]\nroot = '/srv/store'\n[remote]\nurl = 'file:///mnt/usb'\n"
SHARED = "[targets.disk]\nurl = 'file:///mnt/disk'\n"
NOTICE = "[notify]\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "[targets.usb]\nurl = 'file:///mnt/usb/'",
            "remote and usb are one place, file:///mnt/usb",
        ),
        ("[targets.a]", "targets.a.url is not set"),
        ("[targets.a]\nurl = 'file:///a'\nworkers = 3", "did you mean workers under [run]?"),
        ("[snapshots.etc]\npaths = ['etc']", "is 'etc': a list of absolute paths"),
        ("[run]\nbwlimit = 'fast'", "a timetable of times"),
        ("[run]\nbwlimit = '100'", "a rate from 1024 to"),
        ("[run]\nbwlimit = '08:00 4MB/s, 08:00 off'", "one rate from each time on"),
        ("[run]\nbwlimit = '08:00 4MB/s, off'", "a time before each rate"),
        ("[run]\nbwlimit = 'mon 08:00'", "a rate after each time"),
        (f"{SHARED}[lock]\nfile = '/run/l'", "lock.file is /run/l for the targets remote and disk"),
        (
            f"{SHARED}[control]\nsocket = '/run/s'",
            "control.socket is /run/s for the targets remote and disk",
        ),
        (f"{SHARED}[lock]\nfile = '/run/{{target}}.lock'", ""),
        (f"{NOTICE}webhook_url = 'hooks.example.org/{SECRET}'", "begins with https:// or http://"),
        (f"{NOTICE}webhook_url = 'https://me:{SECRET}@a.org'", "without user and password"),
        (f"{NOTICE}webhook_url = 'https://a.org/two words/{SECRET}'", "%20 for a space"),
        (f"{NOTICE}webhook_url = 'https://a.org:99999/{SECRET}'", "a port from 1 to 65535"),
        (f"{NOTICE}ping_url = 'https://a.org/{{taget}}/{SECRET}'", "no placeholder but {target}"),
        (f"{NOTICE}command = '/bin/tell --token={SECRET}'", "as in ["),
        (f"{NOTICE}command = ['tell', '--token={SECRET}']", "by its absolute path"),
        (f"{NOTICE}on = 'success'", "a list of success, failure, "),
    ],
)
def test_a_mistake_is_told_once_with_what_is_needed_and_without_secrets(
    lines: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "ntt.toml"
    path.write_text(f"{PLACE}{lines}\n")
    done = call("--config", str(path), "config", "check")
    told = re.findall(r"^FAILED  (.*)$", done.output, re.MULTILINE)
    assert [said in problem for problem in told] == [True] * bool(said), told
    assert SECRET not in done.output
    assert done.exit_code == (ConfigError.exit_code if said else 0)


def test_a_configuration_for_snapshots_alone_needs_no_store(tmp_path: Path) -> None:
    path = tmp_path / "snapshots.toml"
    path.write_text("[remote]\nurl = 'file:///mnt'\n[snapshots.etc]\npaths = ['/etc']\n")
    assert call("--config", str(path), "config", "check").exit_code == 0


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        (options.TIME, "90s", "90.0"),
        (options.SIZE, "2MiB", "2097152"),
        (options.RATE, "08:00 4MB, 19:00 off", "08:00 4MB, 19:00 off"),
    ],
)
def test_a_value_is_parsed_as_the_setting_of_its_kind(
    option: Callable[[str], object], text: str, value: str
) -> None:
    """The parsers are loaded by their names, which no type checker compares."""
    assert str(option(text)) == value
    with pytest.raises(click.BadParameter, match="'no' is not"):
        option("no")
