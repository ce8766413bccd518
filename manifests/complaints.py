"""Which complaints of the types' validator are true. Pure."""

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from manifests import nodes
from manifests.nodes import Node


def of(error: ValidationError, root: Node) -> list[ErrorDetails]:
    """Return them all, but not that a list is too short if it is not: pydantic does not count its wrong items."""
    details = error.errors(include_url=False)
    return [one for one in details if one["type"] != "too_short" or _is_short(one, root)]


def _is_short(found: ErrorDetails, root: Node) -> bool:
    node = nodes.find(root, found["loc"])
    content = node.content if node is not None else None
    least = found.get("ctx", {}).get("min_length", 0)
    return not isinstance(content, list) or len(content) < least
