"""Trees as JSON or YAML. Imports no type of a kind."""

from collections.abc import Sequence
from typing import Any

import click
import orjson


def tree_text(tree: Any, output: str) -> str:
    """Return a tree as JSON or YAML, with the end of its last line."""
    if output == "yaml":
        from manifests.yaml.core_schema import dump  # noqa: PLC0415 - only needed for YAML

        return dump(tree)
    return orjson.dumps(tree, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()


def print_tree(tree: Any, output: str) -> None:
    """Print a tree as JSON or YAML."""
    click.echo(tree_text(tree, output), nl=False)


def list_tree(items: Sequence[Any]) -> dict[str, Any]:
    """Return several objects as one document."""
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}
