"""Each command has examples, as they are typed: at the end of its `--help`, and in the man page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

PROGRAM: Final = "ntt-backup-remote"

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
    "dumps": ("dumps", "dumps --json", "dumps --all"),
    "failed": (
        "failed",
        "failed --reason missing --since 1d --json",
        "failed --known",
    ),
    "init-db": (
        "init-db",
        "init-db --role backup --monitor grafana",
        "init-db --print-sql=dba",
    ),
    "install-receiver": (
        "install-receiver --print",
        "install-receiver --write ntt-backup-receive",
    ),
    "install-service": ("install-service", "install-service --uninstall"),
    "man": ("man", "man --to /usr/local/share/man/man1"),
    "mount": ("mount /mnt/blobs --packs /srv/packs", "mount /mnt/etc --snapshot etc"),
    "now": ("now", "--target offsite now --json"),
    "notify": ("notify", "notify 'all is well'"),
    "pack": (
        "pack blobs.tar --from /srv/store --prefix 00",
        "pack blobs.tar --list blobids.txt",
        "pack blobs.tar --check",
    ),
    "pause": ("pause", "--target offsite pause --json", "--target all pause"),
    "reconcile": ("reconcile", "reconcile --out differences --apply"),
    "requeue": ("requeue", "requeue --reason missing", "requeue 3f0a17"),
    "restore": (
        "restore --to /srv/store",
        "restore --to /tmp/some --list blobids.txt --bwlimit 4MB",
        "restore --catalog",
    ),
    "resume": ("resume", "--target offsite resume", "--target all resume"),
    "runs": ("runs", "runs --limit 5 --json"),
    "run": ("run --dry-run", "run --watch --bwlimit 8MB", "--target all run --watch"),
    "scan": ("scan", "scan --strays strays.jsonl"),
    "serve": ("serve", "serve --listen 127.0.0.1:8080", "serve --name backup.example.org"),
    "show": ("show 3f0a17", "show 3f0a17 --verify --json"),
    "snapshot": ("snapshot take etc /etc", "snapshot list etc"),
    "snapshot diff": ("snapshot diff etc", "snapshot diff etc@20260101 etc@20260201"),
    "snapshot forget": ("snapshot forget etc", "snapshot forget etc --keep-last 10 --yes"),
    "snapshot list": ("snapshot list", "snapshot list etc --json"),
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
    "snapshot verify": ("snapshot verify", "snapshot verify etc --sample 5%"),
    "status": ("status --json --exact", "--target all status"),
    "stop": ("stop", "--target offsite stop", "--target all stop"),
    "unpack": ("unpack blobs.tar --to /srv/store", "unpack packs/*.tar --to /srv/store --jobs 4"),
    "verify": (
        "verify --sample 1%",
        "verify --max-duration 2h --older-than 30d",
        "verify --local",
    ),
}


def with_examples(command: click.Command, words: str) -> click.Command:
    """Returns a command whose help ends with its examples, also that of commands below it."""
    lines = [f"  {PROGRAM} {line}" for line in EXAMPLES.get(words, ())]
    command.epilog = "\n".join(["\b", "Examples:", *lines]) if lines else None
    for name, below in getattr(command, "commands", {}).items():
        with_examples(below, f"{words} {name}")
    return command
