"""Prints objects as tables, as kubectl does. Pure: the time and the ready nodes are arguments."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from fleetctl.objects.selectors import tree_labels
from fleetctl.objects.table_context import TableContext
from fleetctl.output import columns
from fleetctl.output.columns import Column, Columns
from store.object_trees import Tree, hide_secrets

if TYPE_CHECKING:  # callers with typed objects have imported it; `fleetctl get` has none
    from schemas.meta import ApiObject

age = columns.age

COLUMNS: dict[str, Columns] = {**columns.DECLARED_COLUMNS, **columns.OBSERVED_COLUMNS}

# As kubectl (k8s.io/cli-runtime, pkg/printers/tabwriter.go): columns of at least 3 characters, 3 spaces between.
_GAP, _MIN_WIDTH = 3, 3
_INVALID = "<invalid>"


class TableOptions(NamedTuple):
    """The columns of a table."""

    is_wide: bool = False
    has_labels: bool = False
    """True if all labels are a column."""
    label_columns: tuple[str, ...] = ()
    """Labels with their own column."""
    has_kind: bool = False
    """True if names are written as kind/name."""


def table(
    objects: Sequence["Tree | ApiObject"],
    context: TableContext,
    *,
    is_wide: bool,
    headers: bool = True,
) -> str:
    """Return objects of one kind, trees or typed, as a table."""
    if not objects:
        return ""
    trees = [_tree(obj) for obj in objects]
    options = TableOptions(is_wide=is_wide)
    return align_columns(
        rows(trees, context, options), titles(trees[0]["kind"], options) if headers else ()
    )


def titles(kind: str, options: TableOptions) -> tuple[str, ...]:
    """Return the titles of a table."""
    extra = [key.rpartition("/")[2].upper() for key in options.label_columns]
    named = [column.title for column in _columns(kind, options)]
    return (*named, *extra, *(("LABELS",) if options.has_labels else ()))


def rows(
    trees: Sequence[Tree], context: TableContext, options: TableOptions
) -> list[tuple[str, ...]]:
    """Return one row of cells for each object."""
    return [_row(tree, context, options) for tree in trees]


def stable_text(tree: Tree, context: TableContext, options: TableOptions) -> str:
    """Return the row of an object without the cells that change with time."""
    columns = [c for c in _columns(tree["kind"], options) if c.is_timeless]
    return "\0".join([*(_cell(c, tree, context) for c in columns), *_label_cells(tree, options)])


def widths(
    rows: Sequence[Sequence[str]], titles: Sequence[str] = (), before: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the widths of the columns in terminal cells, at least `before`."""
    lines = [[_width(cell) for cell in row] for row in (titles, *rows)]
    return tuple(max(_MIN_WIDTH, *found) for found in zip_longest(before, *lines, fillvalue=0))


def align_columns(
    rows: Sequence[Sequence[str]], titles: Sequence[str] = (), *, least: Sequence[int] = ()
) -> str:
    """Return the rows aligned in columns; `least` is the minimum width of each column."""
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
    """Align cells with wide characters or several lines, by means of tabulate."""
    # Its import takes as long as the rest of `fleetctl get`, and most tables do not need it.
    from tabulate import DataRow, TableFormat, tabulate  # noqa: PLC0415 - see above

    gaps = DataRow("", " " * _GAP, "")
    options = TableFormat(None, None, None, None, gaps, gaps, 0, None)
    ruler = ["0" * width for width in wide]
    parts = [zip_longest(*(cell.split("\n") for cell in line), fillvalue="") for line in lines]
    text = tabulate([*chain.from_iterable(parts), ruler], tablefmt=options, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines()[:-1])


def _width(cell: str) -> int:
    """Return the width of the longest line of a cell in terminal cells."""
    if "\n" in cell:
        return max(map(_width, cell.split("\n")))
    if cell.isascii():
        return len(cell)
    from wcwidth import wcswidth  # noqa: PLC0415 - as tabulate, which measures with it

    return wcswidth(cell)


def _columns(kind: str, options: TableOptions) -> list[Column]:
    if not options.is_wide:
        return [column for column in COLUMNS[kind] if not column.is_wide]
    return [column._replace(cell=column.wide_cell or column.cell) for column in COLUMNS[kind]]


def _row(tree: Tree, context: TableContext, options: TableOptions) -> tuple[str, ...]:
    found = [_cell(column, tree, context) for column in _columns(tree["kind"], options)]
    if options.has_kind:
        found[0] = f"{tree['kind'].lower()}/{found[0]}"
    return (*found, *_label_cells(tree, options))


def _cell(column: Column, tree: Tree, context: TableContext) -> str:
    """Return a cell as one line; an invalid document must not hide the other objects."""
    try:
        found = column.cell(tree, context)
    except (AttributeError, KeyError, TypeError, ValueError):
        return _INVALID
    if found.isprintable():
        return found
    first, newline, _ = found.partition("\n")
    # Escape sequences would move the cursor of the terminal.
    clean = "".join(letter if letter.isprintable() else " " for letter in first).rstrip()
    return f"{clean}..." if newline else clean


def _label_cells(tree: Tree, options: TableOptions) -> list[str]:
    if not options.has_labels and not options.label_columns:
        return []
    labels = tree_labels(tree)
    found = [labels.get(key, "") for key in options.label_columns]
    if options.has_labels:
        found.append(",".join(f"{k}={v}" for k, v in sorted(labels.items())) or "<none>")
    return found


def _tree(obj: "Tree | ApiObject") -> Tree:
    if isinstance(obj, dict):
        return hide_secrets(obj)
    from manifests.trees import object_tree  # noqa: PLC0415 - as above

    return hide_secrets(object_tree(obj))
