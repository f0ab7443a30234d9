"""Remotes of every kind: slow, loud, silent, mad, without links, with odd tools.

They are shells of this machine with replaced tools (`Machine`), or scripts that only pretend to be
the strategy's far side (`Imposter`), so these tests know how the tar strategy talks.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import explain_ssh
from ntt_backup.config.sections import RunSettings
from ntt_backup.errors import (
    BackupError,
    BatchRejected,
    RemoteCannotStore,
    RemoteUnreachable,
    SourceError,
)
from ntt_backup.model import Batch
from ntt_backup.upload.strategies.session import Rejection, Session
from ntt_backup.upload.strategies.tar_probe import TarProbe
from tests.contract.harness import Harness, Imposter, Machine, receipt_of, settle
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.parametrize("strategy", ["tar"])

READY = 'printf "\\nNTT-TAR 2 ready exact\\n"'
TAKE_ONE = 'IFS=" " read -r number bytes files; head -c "$bytes" >/dev/null; read -r verdict'

BAD_SYNC = "echo \"sync: error syncing '$2': Input/output error\" >&2; exit 1"


class Explained(Imposter):
    """An imposter whose end is explained as an ssh's end is."""

    def explain(self, status: int | None, stderr: str) -> BackupError:
        return explain_ssh(status, stderr)


def sends_everything(harness: Harness, session: Session) -> None:
    """Several batches go out before the first answer is asked for, and all arrive."""
    batches = [
        harness.batch(f"b{n}", *(bytes([n]) * k for k in (1, 511, 40_000))) for n in range(4)
    ]
    for batch in batches:
        session.put(batch)
    assert [receipt_of(outcome).batch for outcome in settle(session)] == batches
    assert harness.on_remote() == harness.expected(*batches)


# --- tools ----------------------------------------------------------------------------------------


def test_a_head_that_reads_ahead_is_found_out_and_the_sides_take_turns(
    local: Harness, machine: Machine
) -> None:
    machine.python_tool(
        "head",
        "import os, sys\n"
        "left = int(sys.argv[2])\n"
        "while left and (data := os.read(0, 65536)):\n"
        "    os.write(1, data[:left])\n"
        "    left -= min(left, len(data))\n",
    )
    sends_everything(local, local.open(transport=machine))


def test_without_hard_links_too_what_is_right_stays_and_what_is_wrong_is_replaced(
    local: Harness, machine: Machine
) -> None:
    machine.tool("cp", "exit 1")
    batch = local.batch("b", b"right", b"wrong before")
    for blob, content in zip(batch.blobs, (b"right", b"something else"), strict=True):
        local.final(blob).parent.mkdir(parents=True)
        local.final(blob).write_bytes(content)
    inode = local.final(batch.blobs[0]).stat().st_ino
    session = local.open(transport=machine)
    session.put(batch)
    settle(session)
    assert local.on_remote() == local.expected(batch)
    assert local.final(batch.blobs[0]).stat().st_ino == inode


def test_a_sync_that_knows_no_file_systems_syncs_everything(
    local: Harness, machine: Machine, tmp_path: Path
) -> None:
    called = tmp_path / "called"
    unknown = "echo \"sync: invalid option -- 'f'\" >&2; exit 1"
    machine.tool("sync", f'[ $# = 0 ] || {{ {unknown}; }}; echo all >> "{called}"')
    sends_everything(local, local.open(transport=machine))
    assert called.read_text().split() == ["all"] * 8  # Content and names of each batch.


def test_content_is_synced_before_it_has_a_name_and_the_name_before_the_receipt(
    local: Harness, machine: Machine, tmp_path: Path
) -> None:
    """Else a power cut may leave empty files under the names of blobs."""
    called = tmp_path / "called"
    machine.tool("sync", f'find "{local.path}/by-hash" -type f | wc -l >>"{called}"')
    session = local.open(transport=machine)
    (opening,) = called.read_text().split()  # That it knows file systems.
    session.put(local.batch("b", b"one", b"two"))
    (outcome,) = settle(session)
    assert len(receipt_of(outcome).stored) == 2
    assert called.read_text().split() == [opening, "0", "2"]


