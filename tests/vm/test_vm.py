"""The model of power cuts of virtual machines; the cuts themselves by `python -m tests.vm`."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256

from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from tests.helpers import blobs
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


def _id(content: bytes) -> str:
    return blake3(content).hexdigest()
