"""Rows of figures as people and programs read them. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Final, TypeAlias, TypeVar

from fleetctl import printers
from fleetctl.top.figures import Figure, ModelRow, NodeRow
from schemas import sizes

Row: TypeAlias = NodeRow | ModelRow
R = TypeVar("R", NodeRow, ModelRow)
_UNKNOWN = "?"

# What --sort-by takes, and what of a row it means.
NODE_ORDERS: Final[Mapping[str, str]] = {
    "memory": "used_bytes",
    "models": "models_bytes",
    "in-flight": "in_flight",
    "queue": "queue",
    "tokens": "tokens_per_second",
}
MODEL_ORDERS: Final[Mapping[str, str]] = {
    "memory": "memory_bytes",
    "in-flight": "in_flight",
    "queue": "queue",
    "requests": "requests_per_second",
    "tokens": "tokens_per_second",
}


def ordered(rows: Sequence[R], orders: Mapping[str, str], by: str) -> list[R]:
    """Return the rows by name, or the largest figure first."""
    if by == "name":
        return sorted(rows, key=lambda row: row.name)
    return sorted(rows, key=lambda row: (getattr(row, orders[by]).rank, row.name))


def nodes(rows: Sequence[NodeRow], *, headers: bool = True) -> str:
    """Return the table of nodes."""
    titles = (
        *("NAME", "MEMORY", "MEMORY%", "MODELS", "MODELS%", "ENGINES"),
        *("IN FLIGHT", "QUEUE", "TOKENS/S"),
    )
    cells = [
        (
            row.name,
            shown(row.used_bytes, _size),
            _share(row.used_bytes, row.total_bytes),
            shown(row.models_bytes, _size),
            _share(row.models_bytes, row.allocatable_bytes),
            shown(row.engines, _count),
            shown(row.in_flight, _count),
            shown(row.queue, _count),
            shown(row.tokens_per_second, _rate),
        )
        for row in rows
    ]
    return printers.lined_up(cells, titles if headers else ())


def models(rows: Sequence[ModelRow], *, headers: bool = True) -> str:
    """Return the table of models."""
    titles = (
        *("NAME", "READY", "MEMORY", "IN FLIGHT", "QUEUE"),
        *("REQUESTS/S", "TOKENS/S", "FIRST TOKEN"),
    )
    cells = [
        (
            row.name,
            f"{row.ready}/{row.wanted}",
            shown(row.memory_bytes, _size),
            shown(row.in_flight, _count),
            shown(row.queue, _count),
            shown(row.requests_per_second, _rate),
            shown(row.tokens_per_second, _rate),
            "-" if row.first_token_s.value is None else shown(row.first_token_s, _time),
        )
        for row in rows
    ]
    return printers.lined_up(cells, titles if headers else ())


def tree(row: Row) -> dict[str, object]:
    """Return a row as `-o json` has it: plain units, null for what nobody knows."""
    found: dict[str, object] = {}
    partial = []
    for one in fields(row):
        value = getattr(row, one.name)
        name = _camel(one.name)
        if isinstance(value, Figure):
            found[name] = _plain(value.value)
            if value.value is not None and not value.is_whole:
                partial.append(name)
        else:
            found[name] = value
    # Of these some part is not known: they are at least what they are.
    return {**found, "partial": partial}


def _plain(value: float | None) -> float | None:
    return int(value) if value is not None and float(value).is_integer() else value


def shown(figure: Figure, spell: Callable[[float], str]) -> str:
    """Return a figure: `?` if nobody knows it, with a plus if it is at least that much."""
    if figure.value is None:
        return _UNKNOWN
    return f"{spell(figure.value)}{'' if figure.is_whole else '+'}"


def _share(part: Figure, whole: Figure) -> str:
    if part.value is None or not whole.value:
        return _UNKNOWN
    return f"{part.value / whole.value:.0%}"


def _size(value: float) -> str:
    return sizes.show(int(value))


def _count(value: float) -> str:
    return f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value:.1f}"


def _time(value: float) -> str:
    return f"{value * 1000:.0f}ms" if value < 10 else f"{value:.1f}s"


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
