"""The register of names and sentences: names a stranger can guess, docstrings that start plainly, references that exist."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.syntax import PRODUCTION, statements

ROOT = Path(__file__).parents[2]

# Terms of the field that end in -ing or -ed: a module may have such a name, and no other participle or gerund.
FIELD_TERMS = frozenset({
    "autoscaling", "batching", "embedded", "error_mapping", "forwarding", "keyring", "logging", "ranking",
    "reasoning", "routing", "sampling", "scheduling",
})  # fmt: skip

# How often one class name may occur in the tree: `Observed` of the reconciler and of the agent is fine, a third is not.
_SAME_CLASS_NAME = 2

# A docstring starts with a noun phrase or with a verb, never with a clause that has no subject.
BAD_FIRST_WORDS = frozenset(
    [
        "has",
        "have",
        "had",
        "who",
        "whom",
        "whose",
        "what",
        "whatever",
        "whether",
        "how",
        "where",
        "when",
        "which",
        "why",
        "nobody",
        "somebody",
        "everybody",
    ]
)
# Processes, machines and requests are "it" and "which"; nobody else is talked about in this code.
PERSONS = re.compile(r"\b(who|whom|whoever|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)

# Python files of other projects that our comments and pages cite.
_VENDOR_FILES = frozenset({
    "base.py", "deepseek_v2.py", "deepseek_v3.py", "generate.py", "mamba2.py", "qwen3_next.py", "sample_utils.py",
    "ssm.py", "utils.py",
})  # fmt: skip
_VENDOR_FOLDERS = ("mlx_lm/", "mlx/", "transformers/", "uvicorn/")


@cache
def _files(*patterns: str) -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return tuple(sorted(path for name in listed if (path := ROOT / name).exists()))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _production() -> list[Path]:
    return [
        path
        for path in _files("*.py")
        if _name(path).split("/")[0] in PRODUCTION and not path.name.endswith("_pb2.py")
    ]


@cache
def _docstrings(path: Path) -> tuple[tuple[int, str], ...]:
    return tuple(_found_docstrings(path))


def _found_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in statements(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text
            yield from _attribute_docstrings(node.body)


def _attribute_docstrings(body: Sequence[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Yield the strings that follow an assignment: documentation of a field or a constant."""
    for before, statement in pairwise(body):
        if not isinstance(before, ast.Assign | ast.AnnAssign) or not isinstance(
            statement, ast.Expr
        ):
            continue
        value = statement.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield statement.lineno, value.value.strip()


def test_modules_are_named_by_nouns() -> None:
    wrong = [
        _name(path)
        for path in _production()
        if re.search(r"(ing|ed)$", path.stem) and path.stem not in FIELD_TERMS
    ]
    assert wrong == [], "name the module after what it holds (retry.py, not asking.py)"


def test_packages_are_named_by_nouns() -> None:
    packages = {parent for path in _production() for parent in path.relative_to(ROOT).parents}
    wrong = [
        str(package)
        for package in sorted(packages)
        if re.search(r"(ing|ed)$", package.name) and package.name not in FIELD_TERMS
    ]
    assert wrong == []


def test_the_same_class_name_is_not_used_everywhere() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in _production():
        for node in statements(path):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(_name(path))
    often = {name: paths for name, paths in found.items() if len(paths) > _SAME_CLASS_NAME}
    assert often == {}, "give each class the head word that says which one it is"


@pytest.mark.parametrize("room", [*PRODUCTION, "bench", "docs", "examples", "tests"])
def test_docstrings_start_with_a_noun_or_a_verb(room: str) -> None:
    wrong = [
        f"{_name(path)}:{line}: {text.splitlines()[0]}"
        for path in _files(f"{room}/**.py")
        if not path.name.endswith("_pb2.py")
        for line, text in _docstrings(path)
        if re.split(r"\W", text.lower(), maxsplit=1)[0] in BAD_FIRST_WORDS
    ]
    assert wrong == []


