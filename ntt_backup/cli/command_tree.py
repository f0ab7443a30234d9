"""The tree of commands: their names, the first sentence of each help, modules, and examples.

A command's module is imported when the command is called. So a short command answers at once, and
`--help` and shell completion import no command.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PROGRAM: Final = "ntt-backup-remote"

# The headings of `--help`, and the commands below each in the order in which they are needed.
SECTIONS: Final = {
    "Every day": {
        "run": "Send the pending blobs to the remote.",
        "status": "Show what is pending, copied and failed, and which workers run.",
        "runs": "List the last runs: when, how they ended, what they copied.",
        "check": "Check everything that a run needs.",
        "verify": "Check the blobs on the remote by their hashes.",
        "drill": "Prove that everything can be restored.",
        "protect": "Renew the object locks of everything in a bucket.",
        "prune": "Remove from a target the blobs whose files are gone.",
        "dump": "Dump the catalog to the remote, and remove old dumps.",
        "dumps": "List dumps of the catalog on the remote; remove, pin or fetch them.",
        "snapshot": "Keep versions of files that change in place, and restore them.",
    },
    "When something is wrong": {
        "why": "Say whether anybody has to act, why, and what to do.",
        "failed": "List the failed blobs by reason, and what to do.",
        "show": "Show everything that is known about one blob.",
        "requeue": "Make failed blobs pending again.",
        "reconcile": "Compare catalog, store and remote by name and size.",
        "restore": "Restore blobs, files or the catalog from the remote.",
        "heal": "Restore missing or damaged blobs of the store from the targets.",
    },
    "Set up": {
        "setup": "Prepare the first backup: settings, catalog, target.",
        "demo": "Back up an example store, all on this machine.",
        "config": "Show or check the configuration.",
        "init-db": "Create the catalog, or add what an existing one lacks.",
        "move-catalog": "Move the catalog to another database, such as from the embedded server.",
        "scan": "Register blobs of the store that the catalog lacks.",
        "bench": "Measure the link, and the ways to send blobs over it.",
        "install-service": "Install the service for systemd, or remove it.",
        "install-receiver": "Prepare an ssh key that can only back up.",
        "completion": "Print the shell code that completes commands, options and names.",
        "man": "Print the man page, or write it into a directory.",
    },
    "A running daemon": {
        "pause": "Make a running daemon send nothing until it is resumed.",
        "resume": "Make a paused daemon continue.",
        "bwlimit": "Limit the bandwidth of a running daemon.",
        "now": "Make a running daemon look for work, and do what is due, immediately.",
        "stop": "Stop a running daemon after the batches in flight.",
        "serve": "Show the state of all targets as a web page.",
        "notify": "Send a test notice.",
    },
    "Files and formats": {
        "pack": "Pack blobs into one file, or examine such a file.",
        "unpack": "Unpack pack files into a directory.",
        "mount": "Mount packs as a directory of blobs, or a snapshot as a tree of files.",
    },
}
# The groups: the help of each, and its commands.
_GROUPS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "bench": (
        """Measure the link, and the ways to send blobs over it.

        The catalog is not changed, and everything that is sent is removed from the remote again. A
        bucket that would keep the objects is not used without --yes.
        """,
        {
            "link": "Measure the link: round trip, handshake, and throughput by number of streams.",
            "strategies": "Compare the ways to send, on a sample of your blobs; for a bucket also"
            " the ways back.",
        },
    ),
    "config": (
        """Show or check the configuration.

        These commands contact neither the catalog nor the remote; the command `check` does that.
        """,
        {
            "check": "Check the configuration, for all targets.",
            "show": "Show every setting with its value, and the source of the value.",
        },
    ),
    "snapshot": (
        """Keep versions of files that change in place, and restore them.

        A set has a name and paths. Each `take` makes a version of the set on the target, and sends
        what has changed since the last version.
        """,
        {
            "diff": "Show what differs between two versions.",
            "forget": "Remove versions that the retention does not keep.",
            "list": "List the versions of a set, or of all.",
            "pin": "Keep a version until it is unpinned, whatever the retention says.",
            "restore": "Restore a version, or a part of it, into a directory.",
            "show": "Show a version; without VERSION the newest.",
            "take": "Make a version of a set on the target.",
            "unpin": "Remove the pins of a version; the retention applies to it again.",
            "verify": "Check that versions are complete and unchanged.",
        },
    ),
}
# The modules that have more than the command of their own name.
_MODULES: Final = {
    name: module
    for module, names in {
        "blob": "failed requeue show",
        "catalog": "init-db move-catalog dump dumps",
        "config": "check notify",
        "install": "install-service install-receiver",
        "manual": "man completion",
        "pack": "unpack mount",
        "restore": "drill",
        "run": "pause resume bwlimit now stop",
        "status": "runs serve why",
        "verify": "protect reconcile scan",
    }.items()
    for name in names.split()
}

# By the words of the command; "" is the program itself. PROGRAM stands before each line.
EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("check", "run --watch", "--target offsite status --json"),
    "bench": ("bench link --streams 1,4", "bench strategies --sample 200MB"),
    "bench link": ("bench link", "bench link --streams 1,4,8 --seconds 5"),
    "bench strategies": (
        "bench strategies --sample 200MB",
        "bench strategies --only stream,tar-pipe",
    ),
    "bwlimit": ("bwlimit 4MB/s", "bwlimit off", "--target all bwlimit timetable"),
    "check": ("check", "--target offsite check"),
    "completion": ("completion bash", "completion fish"),
    "config": ("config show", "config check"),
    "config check": ("config check", "--config new.toml config check"),
    "config show": ("config show", "--target offsite config show --json"),
    "demo": ("demo", "demo --blobs 500 --keep", "demo --s3 --drill"),
    "drill": (
        "drill --scratch /var/tmp/drill --database postgresql:///drill",
        "drill --scratch /var/tmp/drill --database postgresql:///drill --prefix 00",
    ),
    "dump": ("dump", "dump --force --whole"),
    "dumps": (
        "dumps",
        "dumps --pin 20260304T120000Z-0badcafe.dump --reason 'before the move'",
        "dumps --fetch 20260304T120000Z-0badcafe.dump --to /var/tmp/catalog.dump",
    ),
    "failed": ("failed", "failed --reason missing --since 1d --json", "failed --known"),
    "heal": ("heal --dry-run", "heal --blobid ID --blobid ID", "heal --all"),
    "init-db": ("init-db", "init-db --role backup --monitor grafana", "init-db --print-sql=dba"),
    "install-receiver": ("install-receiver --print", "install-receiver --write ntt-backup-receive"),
    "install-service": (
        "install-service",
        "install-service --user app --read-all",
        "install-service --uninstall",
    ),
    "man": ("man", "man --to /usr/local/share/man/man1"),
    "move-catalog": (
        "move-catalog postgresql://backup@db.example.org/copyjob",
        "move-catalog embedded --json",
    ),
    "mount": ("mount /mnt/blobs --packs /srv/packs", "mount /mnt/etc --snapshot etc"),
    "now": ("now", "--target offsite now --json"),
    "notify": ("notify", "notify 'all is well'"),
    "protect": ("protect --for 90d", "protect --until 2027-12-31 --json"),
    "pack": (
        "pack blobs.tar --from /srv/store --prefix 00",
        "pack blobs.tar --list blobids.txt",
        "pack blobs.tar --check",
    ),
    "pause": ("pause", "--target offsite pause --json", "--target all pause"),
    "prune": ("prune --gone-for 90d", "prune --gone-for 90d --apply"),
    "reconcile": ("reconcile", "reconcile --out differences --apply"),
    "requeue": ("requeue", "requeue --reason missing", "requeue 3f0a17"),
    "restore": (
        "restore --to /srv/store",
        "restore --catalog",
        "restore --as-paths --to /srv/uploads --path '/2026/**'",
    ),
    "resume": ("resume", "--target offsite resume", "--target all resume"),
    "runs": ("runs", "runs --limit 5 --json"),
    "run": ("run --dry-run", "run --watch --bwlimit 8MB", "--target all run --watch"),
    "scan": ("scan", "scan --strays strays.jsonl"),
    "serve": ("serve", "serve --listen 127.0.0.1:8080", "serve --name backup.example.org"),
    "setup": (
        "setup",
        "setup --yes --files /srv/photos --to file:///media/usb/backup",
        "setup --store /srv/store --to ssh://vault@backup.example.org/srv/backup --service",
    ),
    "show": ("show 3f0a17", "show 3f0a17 --verify --json"),
    "snapshot": ("snapshot take etc /etc", "snapshot list etc"),
    "snapshot diff": ("snapshot diff etc", "snapshot diff etc@20260101 etc@20260201"),
    "snapshot forget": ("snapshot forget etc", "snapshot forget etc --keep-last 10 --yes"),
    "snapshot list": ("snapshot list", "snapshot list etc --json"),
    "snapshot pin": ("snapshot pin etc", "snapshot pin etc@20260101 --reason 'before the move'"),
    "snapshot restore": (
        "snapshot restore etc --to /tmp/etc --path /etc/ssh",
        "snapshot restore etc@20260101 --to / --delta",
    ),
    "snapshot show": ("snapshot show etc", "snapshot show etc@20260101 --files"),
    "snapshot take": (
        "snapshot take etc /etc",
        "snapshot take home /home --exclude '*.tmp'",
        "snapshot take etc --full",
    ),
    "snapshot unpin": ("snapshot unpin etc@20260101", "snapshot unpin etc@20260101 --json"),
    "snapshot verify": ("snapshot verify", "snapshot verify etc --sample 5%"),
    "status": ("status --json --exact", "--target all status", "status --policy"),
    "stop": ("stop", "--target offsite stop", "--target all stop"),
    "unpack": ("unpack blobs.tar --to /srv/store", "unpack packs/*.tar --to /srv/store --jobs 4"),
    "why": ("why", "--target offsite why", "why --json"),
    "verify": ("verify --sample 1%", "verify --max-duration 2h --older-than 30d", "verify --local"),
}


class LazyGroup(click.Group):
    """A group of commands. Each is a function of its name in a module of `commands/`.

    sections: For each heading of `--help`, its commands with the first sentence of their help.
    """

    def __init__(
        self, *, sections: Mapping[str, Mapping[str, str]], words: str = "", **attributes: Any
    ) -> None:
        super().__init__(**attributes, epilog=_examples(words))
        self.helps = {name: said for helps in sections.values() for name, said in helps.items()}
        self._sections = sections
        self._words = words

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.helps)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.helps:
            return None
        words = f"{self._words} {cmd_name}".strip()
        if words in _GROUPS:
            text, helps = _GROUPS[words]
            return LazyGroup(name=cmd_name, words=words, help=text, sections={"Commands": helps})
        first = words.split()[0]
        module = import_module(f"ntt_backup.cli.commands.{_MODULES.get(first, first)}")
        command: click.Command = getattr(module, words.replace(" ", "_").replace("-", "_"))
        command.epilog = _examples(words)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name[:1].isalnum() and name not in self.helps and not ctx.resilient_parsing:
            near = get_close_matches(name, self.helps, n=1)
            ctx.fail(f"No such command {name!r}." + "".join(f" Did you mean {a}?" for a in near))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the name of a command without importing the command."""
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
                formatter.write_dl([(name.ljust(width), said) for name, said in helps.items()])


def _examples(words: str) -> str:
    """Returns the end of the help of a command: its examples."""
    lines = [f"  {PROGRAM} {line}" for line in EXAMPLES[words]]
    return "\n".join(["\b", "Examples:", *lines])
