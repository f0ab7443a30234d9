"""One object on its way into a bucket: sent in parts, made visible at its end, and compared."""

from __future__ import annotations

from typing import Final

from ntt_backup.errors import NameTaken, RemoteCannotStore
from ntt_backup.objects.bucket import Bucket, Buffer
from ntt_backup.objects.outbox import KeyTaken, Outbox

_WAIT_SECONDS: Final = 0.2


class ObjectUpload:
    """An object that is visible, and compared with what was sent, once it is finished. what: its
    name in errors. Two parts of part_size are in memory.
    """

    def __init__(self, bucket: Bucket, key: str, part_size: int, what: str) -> None:
        self._what = what
        self._outbox = Outbox(bucket, part_size, self.poll)
        self._out = self._outbox.begin(key)

    @property
    def size(self) -> int:
        """Bytes that were added."""
        return self._out.size

    def add(self, data: Buffer) -> None:
        """Sends the next bytes; it is done with the buffer when it returns."""
        self.poll()
        self._outbox.write(self._out, data)

    def flush(self) -> None:
        """Waits until all of it is in the bucket, not visible yet. Nothing more may be added."""
        self._outbox.flush(self._out)

    def finish(self) -> None:
        """Makes it visible. Raises NameTaken where other content had its key before."""
        key = self._out.key
        try:
            self._outbox.finish(self._out)
            assert self._out.done is not None
            while not self._out.done.done():
                self._outbox.wait(_WAIT_SECONDS)
            self._out.done.result()
        except KeyTaken as error:
            if error.older:
                raise NameTaken(key, self._what) from error
            raise RemoteCannotStore(
                f"{self._what} in the bucket is not what was sent",
                detail=key,
                hint="something in the object store damages content: do not rely on it",
            ) from error
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Forgets what was sent, unless it is finished. Never raises."""
        self._outbox.abort()

    def poll(self) -> None:
        """Raises what has gone wrong meanwhile."""
        if (trouble := self._outbox.trouble) is not None:
            raise trouble
