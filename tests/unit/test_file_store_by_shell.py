"""What the remote's shell says of files is that of the question, or an error that tells why not."""

from __future__ import annotations

from hashlib import sha256
from types import SimpleNamespace
from typing import cast

import pytest

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config.sections import RunSettings
from ntt_backup.dump.store import DUMPS
from ntt_backup.errors import (
    BackupError,
    NameTaken,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
)
from ntt_backup.filestore import by_shell
from ntt_backup.filestore.by_shell import FileByShell, FileStoreByShell
from ntt_backup.filestore.contract import UNKNOWN_ARRIVAL, FileMissing, Range

NAME = "20260304T120000Z-0badcafe.dump"
LOST = RemoteUnreachable("the link was lost")
SUM = sha256(b"content").hexdigest().encode()


class Script:
    """A script on the remote, its channel and its answer. said: what comes, None for silence.
    asked: the actions of questions, with their values.
    """

    def __init__(self) -> None:
        self.said: list[bytes | None] = []
        self.status: int | None = 0
        self.answers = b""
        self.error: BackupError | None = None
        self.aborted = False
        self.asked: list[dict[str, str]] = []

    def send(self, *_: object, **__: object) -> None:
        if self.error is not None:
            raise self.error

    def hear(self, *_: object) -> bytes | None:
        self.send()
        return self.said.pop(0) if self.said else b""

    greet = send

    def ask(self, _: object, __: str, values: dict[str, str], **___: object) -> bytes:
        self.asked.append(values)
        return self.answers

    def script(self, text: str) -> str:
        return text

    def rest(self) -> bytes:
        return self.answers

    def lost(self) -> RemoteUnreachable:
        return LOST

    def end_input(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(by_shell, "ScriptAnswer", lambda: script)
    monkeypatch.setattr(by_shell, "ask", script.ask)
    return script


@pytest.fixture
def store(script: Script) -> FileStoreByShell:
    spec = SimpleNamespace(
        identity="",
        root="/srv",
        run=RunSettings(),
        transport=SimpleNamespace(connect_timeout=1.0),
        channel=lambda _: script,
    )
    return FileStoreByShell(cast(SessionSpec, spec), DUMPS)


@pytest.fixture
def file(store: FileStoreByShell) -> FileByShell:
    return store.write(NAME)


def test_what_is_listed_are_files_of_the_area_whatever_else_is_said(
    store: FileStoreByShell, script: Script
) -> None:
    script.answers = (
        f"file={NAME} 7 86400 \nfile={NAME}.json 3 none {{}}\nnoise\nfile=\nfile=x 1 1\n"
        f"file={NAME}.age {'9' * 20} 1\nfile=../{NAME} 1 1\n"
    ).encode()
    found = list(store.list())
    assert [(one.name, one.size, one.arrived.day) for one in found] == [
        (NAME, 7, 2),
        (f"{NAME}.json", 3, UNKNOWN_ARRIVAL.day),
    ]
    # Small files come with the list.
    ranges = [Range(f"{NAME}.json", 0, 9), Range(f"{NAME}.json", 1, 1)]
    assert list(store.read(ranges)) == [b"{}", b"}"]
    assert [one["action"] for one in script.asked] == ["list"]
    # What is removed is read no more.
    script.answers, script.said = b"dropped=yes\n", [b"missing\n"]
    store.remove([f"{NAME}.json"])
    with pytest.raises(FileMissing):
        list(store.read(ranges))


def test_a_file_of_which_nothing_comes_is_an_outage_and_not_its_end(
    store: FileStoreByShell, script: Script
) -> None:
    for said, status, why in (
        ([b"found\ncon", b"tent"], 0, ""),
        ([b"fou", b"nd", b"\n", b"content"], 0, ""),
        ([b"found\ncon", None], 0, "the remote has stalled"),
        ([b"found\ncon"], None, "the link was lost"),
        ([b"found"], None, "the link was lost"),
    ):
        script.said, script.status, script.aborted = [*said], status, False
        got = store.read([Range(NAME, 0, 9)])
        if why:
            with pytest.raises(RemoteUnreachable, match=why):
                list(got)
        else:
            assert list(got) == [b"content"]
        assert script.aborted
    script.said, script.status = [b"missing\n"], 0
    with pytest.raises(FileMissing):
        list(store.read([Range(NAME, 0, 9)]))


def test_a_file_is_not_missing_where_the_remote_tells_another_problem(
    store: FileStoreByShell, script: Script
) -> None:
    script.said = [b"problem=/srv: no such dir", b"ectory\n"]
    with pytest.raises(BackupError) as caught:
        list(store.read([Range(NAME, 0, 9)]))
    assert "/srv: no such directory" in str(caught.value)


def test_a_time_of_arrival_that_no_clock_has_shown_hides_no_file(
    store: FileStoreByShell, script: Script
) -> None:
    script.answers = f"file={NAME} 7 {'9' * 19} \n".encode()
    assert [(one.name, one.arrived) for one in store.list()] == [(NAME, UNKNOWN_ARRIVAL)]


@pytest.mark.parametrize("poll", [True, False])
def test_what_the_remote_says_explains_more_than_the_end_of_the_link(
    file: FileByShell, script: Script, poll: bool
) -> None:
    def go_on() -> None:
        if poll:
            file.poll()
        else:
            file.add(b"content")

    go_on()
    script.error = LOST
    with pytest.raises(RemoteUnreachable, match="the link was lost"):
        go_on()
    script.answers = b"problem=unusable\n"
    with pytest.raises(BackupError) as caught:
        go_on()
    assert caught.value is not LOST


def test_a_sum_comes_in_time_and_as_a_whole(store: FileStoreByShell, script: Script) -> None:
    for said, error, why in (
        ([b"sum=%s\nsize=" % SUM, b"7\n"], None, ""),
        ([b"sum=%s\nsize=7\n" % SUM.replace(SUM[:1], b"0")], RemoteCannotStore, "not what was"),
        ([b"sum=%s\nsize=8\n" % SUM], RemoteCannotStore, "not what was sent"),
        ([b"size=7", None], RemoteUnreachable, "did not answer in time"),
        ([b"size=7"], RemoteUnreachable, "the connection to the remote was lost"),
        ([b"sum=\nsize=7\n"], RemoteUnreachable, "the connection to the remote was lost"),
    ):
        file, script.said = store.write(NAME), [*said]
        file.add(b"content")
        if error is None:
            assert file.finish() == (7, bytes.fromhex(SUM.decode()))
            continue
        with pytest.raises(error, match=why):
            file.finish()


def test_what_is_not_confirmed_is_an_outage(
    store: FileStoreByShell, file: FileByShell, script: Script
) -> None:
    for question, confirmed in (
        (store.try_out, b"tried"),
        (lambda: store.remove([NAME]), b"dropped"),
        (file.publish, b"named"),
    ):
        for script.answers in (b"", confirmed + b"=\n"):
            with pytest.raises(RemoteUnreachable, match="the connection to the remote was lost"):
                question()
        assert not script.aborted
        script.answers = confirmed + b"=yes\n"
        question()
    assert script.aborted
    script.aborted = False
    file.discard()
    assert not script.aborted
    script.answers = b"removed=one\nremoved=two\ndropped=yes\n"
    assert store.remove([NAME, f"{NAME}.json"]) == 2
    assert script.asked[-1]["names"] == f"{NAME} {NAME}.json"


def test_a_name_that_is_taken_is_told_and_what_was_sent_is_dropped(
    file: FileByShell, script: Script
) -> None:
    script.answers = b"taken=yes\n"
    with pytest.raises(NameTaken):
        file.publish()
    file.discard()
    assert script.aborted
    assert script.asked[-1]["action"] == "drop"
    assert script.asked[-1]["token"] == script.asked[0]["token"]
    assert script.asked[-1]["names"] == ""


def test_a_connection_that_is_not_greeted_is_ended(store: FileStoreByShell, script: Script) -> None:
    script.error = RemoteDenied("not allowed")
    with pytest.raises(RemoteDenied, match="not allowed"):
        store.write(NAME)
    assert script.aborted
