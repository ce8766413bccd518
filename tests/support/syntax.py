"""Syntax trees of the repository's own files, for the tests that judge names, sentences and sizes."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# The packages that a fleet runs.
PRODUCTION = (
    "schemas", "machinery", "store", "identity", "models", "manifests",
    "compat", "reconciler", "nodeagent", "engine", "gateway", "insight", "dashboard", "fleetctl",
)  # fmt: skip

# Fields of a statement that hold statements.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed once in a process.

    The nodes of all files are two million, and none becomes garbage: looked at again and again by the collector, they
    cost five times what parsing does.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file, expressions too."""
    return tuple(ast.walk(tree(path)))


@cache
def statements(path: Path) -> tuple[ast.AST, ...]:
    """Return the module, its statements, and the handlers and cases of its blocks, the outer ones first.

    Expressions are left out. They are nine tenths of a tree, and hold neither definitions nor docstrings.
    """
    return tuple(_blocks(tree(path)))


def _blocks(root: ast.AST) -> Iterator[ast.AST]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        for name in _BLOCKS:
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                waiting.extend(reversed(inner))
