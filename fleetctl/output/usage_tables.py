"""Tables of usage rows. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from fleetctl.output import printers
from insight.usage import Figure, ModelRow, NodeRow
from schemas import sizes

_UNKNOWN_TEXT: Final = "?"

Row = TypeVar("Row", NodeRow, ModelRow)
Columns: TypeAlias = Mapping[str, Callable[[Row], str]]
"""The cell of each column, by its title."""


def node_table(rows: Sequence[NodeRow], *, headers: bool = True) -> str:
    """Return the table of node rows."""
    columns: Columns[NodeRow] = {
        "NAME": lambda row: row.name,
        "MEMORY": lambda row: figure_text(row.used_bytes, _size_text),
        "MEMORY%": lambda row: _share_text(row.used_bytes, row.total_bytes),
        "MODELS": lambda row: figure_text(row.models_bytes, _size_text),
        "MODELS%": lambda row: _share_text(row.models_bytes, row.allocatable_bytes),
        "ENGINES": lambda row: figure_text(row.engines, _count_text),
        "IN FLIGHT": lambda row: figure_text(row.in_flight, _count_text),
        "QUEUE": lambda row: figure_text(row.queue, _count_text),
        "TOKENS/S": lambda row: figure_text(row.tokens_per_second, _rate_text),
    }
    return _table(rows, columns, headers=headers)


def model_table(rows: Sequence[ModelRow], *, headers: bool = True) -> str:
    """Return the table of model rows."""
    columns: Columns[ModelRow] = {
        "NAME": lambda row: row.name,
        "READY": lambda row: f"{row.ready}/{row.wanted}",
        "MEMORY": lambda row: figure_text(row.memory_bytes, _size_text),
        "IN FLIGHT": lambda row: figure_text(row.in_flight, _count_text),
        "QUEUE": lambda row: figure_text(row.queue, _count_text),
        "REQUESTS/S": lambda row: figure_text(row.requests_per_second, _rate_text),
        "TOKENS/S": lambda row: figure_text(row.tokens_per_second, _rate_text),
        "FIRST TOKEN": lambda row: (
            "-" if row.first_token_s.value is None else figure_text(row.first_token_s, _time_text)
        ),
    }
    return _table(rows, columns, headers=headers)


def _table(rows: Sequence[Row], columns: Columns[Row], *, headers: bool) -> str:
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return printers.align_columns(cells, tuple(columns) if headers else ())


def figure_text(figure: Figure, render: Callable[[float], str]) -> str:
    """Return the figure's text: `?` if unknown, with `+` if incomplete."""
    if figure.value is None:
        return _UNKNOWN_TEXT
    return f"{render(figure.value)}{'' if figure.is_complete else '+'}"


def _share_text(part: Figure, whole: Figure) -> str:
    if part.value is None or not whole.value:
        return _UNKNOWN_TEXT
    return f"{part.value / whole.value:.0%}"


def _size_text(value: float) -> str:
    return sizes.show(int(value))


def _count_text(value: float) -> str:
    return f"{value:.0f}"


def _rate_text(value: float) -> str:
    return f"{value:.1f}"


def _time_text(value: float) -> str:
    return f"{value * 1000:.0f}ms" if value < 10 else f"{value:.1f}s"
