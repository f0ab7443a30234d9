"""Which tests run which lines: found by one run of all tests in a copy that notes it.

A line is noted by a call that stands before it in the source, not by Python's tracing: so it is
also known of receivers, whose source travels to another process and Python, and of what forks.
A process without the environment of its test, as below sshd, is told by the time.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.mutation.mutants import Mutant, mutants

_HEAD: Final = "from __future__ import annotations\n"
# Tests replace the functions of os; those of posix stay. Nothing here may end what it is added to.
_NOTE: Final = """
import os as _ntt_os
import posix as _ntt_posix
import time as _ntt_time
def _ntt_reached(site, _seen=set()):
    try:
        test = _ntt_os.environ._data.get(b"PYTEST_CURRENT_TEST", b"")
        if (site, test) not in _seen:
            _seen.add((site, test))
            line = b"%d %f %s\\n" % (site, _ntt_time.time(), test.replace(b"\\n", b" "))
            fd = _ntt_posix.open({file!r}, _ntt_posix.O_WRONLY | _ntt_posix.O_APPEND)
            try:
                _ntt_posix.write(fd, line)
            finally:
                _ntt_posix.close(fd)
    except Exception:
        pass
"""
REPORTS: Final = "NTT_MUTATION_REPORTS"

Site = tuple[str, str]
# Seconds by test, by place.
Reach = dict[Site, dict[str, float]]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note when a test ran; as a plugin of the run that looks what is reached."""
    if REPORTS in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[REPORTS]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.when, report.start, report.stop]) + "\n")


def site_of(mutant: Mutant) -> Site:
    """Returns the place of a mutant by what stays the same when lines move."""
    return (str(mutant.path), mutant.statement)


def add_notes(root: Path, packages: Iterable[str], hits: Path) -> list[Site]:
    """Changes the packages below root so that all places of mutants are noted in hits."""
    sites: list[Site] = []
    numbers: dict[Site, int] = {}
    for package in packages:
        for file in sorted((root / "ntt_backup" / package).rglob("*.py")):
            source = file.read_text()
            if _HEAD not in source:
                continue
            lines = source.splitlines(keepends=True)
            places = {one.site: site_of(one) for one in mutants(file.relative_to(root), source)}
            for line, site in sorted(places.items(), reverse=True):
                if site not in numbers:
                    numbers[site] = len(sites)
                    sites.append(site)
                text = lines[line - 1]
                indent = text[: len(text) - len(text.lstrip())]
                lines.insert(line - 1, f"{indent}_ntt_reached({numbers[site]})\n")
            note = _NOTE.format(file=str(hits))
            file.write_text("".join(lines).replace(_HEAD, _HEAD + note, 1))
    return sites


def reach_of(sites: list[Site], hits: Path, reports: Path) -> Reach:
    """Returns which tests, without their parameters, have reached each place."""
    ran: list[tuple[float, float, str]] = []
    took = defaultdict[str, float](float)
    for line in reports.read_text().splitlines():
        node, when, start, stop = json.loads(line)
        ran.append((start, stop, _bare(node)))
        # What a session's fixture takes says nothing of a test.
        took[_bare(node)] += stop - start if when == "call" else 0
    found: Reach = {site: {} for site in sites}
    for line in hits.read_bytes().decode(errors="replace").splitlines():
        number, at, *words = line.split(" ", 2)
        test = _bare(words[0].rpartition(" ")[0]) if words and words[0] else ""
        moment = float(at)
        tests = [test] if test else [one for a, b, one in ran if a <= moment <= b]
        found[sites[int(number)]].update({one: took[one] for one in tests})
    return found


def _bare(node: str) -> str:
    """Returns the name of a test without parameters, whose text may be anything."""
    return node.partition("[")[0]


def tests_for(mutant: Mutant, reach: Mapping[Site, Mapping[str, float]], most: float) -> list[str]:
    """Returns the tests that reach a mutant: the quickest of each module, then the next ones.

    Args:
        mutant: The mutant.
        reach: The tests by place.
        most: Seconds, above which no more tests are added.
    """
    tests = reach.get(site_of(mutant))
    if tests is None:
        # The line is newer than what is known of the module.
        of_module = [some for (path, _), some in reach.items() if path == str(mutant.path)]
        tests = {test: seconds for some in of_module for test, seconds in some.items()}
    turns = Counter[str]()
    ranked = []
    for test, seconds in sorted(tests.items(), key=lambda one: one[1]):
        module = test.partition("::")[0]
        ranked.append((_needs(test), turns[module], seconds, test))
        turns[module] += 1
    chosen: list[str] = []
    for _, _, seconds, test in sorted(ranked):
        most -= seconds
        if chosen and most < 0:
            break
        chosen.append(test)
    return chosen


def _needs(test: str) -> int:
    """Returns how much has to be started before a test: unit tests need nothing."""
    return ("unit", "integration", "contract", "acceptance").index(test.split("/")[1])


def save(reach: Reach, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps([[*site, tests] for site, tests in sorted(reach.items())]))


def load(file: Path) -> Reach:
    return {(path, text): tests for path, text, tests in json.loads(file.read_text())}
