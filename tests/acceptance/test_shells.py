"""Completion as the shells do it: each loads what `completion` prints, and completes a word.

bin/setup installs neither zsh nor fish: their tests run where they are.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# What is typed, and the word that a shell makes of its end. zsh does it only on a terminal.
TYPED = "ntt-backup-remote snapshot take machi"
WORD = "machine-1"
BASH = """
eval "$(ntt-backup-remote completion bash)"
COMP_WORDS=(%s) COMP_CWORD=3
$(complete -p ntt-backup-remote | sed 's/.*-F //; s/ .*//') ntt-backup-remote
echo "${COMPREPLY[@]}"
"""
ZSH = """
zmodload zsh/zpty
zpty inner zsh -f -i
zpty -w inner 'autoload -Uz compinit; compinit -u -D; eval "$(ntt-backup-remote completion zsh)"'
zpty -w inner 'print rea''dy'; zpty -r inner said '*ready*'
zpty -w -n inner '%s'$'\\t'
zpty -r inner said '*machine-1*'
zpty -d inner
print -- $said
"""
FISH = """
ntt-backup-remote completion fish | source
complete --do-complete '%s'
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which the program is a command, and has a configuration with a snapshot set."""
    program = tmp_path / "ntt-backup-remote"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ntt_backup "$@"\n')
    program.chmod(0o755)
    config = tmp_path / "ntt.toml"
    config.write_text(f"[snapshots.{WORD}]\npaths = ['/etc']\n")
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "NTT_CONFIG": str(config),
        "TERM": "dumb",
    }


@pytest.mark.parametrize(
    ("shell", "script"),
    [
        ("bash", BASH),
        pytest.param("zsh", ZSH, marks=pytest.mark.long),
        pytest.param("fish", FISH, marks=pytest.mark.long),
    ],
)
def test_a_shell_completes_a_name_of_the_configuration(
    shell: str, script: str, environment: dict[str, str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [shell, "-c", script % TYPED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert WORD in done.stdout, done
