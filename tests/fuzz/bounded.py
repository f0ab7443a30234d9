"""Hostile inputs are read: they must be refused, and must not take much memory.

Input that is made to take much memory is read in processes of their own, which are measured.

A process that forks copies nothing: what the child takes is what it adds, and what a process of its
own would have had to begin with is counted, too.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

MOST_BYTES = 100_000_000


def memory(which: str) -> int:
    """Returns the bytes that this process has in memory (VmRSS), or had at most (VmHWM).

    The figure of getrusage would not do: it begins at what the parent had.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def harm_of(
    inputs: Mapping[str, Callable[[], bytes]],
    read: Callable[[bytes], object],
    refusals: tuple[type[Exception], ...],
    most: int = MOST_BYTES,
) -> Iterator[str]:
    """Yields which inputs end in another error than the reader promises, or take too much memory.

    Args:
        inputs: What makes each input, by name.
        read: Reads an input to its end.
        refusals: The errors with which it may refuse one.
        most: Bytes of memory that a process may take.
    """
    base = memory("VmRSS")
    for name, make in inputs.items():
        file = os.memfd_create("input")
        path = Path(f"/proc/{os.getpid()}/fd/{file}")
        said = Path(f"/proc/{os.getpid()}/fd/{(end := os.memfd_create('said'))}")

        def reading(path: Path = path, said: Path = said) -> None:
            said.write_text(_read(path.read_bytes(), read, refusals, base, most))

        # To make an input takes more memory than to read it may.
        _apart(lambda path=path, make=make: path.write_bytes(make()))  # type: ignore[misc]
        _apart(reading)
        if harm := said.read_text():
            yield f"{name}: {harm}"
        os.close(file)
        os.close(end)


def harm_of_mutated(
    noun: str,
    valid: Sequence[bytes],
    changed: Callable[[bytes, random.Random], bytes],
    read: Callable[[bytes], object],
    refusal: type[Exception],
    seed: int,
    rounds: int,
) -> Iterator[str]:
    """Yields which mutated inputs end in another error than the reader promises.

    Args:
        noun: What an input is, for people.
        valid: The inputs that are mutated.
        changed: Mutates an input.
        read: Reads an input to its end.
        refusal: The error with which it may refuse one.
        seed: What chance begins with; with the number of a round it repeats that round.
        rounds: How many inputs are read.
    """
    was_read = 0
    for number in range(rounds):
        chance = random.Random(f"{seed}/{number}")
        try:
            read(changed(chance.choice(valid), chance))
            was_read += 1
        except refusal:
            pass
        except Exception as error:  # noqa: BLE001  Whatever escapes is what is looked for.
            yield f"seed {seed}, {noun} {number}: {error!r}"
    # Where all are refused at the door, they say nothing about what is behind it.
    if rounds >= 100 and not was_read:
        yield f"no {noun} was read"


def _read(
    data: bytes,
    read: Callable[[bytes], object],
    refusals: tuple[type[Exception], ...],
    base: int,
    most: int,
) -> str:
    before = memory("VmRSS")
    try:
        read(data)
    except refusals:
        pass
    except Exception:  # noqa: BLE001  Whatever escapes is what is looked for.
        return traceback.format_exc(limit=-4)
    took = base + memory("VmHWM") - before
    return f"{took / 1e6:.0f} MB of memory" if took > most else ""


def _apart(work: Callable[[], object]) -> None:
    """Does work in a copy of this process."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
            work()
            code = 0
        except BaseException:  # noqa: BLE001  It must not return from here.
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
