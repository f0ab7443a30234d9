"""A target's URL: what it names, its one form, and what is refused."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Local, Sftp, Ssh
from ntt_backup.config import (
    CatalogConfig,
    RemoteConfig,
    RemoteSettings,
    SendConfig,
    Settings,
    load,
)
from ntt_backup.config.values import TargetPlace, parse_target_url
from ntt_backup.errors import ConfigError
from ntt_backup.upload.strategies.stream import connect
from tests.helpers.waiting import wait_until

SECRET = "hunter2"


def remote(url: str, **more: str) -> RemoteSettings:
    """The target that NTT_REMOTE_URL and more of the environment name."""
    return load(RemoteConfig, environ={"NTT_REMOTE_URL": url, **more}).remote


@pytest.mark.parametrize(
    ("url", "place", "form"),
    [
        ("ssh://vault/srv", TargetPlace("ssh", "vault", None, "/srv"), ""),
        ("ssh://me@vault:22/srv", TargetPlace("ssh", "me@vault", 22, "/srv"), ""),
        (
            "SSH://vault:/srv//x/./",
            TargetPlace("ssh", "vault", None, "/srv/x"),
            "ssh://vault/srv/x",
        ),
        ("ssh://vault/a b", TargetPlace("ssh", "vault", None, "/a b"), "ssh://vault/a%20b"),
        ("sftp://me@vault:23/srv", TargetPlace("sftp", "me@vault", 23, "/srv"), ""),
        ("ssh://me@[::1]:22/srv", TargetPlace("ssh", "me@::1", 22, "/srv"), ""),
        ("ssh://[fe80::1%25eth0]/srv", TargetPlace("ssh", "fe80::1%eth0", None, "/srv"), ""),
        ("ssh://DOMAIN%5Cme@vault/srv", TargetPlace("ssh", "DOMAIN\\me@vault", None, "/srv"), ""),
        ("ssh://a%40b@vault/srv", TargetPlace("ssh", "a@b@vault", None, "/srv"), ""),
        ("file:///mnt/usb", TargetPlace("file", path="/mnt/usb"), ""),
        (
            "file:///mnt/usb%20disk/",
            TargetPlace("file", path="/mnt/usb disk"),
            "file:///mnt/usb%20disk",
        ),
        ("file:///100%25%20%23%3F", TargetPlace("file", path="/100% #?"), ""),
        ("file:///médias", TargetPlace("file", path="/médias"), "file:///m%C3%A9dias"),
        ("s3://bucket", TargetPlace("s3", bucket="bucket"), "s3://bucket/"),
        ("s3://bucket/a//b/", TargetPlace("s3", bucket="bucket", prefix="a/b"), "s3://bucket/a/b"),
    ],
)
def test_a_url_names_a_place_and_has_one_form(url: str, place: TargetPlace, form: str) -> None:
    assert parse_target_url(url) == place
    assert str(place) == (form or url)


@pytest.mark.parametrize(
    ("url", "needed"),
    [
        ("/mnt/usb", "file:///path"),
        ("vault:/srv", "ssh://"),
        ("https://bucket.example.org", "s3://"),
        ("file:/mnt/usb", "file:///path"),
        ("file://mnt/usb", "three slashes"),
        ("file://localhost/mnt/usb", "three slashes"),
        ("file:///", "below /"),
        ("file:///mnt/../..", r"without \.\."),
        ("file:///mnt/%2e%2E/x", r"without \.\."),
        ("file:///mnt/100%", "%25"),
        ("file:///mnt/a?b", "%3F"),
        ("file:///mnt/a#b", "%23"),
        ("file:///mnt/a%00b", "control characters"),
        ("file:///mnt/a%0Ab", "control characters"),
        ("file:///mnt/%ff", "UTF-8"),
        ("ssh://vault", "an absolute path"),
        ("ssh:///srv", "a host"),
        ("ssh://@vault/srv", "a host"),
        ("ssh://-oProxyCommand=x/srv", "a host"),
        ("ssh://va%20ult/srv", "a host"),
        ("ssh://va%0ault/srv", "a host"),
        ("ssh://va%3Ault/srv", "a host"),
        ("ssh://::1/srv", "a host"),
        ("ssh://[vault]/srv", "a host"),
        ("ssh://vault:0/srv", "a port"),
        ("ssh://vault:65536/srv", "a port"),
        ("ssh://vault:ssh/srv", "a host"),
        (f"ssh://me:{SECRET}@vault/srv", "without credentials"),
        (f"s3://{SECRET}@bucket/x", "without credentials"),
        (f"file://me:{SECRET}@/x", "without credentials"),
        ("s3:///prefix", "a bucket"),
        ("s3://b", "a bucket"),
        ("s3://a..b/x", "a bucket"),
        ("s3://bucket:9000/x", "remote.endpoint"),
        ("s3://bucket/../x", r"a prefix without \. and \.\."),
        ("s3://bucket/" + "x" * 801, "at most 800 bytes"),
    ],
)
def test_a_wrong_url_is_refused_with_what_is_needed(url: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=f"^NTT_REMOTE_URL is .*{needed}.* needed") as caught:
        remote(url)
    assert SECRET not in f"{caught.value} {caught.value.hint}"
    assert str(caught.value).isprintable()


words = st.text(
    st.characters(min_codepoint=33, exclude_characters="/\x7f", codec="utf-8"), min_size=1
)
paths = st.lists(words.filter(lambda word: word not in (".", "..")), min_size=1, max_size=4)
hosts = st.one_of(
    st.from_regex(r"\A[a-z0-9][a-z0-9._+-]{0,20}\Z"),
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map(lambda address: f"{address}%eth0"),
)
places = st.one_of(
    st.builds(
        lambda user, host, port, path: TargetPlace("ssh", user + host, port, "/" + "/".join(path)),
        st.one_of(st.just(""), st.from_regex(r"\A[a-z][a-z0-9_.\\@%-]{0,8}\Z").map("{}@".format)),
        hosts,
        st.none() | st.integers(1, 65535),
        paths,
    ),
    paths.map(lambda path: TargetPlace("file", path="/" + "/".join(path))),
    st.builds(
        lambda bucket, path: TargetPlace("s3", bucket=bucket, prefix="/".join(path)),
        st.from_regex(r"\A[a-z0-9][a-z0-9-]{1,60}[a-z0-9]\Z"),
        st.just([]) | paths.filter(lambda path: len("/".join(path).encode()) <= 800),
    ),
)


@given(places)
def test_a_place_is_the_one_that_its_url_names(place: TargetPlace) -> None:
    assert parse_target_url(str(place)) == place
    assert str(place).isascii()


@given(
    st.sampled_from(["ssh://", "file://", "s3://"]), st.text(st.characters(exclude_characters="\0"))
)
def test_any_url_names_a_place_or_is_refused(scheme: str, rest: str) -> None:
    with suppress(PydanticCustomError):
        form = str(parse_target_url(scheme + rest))
        assert str(parse_target_url(form)) == form
        assert form.isascii()


# --- as a setting ---------------------------------------------------------------------------------


def test_host_port_and_path_are_the_same_place_as_their_url() -> None:
    parts = {"NTT_REMOTE_HOST": "me@vault", "NTT_REMOTE_PORT": "23", "NTT_REMOTE_PATH": "/srv/"}
    by_parts, by_url = load(RemoteConfig, environ=parts).remote, remote("ssh://me@vault:23/srv")
    assert by_parts == by_url == remote("ssh://me@vault:23/srv", **parts)
    assert (by_url.kind, by_url.where) == ("ssh", "me@vault:/srv")


@pytest.mark.parametrize("name", ["NTT_REMOTE_HOST", "NTT_REMOTE_PORT", "NTT_REMOTE_PATH"])
@pytest.mark.parametrize("url", ["ssh://vault:22/srv", "file:///srv/x", "s3://bucket/srv"])
def test_a_url_and_another_place_are_refused_by_both_names(url: str, name: str) -> None:
    value = {"NTT_REMOTE_PORT": "23"}.get(name, "/other")
    value = "other" if name == "NTT_REMOTE_HOST" else value
    with pytest.raises(ConfigError) as caught:
        remote(url, **{name: value})
    assert caught.value.message == f"NTT_REMOTE_URL and {name} name different places"


def test_a_target_with_a_url_inherits_no_part_of_another_place(tmp_path: Path) -> None:
    file = tmp_path / "backup.toml"
    file.write_text(
        '[remote]\nurl = "ssh://vault:23/srv"\nendpoint = "https://s3.example.org"\n'
        'connect_timeout = 5\n[targets.usb]\nurl = "file:///mnt/usb"\n'
        '[targets.nas]\nhost = "nas"\npath = "/volume"\n'
    )
    usb = load(RemoteConfig, environ={}, file=file, target="usb").remote
    assert (usb.kind, usb.where, usb.path) == ("file", "file:///mnt/usb", "/mnt/usb")
    assert (usb.host, usb.port, usb.endpoint, usb.connect_timeout) == ("", None, None, 5)
    assert load(RemoteConfig, environ={}, file=file, target="nas").remote.url == "ssh://nas/volume"
    with pytest.raises(ConfigError, match=r"^NTT_REMOTE_URL is set, but targets\.usb\.url in "):
        load(RemoteConfig, environ={"NTT_REMOTE_URL": "file:///x"}, file=file, target="usb")
    load(RemoteConfig, environ={"NTT_S3_ENDPOINT": "https://x"}, file=file, target="usb")


def test_the_server_of_a_bucket_is_ours_before_that_of_aws() -> None:
    aws = {"AWS_ENDPOINT_URL": "https://all", "AWS_ENDPOINT_URL_S3": "https://s3/"}
    assert remote("s3://bucket", **aws).endpoint == "https://s3"
    assert remote("s3://bucket", **aws, NTT_S3_ENDPOINT="http://[::1]:9000").endpoint == (
        "http://[::1]:9000"
    )
    assert remote("s3://bucket", AWS_ENDPOINT_URL="https://all").endpoint == "https://all"
    assert remote("file:///mnt", **aws).endpoint is None
    assert remote("s3://bucket").endpoint is None


@pytest.mark.parametrize(
    "key", ["access_key", "aws_secret_access_key", "session_token", "password"]
)
def test_credentials_in_the_file_are_refused_with_where_they_belong(
    tmp_path: Path, key: str
) -> None:
    file = tmp_path / "backup.toml"
    file.write_text(f'[remote]\nurl = "s3://bucket"\n{key} = "{SECRET}"\n')
    with pytest.raises(
        ConfigError, match=rf"^remote\.{key} in .* is not a setting: cred"
    ) as caught:
        load(RemoteConfig, environ={}, file=file)
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    assert SECRET not in f"{caught.value!r} {caught.value} {caught.value.hint}"


# --- what a kind has not --------------------------------------------------------------------------


def test_settings_of_other_kinds_are_named_unless_they_are_shared(tmp_path: Path) -> None:
    file = tmp_path / "backup.toml"
    file.write_text(
        '[remote]\nurl = "ssh://vault/srv"\nidentity_file = "/key"\nregion = "eu"\n'
        '[targets.usb]\nurl = "file:///mnt/usb"\nknown_hosts = "/known"\n'
        '[targets.cloud]\nurl = "s3://bucket"\npart_size = "16MiB"\n'
        '[targets.nas]\nhost = "nas"\npath = "/volume"\n'
    )
    idle = {
        name: load(RemoteConfig, environ={}, file=file, target=name).remote.idle
        for name in ("remote", "usb", "cloud", "nas")
    }
    assert idle == {"remote": ["region"], "usb": ["known_hosts"], "cloud": [], "nas": []}
    cloud = load(RemoteConfig, environ={}, file=file, target="cloud").remote
    assert (cloud.region, cloud.part_size, cloud.identity_file) == ("eu", 16 * 1024**2, None)


@pytest.mark.parametrize(
    ("strategy", "url"),
    [("tar", "s3://bucket/x"), ("stream", "s3://bucket/x"), ("packs", "file:///mnt/usb")],
)
def test_a_strategy_of_another_kind_is_refused(strategy: str, url: str) -> None:
    environ = {"NTT_REMOTE_URL": url, "NTT_SOURCE_ROOT": "/srv/store"}
    load(SendConfig, environ=environ)
    flags = {"run.strategy": strategy}
    with pytest.raises(ConfigError) as caught:
        load(SendConfig, environ=environ, flags=flags)
    assert caught.value.message == "--strategy is not for this target (remote)"
    assert "the layout packs takes packs, plain files stream or tar" in caught.value.hint
    # What does not send need not have it.
    for model in (CatalogConfig, RemoteConfig, Settings):
        load(model, environ=environ, flags=flags)


def test_a_session_goes_the_way_of_its_kind() -> None:
    def spec(url: str, **more: str) -> SessionSpec:
        environ = {"NTT_REMOTE_URL": url, **more}
        return SessionSpec.of(load(RemoteConfig, environ=environ), "run", "0")

    assert isinstance(spec("ssh://vault/srv").transport, Ssh)
    assert spec("ssh://vault/srv").run.codec == "auto"
    disk = spec("file:///mnt/usb")
    assert (type(disk.transport), disk.root, disk.run.codec) == (Local, "/mnt/usb", "none")
    assert spec("file:///mnt/usb", NTT_CODEC="zlib").run.codec == "zlib"
    with pytest.raises(ConfigError, match="cannot use a bucket: s3://bucket/"):
        spec("s3://bucket")
    assert isinstance(spec("sftp://vault/srv").transport, Sftp)


@pytest.mark.parametrize("url", ["s3://bucket/x", "sftp://vault/srv"])
def test_plain_files_are_refused_where_only_packs_can_be(url: str) -> None:
    assert remote(url).layout == "packs"
    with pytest.raises(ConfigError, match="NTT_REMOTE_LAYOUT is files, and the target is a"):
        remote(url, NTT_REMOTE_LAYOUT="files")


def test_settings_have_an_effect_for_the_kinds_that_have_them(tmp_path: Path) -> None:
    key = {"NTT_SSH_KEY": str(tmp_path), "NTT_S3_ENDPOINT": "https://x"}
    assert remote("ssh://vault/srv", **key).idle == ["endpoint"]
    assert remote("sftp://vault/srv", **key).idle == ["endpoint"]
    assert remote("s3://bucket/x", **key).idle == ["identity_file"]
    assert remote("file:///mnt", **key).idle == ["endpoint", "identity_file"]


def test_a_local_receiver_that_is_killed_clears_up_and_runs_our_python(tmp_path: Path) -> None:
    settings = load(RemoteConfig, environ={"NTT_REMOTE_URL": f"file://{tmp_path}"})
    connection = connect(SessionSpec.of(settings, "run", "0"))
    assert connection.banner.python == platform.python_version()
    assert "blake3" in connection.banner.hashes
    connection.hello()
    assert [*tmp_path.iterdir()] != []
    connection.abort()
    wait_until(lambda: [*tmp_path.iterdir()] == [], "the receiver to clear up")
