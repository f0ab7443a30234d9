"""A watching worker whose store is there in part: it copies that part, and marks nothing."""

from __future__ import annotations

from typing import Any

import pytest

from ntt_backup.upload.worker import Worker
from tests.unit.scene import Scene, scene

BLOBS = 3000
ENDLESS = 300


def watching(made: Scene, **run: Any) -> Worker:
    return made.worker(watch=True, batch_size=1000, **run)


def away(made: Scene, first: int, last: int) -> set[str]:
    """Unmount what lies in the prefixes from first to last; the blobids of it."""
    gone = {one.blobid for one in made.all if first <= int(one.blobid[:2], 16) <= last}
    made.remote.unreadable |= gone
    return gone


def everybody(made: Scene) -> set[str]:
    return {one.blobid for one in made.all}


def mount_when(made: Scene, copied: set[str]) -> list[int]:
    """Have the store whole again once all of these are copied, and the worker told to stop when
    nothing is pending, or when it tries for ever. The number that was copied at the mount.
    """
    mounted: list[int] = []

    def look(event: dict[str, Any]) -> None:
        if not mounted and made.catalog.copied == copied:
            mounted.append(len(copied))
            made.remote.unreadable.clear()
        tried_for_ever = len(made.remote.batches) > ENDLESS
        made.pipe.stopping = not made.catalog.pending or tried_for_ever

    made.pipe.on_event = look
    return mounted


def test_what_cannot_be_read_waits_and_is_not_tried_first_again() -> None:
    made = scene(BLOBS)
    gone = away(made, 0x00, 0xA9)

    def stop_when_waiting(state: str) -> None:
        if state == "outage":
            made.pipe.stop()

    made.pipe.on_state = stop_when_waiting
    watching(made, backoff_base=60, backoff_cap=60, window=1).run()
    sent = [blob.blobid for batch in made.remote.batches for blob in batch.blobs]
    assert len(sent) == len(set(sent)) == BLOBS
    assert made.catalog.copied == everybody(made) - gone
    assert made.catalog.failed == {}


def test_blobs_that_are_really_gone_are_marked_once_the_store_is_whole_again() -> None:
    made = scene(BLOBS)
    lost = {made.all[number].blobid for number in (0, 4)}
    gone = away(made, 0x00, 0xA9)
    assert lost < gone

    def mount(event: dict[str, Any]) -> None:
        if made.catalog.copied == everybody(made) - gone:
            made.remote.unreadable &= lost
        made.pipe.stopping = not made.catalog.pending or len(made.remote.batches) > ENDLESS

    made.pipe.on_event = mount
    watching(made).run()
    made.assert_done(sorted(lost))


def test_a_catalog_that_is_lost_meanwhile_loses_nothing() -> None:
    made = scene(BLOBS, catalog=["ok"] * 9 + ["catalog lost at take"])
    gone = away(made, 0x00, 0xA9)
    mounted = mount_when(made, everybody(made) - gone)
    watching(made).run()
    assert mounted
    made.assert_done()


@pytest.mark.parametrize("fault", ["answered, then lost", "answered, then lost in put"])
def test_what_was_answered_is_recorded_before_the_wait_for_a_remote(fault: str) -> None:
    made = scene(60, remote=["ok"] * 4 + [fault])
    waits: list[bool] = []

    def look(state: str) -> None:
        if state == "outage":
            waits.append(made.catalog.copied == made.remote.stored != set())

    made.pipe.on_state = look
    made.worker(window=2).run()
    made.assert_done()
    assert waits
    assert all(waits)
