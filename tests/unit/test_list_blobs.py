"""LIST: every name once and in order, and every stray once, however the client cuts its pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.receiver.list_blobs import Listing
from ntt_backup.receiver.workspace import Workspace
from ntt_backup.wire import framing, read_messages
from ntt_backup.wire.framing import Inbox

BLOBIDS = ["00" * 32, "0000" + "1" * 60, "0001" + "0" * 60, "0100" + "0" * 60, "ff" * 32]
STRAYS = ["README", "00/x", "00/00/.tmp", "00/01/.tmp", "01/x", "ff/ff/" + "0" * 64]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    by_hash = tmp_path / "by-hash"
    for name in [*map(relative_path, BLOBIDS), *STRAYS]:
        (by_hash / name).parent.mkdir(parents=True, exist_ok=True)
        (by_hash / name).touch()
    workspace = Workspace(str(tmp_path))
    yield workspace
    workspace.leave()


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_list_tells_every_name_and_every_stray_once_however_long_a_page_is(
    workspace: Workspace, most: int
) -> None:
    names: list[str] = []
    strays: list[str] = []
    low = bytes(32)
    more = True
    while more:
        page: list[bytes] = []
        asked = read_messages.Range(low, b"\xff" * 32, most)
        inbox = Inbox(read_messages.TO_CLIENT)
        for frame in Listing(workspace, asked, lambda: None).frames():
            inbox.space()[: len(frame)] = frame
            inbox.filled(len(frame))
            kind, payload = inbox.next() or (0, memoryview(b""))
            if kind == framing.NAMES:
                page += [digest for digest, _ in read_messages.read_names(payload)]
            elif kind == framing.STRAY:
                strays.append(read_messages.read_stray(payload)[1])
            else:
                more = bool(read_messages.read_listed(payload).more)
        names += [digest.hex() for digest in page]
        if more:
            low = (int.from_bytes(page[-1], "big") + 1).to_bytes(32, "big")
    assert names == BLOBIDS
    assert sorted(strays) == sorted(STRAYS)