def test_content_that_could_not_be_synced_gets_no_name(
    local: Harness, machine: Machine, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    machine.tool("sync", f'mkdir "{first}" 2>/dev/null || {{ {BAD_SYNC}; }}')
    assert isinstance(refusal(local, machine, b"content"), RemoteCannotStore)
    assert local.on_remote() == {}


@pytest.mark.parametrize("kind", ["65735546", "fe534d42", "f15f"])
def test_what_hears_only_of_a_file_s_sync_is_synced_file_by_file(
    local: Harness, machine: Machine, tmp_path: Path, kind: str
) -> None:
    called = tmp_path / "called"
    machine.tool("stat", f'[ "$*" = "-f -c %t {local.path}/by-hash" ] && echo {kind}')
    machine.tool("sync", f'for each; do echo "$PWD/$each"; done >>"{called}"')
    batch = local.batch("b", b"one", b"two", b"kept")
    kept = local.final(batch.blobs[2])
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"kept")
    session = local.open(transport=machine)
    session.put(batch)
    (outcome,) = settle(session)
    assert receipt_of(outcome).stored == batch.blobs
    synced = {os.path.normpath(path) for path in called.read_text().split()}
    finals = [local.final(blob) for blob in batch.blobs]
    assert {str(above) for path in finals for above in (path, *path.parents[:3])} <= synced


@pytest.mark.parametrize(
    ("said", "inodes"),
    [
        ("Filesystem Inodes IUsed IFree IUse% Mounted\\nd 100 93 7 93% /", 7),
        ("Filesystem Inodes IUsed IFree IUse% Mounted\\nd 0 0 0 - /", None),
        ("Filesystem 512-blocks Used Avail Capacity iused\\nd 100 93 7 93% 5", None),
        ("df: invalid option -- i", None),
    ],
)
def test_the_shell_tells_how_many_inodes_are_free(
    local: Harness, machine: Machine, said: str, inodes: int | None
) -> None:
    machine.tool(
        "df", f"[ $1 != -Pi ] || {{ printf '%b\\n' '{said}'; exit; }}; exec /bin/df \"$@\""
    )
    run = RunSettings(strategy="tar")
    spec = SessionSpec(machine, local.path, "0123456789ab", "run", "0", run)
    probe = TarProbe(spec)
    assert probe.facts().free_inodes == inodes
    probe.close()


def test_what_could_not_be_synced_has_no_receipt(
    local: Harness, machine: Machine, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    machine.tool("sync", f'mkdir "{first}" 2>/dev/null || {{ {BAD_SYNC}; }}')
    error = refusal(local, machine, b"content")
    assert isinstance(error, RemoteCannotStore)
    assert "Input/output error" in error.detail


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("tar: ab: Cannot open: No space left on device", RemoteCannotStore),
        ("sh: 1: Cannot fork", RemoteUnreachable),
        ("tar: something nobody has heard of", BatchRejected),
    ],
)
def test_the_words_of_the_remote_tar_decide_the_error_of_a_batch(
    local: Harness, machine: Machine, said: str, kind: type[BackupError]
) -> None:
    machine.tool("tar", f"cat >/dev/null; echo '{said}' >&2; exit 2")
    session = local.open(transport=machine)
    batch = local.batch("b", b"content")
    session.put(batch)
    (rejection,) = settle(session)
    assert isinstance(rejection, Rejection)
    assert (rejection.batch, type(rejection.error)) == (batch, kind)
    assert said in rejection.error.detail
    assert local.on_remote() == {}
    assert session.usable


