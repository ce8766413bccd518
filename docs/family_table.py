"""Generates the table of families of models: what tests measured of each, from tests/golden/families.json."""

import json
from pathlib import Path

_MEASURED = Path(__file__).parent.parent / "tests" / "golden" / "families.json"
_COLUMNS = {
    "greedy": "alone",
    "batch": "in a batch",
    "turn": "second turn",
    "disk": "from disk",
    "guesses": "guesses",
    "tools": "tools",
    "reasoning": "reasoning",
}
_MEDIA = ("images", "video", "audio")


def table() -> str:
    """Return the table, with a row for each family."""
    rows = json.loads(_MEASURED.read_text())
    lines = [
        f"| `{family}` | "
        + " | ".join(_cell(name, cells.get(name, "")) for name in _COLUMNS)
        + f" | {', '.join(kind for kind in _MEDIA if kind in cells)} |"
        for family, cells in rows.items()
    ]
    titles = ("family", *_COLUMNS.values(), "sees and hears")
    return "\n".join((f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *lines))


def _cell(column: str, value: str) -> str:
    value = value.replace("|", r"\|")
    return f"`{value}`" if value and column in ("tools", "reasoning") else value
