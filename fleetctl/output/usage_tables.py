"""Tables of usage rows. Pure."""

from collections.abc import Callable, Sequence
from typing import Final

from fleetctl.output import printers
from insight.usage import Figure, ModelRow, NodeRow
from schemas import sizes

_UNKNOWN_TEXT: Final = "?"


def node_table(rows: Sequence[NodeRow], *, headers: bool = True) -> str:
    """Return the table of node rows."""
    titles = (
        *("NAME", "MEMORY", "MEMORY%", "MODELS", "MODELS%", "ENGINES"),
        *("IN FLIGHT", "QUEUE", "TOKENS/S"),
    )
    cells = [
        (
            row.name,
            figure_text(row.used_bytes, _size_text),
            _share_text(row.used_bytes, row.total_bytes),
            figure_text(row.models_bytes, _size_text),
            _share_text(row.models_bytes, row.allocatable_bytes),
            figure_text(row.engines, _count_text),
            figure_text(row.in_flight, _count_text),
            figure_text(row.queue, _count_text),
            figure_text(row.tokens_per_second, _rate_text),
        )
        for row in rows
    ]
    return printers.align_columns(cells, titles if headers else ())


def model_table(rows: Sequence[ModelRow], *, headers: bool = True) -> str:
    """Return the table of model rows."""
    titles = (
        *("NAME", "READY", "MEMORY", "IN FLIGHT", "QUEUE"),
        *("REQUESTS/S", "TOKENS/S", "FIRST TOKEN"),
    )
    cells = [
        (
            row.name,
            f"{row.ready}/{row.wanted}",
            figure_text(row.memory_bytes, _size_text),
            figure_text(row.in_flight, _count_text),
            figure_text(row.queue, _count_text),
            figure_text(row.requests_per_second, _rate_text),
            figure_text(row.tokens_per_second, _rate_text),
            "-" if row.first_token_s.value is None else figure_text(row.first_token_s, _time_text),
        )
        for row in rows
    ]
    return printers.align_columns(cells, titles if headers else ())


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