def test_a_tar_that_fails_without_reading_does_not_disturb_the_next_batch(
    local: Harness, machine: Machine, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    machine.tool("tar", f'if mkdir "{once}" 2>/dev/null; then exit 3; fi; exec /bin/tar "$@"')
    bad, good = local.batch("bad", b"b" * 3_000_000), local.batch("good", b"g" * 30_000)
    session = local.open(transport=machine)
    session.put(bad)
    session.put(good)
    rejection, receipt = settle(session)
    assert isinstance(rejection, Rejection)
    assert rejection.batch == bad
    assert receipt_of(receipt).batch == good
    assert local.on_remote() == local.expected(good)


@pytest.mark.parametrize("missing", ["tar", "cmp"])
def test_a_missing_program_is_named(local: Harness, machine: Machine, missing: str) -> None:
    needed = "sh tar head cat cp mv cmp df find sync cut tr rm mkdir sed wc".split()  # noqa: SIM905
    path = machine.only(*(name for name in needed if name != missing))["PATH"]
    bare = replace(machine, startup=f"PATH={path}")
    with pytest.raises(RemoteCannotStore) as caught:
        local.open(transport=bare)
    assert missing in caught.value.detail
    assert caught.value.hint


@pytest.mark.parametrize("name", ['it\'s "a b"', "$(touch x)`id`\n%s", "-rf"])
def test_the_remote_path_may_hold_anything(local: Harness, machine: Machine, name: str) -> None:
    local.remote_dir /= name
    (local.remote_dir / "by-hash").mkdir(parents=True)
    sends_everything(local, local.open(root=str(local.remote_dir)))
    assert {path.name for path in local.remote_dir.parent.iterdir()} == {name, "by-hash"}


def test_the_remotes_own_umask_and_tar_options_change_nothing(
    local: Harness, machine: Machine
) -> None:
    odd = replace(machine, startup="umask 077; export TAR_OPTIONS=--no-such-option")
    session = local.open(transport=odd)
    batch = local.batch("b", b"content")
    session.put(batch)
    settle(session)
    assert local.on_remote() == local.expected(batch)
    assert local.final(batch.blobs[0]).stat().st_mode & 0o7777 == 0o644
    assert local.final(batch.blobs[0]).parent.stat().st_mode & 0o7777 == 0o755


# --- what a receipt rests on ----------------------------------------------------------------------


def refusal(local: Harness, machine: Machine, *contents: bytes) -> BackupError:
    """What the remote says about a batch of these contents."""
    session = local.open(transport=machine)
    session.put(local.batch("b", *contents))
    (rejection,) = settle(session)
    assert isinstance(rejection, Rejection)
    return rejection.error


@pytest.mark.parametrize("fails", ["exit 137", ":", "/usr/bin/find . -type f -name 0 ; exit 137"])
def test_a_search_that_fails_or_sees_nothing_is_no_receipt(
    local: Harness, machine: Machine, fails: str
) -> None:
    machine.tool("cp", "exit 1")
    machine.tool("find", fails)
    assert isinstance(refusal(local, machine, b"one", b"two"), BatchRejected)


def test_files_that_went_missing_before_they_were_linked_are_no_receipt(
    local: Harness, machine: Machine
) -> None:
    machine.tool("cp", 'for one in */*/*; do rm "$one"; break; done; exec /bin/cp "$@"')
    error = refusal(local, machine, b"one", b"two", b"three")
    assert isinstance(error, BatchRejected)
    assert "2 of 3 files" in error.detail


def test_a_disk_that_is_not_mounted_is_an_outage_and_nothing_is_made_there(local: Harness) -> None:
    (local.remote_dir / "by-hash").rmdir()
    with pytest.raises(RemoteUnreachable) as caught:
        local.open()
    assert "by-hash" in caught.value.detail
    assert "mounted" in caught.value.hint
    assert list(local.remote_dir.iterdir()) == []


def test_a_disk_that_goes_away_under_a_session_is_no_batchs_trouble(
    local: Harness, machine: Machine
) -> None:
    session = local.open()
    first, second = local.batch("first", b"1"), local.batch("second", b"2")
    session.put(first)
    settle(session)
    local.remote_dir.rename(local.remote_dir.with_name("unmounted"))
    local.remote_dir.mkdir()
    session.put(second)
    with pytest.raises(RemoteUnreachable) as caught:
        settle(session)
    assert caught.value.message == "remote.path is gone"
    assert session.in_flight == (second,)
    assert list(local.remote_dir.iterdir()) == []


def test_a_part_of_by_hash_on_another_file_system_is_refused(
    local: Harness, machine: Machine
) -> None:
    batch = local.batch("b", b"content")
    place = local.final(batch.blobs[0]).parent
    machine.tool("cp", 'echo "cp: Invalid cross-device link" >&2; exit 1')
    machine.tool(
        "df", f'echo head; [ "$2" != "{place}" ] || set -- "" /mnt/x; echo "d 1 1 1 1% $2"'
    )
    error = refusal(local, machine, b"content")
    assert isinstance(error, RemoteCannotStore)
    assert "another file system" in error.detail
    assert local.on_remote() == {}


def test_a_df_that_was_killed_tells_of_no_other_file_system(
    local: Harness, machine: Machine
) -> None:
    """A remote short of memory kills any of its tools: that passes, and the run waits."""
    batch = local.batch("b", b"content")
    place = local.final(batch.blobs[0]).parent
    machine.tool("cp", "exit 1")
    machine.tool("df", f'[ "$2" != "{place}" ] || kill -KILL $$; exec /bin/df "$@"')
    error = refusal(local, machine, b"content")
    assert isinstance(error, RemoteUnreachable | BatchRejected)
    assert f"df says nothing of {place}" in error.detail
    assert local.on_remote() == {}


def test_a_link_in_place_of_a_directory_is_not_followed(
    local: Harness, machine: Machine, tmp_path: Path
) -> None:
    batch = local.batch("b", b"content")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = local.final(batch.blobs[0]).parents[1]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    assert "a symbolic link stands in its place" in refusal(local, machine, b"content").detail
    assert list(elsewhere.iterdir()) == []


# --- the greeting ---------------------------------------------------------------------------------

NOISE = [
    "echo Welcome",
    "echo Welcome >&2",
    "printf 'no end of line'",
    "printf '\\000\\377\\n\\n\\n'",
    "echo NTT-TAR 2",
    "yes | head -n 50000",
]


@pytest.mark.parametrize("startup", NOISE)
def test_noise_before_the_greeting_is_skipped(
    local: Harness, machine: Machine, startup: str
) -> None:
    sends_everything(local, local.open(transport=replace(machine, startup=startup)))


@pytest.mark.parametrize(
    ("startup", "patience"),
    [("exec sleep 600", 0.3), ("cat >/dev/null", 0.3), ("echo Password:; exec sleep 600", 3.0)],
)
def test_silence_ends_with_what_was_waited_for(
    local: Harness, machine: Machine, startup: str, patience: float
) -> None:
    silent = replace(machine, startup=startup, connect_timeout=patience)
    with pytest.raises(RemoteUnreachable) as caught:
        local.open(transport=silent)
    assert "did not answer in time: starting our loop" in caught.value.message
    assert "waited" in caught.value.detail
    assert ("Password:" in caught.value.detail) is ("Password" in startup)
    assert caught.value.hint


def test_words_of_a_login_banner_do_not_explain_a_later_loss(
    local: Harness, machine: Machine
) -> None:
    script = f"echo 'Permission denied (publickey)' >&2; {READY}; {TAKE_ONE}; exit 255"
    session = local.open(transport=Explained(machine.tools, script=script))
    session.put(local.batch("b", b"content"))
    with pytest.raises(RemoteUnreachable):
        settle(session)


# --- protocol violations, stalls and losses -------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'ok 99'",
        "echo",
        "echo 'ok 2'",
        "printf '\\000\\001\\002\\n'",
        "echo 'ok 1'; echo 'ok 1'",
        "head -c 1000000 /dev/zero",
    ],
)
def test_a_protocol_violation_ends_the_session_and_loses_no_batch(
    local: Harness, machine: Machine, answer: str
) -> None:
    mad = Imposter(machine.tools, script=f"{READY}; {TAKE_ONE}; {answer}; cat >/dev/null")
    session = local.open(transport=mad)
    batch = local.batch("b", b"content")
    answered: list[Batch] = []

    def mad_enough() -> bool:
        answered.extend(outcome.batch for outcome in session.collect(0.1))
        if not session.in_flight:
            session.put(local.batch("more", b"more"))
        return False

    session.put(batch)
    with pytest.raises(RemoteUnreachable) as caught:
        wait_until(mad_enough, "the violation to be noticed")
    assert "violates the protocol" in caught.value.message
    assert not session.usable
    answered += [outcome.batch for outcome in session.collect(0.0)]
    assert [*answered, *session.in_flight][0] == batch


