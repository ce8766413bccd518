"""Every reason that the fleet can write is documented with its meaning and its cure, and no documented reason is stale."""

import ast
import re
from pathlib import Path

import pytest

from schemas.reasons import SECTIONS
from tests.support.command_lines import problems
from tests.support.reasons import FoundReasons, find_reasons
from tests.support.syntax import PRODUCTION, nodes

ROOT = Path(__file__).parents[2]
ROWS = [(section.title, row) for section in SECTIONS for row in section.reasons]


@pytest.fixture(scope="module")
def found() -> FoundReasons:
    return find_reasons(ROOT)


def test_every_expression_that_is_a_reason_can_be_followed(found: FoundReasons) -> None:
    assert found.unresolved == [], (
        "write the reason as a constant, or extend tests/support/reasons.py"
    )


def test_every_reason_in_the_code_is_documented(found: FoundReasons) -> None:
    documented = {row.name for _, row in ROWS}
    missing = {
        name: sorted(places) for name, places in found.reasons.items() if name not in documented
    }
    assert missing == {}, "add a row with its meaning and its cure to schemas/reasons/"


def test_no_documented_reason_is_stale(found: FoundReasons) -> None:
    stale = [f"{title}: {row.name}" for title, row in ROWS if row.name not in found.reasons]
    assert stale == [], "no code writes this reason any more: remove its row"


def test_a_section_has_each_reason_once() -> None:
    keys = [(title, row.name) for title, row in ROWS]
    assert sorted(set(keys)) == sorted(keys)


def test_meanings_and_cures_are_sentences() -> None:
    for title, row in ROWS:
        assert row.meaning.endswith("."), f"{title}: {row.name}"
        assert row.cure == "" or row.cure.endswith((".", "`")), f"{title}: {row.name}"


# What a person is told to run, word for word; elsewhere a command may be named only.
_REMEDIES = ("schemas/reasons/", "insight/")


def test_commands_in_messages_can_be_run() -> None:
    """Each command in backticks, in every string of production code, is read by its program's parser of arguments."""
    wrong = [
        f"{section.title}: {word}" for section in SECTIONS for word in problems(section.shown_by)
    ]
    count = 0
    for path in (one for package in PRODUCTION for one in sorted((ROOT / package).rglob("*.py"))):
        place = str(path.relative_to(ROOT))
        for node in nodes(path):
            for command in re.findall(r"`(fleetctl (?!X`)[^`]+)`", text_of(node)):
                count += 1
                is_whole = place.startswith(_REMEDIES)
                wrong += [
                    f"{place}: {command}: {problem}"
                    for problem in problems(command, is_whole=is_whole)
                ]
    assert sorted(wrong) == []
    assert count > 300


def test_commands_on_the_page_can_be_run() -> None:
    """Each command that the dashboard's scripts show whole, to copy."""
    wrong, count = [], 0
    for path in sorted((ROOT / "dashboard" / "static").rglob("*.js")):
        for command in re.findall(
            r'(?:text="|text=\$\{`|<code>)(fleetctl [^"`<]+)', path.read_text()
        ):
            count += 1
            words = re.sub(r"\$\{[^}]*(\}|$)", "X", command)
            wrong += [f"{path.name}: {command}: {word}" for word in problems(words, is_whole=True)]
    assert wrong == []
    assert count > 20


def text_of(node: ast.AST) -> str:
    """Return the text of a string, with X for each value that is put into it; "" for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = node.values if isinstance(node, ast.JoinedStr) else ()
    return "".join(text_of(part) if isinstance(part, ast.Constant) else "X" for part in parts)


_TOLD_ONCE = {"cause", "meaning", "problem", "remedy", "what to do", "what to fix"}


def test_no_page_of_operations_tells_meanings_and_remedies_of_reasons() -> None:
    """They live in schemas/reasons/; a page about operations has what is its own, such as thresholds, and links."""
    names = {row.name for _, row in ROWS}
    found: dict[str, list[str]] = {}
    for page in sorted((ROOT / "docs" / "operations").glob("*.md")):
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
            header, _, *rows = (
                [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
            )
            told = [row[0] for row in rows if _words(row[0]) and _words(row[0]) <= names]
            if len(told) > 1 and not _TOLD_ONCE.isdisjoint(header):
                found[page.name] = told
    assert found == {}, "move them to schemas/reasons/, and link to docs/reference/reasons.md"


def _words(cell: str) -> set[str]:
    """Return the names in the first cell of a row: `RankEnded`, or `True, Measured`."""
    return set(re.findall(r"[^\s`,]+", cell)) - {"True", "False", "Unknown"}
