"""The model of power cuts of virtual machines; the cuts themselves by `python -m tests.vm`."""

from __future__ import annotations

import json
import os
import struct
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from tests.helpers import blobs
from tests.power.crashes import Log
from tests.power.disks import LoggedDisk
from tests.vm.campaign import Model, blobs_of


def test_the_model_finds_what_is_lost_torn_or_unknown() -> None:
    contents = [b"one", b"two", blobs.noise(5000)]
    files = {f"by-hash/{relative_path(_id(content))}": content for content in contents}
    ids, first = {_id(content) for content in contents}, min(files)
    model = Model()
    assert model.target_violations(files, ids, []) == []
    torn = model.target_violations({**files, first: files[first][:-1]}, ids, [])
    assert [one.partition(": ")[0] for one in torn] == [
        f"{first} is not what its name says",
        "1 blobs were said to be copied and are not there",
        "1 blobs had a final name and are gone",
    ]
    model.lose(ids - {first.rpartition("/")[2]})
    del files[first]
    assert model.target_violations(files, [], []) == []
    pack, key = blobs.pack(contents), "packs/aa-bb-cc"
    row = [key, "3", str(len(pack)), b64encode(sha256(pack).digest()).decode()]
    assert Model().target_violations({key: pack}, ids, [row]) == []
    assert len(Model().target_violations({key: pack[:-512]}, ids, [row])) == 3
    assert len(Model().target_violations({}, [], [row])) == 1
    record = {"sha256": sha256(b"dump").hexdigest(), "format": 1}
    dump = {"pgdump/x.dump": b"dump", "pgdump/x.dump.json": json.dumps(record).encode()}
    assert Model().target_violations(dump, [], []) == []
    assert len(Model().target_violations({**dump, "pgdump/x.dump": b"dum"}, [], [])) == 1
    assert blobs_of({"packs/.part": b"half"}) == ({}, [])


def test_a_page_is_flushed_only_by_what_comes_after_it(tmp_path: Path) -> None:
    page, disk = os.urandom(4096), LoggedDisk(tmp_path / "base", tmp_path, tmp_path, 0)
    (tmp_path / "log.dat").write_bytes(bytes(4096) + page)
    writes = [(1, 0, 0, 1, 4096), (3, 4096, 4096, 1, 4096)]
    for flushes, found in (([], False), ([(2, 0, 0, 2, 0)], False), ([(4, 0, 0, 2, 0)], True)):
        records = sorted([*writes, *flushes])
        (tmp_path / "log.idx").write_bytes(b"".join(struct.pack("<QQQII", *one) for one in records))
        assert Log(disk).has_flushed(page) is found
    assert not Log(disk).has_flushed(os.urandom(4096))


def _id(content: bytes) -> str:
    return blake3(content).hexdigest()
