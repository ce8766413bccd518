"""What columns are made of, whatever the kind: names, ages, conditions, fields. Pure."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from fleetctl import documents
from fleetctl.documents import Tree

UNKNOWN = "<unknown>"


class Moment(NamedTuple):
    """What a table needs to know beside the objects."""

    now: datetime
    ready_nodes: frozenset[str] = frozenset()


Cell: TypeAlias = Callable[[Tree, Moment], str]


class Column(NamedTuple):
    """One column; wide ones are shown with `-o wide` only."""

    title: str
    cell: Cell
    is_wide: bool = False
    is_timeless: bool = True
    """Whether it stays as it is while nothing happens but time."""
    wide_cell: Cell | None = None
    """What `-o wide` shows instead."""


Columns: TypeAlias = tuple[Column, ...]


def age(then: datetime | None, now: datetime) -> str:
    """Return how long ago, as kubectl writes it: 45s, 12m, 3h, 2d."""
    if then is None:
        return UNKNOWN
    seconds = max(0, int((now - then).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def at(tree: Any, *path: str) -> Any:
    """Return what is there in a tree, None if it or what is above it is not."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def text(*path: str) -> Cell:
    """Return the cell that shows a field as it is; nothing if it is not there."""

    def cell(tree: Tree, _: Moment) -> str:
        found = at(tree, *path)
        return "" if found is None else str(found)

    return cell


def number(*path: str) -> Cell:
    """Return the cell that shows a count; 0 if it is not there, for that is every count's default."""
    return lambda tree, _: str(at(tree, *path) or 0)


def texts(*path: str) -> Cell:
    """Return the cell that shows a list of texts, with commas."""
    return lambda tree, _: ",".join(map(str, at(tree, *path) or ()))


def since(*path: str) -> Cell:
    """Return the cell that shows how long ago a time was."""
    return lambda tree, moment: age(documents.time_of(at(tree, *path)), moment.now)


def condition(type_: str) -> Cell:
    """Return the cell that shows whether a condition is true."""

    def cell(tree: Tree, _: Moment) -> str:
        found = documents.condition(tree, type_)
        return "Unknown" if found is None else str(found.get("status", "Unknown"))

    return cell


def reason(type_: str) -> Cell:
    """Return the cell that shows why a condition is not true; nothing if it is."""

    def cell(tree: Tree, _: Moment) -> str:
        found = documents.condition(tree, type_)
        if found is None or found.get("status") == "True":
            return ""
        words = [str(found.get("reason", "")), str(found.get("message", ""))]
        return ": ".join(word for word in words if word)

    return cell


NAME = Column("NAME", text("metadata", "name"))
AGE = Column("AGE", since("metadata", "creationTimestamp"), is_timeless=False)