def test_an_answer_that_is_not_read_yet_when_the_remote_goes_is_kept(
    local: Harness, machine: Machine, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    script = f"{READY}; {TAKE_ONE}; echo got 1; echo ok 1; exec <&-; touch {gone}; exec sleep 600"
    session = local.open(transport=Imposter(machine.tools, script=script))
    first, second = local.batch("first", b"1"), local.batch("second", b"2" * 6_000_000)
    session.put(first)
    wait_until(gone.exists, "the remote to read no more")
    with pytest.raises(RemoteUnreachable):
        session.put(second)
    assert [receipt_of(outcome).batch for outcome in session.collect(0.0)] == [first]


def test_a_remote_that_stops_reading_is_a_stall(local: Harness, machine: Machine) -> None:
    stuck = Imposter(machine.tools, script=f"{READY}; exec sleep 600")
    session = local.open(transport=stuck, stall_timeout=1)
    batch = local.batch("b", b"more than a pipe takes" * 200_000)
    with pytest.raises(RemoteUnreachable) as caught:
        session.put(batch)
    assert "stalled" in caught.value.message
    assert session.in_flight == (batch,)
    assert not session.usable


def test_a_remote_that_never_answers_is_not_waited_for_for_ever(
    local: Harness, machine: Machine
) -> None:
    stuck = Imposter(machine.tools, script=f"{READY}; cat >/dev/null")
    session = local.open(transport=stuck, receipt_timeout=1)
    batch = local.batch("b", b"content")
    session.put(batch)
    with pytest.raises(RemoteUnreachable) as caught:
        settle(session)
    assert "does not answer" in caught.value.message
    assert "b, 1 s" in caught.value.detail
    assert session.in_flight == (batch,)


# --- what is sent ---------------------------------------------------------------------------------


def test_what_dead_sessions_left_is_removed_and_others_things_stay(
    local: Harness, machine: Machine
) -> None:
    incoming = local.remote_dir / ".ntt-incoming"
    mine, young, same_run, other = (
        incoming / "0123456789ab.earlier.0.77",
        incoming / "0123456789ab.earlier.1.80",
        incoming / "0123456789ab.run.9.78",
        incoming / "ffffffffffff.earlier.0.79",
    )
    for directory in (mine, young, same_run, other):
        directory.mkdir(parents=True)
        (directory / "leftover").write_bytes(b"half a batch")
        os.utime(directory, (time.time() - 86400 * 2 * (directory != young),) * 2)
    # A receiver may be at work in it: what is deleted in a directory of it may be published by now.
    receivers = incoming / "0123456789ab.earlier.0.0123456789abcdef"
    receivers.mkdir()
    lock = os.open(receivers / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.utime(receivers, (0, 0))
    session = local.open()
    session.close()
    os.close(lock)
    assert not mine.exists()
    assert young.exists()
    assert same_run.exists()
    assert other.exists()
    assert receivers.exists()


def test_a_session_never_takes_over_the_stage_of_another_one(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of processes are those of one machine; others may share the remote's directory."""
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 2 * count)
    taken = local.remote_dir / ".ntt-incoming" / "0123456789ab.run.0.0000000000000000"
    taken.mkdir(parents=True)
    (taken / "lock").touch()
    (taken / "1").write_bytes(b"another's")
    with pytest.raises(BackupError) as caught:
        local.open()
    assert "File exists" in str(caught.value)
    assert (taken / "1").read_bytes() == b"another's"


def test_a_source_disk_that_hangs_is_given_up_after_a_while(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = local.open(stall_timeout=1)
    machine.tool("tar", "exec sleep 600")
    monkeypatch.setenv("PATH", f"{machine.tools}:{os.environ['PATH']}")
    batch = local.batch("b", b"content")
    with pytest.raises(SourceError) as caught:
        session.put(batch)
    assert "tar read nothing for 1 s" in caught.value.detail
    assert not session.usable
    assert session.in_flight == (batch,)


def test_a_source_that_is_away_is_no_batchs_trouble(local: Harness) -> None:
    session = local.open()
    batch = local.batch("b", b"content")
    local.store.rename(local.store.with_name("elsewhere"))
    with pytest.raises(SourceError) as caught:
        session.put(batch)
    assert caught.value.exit_code == 2
    assert session.in_flight == ()
    local.store.with_name("elsewhere").rename(local.store)
    session.put(batch)
    assert [outcome.batch for outcome in settle(session)] == [batch]
