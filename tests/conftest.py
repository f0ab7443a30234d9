"""Fixtures for all tests: an embedded PostgreSQL, a real sshd, and a link that can fail.

Nothing is started before a test asks for it, so the unit tests need neither.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ntt_backup.errors import remember_global_options
from tests.helpers.parallel import memory, processes
from tests.helpers.waiting import wait_until

pytest_plugins = [
    "tests.helpers.program",
    "tests.helpers.postgres",
    "tests.helpers.application",
    "tests.helpers.sshd",
    "tests.helpers.s3_servers",
    "tests.helpers.environment",
    "tests.helpers.bucket_packs",
    "tests.helpers.bucket_environment",
    "tests.helpers.link",
]

# The first python3 on PATH may be one that looks for Python at each start: that takes longer than
# the start, and each remote on this machine has one.
_python = str(Path(sys.executable).resolve().parent)
os.environ["PATH"] = os.pathsep.join([_python, os.environ.get("PATH", os.defpath)])

# No test reads or makes a host key of this machine.
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / f"ntt-config-{os.getpid()}")

# Where pytest keeps the tests' directories, as long as --basetemp does not say so.
if place := memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(place))

# A build must not fail by luck: the same examples every time, and no deadline on a busy machine.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=25)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return processes(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also what takes ten seconds and more")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is long, unless it was asked for, also by its name."""
    if config.getoption("--long") or any("::" in place for place in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_collection_finish() -> None:
    """Have the garbage collector look only at what tests make, and not at all the tests."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    # A build may run in the background, where these are ignored, and every child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Whoever ends a build by a time limit wants its servers and containers ended too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.addinivalue_line("markers", "docker: needs the sshd in a container; skipped without one")


def pytest_runtest_setup(item: pytest.Item) -> None:
    from tests.helpers.sshd import chosen_kind

    if item.get_closest_marker("docker") and chosen_kind()[0] != "docker":
        pytest.skip(f"needs the sshd in a container: {chosen_kind()[1]}")


@pytest.fixture(autouse=True)
def _no_options_are_remembered() -> Iterator[None]:
    """Those of a command that a test ran in this process stand in others' hints otherwise."""
    yield
    remember_global_options([])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can be copied: the threads in which tests are spread over processes only wait
    for the next one.
    """
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test() -> Iterator[None]:
    """A process with a second thread cannot be copied, so one that stays fails others' tests."""
    before = set(threading.enumerate())
    yield

    def ended() -> bool:
        if set(threading.enumerate()) <= before:
            return True
        gc.collect()  # A pool's threads end with the pool, which what they still do may hold.
        return False

    wait_until(ended, "the end of the threads that this test began")


@pytest.fixture(autouse=True)
def _no_file_stays_open_after_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A daemon that leaves one open for each blob or session has no descriptor left after a while.
    Pipes of a test, and what it has removed, are its own affair.
    """
    place = Path("/proc/self/fd")
    before = set(os.listdir(place))
    if "tmp_path" in request.fixturenames:
        request.getfixturevalue("tmp_path")  # Else it would be removed before this looks.
    yield
    if "unit" in request.path.parts and len(os.listdir(place)) > len(before):
        gc.collect()  # What an exception or a cycle holds.
        left = [place / one for one in set(os.listdir(place)) - before]
        files = [str(one.readlink()) for one in left if one.is_symlink()]
        assert not [one for one in files if one[0] == "/" and not one.endswith(" (deleted)")]
