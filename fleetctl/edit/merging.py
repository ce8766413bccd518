"""What a user changed of an object, put onto what it is by now. Pure; an object is a tree of what a user may change."""

from collections.abc import Iterator
from dataclasses import dataclass

from fleetctl.patch.merge import difference, is_equal, merged
from manifests.tree import Path, Tree, show_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A field that the user and somebody else changed, to different values; None: it was taken away."""

    path: Path
    ours: Tree
    theirs: Tree

    @property
    def field(self) -> str:
        return show_path(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """What comes of both changes."""

    tree: Tree
    conflicts: tuple[Conflict, ...] = ()


def merge(base: Tree, ours: Tree, theirs: Tree) -> Merge:
    """Return `theirs` with what was changed between `base` and `ours`; lists are compared whole."""
    mine, other = difference(base, ours), difference(base, theirs)
    conflicts = tuple(_conflicts((), mine, other, ours, theirs))
    return Merge(tree=merged(theirs, mine), conflicts=conflicts)


def settled(base: Tree, conflicts: tuple[Conflict, ...]) -> Tree:
    """Return the base as it is once the user was told: what others wrote there is known, and may be written over."""
    for one in conflicts:
        base = _with(base, one.path, one.theirs)
    return base


def _conflicts(path: Path, mine: Tree, other: Tree, ours: Tree, theirs: Tree) -> Iterator[Conflict]:
    if isinstance(mine, dict) and isinstance(other, dict):
        for key in mine.keys() & other.keys():
            inside = (*path, key)
            yield from _conflicts(
                inside, mine[key], other[key], _child(ours, key), _child(theirs, key)
            )
    elif not is_equal(ours, theirs):
        yield Conflict(path=path, ours=ours, theirs=theirs)


def _child(tree: Tree, key: str) -> Tree:
    return tree.get(key) if isinstance(tree, dict) else None


def _with(tree: Tree, path: Path, value: Tree) -> Tree:
    """Return the tree with the value at the path; None takes away what is there."""
    if not path:
        return value
    found = dict(tree) if isinstance(tree, dict) else {}
    key = str(path[0])
    inner = _with(found.get(key), path[1:], value)
    if inner is None:
        found.pop(key, None)
        return found
    return {**found, key: inner}
