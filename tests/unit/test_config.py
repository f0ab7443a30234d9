"""Settings: what is right loads; what is wrong is told with its name, origin and what is needed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ntt_backup.config import (
    CatalogConfig,
    SendConfig,
    Settings,
    StoreConfig,
    load,
    load_each,
    misspelt,
)
from ntt_backup.config.command_settings import ENVIRONMENT, TABLES
from ntt_backup.config.display import HIDDEN, settings_in_effect
from ntt_backup.config.sections import CatalogFromSettings, FilesSettings, SnapshotSettings
from ntt_backup.config.sources import snapshot_sets, targets
from ntt_backup.config.values import needed
from ntt_backup.errors import ConfigError

SAMPLES = Path(__file__).parent.parent / "samples" / "config"
GOOD = """
[source]
root = "/data"

[remote]
host = "vault"
path = "/storage"
identity_file = "/keys/id"
"""
SECRET = "hunter2"
RECIPIENT = f"age1{'q' * 58}"


def names(folder: str) -> list[str]:
    return sorted(path.name for path in (SAMPLES / folder).glob("*.toml"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "backup.toml"
    path.write_text(GOOD)
    return path


@pytest.fixture(autouse=True)
def no_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    default = tmp_path / "default.toml"
    monkeypatch.setattr("ntt_backup.config.sources.DEFAULT_FILE", default)
    return default


def refused(text: str = GOOD, *, model: type[CatalogConfig] = Settings, **how: Any) -> ConfigError:
    """The error that loading text gives."""
    how.setdefault("environ", {})
    path = how.pop("path")
    assert isinstance(path, Path)
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(model, file=path, **how)
    return caught.value


def outcome(model: type[CatalogConfig], **how: Any) -> tuple[CatalogConfig, ConfigError | None]:
    """What loading gives: settings (the default ones if refused), and the error if refused."""
    try:
        return load(model, **how), None
    except ConfigError as error:
        return CatalogConfig(), error


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names("valid"))
def test_valid_sample_loads(name: str) -> None:
    load(SendConfig, file=SAMPLES / "valid" / name, environ={})


@pytest.mark.parametrize("name", names("invalid"))
def test_invalid_sample_says_what_is_wrong_in_one_line(name: str) -> None:
    path = SAMPLES / "invalid" / name
    expected = path.read_text().splitlines()[0].removeprefix("# expect: ")
    with pytest.raises(ConfigError, match=expected) as caught:
        load(SendConfig, file=path, environ={})
    said = f"{caught.value} {caught.value.hint}"
    assert "\n" not in said
    assert "secret" not in said
    assert not re.search(r"(?i)input should|valid (integer|number|string)|pydantic", said)


def test_every_setting_of_the_full_sample_is_used_and_differs_from_its_default() -> None:
    path = SAMPLES / "valid" / "everything.toml"
    settings = load(Settings, file=path, environ={})
    for table, model in TABLES.items():
        section = getattr(settings, table)
        for name, field in model.model_fields.items():
            if field.alias:  # In the sample of files that go by their paths.
                continue
            assert name in section.model_fields_set, f"{table}.{name}"
            assert getattr(section, name) != field.default, f"{table}.{name}"
    snapshots = settings.snapshots["machine-1"]
    assert snapshots.model_fields_set == set(SnapshotSettings.model_fields)
    assert snapshots.paths == (Path("/etc"), Path("~/notes").expanduser())
    assert settings.run.batch_bytes == 1_500_000_000
    assert str(settings.run.bwlimit) == "mon-fri 08:00 4MB/s, mon-fri 19:00 12MB/s, sat-sun off"
    assert settings.remote.path == "/storage/backup"
    assert settings.remote.identity_file == Path("~/.ssh/id_backup").expanduser()


def test_every_setting_of_files_by_path_is_used() -> None:
    settings = load(Settings, file=SAMPLES / "valid" / "files-by-path.toml", environ={})
    assert settings.by_path
    given = settings.catalog.from_
    assert given is not None
    assert given.model_fields_set == set(CatalogFromSettings.model_fields)
    assert given.query == "select path, size from files"
    assert settings.files["images"].model_fields_set == set(FilesSettings.model_fields)


def test_the_former_name_of_a_setting_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text("[dump]\nrefresh = 60\n")
    assert load(CatalogConfig, file=file, environ={}).dump.max_age == 60
    file.write_text("[dump]\nrefresh = true\n")
    with pytest.raises(ConfigError) as caught:
        load(CatalogConfig, file=file, environ={})
    assert str(caught.value).startswith(f"dump.refresh in {file} is True: ")
    file.write_text("[dump]\nmax_age = 60\nrefresh = 70\n")
    with pytest.raises(ConfigError) as caught:
        load(CatalogConfig, file=file, environ={})
    assert caught.value.message == f"{file} sets dump.refresh and dump.max_age, which are the same"
    assert caught.value.hint == "keep dump.max_age"


@pytest.mark.parametrize("name", ["{target", "{0}", "{target.__class__}", "target}", "{Target}"])
def test_a_misspelt_placeholder_in_the_name_of_the_lock_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"with no placeholder but \{target\} is needed"):
        load(CatalogConfig, environ={"NTT_LOCK_FILE": f"/run/{name}.lock"}, file=None)


def test_every_time_may_be_written_with_its_unit() -> None:
    flags = {"source.root": "/d", "remote.url": "file:///r"}
    times = [
        f"{table}.{name}"
        for table, model in TABLES.items()
        for name, field in model.model_fields.items()
        if needed(field).startswith("a duration")
    ]
    assert len(times) >= 13
    for key in times:
        table, _, name = key.partition(".")
        for value in ("30s", 30):
            found = load(Settings, flags={**flags, key: value}, environ={})
            assert getattr(getattr(found, table), name) == 30, key


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7d", 604_800),
        ("12h", 43_200),
        ("15min", 900),
        ("2 h", 7200),
        ("1w", 604_800),
        ("90", 90),
        (90.5, 90.5),
        ("1.5H", 5400),
        *((wrong, None) for wrong in ("7 days", "soon", "", True, "-1s", "1d12h", [7])),
    ],
)
def test_a_time_is_read_in_every_unit(text: object, seconds: float | None) -> None:
    found, error = outcome(CatalogConfig, flags={"dump.max_age": text}, environ={})
    assert (error is None) == (seconds is not None)
    if error is None:
        assert found.dump.max_age == seconds
    else:
        assert "a duration (7d, 12h, 15min, 30s) or a number of seconds" in error.message
    whole = {"remote.url": "file:///r", "remote.connect_timeout": 1.5}
    assert outcome(CatalogConfig, flags=whole, environ={})[1] is not None


@pytest.mark.parametrize(
    "host", ["vault", "me@vault", "::1", "me@10.0.0.1", "DOMAIN\\me@vault", "ssh://me@vault:22"]
)
def test_a_host_that_ssh_takes_is_kept_as_written(file: Path, host: str) -> None:
    assert load(Settings, file=file, environ={"NTT_REMOTE_HOST": host}).remote.host == host
    bare = load(Settings, file=SAMPLES / "valid" / "ipv6.toml", environ={})
    assert bare.remote.host == "backup@fe80::1%eth0"


# --- layers ---------------------------------------------------------------------------------------


def test_flags_win_over_environment_over_file_over_defaults(file: Path) -> None:
    file.write_text(GOOD + "[run]\nworkers = 2\nbatch_size = 20\nwindow = 3\n")
    settings = load(
        Settings,
        flags={"run.workers": 8, "run.batch_size": None},
        environ={"NTT_WORKERS": "5", "NTT_BATCH_SIZE": "50"},
        file=file,
    )
    assert settings.run.workers == 8
    assert settings.run.batch_size == 50
    assert settings.run.window == 3
    assert settings.run.attempts == 3


def test_a_problem_names_the_flag_variable_or_key_that_was_set(file: Path) -> None:
    error = refused(
        GOOD + "[run]\nwindow = 0\n",
        path=file,
        flags={"run.batch_size": 0},
        environ={"NTT_WORKERS": "abc"},
    )
    assert str(error) == (
        "NTT_WORKERS is 'abc': a whole number from 1 to 256 is needed; "
        "--batch-size is 0: a whole number from 1 to 100000 is needed; "
        f"run.window in {file} is 0: a whole number from 1 to 64 is needed"
    )


def test_every_variable_sets_its_own_key() -> None:
    values = {
        "NTT_DB_URL": "postgresql:///other",
        "NTT_REMOTE_URL": "ssh://vault:23/NTT_REMOTE_PATH",
        "NTT_REMOTE_HOST": "vault",
        "NTT_REMOTE_PORT": "23",
        "NTT_REMOTE_LAYOUT": "files",
        "NTT_S3_ENDPOINT": "https://s3.example.org:9000",
        "NTT_WORKERS": "23",
        "NTT_BATCH_SIZE": "23",
        "NTT_BATCH_BYTES": "23 kB",
        "NTT_STRATEGY": "tar",
        "NTT_CODEC": "zstd-1",
        "NTT_SOURCE_LAYOUT": "0:2/2:4/4:",
        "NTT_SOURCE_HASH": "sha256",
        "NTT_READ_ORDER": "extent",
        "NTT_GRACE": "23.0",
        "NTT_SOURCE_PREFIXES": "0-23 a3",
        "NTT_LOG_LEVEL": "error",
        "NTT_METRICS_LISTEN": "[::1]:9787",
        "NTT_PACK_RECIPIENTS": f"{RECIPIENT}, {RECIPIENT}",
        "NTT_PACK_UNSEALED_UNTIL": "2026-12-31",
    }
    environ = {name: values.get(name, f"/{name}") for name in ENVIRONMENT}
    settings = load(Settings, environ=environ)
    found = {}
    for name, key in ENVIRONMENT.items():
        table, _, field = key.partition(".")
        found[name] = str(getattr(getattr(settings, table), field))
    assert found == environ | {
        "NTT_BATCH_BYTES": "23000",
        "NTT_PACK_RECIPIENTS": str((RECIPIENT, RECIPIENT)),
        "NTT_SOURCE_PREFIXES": str(("00-23", "a3")),
    }


def test_a_credential_is_a_setting_above_the_file_and_below_the_environment(
    file: Path, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.mkdir()
    (held / "catalog.url").write_text("postgresql://u:secret@h/db\n")
    (held / "remote.identity_file").write_text("a key")
    (held / "run.workers").write_text("9")
    file.write_text('[catalog]\nurl = "postgresql:///file"\n[remote]\nhost = "h"\npath = "/p"\n')
    given = {"CREDENTIALS_DIRECTORY": str(held)}
    settings = load(CatalogConfig, environ=given, file=file)
    assert settings.catalog.url == "postgresql://u:secret@h/db"
    assert settings.remote is not None
    assert settings.remote.identity_file == held / "remote.identity_file"
    assert settings.run.workers == 4
    above = load(CatalogConfig, environ={**given, "NTT_DB_URL": "postgresql:///env"}, file=file)
    assert above.catalog.url == "postgresql:///env"
    (held / "catalog.url").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot read the credential"):
        load(CatalogConfig, environ=given, file=file)


def test_a_credential_of_the_remote_gives_way_to_what_a_target_has_of_its_own(
    file: Path, tmp_path: Path
) -> None:
    """One daemon serves them all, and hands each its own key."""
    for name in ("remote.identity_file", "targets.held.identity_file", "pack.identity_file"):
        (tmp_path / name).write_text("a key")
    tables = [f'[targets.{name}]\nurl = "ssh://{name}/p"\n' for name in ("held", "filed", "none")]
    tables[1] += 'identity_file = "/in/file"\n[targets.filed.pack]\nidentity_file = "/pack"\n'
    disk = '[targets.disk]\nurl = "file:///mnt/usb"\n'
    file.write_text('[remote]\nurl = "ssh://h/p"\n' + "".join(tables) + disk)
    given = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    found = load_each(CatalogConfig, "all", environ=given, file=file)
    held = {name: one.remote.identity_file for name, one in found.items() if one.remote is not None}
    assert held == {
        "remote": tmp_path / "remote.identity_file",
        "held": tmp_path / "targets.held.identity_file",
        "filed": Path("/in/file"),
        "none": tmp_path / "remote.identity_file",
        "disk": None,
    }
    opened = {name: one.pack.identity_file for name, one in found.items()}
    assert opened.pop("filed") == Path("/pack")
    assert set(opened.values()) == {tmp_path / "pack.identity_file"}


def test_an_empty_variable_counts_as_not_set(file: Path) -> None:
    environ = dict.fromkeys([*ENVIRONMENT, "NTT_CONFIG"], "")
    assert load(Settings, environ=environ, file=file) == load(Settings, environ={}, file=file)


def test_a_missing_setting_is_reported_with_the_ways_to_set_it(file: Path) -> None:
    error = refused("[source]\nroot = '/data'\n", path=file)
    assert error.message == "remote.url is not set"
    assert "NTT_REMOTE_URL or url under [remote]" in error.hint
    assert "file:///path" in error.hint


def test_a_command_needs_the_store_and_the_remote_only_where_it_uses_them() -> None:
    settings = load(CatalogConfig, environ={})
    assert settings.source is None
    assert settings.remote is None
    assert settings.catalog.url == "postgresql:///copyjob"
    assert load(StoreConfig, environ={"NTT_SOURCE_ROOT": "/data"}).source.root == Path("/data")
    with pytest.raises(ConfigError, match=r"^source\.root is not set$"):
        load(StoreConfig, environ={})


# --- the file -------------------------------------------------------------------------------------


def test_the_file_is_the_named_one_or_that_of_the_variable_or_the_default_one(
    no_file_of_this_machine: Path, file: Path, tmp_path: Path
) -> None:
    no_file_of_this_machine.write_text(GOOD + "[run]\nworkers = 7\n")
    other = tmp_path / "other.toml"
    other.write_text(GOOD + "[run]\nworkers = 9\n")
    named = {"NTT_CONFIG": str(other)}
    assert load(Settings, environ={}).run.workers == 7
    assert load(Settings, environ=named).run.workers == 9
    assert load(Settings, environ=named, file=file).run.workers == 4
    other.unlink()
    for how in ({"file": other, "environ": {}}, {"environ": named}):
        _, error = outcome(CatalogConfig, **how)
        assert re.search(r"cannot read .*other\.toml: No such file", str(error))


def test_a_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, no_file_of_this_machine: Path
) -> None:
    no_file_of_this_machine.mkdir()
    for file in (tmp_path, None):
        with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory") as caught:
            load(CatalogConfig, file=file, environ={})
        assert "--config" in caught.value.hint
    wrong = tmp_path / "latin.toml"
    wrong.write_bytes(b"[source]\nroot = '/caf\xe9'\n")
    with pytest.raises(ConfigError, match="line 2 is not UTF-8"):
        load(CatalogConfig, file=wrong, environ={})


@pytest.mark.parametrize("value", [os.fsdecode(b"/caf\xe9"), "~no-such-user/x"])
def test_a_path_that_nobody_can_have_is_refused(file: Path, value: str) -> None:
    error = refused(path=file, environ={"NTT_SOURCE_ROOT": value})
    assert error.message == f"NTT_SOURCE_ROOT is {value!r}: an absolute path is needed"


# --- targets --------------------------------------------------------------------------------------

NAS = GOOD + '[targets.nas]\nhost = "nas"\npath = "/volume"\n'


def test_a_target_has_its_own_place_and_shares_other_settings(file: Path) -> None:
    file.write_text(NAS.replace('path = "/storage"', 'path = "/storage"\nport = 2222'))
    nas = load(Settings, file=file, environ={}, target="nas")
    assert (nas.target, nas.remote.host, nas.remote.path) == ("nas", "nas", "/volume")
    assert nas.remote.port is None
    assert nas.remote.identity_file == Path("/keys/id")
    error = refused(NAS.replace('path = "/volume"\n', ""), path=file, target="nas")
    assert error.message == "targets.nas.path is not set"
    assert f"path under [targets.nas] in {file}" in error.hint
    assert "place by url" in error.hint
    file.write_text(GOOD.replace('path = "/storage"', 'path = "/storage"\nport = 2222'))
    vault = load(Settings, file=file, environ={})
    assert (vault.target, vault.remote.host, vault.remote.port) == ("remote", "vault", 2222)


def test_a_target_seals_for_recipients_of_its_own(file: Path) -> None:
    other = RECIPIENT.replace("q", "p")
    file.write_text(
        f"{GOOD}[pack]\nrecipients = ['{RECIPIENT}']\n[targets.vault]\nurl = 's3://bucket/b'\n"
        f"[targets.vault.pack]\nrecipients = ['{other}']\n[targets.box]\nurl = 's3://bucket/c'\n"
        "[targets.open]\nurl = 's3://bucket/d'\npack.recipients = []\n"
    )
    found = {
        name: load(Settings, environ={}, file=file, target=name).recipients
        for name in ("vault", "box", "open", "remote")
    }
    assert found == {"vault": (other,), "box": (RECIPIENT,), "open": (), "remote": ()}


@pytest.mark.parametrize("value", ["['age1short']", "'x'", "[1]", "['AGE-SECRET-KEY-1QQQ']"])
def test_what_is_no_recipient_is_refused(file: Path, value: str) -> None:
    error = refused(f"{GOOD}[pack]\nrecipients = {value}\n", path=file)
    assert "public keys of age" in error.message
    assert "QQQ" not in str(error)


@pytest.mark.parametrize("variable", ["NTT_REMOTE_HOST", "NTT_REMOTE_PATH", "NTT_REMOTE_PORT"])
def test_the_environment_cannot_send_a_target_elsewhere(file: Path, variable: str) -> None:
    environ = {variable: {"NTT_REMOTE_PATH": "/elsewhere"}.get(variable, "22")}
    error = refused(NAS, path=file, target="nas", environ=environ)
    assert error.message == f"{variable} is set, but targets.nas.host in {file} is another place"
    load(Settings, file=file, environ=environ)


def test_the_environment_alone_can_describe_a_target() -> None:
    environ = {"NTT_SOURCE_ROOT": "/d", "NTT_REMOTE_HOST": "nas", "NTT_REMOTE_PATH": "/volume"}
    assert load(Settings, environ=environ, target="nas").remote.host == "nas"


def test_an_unknown_target_is_refused_with_the_known_ones(file: Path) -> None:
    error = refused(NAS, path=file, target="nsa")
    assert str(error) == f"target 'nsa' is not in {file}: it has remote, nas"
    for text, known in (
        (
            "[targets.nas]\nurl = 'file:///n'\n[remote]\nconnect_timeout = 5\n",
            "it has nas",
        ),
        ("[run]\nworkers = 2\n", "it has no targets"),
    ):
        assert str(refused(text, path=file, target="nsa")).endswith(f"{file}: {known}")


@pytest.mark.parametrize("target", ["", "Nas", "1st", "a-b", "nas\n", "x" * 32, 'a"; drop'])
def test_a_target_must_be_a_valid_name(target: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid name"):
        load(CatalogConfig, environ={}, target=target)


def test_each_target_has_its_own_lock_unless_the_name_is_set(file: Path) -> None:
    file.write_text(NAS)
    locks = [load(Settings, file=file, environ={}, target=t).lock.file for t in ("remote", "nas")]
    assert locks == [Path("/tmp/ntt-backup-remote.lock"), Path("/tmp/ntt-backup-nas.lock")]
    for name, expected in (("/run/ntt/lock", "/run/ntt/lock"), ("/srv/{target}", "/srv/nas")):
        one = load(Settings, file=file, environ={"NTT_LOCK_FILE": name}, target="nas")
        assert one.lock.file == Path(expected)
    for lock, socket in (
        ("/run/{target}.lock", "/run/far.sock"),
        ("/run/ntt.{target}", "/run/ntt.far.sock"),
        ("/run/lock", "/run/lock.sock"),
    ):
        beside = CatalogConfig(target="far", lock={"file": lock})
        assert str(beside.control.socket) == socket


# --- secrets --------------------------------------------------------------------------------------

URL = f"postgresql://copyjob:{SECRET}@db/catalog"


@pytest.mark.parametrize(
    "environ",
    [
        {"NTT_DB_URL": URL + "\n"},
        {"NTT_DB_URL": f"host=db password={SECRET}\n"},
        {"NTT_DB_URL": f"\n{SECRET}"},
        {"NTT_REMOTE_HOST": URL},
        {"NTT_REMOTE_HOST": f"copyjob:{SECRET}@db"},
        {"NTT_REMOTE_PATH": URL},
        {"NTT_REMOTE_URL": URL},
        {"NTT_REMOTE_URL": f"ssh://copyjob:{SECRET}@vault/storage"},
        {"NTT_REMOTE_URL": f"ssh://copyjob%3A{SECRET}@vault/storage"},
        {"NTT_REMOTE_URL": f"s3://AKIA:{SECRET}@bucket/prefix"},
        {"NTT_REMOTE_URL": f"s3://{SECRET}@bucket/prefix"},
        {"NTT_REMOTE_URL": f"s3://AKIA:{SECRET}/prefix"},
        {"NTT_REMOTE_URL": f"s3://bucket/?secret={SECRET}"},
        {"NTT_S3_ENDPOINT": f"https://AKIA:{SECRET}@s3.example.org"},
        {"NTT_WORKERS": f"host=db PASSWORD={SECRET}"},
        {"NTT_SOURCE_ROOT": URL},
        {"NTT_STRATEGY": f"https://db/?token={SECRET}"},
        {"NTT_DBURL": URL},
    ],
)
def test_no_error_shows_a_password(file: Path, environ: dict[str, str]) -> None:
    good = GOOD.replace('host = "vault"\npath = "/storage"\n', "url = 'file:///storage'\n")
    text = good if "NTT_REMOTE_URL" in environ else GOOD
    error = refused(text + "[run]\nworkers = 0\n", path=file, environ=environ)
    chain = f"{error!r} {error} {error.detail} {error.hint} {error.__cause__!s}"
    assert SECRET not in chain + " ".join(misspelt(environ))
    settings = load(Settings, file=SAMPLES / "valid" / "smallest.toml", environ={"NTT_DB_URL": URL})
    assert SECRET not in f"{settings!r} {settings!s}"
    assert settings.catalog.url == URL


# --- variables of other programs ------------------------------------------------------------------

# The variables of the programs that fill the store.
THEIRS = {
    "NTT_DB_URL": "postgres:///copyjob",
    "NTT_LOG_JSON": "/var/log/ntt/orchestrator.jsonl",
    "NTT_ARCHIVED_ROOT": "/data/archived",
    "NTT_ARCHIVER_LOG": "/var/log/ntt/archiver.jsonl",
    "NTT_BIN": "/opt/ntt/bin",
    "NTT_BY_HASH_ROOT": "/data/by-hash",
    "NTT_CLEANUP_IDLE_HOURS": "4",
    "NTT_DRY_RUN": "1",
    "NTT_DRY_RUN_LIMIT": "100",
    "NTT_DST_ROOT": "/data/dst",
    "NTT_ENUM_LOG": "/var/log/ntt/enum.jsonl",
    "NTT_IGNORE_PATTERNS": "/etc/ntt/ignore",
    "NTT_IMAGE_ROOT": "/data/img",
    "NTT_IMAGES_ROOT": "/data/img",
    "NTT_LOADER_LOG": "/var/log/ntt/loader.jsonl",
    "NTT_ORCHESTRATOR_LOG": "/var/log/ntt/orchestrator.jsonl",
    "NTT_RAMDISK": "/tmp/ram",
    "NTT_RAW_ROOT": "/data/raw",
    "NTT_SAMPLE_SIZE": "100",
    "NTT_SEARCH_PATH": "copyjob_test",
    "NTT_WORKER_ID": "4",
}


def test_variables_of_other_programs_set_nothing_but_what_is_the_same() -> None:
    found = load(CatalogConfig, environ=THEIRS)
    assert found.catalog.url == "postgres:///copyjob"
    assert found.log.jsonl == Path("/var/log/ntt/orchestrator.jsonl")
    (warning,) = misspelt(THEIRS)
    assert warning.startswith("NTT_LOG_JSON ")
    assert warning.endswith("set NTT_BACKUP_LOG instead")
    ours = {**THEIRS, "NTT_BACKUP_LOG": "/var/log/ntt/backup-remote.jsonl"}
    assert load(CatalogConfig, environ=ours).log == CatalogConfig().log
    assert misspelt(ours) == []


# --- misspelt variables ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NTT_WORKRES", "NTT_WORKERS"),
        ("NTT_DB_URI", "NTT_DB_URL"),
        ("NTT_SSHKEY", "NTT_SSH_KEY"),
        ("ntt_workers", "NTT_WORKERS"),
        ("NTT_CONFIGS", "NTT_CONFIG"),
    ],
)
def test_a_misspelt_variable_is_reported(name: str, meant: str) -> None:
    assert misspelt({name: "4"}) == [f"{name} has no effect; did you mean {meant}?"]


def test_correct_and_foreign_variables_are_not_reported() -> None:
    ours = dict.fromkeys([*ENVIRONMENT, "NTT_CONFIG"], "4")
    assert misspelt({**ours, "NTT_TEST_SSHD": "docker", "WORKRES": "4", "NTT_WORKRES": ""}) == []


# --- whatever is set ------------------------------------------------------------------------------

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "mib": 2**20, "GIB": 2**30, "TiB": 2**40}


@given(
    number=st.integers(1, 900),
    unit=st.sampled_from(sorted(UNITS)),
    gap=st.sampled_from(["", " "]),
)
def test_sizes_are_read_in_every_unit(number: int, unit: str, gap: str) -> None:
    environ = {"NTT_BATCH_BYTES": f"{number}{gap}{unit}"}
    assert load(CatalogConfig, environ=environ).run.batch_bytes == number * UNITS[unit]


@given(
    st.dictionaries(
        st.sampled_from(sorted(ENVIRONMENT)), st.text(st.characters(exclude_characters="\0"))
    )
)
def test_any_environment_loads_or_is_refused_in_one_line(environ: dict[str, str]) -> None:
    _, error = outcome(CatalogConfig, environ=environ)
    if error is not None:
        assert str(error).isprintable()
        assert any(name in str(error) for name in [*environ, "is not set"])


toml_values = st.recursive(
    st.one_of(st.integers(), st.floats(), st.booleans(), st.text(), st.dates()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=5,
)
keys = sorted(f"{table}.{name}" for table, model in TABLES.items() for name in model.model_fields)


@given(key=st.sampled_from(keys), value=toml_values)
@example(key="run.backoff_cap", value=0.5)  # Below the default of another one.
def test_any_value_loads_or_is_refused_by_its_name(key: str, value: object) -> None:
    flags = {"source.root": "/d", "remote.host": "h", "remote.path": "/p", key: value}
    _, error = outcome(Settings, flags=flags, environ={})
    if error is not None:
        assert f"--{key.partition('.')[2].replace('_', '-')}" in error.message.split()
        assert str(error).isprintable()


def test_batches_begin_smaller_than_they_may_become_unless_their_bytes_are_set() -> None:
    usual = Settings(source={"root": "/s"}, remote={"url": "file:///r"}).run
    fixed = Settings(
        source={"root": "/s"}, remote={"url": "file:///r"}, run={"batch_bytes": 2**40}
    ).run
    assert (usual.first_bytes, usual.batch_bytes) == (64 * 2**20, 256 * 2**20)
    assert fixed.first_bytes == fixed.batch_bytes == 2**40


def test_a_batch_to_a_bucket_is_a_pack_unless_something_else_is_set() -> None:
    remote = {"url": "s3://bucket/prefix"}
    packs = Settings(source={"root": "/s"}, remote=remote).run
    own = Settings(source={"root": "/s"}, remote=remote, run={"batch_size": 7, "window": 1}).run

    assert (packs.strategy, packs.batch_size, packs.window) == ("packs", 24_576, 2)
    assert (own.strategy, own.batch_size, own.window) == ("packs", 7, 1)
    assert (packs.most_blobs, own.most_blobs) == (24_576, 7)  # No pack grows.
    assert (packs.first_bytes, own.first_bytes) == (packs.batch_bytes, own.batch_bytes)


def test_what_has_no_right_form_is_told_together_with_wrong_values(file: Path) -> None:
    error = refused(
        "oops = 1\n[runn]\n[run]\nworkers = 0\n[snapshots.Bad]\n[targets.BAD]\n[targets.remote]\n"
        "[targets.off]\nurl = 'file://host/z'\n",
        path=file,
        model=CatalogConfig,
    )
    for said in (
        "oops in",
        "runn in",
        "did you mean run?",
        "run.workers in",
        "snapshots.Bad in",
        "targets.BAD in",
        "targets.remote in",
        "targets.off.url in",
    ):
        assert said in error.message


def test_the_targets_are_those_that_have_a_place(file: Path) -> None:
    file.write_text("[targets.off]\n[targets.two]\n[snapshots.etc]\n")
    place = {"NTT_REMOTE_URL": "file:///mnt"}
    assert targets(file, {}) == ["off", "two"]
    assert targets(file, place) == ["remote", "off", "two"]
    assert targets(None, {"NTT_CONFIG": str(file)}) == ["off", "two"]
    assert targets(None, {}) == ["remote"]
    assert snapshot_sets(file, {}) == ["etc"]


def test_only_valid_names_are_completed(file: Path) -> None:
    """A shell would put the others into a command line."""
    file.write_text('[targets."$(id)"]\n[targets.two]\n[snapshots."a\\nb"]\n[snapshots.etc]\n')
    assert (targets(file, {}), snapshot_sets(file, {})) == (["two"], ["etc"])


def test_several_targets_are_named_by_a_list_or_are_all_that_have_a_place(file: Path) -> None:
    file.write_text(NAS)
    for said, names in (("all", ["remote", "nas"]), ("nas,remote", ["nas", "remote"])):
        found = load_each(Settings, said, file=file, environ={})
        assert {name: one.remote.host for name, one in found.items()} == {
            name: {"remote": "vault"}.get(name, name) for name in names
        }
        assert list(found) == names
    file.write_text(NAS.replace('host = "vault"\npath = "/storage"\n', ""))
    assert list(load_each(Settings, "all", file=file, environ={})) == ["nas"]
    file.write_text(NAS + "[targets.all]\nurl = 'file:///mnt/all'\n")
    assert list(load_each(Settings, "all", file=file, environ={})) == ["all"]


@pytest.mark.parametrize(
    ("said", "text", "message"),
    [
        ("nas,nsa", NAS, "target nsa: target 'nsa' is not in "),
        ("all", NAS.replace('path = "/volume"\n', ""), "target nas: targets.nas.path is not set"),
        ("all", NAS.replace('root = "/data"\n', ""), "source.root is not set"),
        ("nas,", NAS, "--target nas, has a comma with no name beside it"),
    ],
)
def test_a_mistake_in_one_of_several_targets_is_told_with_its_name(
    file: Path, said: str, text: str, message: str
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_each(Settings, said, file=file, environ={})
    assert caught.value.message.startswith(message)


def test_the_database_of_a_drill_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text('[checks]\ndrill = { every = "1d", database = "postgresql://me:sesame@h/d" }\n')
    settings = load(CatalogConfig, file=file, environ={})
    shown = {one.key: one.value for one in settings_in_effect(settings, {})}
    assert shown["checks.drill"]["database"] == HIDDEN
    assert shown["checks.drill"]["every"] == 86400
    file.write_text('[checks]\ndrill = { every = "1d", database = ["sesame"] }\n')
    with pytest.raises(ConfigError) as caught:
        load(CatalogConfig, file=file, environ={})
    assert "sesame" not in str(caught.value)
