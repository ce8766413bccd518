"""docs/coming-from.md: each row says whether and how, and each test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
SYSTEMS = (
    "mlx-stack's mesh",
    "mlx_distributed_ring_inference_v2",
    "mlx-jaccl-cluster",
    "LocalAI's MLX distributed inference",
    "mlx-serving's distributed PRD",
)


def rows() -> list[list[str]]:
    """Return the cells of all rows, without the titles."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "theirs"]


def names_in(path: Path) -> set[str]:
    """Return the names of the tests that a file defines."""
    tree = ast.parse(path.read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_each_row_says_whether_and_how() -> None:
    for row in rows():
        assert len(row) == 4, row
        assert row[1] in ("yes", "partly", "no"), row
        assert len(row[2]) > 3, row
        assert row[3] == "-" or TEST.fullmatch(row[3]), row


def test_each_system_has_a_table() -> None:
    titles = [
        line.removeprefix("## ") for line in PAGE.read_text().splitlines() if line.startswith("## ")
    ]
    assert titles == list(SYSTEMS)
    assert len(rows()) > 100


@pytest.mark.parametrize("named", sorted({cell for row in rows() for cell in TEST.findall(row[3])}))
def test_a_test_that_the_page_names_exists(named: tuple[str, str]) -> None:
    file, name = named
    path = ROOT / file
    assert path.is_file(), f"{file} does not exist"
    assert name in names_in(path), f"{file} has no {name}"
