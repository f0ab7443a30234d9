"""Restores, at the end, the hard links of a version, and the attributes of its directories."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from re import compile as pattern
from typing import Final

from ntt_backup.format import many
from ntt_backup.process.durable import sync_below
from ntt_backup.snapshot.format.entry import DIRECTORY, HARD_LINK, Entry
from ntt_backup.snapshot.restore.attributes import Attributes
from ntt_backup.snapshot.restore.choice import Choice
from ntt_backup.snapshot.restore.files import Step
from ntt_backup.snapshot.restore.tree import Refused, Tree, link, split

# Inside a text of JSON a backslash would stand before each of these quotes.
_LAST: Final = pattern(rb'","[dh]",')
_LEFT_OUT: Final = (
    "{} that this user may not open cannot be made durable on this file system: run `sync` here,"
    " and call it again to compare their content"
)


def last_lines(lines: bytes) -> Iterator[bytes]:
    """Yields those of a manifest's lines that `finish` restores, each once and with its end; and a
    few others, where a field looks like the kind of an entry.
    """
    end = 0
    while found := _LAST.search(lines, end):
        begin = lines.rfind(b"\n", end, found.start()) + 1 or end
        end = lines.index(b"\n", found.end()) + 1
        yield lines[begin:end]


def finish(
    entries: Iterable[Entry],
    root: int,
    choice: Choice | None,
    wrong: Container[str],
    attributes: Attributes,
) -> Step:
    """Makes the hard links, then gives each directory its attributes, once all in it is there. At
    the end all is made durable, on each file system that has a part of it. entries: the links and
    directories, in order. wrong: files that were not restored. Raises OSError for what is about
    more than a file.
    """
    step = Step()
    tree, targets = Tree(root, make=True), Tree(root, make=False)
    entered: list[Entry] = []
    # Those that this user may not enter any more: a later link may be one to a file in them.
    closed: list[Entry] = []

    def settle(entry: Entry) -> None:
        try:
            attributes.set(tree.enter(entry.path).fd, entry)
        except (OSError, Refused) as error:
            step.problem(entry.path, error)

    def leave(path: str) -> None:
        """Settles the directories that have nothing more in them."""
        while entered and not path.startswith(f"{entered[-1].path}/"):
            entry = entered.pop()
            if entry.mode & 0o500 != 0o500 and attributes.user:
                closed.append(entry)
            else:
                settle(entry)

    def take(entry: Entry) -> None:
        if entry.kind == DIRECTORY:
            if choice is None or choice.has_directory(entry.path):
                tree.enter(entry.path)
                entered.append(entry)
        elif entry.kind == HARD_LINK and (choice is None or choice.has(entry.path)):
            if entry.target in wrong:
                raise Refused("the file that it is a link to was not restored")
            made = _link(tree, targets, entry)
            step.files += made
            step.kept += not made

    try:
        for entry in entries:
            leave(entry.path)
            try:
                take(entry)
            except (OSError, Refused, ValueError) as error:
                step.problem(entry.path, error)
        leave("")
        for entry in closed:
            settle(entry)
        if left_out := sum(sync_below(one) for one in (*tree.mounted, root)):
            step.durable = False
            step.notes.append(_LEFT_OUT.format(many(left_out, "entry", "entries")))
    finally:
        tree.close()
        targets.close()
    step.notes += sorted(attributes.notes)
    return step


def _link(tree: Tree, targets: Tree, entry: Entry) -> bool:
    above, name = split(entry.path)
    target_above, target_name = split(entry.target)
    return link(tree.enter(above), name, targets.enter(target_above), target_name)
