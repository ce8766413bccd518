"""Prints objects as tables, as kubectl does. Pure: the time and the ready nodes are arguments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fleetctl.objects.selectors import tree_labels
from fleetctl.objects.table_context import TableContext
from fleetctl.output import columns
from fleetctl.output.columns import Column, Columns
from machinery import text_table
from store.object_trees import Tree

if TYPE_CHECKING:  # callers with typed objects have imported it; `fleetctl get` has none
    from schemas.meta import ApiObject

age = columns.age
align_columns, widths = text_table.align_columns, text_table.widths

COLUMNS: dict[str, Columns] = {**columns.DECLARED_COLUMNS, **columns.OBSERVED_COLUMNS}

_INVALID = "<invalid>"
_INVALID_DOCUMENT = (AttributeError, KeyError, TypeError, ValueError)


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
    if not trees:
        return []
    columns = _columns(trees[0]["kind"], options)
    return [_row(tree, columns, context, options) for tree in trees]


def stable_text(tree: Tree, context: TableContext, options: TableOptions) -> str:
    """Return the row of an object without the cells that change with time."""
    columns = [c for c in _columns(tree["kind"], options) if c.is_timeless]
    return "\0".join([*(_cell(c, tree, context) for c in columns), *_label_cells(tree, options)])


def _columns(kind: str, options: TableOptions) -> list[Column]:
    if not options.is_wide:
        return [column for column in COLUMNS[kind] if not column.is_wide]
    return [column._replace(cell=column.wide_cell or column.cell) for column in COLUMNS[kind]]


def _row(
    tree: Tree, columns: Sequence[Column], context: TableContext, options: TableOptions
) -> tuple[str, ...]:
    found = _plain_cells(tree, columns, context)
    if found is None:
        found = [_cell(column, tree, context) for column in columns]
    if options.has_kind:
        found[0] = f"{tree['kind'].lower()}/{found[0]}"
    return (*found, *_label_cells(tree, options))


def _plain_cells(tree: Tree, columns: Sequence[Column], context: TableContext) -> list[str] | None:
    """Return the cells of a valid document without control characters, as nearly all are; None for any other."""
    try:
        found = [column.cell(tree, context) for column in columns]
    except _INVALID_DOCUMENT:
        return None
    return found if "".join(found).isprintable() else None


def _cell(column: Column, tree: Tree, context: TableContext) -> str:
    """Return a cell as one line; an invalid document must not hide the other objects."""
    try:
        cell = column.cell(tree, context)
    except _INVALID_DOCUMENT:
        return _INVALID
    if cell.isprintable():
        return cell
    first, newline, _ = cell.partition("\n")
    # Escape sequences would move the cursor of the terminal.
    clean = "".join(letter if letter.isprintable() else " " for letter in first).rstrip()
    return f"{clean}..." if newline else clean


def _label_cells(tree: Tree, options: TableOptions) -> list[str]:
    if not options.has_labels and not options.label_columns:
        return []
    labels = tree_labels(tree)
    label_cells = [labels.get(key, "") for key in options.label_columns]
    if options.has_labels:
        label_cells.append(",".join(f"{k}={v}" for k, v in sorted(labels.items())) or "<none>")
    return label_cells


def _tree(obj: "Tree | ApiObject") -> Tree:
    if isinstance(obj, dict):
        return dict(obj)
    from manifests.trees import object_tree  # noqa: PLC0415 - as above

    return object_tree(obj)
