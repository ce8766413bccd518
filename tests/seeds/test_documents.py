"""The documents of the five systems: each literal in them is cut out, tested, and has its row in docs/coming-from.md."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.seeds import literals

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
# The first words of files, requests, answers and commands.
OPENINGS = re.compile(
    r"\s*(mesh:$|cluster:$|name: llama|[\[{]$|\[[\"n]|\[?\{\"|curl |GET /|POST |import requests|"
    r"local-ai |docker run|mlx-stack mesh|\./launch\.sh |# TYPE|'(worker|model|health|metrics|cluster)\.)"
)
# Commands in prose and tables, which are rows of the page below, and code of the authors' own programs.
PROSE = {("ring", 21), ("ring", 220), ("ring", 226)}


def opened(document: str) -> Iterable[int]:
    """Return the lines that begin a literal; code in TypeScript is none, apart from the API it lists."""
    fence = ""
    for number, line in enumerate(literals.lines_of(document), 1):
        if line.startswith("```"):
            fence = "" if fence else line[3:].strip() or "text"
        elif OPENINGS.match(line) and (fence != "typescript" or "GET /" in line or "'" in line):
            yield number


@pytest.mark.parametrize("document", ["mesh", "ring", "jaccl", "localai", "serving"])
def test_each_literal_of_a_document_is_cut_out(document: str) -> None:
    known: set[int] = set()
    for literal in literals.ALL.values():
        if literal.document == document:
            known |= set(range(literal.first, literal.last + 1))
    missing = [n for n in opened(document) if n not in known and (document, n) not in PROSE]
    assert missing == [], [literals.lines_of(document)[n - 1] for n in missing]
    assert known


def test_each_literal_is_used_by_a_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in literals.ALL if f"literals.{name}" not in text] == []


def words() -> dict[str, set[str]]:
    """Return what users of each system type, ask or set, by what it is called in the page."""
    env = literals.variables
    return {
        "verbs of the mesh": set(
            re.findall(r"^mlx-stack mesh (\w+)", literals.MESH_VERBS.text, re.MULTILINE)
        ),
        "targets of make": set(re.findall(r"make ([a-z-]+) \|", literals.JACCL_VERBS.text)),
        "verbs of launch.sh": set(re.findall(r"launch\.sh (\w+)", literals.RING_VERBS.text)),
        "paths of the ring server": set(
            re.findall(r"(?:GET|POST) \| ?\n?(/[\w/]*)", literals.RING_ENDPOINTS.text)
        ),
        "paths of mlx-jaccl-cluster": set(
            re.findall(r"^(/[\w/]+) \|", literals.JACCL_ENDPOINTS.text, re.MULTILINE)
        ),
        "variables of the ring server": set(env(literals.RING_VARIABLES)),
        "variables of mlx-jaccl-cluster": set(env(literals.JACCL_VARIABLES)),
        "topics of mlx-serving": set(
            re.findall(r"^'([\w.*]+)'", literals.SERVING_TOPICS.text, re.MULTILINE)
        ),
        "flags of LocalAI's workers": set(
            re.findall(r"--([a-z0-9-]+)", literals.LOCALAI_WORKERS.text)
        ),
        "words of LocalAI's quick start": {"run --p2p", "TOKEN", "worker p2p-mlx", "Docker images"}
        if {"docker run", "TOKEN=", "--p2p", "p2p-mlx"}
        <= set(re.findall(r"docker run|TOKEN=|--p2p|p2p-mlx", literals.LOCALAI_COMMANDS.text))
        else set(),
    }


@pytest.mark.parametrize(("what", "named"), words().items())
def test_each_verb_path_and_variable_has_a_row(what: str, named: set[str]) -> None:
    assert len(named) >= 4, (what, named)
    missing = {one for one in named if not re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", PAGE)}
    assert missing == set(), what
