"""Calls of MLX that may only be made in one place, because macOS can panic when they are made elsewhere (mlx#3186)."""

import ast
from pathlib import Path

from tests.support.syntax import PRODUCTION, nodes

ROOT = Path(__file__).parents[2]
FILES = [path for package in PRODUCTION for path in (ROOT / package).rglob("*.py")]


def calls_of(name: str) -> list[tuple[str, ast.Call]]:
    """Return the calls of a function of MLX in production code, with their files."""
    return [
        (str(path.relative_to(ROOT)), node)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
    ]


def test_buffers_are_cleared_in_one_place_and_after_all_computation() -> None:
    ((file, clear),) = calls_of("clear_cache")
    ((other, wait),) = calls_of("synchronize")
    assert file == other == "engine/memory/allocation.py"
    # Two statements of one function, one after the other.
    assert (wait.lineno + 1, wait.col_offset) == (clear.lineno, clear.col_offset)


def test_memory_is_wired_in_one_place() -> None:
    assert [file for file, _ in calls_of("set_wired_limit")] == ["engine/memory/allocation.py"]
