"""Selections of the state for one reader: views, their columns and rows, and changes in the form of columns. Pure.

A selection is the text `VIEW[:COLUMNS[:COLUMN=VALUE]]`, such as `macs:state,reason` or `problems::tone=bad`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from dashboard.fleet_model import FIGURES, IN_FLIGHT, LIVE_VIEWS
from insight.conditions import Row
from insight.fleet_views import VIEWS
from schemas.wire.errors import invalid

ALL_VIEWS: Final = (*VIEWS, *LIVE_VIEWS)
_UNSELECTED: Final = (*VIEWS, FIGURES)
"""Views of a client that selects none."""
MOST_SELECTIONS: Final = 16
MOST_EVENTS: Final = 500
_MOST_COLUMNS: Final = 60
# Numbers that move all the time: they are sent at a pace, while states are sent at once.
_PACED: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "macs": frozenset(
            {
                *("memoryBytes", "allocatableBytes", "diskFreeBytes"),
                *("promisedBytes", "weightsBytes", "kvBytes"),
            }
        ),
    }
)
_PROGRESS: Final = frozenset({"enginePhase", "promptTokens", "prefilledTokens", "tokens"})

Patch: TypeAlias = Mapping[str, Mapping[str, Row | None]]
"""Changed columns by view and row; None for a row that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows of one view, and their columns."""

    view: str
    columns: frozenset[str] = frozenset()
    """Empty: all of them. The name of a row is always shown."""
    column: str = ""
    """The column that decides which rows are shown; empty: all rows."""
    value: str = ""

    def matches(self, row: Row) -> bool:
        """Return whether a row is shown."""
        return not self.column or cell_text(row.get(self.column)) == self.value

    def shown(self, row: Row) -> Row:
        """Return the columns of a row that are shown."""
        if not self.columns:
            return row
        return {key: value for key, value in row.items() if key in self.columns}


def views_read(selections: Iterable[Selection]) -> list[str]:
    """Return the views that are read; requests in flight only if their progress is, for which engines are asked."""
    return [
        selection.view
        for selection in selections
        if selection.view != IN_FLIGHT or not selection.columns or selection.columns & _PROGRESS
    ]


def parse_selections(texts: Iterable[str]) -> tuple[Selection, ...]:
    """Return the selections of a query; all views for none. A text without a colon may name several views.

    Raises:
        RefusedError: a view does not exist, is selected twice, or there are too many.

    """
    selections: list[Selection] = []
    for text in texts:
        if ":" in text:
            selections.append(_parse(text))
        else:
            selections += [Selection(view=checked_view(part)) for part in text.split(",") if part]
        if len(selections) > MOST_SELECTIONS:
            raise invalid(f"At most {MOST_SELECTIONS} views can be selected.", "view")
    if len({selection.view for selection in selections}) < len(selections):
        raise invalid("Each view can be selected once.", "view")
    return tuple(selections) or tuple(Selection(view=view) for view in _UNSELECTED)


def _parse(text: str) -> Selection:
    view, _, rest = text.partition(":")
    columns, _, rule = rest.partition(":")
    column, equals, value = rule.partition("=")
    if rule and not equals:
        raise invalid(f"'{rule[:60]}' is no COLUMN=VALUE.", "view")
    names = frozenset(filter(None, columns.split(",")))
    if len(names) > _MOST_COLUMNS:
        raise invalid(f"At most {_MOST_COLUMNS} columns can be selected.", "view")
    return Selection(
        view=checked_view(view),
        columns=names | {"name"} if names else names,
        column=column,
        value=value.lower(),
    )


def checked_view(name: str) -> str:
    """Return the name of a view. Raises RefusedError if there is none of it."""
    if name not in ALL_VIEWS:
        raise invalid(f"There is no view '{name[:60]}'; there are {', '.join(ALL_VIEWS)}.", "view")
    return name


def cell_text(value: object) -> str:
    """Return a value as filters compare it: lower case, `true` and `false`, empty for null."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value).lower()


def selected_rows(selection: Selection, rows: Iterable[Row]) -> list[Row]:
    """Return the rows that are shown with their columns; of events the newest."""
    found = [selection.shown(row) for row in rows if selection.matches(row)]
    if selection.view == "events" and len(found) > MOST_EVENTS:
        found.sort(key=lambda row: str(row.get("lastSeen")))
        del found[:-MOST_EVENTS]
    return found


def selected_changes(
    selection: Selection,
    changes: Mapping[str, Row | None],
    rows: Mapping[str, Row],
    known: set[str] | None,
) -> dict[str, Row | None]:
    """Return what a reader must be told of changed rows. `known`: the rows that it has, kept current; None: it may have any.

    A row that begins to match comes whole, and one that ceases to match is gone.
    """
    found: dict[str, Row | None] = {}
    for name, columns in changes.items():
        row = rows.get(name) if columns is not None else None
        if row is None or not selection.matches(row):
            if known is None or name in known:
                found[name] = None
            if known is not None:
                known.discard(name)
            continue
        is_new = bool(selection.column) and (known is None or name not in known)
        if known is not None:
            known.add(name)
        if shown := selection.shown(row if is_new else columns or {}):
            found[name] = shown
    return found


def split_paced(view: str, changes: Mapping[str, Row | None]) -> tuple[Patch, Patch]:
    """Return the changes that are sent at once, and those that are sent at a pace, both for one view."""
    if view in LIVE_VIEWS:
        return {}, {view: changes}
    paced = _PACED.get(view, frozenset())
    now: dict[str, Row | None] = {}
    later: dict[str, Row | None] = {}
    for name, columns in changes.items():
        if columns is None or "name" in columns:  # a row that goes, or a new one
            now[name] = columns
            continue
        states = {key: value for key, value in columns.items() if key not in paced}
        if states:
            now[name] = states
        if len(states) < len(columns):
            later[name] = {key: value for key, value in columns.items() if key in paced}
    return {view: now}, {view: later}


def merged(before: Patch, after: Patch) -> Patch:
    """Return two patches as one; the later values count."""
    patch: dict[str, dict[str, Row | None]] = {view: dict(rows) for view, rows in before.items()}
    for view, rows in after.items():
        of_view = patch.setdefault(view, {})
        for name, columns in rows.items():
            earlier = of_view.get(name)
            of_view[name] = None if columns is None else {**(earlier or {}), **columns}
    return patch


def in_columns(rows: Mapping[str, Row | None]) -> dict[str, object]:
    """Return changed rows of one view as blocks of columns: rows whose same columns changed are one block.

    `{"gone": [names], "blocks": [{"name": [...], "state": [...]}]}`; a part that is empty is left out.
    """
    gone: list[str] = []
    blocks: dict[tuple[str, ...], dict[str, list[object]]] = {}
    for name, columns in rows.items():
        if columns is None:
            gone.append(name)
            continue
        keys: Sequence[str] = [key for key in columns if key != "name"]
        block = blocks.setdefault(tuple(keys), {"name": [], **{key: [] for key in keys}})
        block["name"].append(name)
        for key in keys:
            block[key].append(columns[key])
    found: dict[str, object] = {}
    if gone:
        found["gone"] = gone
    if blocks:
        found["blocks"] = list(blocks.values())
    return found
