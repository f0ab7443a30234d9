"""Which stores go over which links: the full table, a quick one, and others of one question each.

On 2 idle cores the full table takes well under 30 minutes, the quick one under 4. A peer that pays
several round trips a file would take hours on a slow link, so stores of small files are small
there. What starting up costs is a tenth of such a run and nothing of one in production: the long
table has stores of which a run takes a minute or more, for a few contenders by name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tests.bench.lab import SHAPES, Link
from tests.bench.stores import Kind, Recipe

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One store over one link."""

    recipe: Recipe
    link: Link


@dataclass(frozen=True, slots=True)
class Plan:
    """limit: the seconds after which a run is given up.

    patience: a peer that has had so many seconds in one case gets no further round in it.
    """

    cases: tuple[Case, ...]
    limit: float
    patience: float


def _case(
    kind: Kind, link: Link, *, blobs: int | None = None, megabytes: int | None = None
) -> Case:
    size = None if megabytes is None else megabytes * 1_000_000
    return Case(Recipe(kind, blobs, size), link)


FULL = Plan(
    (
        _case("small", "loopback", blobs=24_000),
        _case("mix", "loopback", megabytes=1000),
        _case("text", "loopback", megabytes=400),
        _case("small", "slow", blobs=8_000),
        _case("mix", "slow", megabytes=60),
        _case("text", "slow", megabytes=60),
        _case("small", "fast", blobs=24_000),
        _case("mix", "fast", megabytes=300),
        _case("text", "fast", megabytes=200),
    ),
    limit=120,
    patience=40,
)
QUICK = Plan(
    (
        _case("small", "loopback", blobs=5_000),
        _case("small", "slow", blobs=600),
        _case("mix", "fast", megabytes=60),
    ),
    limit=30,
    patience=4,
)
LONG = Plan(
    (
        _case("small", "loopback", blobs=100_000),
        _case("mix", "loopback", megabytes=2000),
        _case("small", "slow", blobs=200_000),
        _case("mix", "slow", megabytes=2000),
        _case("text", "slow", megabytes=1000),
    ),
    limit=600,
    patience=600,
)
CONTENTS = Plan(
    tuple(
        _case(kind, link, megabytes=100 if link == "slow" else 500)
        for link in SHAPES
        for kind in ("mix", "text", "tree")
    ),
    limit=120,
    patience=120,
)
LONG_CONTENTS = Plan(
    tuple(
        _case(kind, link, megabytes=500 if link == "slow" else 2000)
        for link in SHAPES
        for kind in ("mix", "text", "tree")
    ),
    limit=600,
    patience=600,
)
START = Plan((_case("small", "loopback", blobs=100),), limit=30, patience=30)


@dataclass(frozen=True, slots=True)
class Choice:
    """The cases and contenders that are wanted."""

    cases: tuple[Case, ...]
    contenders: tuple[str, ...]


def choose(plan: Plan, contenders: Collection[str], words: Collection[str]) -> Choice:
    """Narrow down to the kinds, links and contenders among words; no word of a sort means all.

    A word stands for every contender that begins with it. Raises ValueError for an unknown word.
    """
    kinds = {case.recipe.kind for case in plan.cases}
    wanted_kinds = {word for word in words if word in kinds}
    wanted_links = {word for word in words if word in SHAPES}
    rest = set(words) - wanted_kinds - wanted_links
    unknown = [word for word in rest if not any(name.startswith(word) for name in contenders)]
    if unknown:
        known = ", ".join([*sorted(kinds), *SHAPES, *contenders])
        raise ValueError(f"{', '.join(sorted(unknown))}: none of {known}")
    return Choice(
        tuple(
            case
            for case in plan.cases
            if case.recipe.kind in (wanted_kinds or kinds) and case.link in (wanted_links or SHAPES)
        ),
        tuple(
            name for name in contenders if not rest or any(name.startswith(word) for word in rest)
        ),
    )
