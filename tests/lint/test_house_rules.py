"""The budgets of CONTRIBUTING.md, so that no room grows without anybody noticing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax import PRODUCTION, statements, tree

ROOT = Path(__file__).parents[2]
_LINES, _FUNCTION_LINES = 600, 100
_SUPPRESSIONS_PER_1000 = 1.5


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


# One test for a room, not for a file: there are a thousand files, and each worker collects every test.
every_room = pytest.mark.parametrize("room", PRODUCTION)


@pytest.mark.parametrize("room", [*PRODUCTION, "tests", "bench"])
def test_no_file_does_several_jobs(room: str) -> None:
    wrong: list[str] = []
    for path in sources(room):
        lines = len(path.read_text().splitlines())
        if lines > _LINES:
            wrong.append(f"{label(path)} has {lines} lines; split it by job")
        if not ast.get_docstring(tree(path)):
            wrong.append(f"{label(path)} does not say its job in its first sentence")
    assert wrong == []


@every_room
def test_functions_are_short(room: str) -> None:
    wrong: list[str] = []
    for path in sources(room):
        for function in functions(path):
            assert function.end_lineno is not None
            length = function.end_lineno - function.lineno + 1
            if length > _FUNCTION_LINES:
                wrong.append(f"{label(path)}: {function.name} has {length} lines")
    assert wrong == []


def test_suppressions_are_few_and_say_why() -> None:
    lines = [
        (path, line) for path in sources(*PRODUCTION) for line in path.read_text().splitlines()
    ]
    marked = [(path, line) for path, line in lines if re.search(r"# (noqa|type: ignore)", line)]
    assert len(marked) <= _SUPPRESSIONS_PER_1000 * len(lines) / 1000
    for path, line in marked:
        assert re.search(r"(noqa: [A-Z0-9, ]+|ignore\[[a-z-]+\]) +(- |# )\S+", line), (
            f"{label(path)}: {line.strip()} does not say why"
        )


@every_room
def test_the_environment_is_read_at_the_edge_only(room: str) -> None:
    wrong: list[str] = []
    for path in sources(room):
        if path.name == "__main__.py" or label(path) == "machinery/environment.py":
            continue
        # Set, not read.
        text = path.read_text().replace('os.environ.setdefault("GRPC_', "")
        if re.search(r"os\.environ|os\.getenv", text):
            wrong.append(label(path))
    assert wrong == []


# Who may catch everything: the loop that decides about retries, the outermost edge of a process or a
# thread, and the walls around mlx-lm and tokenizers, which raise whatever their own libraries raise. In the gateway's
# handler a request ends: its callbacks would pass an error to the transport, which closes another's connection.
MAY_CATCH_ALL = {
    "gateway/handler.py",
    "gateway/upstream/external_client.py",
    "machinery/control_loop.py",
    "machinery/process_main.py",
    "engine/batch/loop.py",
    "engine/batch/embedder.py",
    "engine/encoder/loop.py",
    "engine/input_workers/fork_server.py",
    "engine/model/loader.py",
    "engine/speech/loader.py",
    "engine/speech/loop.py",
    "engine/text/codec.py",
    "engine/worker.py",
}


def catches_all(handler: ast.ExceptHandler) -> bool:
    """Return whether it catches everything, and keeps it."""
    caught = ast.unparse(handler.type) if handler.type is not None else "everything"
    last = handler.body[-1]
    passes_on = isinstance(last, ast.Raise) and last.exc is None
    return caught in ("Exception", "BaseException", "everything") and not passes_on


@every_room
def test_nobody_else_catches_everything(room: str) -> None:
    wrong = [
        f"{label(path)}:{node.lineno}"
        for path in sources(room)
        if label(path) not in MAY_CATCH_ALL
        for node in statements(path)
        if isinstance(node, ast.ExceptHandler) and catches_all(node)
    ]
    assert wrong == []