@pytest.mark.parametrize("room", PRODUCTION)
def test_docstrings_speak_of_things_and_not_of_persons(room: str) -> None:
    wrong = [
        f"{_name(path)}:{line}: {found[0]!r} in {text.splitlines()[0]!r}"
        for path in _production()
        if _name(path).startswith(f"{room}/")
        for line, text in _docstrings(path)
        if (found := PERSONS.search(text))
    ]
    assert wrong == []


@cache
def _basenames() -> frozenset[str]:
    return frozenset(path.name for path in _files("*.py"))


def _stale_references(text: str) -> Iterator[str]:
    """Yield the Python files that a text names and that do not exist."""
    if ".py" not in text:  # most lines; the pattern is slow
        return
    for found in re.finditer(r"(?<![\w/.@-])((?:[\w.-]+/)*\w+\.py)\b(?!\w)", text):
        reference = found[1]
        if reference in _VENDOR_FILES or reference.startswith(_VENDOR_FOLDERS):
            continue
        parts = reference.split("/")
        if len(parts) == 1:
            if parts[0] not in _basenames():
                yield reference
        elif parts[0] in (*PRODUCTION, "tests", "bench", "docs", "examples"):
            if not (ROOT / reference).exists():
                yield reference
        elif parts[-1] not in _basenames():
            yield reference


def _stale_modules(text: str) -> Iterator[str]:
    """Yield the dotted modules in backticks that do not exist."""
    for found in re.finditer(rf"`((?:{'|'.join(PRODUCTION)})(?:\.\w+)+)`", text):
        parts = found[1].split(".")
        for length in (len(parts), len(parts) - 1, len(parts) - 2):
            if length < 1:
                continue
            path = ROOT.joinpath(*parts[:length])
            if path.is_dir() or path.with_suffix(".py").exists():
                break
        else:
            yield found[1]


def test_files_that_comments_and_docstrings_name_exist() -> None:
    wrong: list[str] = []
    for path in _files("*.py"):
        if path == Path(__file__) or path.name.endswith("_pb2.py"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            comment = line.partition("#")[2]
            wrong += [f"{_name(path)}:{number}: {stale}" for stale in _stale_references(comment)]
        for start, text in _docstrings(path):
            wrong += [f"{_name(path)}:{start}: {stale}" for stale in _stale_references(text)]
            wrong += [f"{_name(path)}:{start}: {stale}" for stale in _stale_modules(text)]
    assert wrong == []


def test_files_that_pages_name_exist() -> None:
    wrong: list[str] = []
    for path in _files("*.md"):
        if path.name == "CHANGELOG.md":  # it speaks of the past
            continue
        text = path.read_text()
        wrong += [f"{_name(path)}: {stale}" for stale in _stale_references(text)]
        wrong += [f"{_name(path)}: {stale}" for stale in _stale_modules(text)]
    assert wrong == []


# A table's row and a command are as long as they are; a paragraph is wrapped.
_PAGE_WIDTH = 120


def test_lines_of_pages_are_short() -> None:
    wrong: list[str] = []
    for path in _files(
        "README.md", "CONTRIBUTING.md", "docs/*.md", "docs/operations/*.md", "docs/adr/*.md"
    ):
        in_code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.startswith("```"):
                in_code = not in_code
            if not in_code and len(line) > _PAGE_WIDTH and not line.startswith("|"):
                wrong.append(f"{_name(path)}:{number}: {len(line)} characters")
    assert wrong == []


def test_no_test_module_imports_another() -> None:
    wrong: list[str] = []
    for path in _files("tests/*.py"):
        for node in statements(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                wrong += [
                    f"{_name(path)}:{node.lineno}: {name}"
                    for name in names
                    if name.startswith("test_")
                ]
    assert wrong == [], "shared helpers live in tests/support or in a conftest.py"
