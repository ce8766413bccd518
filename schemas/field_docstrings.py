"""The docstrings of a model's fields: the strings below them in the source of its class."""

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache

from pydantic import BaseModel


def field_docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstrings of a model's fields by name; "" for a field without one, and nothing without source."""
    texts: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            texts |= _module_docstrings(kind.__module__).get(kind.__qualname__, {})
    return texts


@cache
def _module_docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of the fields of a module's classes, by class and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError):
        return {}
    return {node.name: _docstrings(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docstrings(node: ast.ClassDef) -> Mapping[str, str]:
    texts: dict[str, str] = {}
    for field, text in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match text:
                case ast.Expr(value=ast.Constant(value=str(doc))):
                    texts[field.target.id] = inspect.cleandoc(doc)
                case _:
                    texts[field.target.id] = ""  # not the docstring of a base's field
    return texts
