"""The real program with other people's object stores, where these are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from ntt_backup.pack.names import LARGE_BLOB
from ntt_backup.packstore.tables import packs_of
from tests.helpers import s3_servers
from tests.helpers.bucket_environment import BucketEnvironment, environment
from tests.helpers.bucket_packs import packs_in
from tests.helpers.s3_servers import S3Server

pytestmark = pytest.mark.long

Start = Callable[[], AbstractContextManager[S3Server]]
_SERVERS: dict[str, Start] = {
    "versitygw": s3_servers.versitygw,
    "versitygw with versions": partial(s3_servers.versitygw, versioned=True),
    "rclone": s3_servers.rclone,
    "moto": s3_servers.moto,
    "gofakes3": s3_servers.gofakes3,
    "s3proxy": s3_servers.s3proxy,
}


@pytest.fixture(params=_SERVERS)
def env(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    catalog_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[BucketEnvironment]:
    """An environment with a bucket of a server; its objects have versions where it can."""
    with _SERVERS[request.param]() as server:
        s3_servers.as_account(monkeypatch, server.owner)
        with environment(tmp_path, catalog_url, server) as made:
            if request.param.endswith("with versions"):
                server.client().put_bucket_versioning(
                    Bucket=made.place.bucket, VersioningConfiguration={"Status": "Enabled"}
                )
            yield made


def test_all_is_sent_checked_and_comes_back(env: BucketEnvironment, tmp_path: Path) -> None:
    env.fill(40)
    env.put(bytes(LARGE_BLOB + 1))

    # A second check and a second run meet what the first trial has left.
    for _ in range(2):
        env.call("check", expect=0)
        env.run("run", expect=0)
        env.put(b"more" + bytes([len(env.in_store())]))
    env.run("run", expect=0)

    assert env.on_remote() == env.in_store()
    assert env.copied() == {Path(name).name for name in env.in_store()}
    for way in ((), ("--download",)):
        env.call("verify", *way, expect=0)
    restored = tmp_path / "restored"
    restored.mkdir()
    env.call("restore", "--to", str(restored), expect=0)
    names = {path.name for path in restored.rglob("*") if path.is_file()}
    assert names == {Path(name).name for name in env.in_store()}


def test_an_object_of_the_same_size_in_the_place_of_a_pack_is_noticed(
    env: BucketEnvironment, request: pytest.FixtureRequest
) -> None:
    if "gofakes3" in request.node.name:
        pytest.skip("gofakes3 goes on telling the SHA-256 of the object that was there before")
    env.fill(40)
    env.run("run", expect=0)
    (pack,) = packs_of(packs_in(env.bucket))
    key = f"{env.place.prefix}/{pack.key}"
    env.server.client().put_object(Bucket=env.place.bucket, Key=key, Body=bytes(pack.size))

    verified = env.call("verify")

    # What a server tells of an object may be too little: then verify says so.
    told = "by the size of their files alone" in verified.stdout
    assert verified.returncode == (0 if told else 7), verified.stdout
    assert not told or env.call("verify", "--download").returncode == 7


def test_s3rver_which_cannot_list_page_by_page_is_refused_in_one_line(
    tmp_path: Path, catalog_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_servers.s3rver() as server:
        s3_servers.as_account(monkeypatch, server.owner)
        with environment(tmp_path, catalog_url, server) as env:
            env.fill(3)
            env.run("run", expect=0)

            done = env.call("check", expect=5)
            (line,) = [one for one in done.stdout.splitlines() if one.startswith("FAILED")]
            assert "the object store reports an error of its own" in line


@pytest.mark.parametrize("strict", [partial(s3_servers.s3proxy, lenient=False)])
def test_a_server_that_refuses_a_header_is_told_in_one_line(
    tmp_path: Path, catalog_url: str, monkeypatch: pytest.MonkeyPatch, strict: Start
) -> None:
    with strict() as server:
        s3_servers.as_account(monkeypatch, server.owner)
        with environment(tmp_path, catalog_url, server) as env:
            env.fill(3)
            for call in (env.call("check"), env.run("run")):
                assert call.returncode == 5, call.stdout
                assert "does not know the header x-amz-checksum" in call.stdout
                assert "ignore headers that it does not know" in call.stdout
