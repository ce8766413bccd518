"""Curves of the scale bench as an SVG picture: `python -m bench.curves RESULT PICTURE`.

RESULT is a file whose last line is the JSON object of `make bench-scale`. The picture needs no program to be drawn, and
is equal for equal results.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 300, 210, 44, 40, 34, 16
_COLORS = ("#1f6feb", "#d1591f", "#3d8b40")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One set of axes: the number of nodes to the right, on a logarithmic scale, and figures upwards from 0."""

    title: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    """Points by the name of the curve."""


def panels(result: Mapping[str, Any]) -> list[Panel]:
    """Return the panels of a result of `bench.scale`; figures that it does not have are left out."""
    sizes = sorted(
        int(name.split("_")[1])
        for name in result
        if name.startswith("nodes_") and name.endswith("_binds_per_s")
    )

    def points(figure: str, part: str = "") -> list[tuple[int, float]]:
        found = ((size, result.get(f"nodes_{size}_{figure}")) for size in sizes)
        values = ((s, v.get(part) if part and isinstance(v, Mapping) else v) for s, v in found)
        return [(size, float(value)) for size, value in values if isinstance(value, int | float)]

    def of_both(figure: str) -> dict[str, list[tuple[int, float]]]:
        return {part: points(figure, part) for part in ("reconciler", "etcd")}

    return [
        Panel(title="CPU of a replica, ms", curves=of_both("cpu_ms_per_replica")),
        Panel(title="memory, MiB", curves=of_both("memory_mib")),
        Panel(title="replicas bound a second", curves={"binds": points("binds_per_s")}),
        Panel(
            title="start of a reader, s",
            curves={"lists": points("lists_s"), "first look": points("first_look_s")},
        ),
    ]


def draw(found: Sequence[Panel]) -> str:
    """Return the picture: two panels in a row."""
    rows = (len(found) + 1) // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {rows * _HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for at, panel in enumerate(found):
        parts.append(f'<g transform="translate({at % 2 * _WIDTH} {at // 2 * _HEIGHT})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    points = [point for curve in panel.curves.values() for point in curve]
    parts = [_text(_LEFT, 16, panel.title, weight="bold")]
    if not points:
        return [*parts, _text(_LEFT, _HEIGHT / 2, "not measured")]
    sizes = sorted({size for size, _ in points})
    most = max(value for _, value in points) or 1.0
    base, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    span = log10(sizes[-1] / sizes[0]) or 1.0

    def place(size: int, value: float) -> tuple[float, float]:
        across = (right - _LEFT) * log10(size / sizes[0]) / span
        return _LEFT + across, base - (base - _TOP) * value / most

    parts.append(f'<path d="M{_LEFT} {_TOP}V{base}H{right}" fill="none" stroke="#888"/>')
    parts += [_text(place(size, 0)[0], base + 14, f"{size:,}", anchor="middle") for size in sizes]
    for value in (0.0, most / 2, most):
        parts.append(_text(_LEFT - 5, place(sizes[0], value)[1] + 4, f"{value:.3g}", anchor="end"))
    for at, (name, curve) in enumerate(panel.curves.items()):
        color = _COLORS[at % len(_COLORS)]
        placed = [place(*point) for point in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in placed]
        parts.append(_text(_LEFT + 85 * at, _HEIGHT - 6, name, color=color))
    return parts


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", weight: str = "", color: str = "#222"
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}"{bold}>{escape(words)}</text>'


def main() -> None:
    """Draw a result."""
    result, picture = map(Path, sys.argv[1:3])
    found = json.loads(result.read_text().strip().splitlines()[-1])
    picture.write_text(draw(panels(found)))


if __name__ == "__main__":
    main()
