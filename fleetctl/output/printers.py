"""Objects as tables, as kubectl prints them. Pure: the time and who is alive arrive as arguments."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from fleetctl.objects.selectors import tree_labels
from fleetctl.output import columns
from fleetctl.output.columns import Column, Columns
from store.object_trees import Tree

if TYPE_CHECKING:  # who has typed objects has imported it; `fleetctl get` has none
    from schemas.meta import ApiObject

TableContext = columns.TableContext
age = columns.age

COLUMNS: dict[str, Columns] = {**columns.DECLARED_COLUMNS, **columns.OBSERVED_COLUMNS}

# kubectl's (k8s.io/cli-runtime, pkg/printers/tabwriter.go): three blanks between columns of three or more.
_GAP, _MIN_WIDTH = 3, 3
_INVALID = "<invalid>"


class TableOptions(NamedTuple):
    """Which columns a table has."""

    is_wide: bool = False
    has_labels: bool = False
    """Whether all labels are a column."""
    label_columns: tuple[str, ...] = ()
    """Labels that have a column of their own."""
    has_kind: bool = False
    """Whether names have their kind before them."""


def table(
    objects: Sequence["Tree | ApiObject"],
    moment: TableContext,
    *,
    is_wide: bool,
    headers: bool = True,
) -> str:
    """Return the objects, all of one kind, as a table; trees, or typed ones."""
    if not objects:
        return ""
    trees = [_tree(obj) for obj in objects]
    look = TableOptions(is_wide=is_wide)
    return align_columns(
        rows(trees, moment, look), titles(trees[0]["kind"], look) if headers else ()
    )


def titles(kind: str, look: TableOptions) -> tuple[str, ...]:
    """Return the line above a table."""
    extra = [key.rpartition("/")[2].upper() for key in look.label_columns]
    named = [column.title for column in _columns(kind, look)]
    return (*named, *extra, *(("LABELS",) if look.has_labels else ()))


def rows(trees: Sequence[Tree], moment: TableContext, look: TableOptions) -> list[tuple[str, ...]]:
    """Return the cells of objects, a row each."""
    return [_row(tree, moment, look) for tree in trees]


def stable_text(tree: Tree, moment: TableContext, look: TableOptions) -> str:
    """Return an object's row without what changes by itself."""
    columns = [c for c in _columns(tree["kind"], look) if c.is_timeless]
    return "\0".join([*(_cell(c, tree, moment) for c in columns), *_label_cells(tree, look)])


def widths(
    rows: Sequence[Sequence[str]], titles: Sequence[str] = (), before: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return how wide columns are, in places on a terminal; never less than `before`."""
    lines = [[_width(cell) for cell in row] for row in (titles, *rows)]
    return tuple(max(_MIN_WIDTH, *found) for found in zip_longest(before, *lines, fillvalue=0))


def align_columns(
    rows: Sequence[Sequence[str]], titles: Sequence[str] = (), *, least: Sequence[int] = ()
) -> str:
    """Return the rows in columns; `least` says how wide these are at least (see `widths`)."""
    wide = widths(rows, titles, least)
    lines = [titles, *rows] if titles else rows
    if all(cell.isascii() and "\n" not in cell for line in lines for cell in line):
        return "\n".join(_line(line, wide) for line in lines)
    return _align_wide(lines, wide)


def _line(row: Sequence[str], wide: Sequence[int]) -> str:
    return "".join(
        cell.ljust(width + _GAP) for cell, width in zip(row, wide, strict=False)
    ).rstrip()


def _align_wide(lines: Sequence[Sequence[str]], wide: Sequence[int]) -> str:
    """Return the same where letters are wide or none, or cells have several lines: tabulate knows."""
    # Importing it takes as long as all else that `fleetctl get` does, and most tables do without.
    from tabulate import DataRow, TableFormat, tabulate  # noqa: PLC0415 - see above

    gaps = DataRow("", " " * _GAP, "")
    look = TableFormat(None, None, None, None, gaps, gaps, 0, None)
    ruler = ["0" * width for width in wide]
    parts = [zip_longest(*(cell.split("\n") for cell in line), fillvalue="") for line in lines]
    text = tabulate([*chain.from_iterable(parts), ruler], tablefmt=look, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines()[:-1])


def _width(cell: str) -> int:
    """Return how many places a cell takes on a terminal; of its longest line."""
    if "\n" in cell:
        return max(map(_width, cell.split("\n")))
    if cell.isascii():
        return len(cell)
    from wcwidth import wcswidth  # noqa: PLC0415 - as tabulate, and tabulate measures by it

    return wcswidth(cell)


def _columns(kind: str, look: TableOptions) -> list[Column]:
    if not look.is_wide:
        return [column for column in COLUMNS[kind] if not column.is_wide]
    return [column._replace(cell=column.wide_cell or column.cell) for column in COLUMNS[kind]]


def _row(tree: Tree, moment: TableContext, look: TableOptions) -> tuple[str, ...]:
    found = [_cell(column, tree, moment) for column in _columns(tree["kind"], look)]
    if look.has_kind:
        found[0] = f"{tree['kind'].lower()}/{found[0]}"
    return (*found, *_label_cells(tree, look))


def _cell(column: Column, tree: Tree, moment: TableContext) -> str:
    """Return a cell in one line; a document that somebody wrote by hand must not hide the others."""
    try:
        found = column.cell(tree, moment)
    except (AttributeError, KeyError, TypeError, ValueError):
        return _INVALID
    if found.isprintable():
        return found
    first, newline, _ = found.partition("\n")
    # Escape sequences would move the cursor of whoever looks.
    clean = "".join(letter if letter.isprintable() else " " for letter in first).rstrip()
    return f"{clean}..." if newline else clean


def _label_cells(tree: Tree, look: TableOptions) -> list[str]:
    if not look.has_labels and not look.label_columns:
        return []
    labels = tree_labels(tree)
    found = [labels.get(key, "") for key in look.label_columns]
    if look.has_labels:
        found.append(",".join(f"{k}={v}" for k, v in sorted(labels.items())) or "<none>")
    return found


def _tree(obj: "Tree | ApiObject") -> Tree:
    if isinstance(obj, dict):
        return obj
    from manifests.trees import object_tree  # noqa: PLC0415 - as above

    return object_tree(obj)
