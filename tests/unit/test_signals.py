"""Signals are noted, wake a wait, and change nothing once we are done with them."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import pytest

from ntt_backup.daemon.signals import SignalInbox, time_limit
from ntt_backup.errors import CatalogUnavailable, Stopped
from ntt_backup.process.spawn import wait_for
from tests.helpers.waiting import PATIENCE


def kill(*signums: int) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)


def test_stops_are_counted_and_the_first_is_remembered() -> None:
    with SignalInbox().installed() as inbox:
        assert (inbox.stops, inbox.first_stop) == (0, 0)
        kill(signal.SIGTERM, signal.SIGINT)
        assert (inbox.stops, inbox.first_stop) == (2, signal.SIGTERM)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_wakes_a_wait(signum: int) -> None:
    with SignalInbox().installed() as inbox:
        assert not wait_for(reading=[inbox.fd], timeout=0)
        kill(signum)
        assert wait_for(reading=[inbox.fd], timeout=PATIENCE) == {inbox.fd}
        inbox.drain()
        assert not wait_for(reading=[inbox.fd], timeout=0)


def test_a_hangup_is_no_stop_and_is_taken_once() -> None:
    with SignalInbox().installed() as inbox:
        kill(signal.SIGHUP, signal.SIGHUP)
        assert inbox.stops == 0
        assert inbox.take_hangup()
        assert not inbox.take_hangup()


def test_afterwards_signals_do_what_they_did_before() -> None:
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(signum) for signum in ours]
    descriptors = len(os.listdir("/proc/self/fd"))
    with SignalInbox().installed():
        assert [signal.getsignal(signum) for signum in ours] != before
    assert [signal.getsignal(signum) for signum in ours] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_stop_is_raised_where_there_is_nothing_to_finish() -> None:
    with SignalInbox().installed() as inbox:
        with pytest.raises(Stopped) as caught, inbox.raising():
            kill(signal.SIGINT)
        assert caught.value.exit_code == 130
        kill(signal.SIGTERM)  # and no more once the context is left
        assert inbox.stops == 2


def test_a_stop_that_came_just_before_is_raised_too() -> None:
    with SignalInbox().installed() as inbox:
        kill(signal.SIGTERM)
        with pytest.raises(Stopped) as caught, inbox.raising():
            pytest.fail("not raised")
        assert caught.value.exit_code == 143


def test_what_was_in_use_at_a_time_limit_is_freed_at_once() -> None:
    class Connection:
        """What the limit interrupts."""

    used: list[weakref.ref[Connection]] = []

    def wait() -> None:
        connection = Connection()
        used.append(weakref.ref(connection))
        wait_for(timeout=PATIENCE)

    gc.disable()
    try:
        with pytest.raises(CatalogUnavailable), time_limit(0.01, CatalogUnavailable("too slow")):
            wait()
    finally:
        gc.enable()
    assert used[0]() is None
