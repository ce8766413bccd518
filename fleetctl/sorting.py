"""`--sort-by`: objects in the order of a field, as kubectl has it. Pure."""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from fleetctl import jsonpath
from fleetctl.documents import Tree
from fleetctl.errors import FleetctlError
from schemas import sizes

# What is not there comes first, then numbers (and sizes as "8Gi"), then texts.
Rank: TypeAlias = tuple[int, float, tuple[tuple[int, int, str], ...]]

_DIGITS = re.compile(r"([0-9]+)")
_MISSING: Rank = (0, 0, ())


def sort(trees: Sequence[Tree], expression: str) -> list[Tree]:
    """Return the objects in the order of what a JSONPath finds in each; equals keep their order.

    Raises:
        FleetctlError: it is no path, or no object has such a field.

    """
    path = jsonpath.relaxed(expression)
    found = [path.find(tree) for tree in trees]
    if trees and not any(found):
        raise FleetctlError(
            f"--sort-by {expression}: none of the objects has such a field; write it as in "
            "--sort-by=.metadata.creationTimestamp, and see `-o yaml` for what there is"
        )
    ranks = [_rank(values[0]) if values else _MISSING for values in found]
    return [tree for _, tree in sorted(zip(ranks, trees, strict=True), key=lambda pair: pair[0])]


def _rank(value: Any) -> Rank:
    if value is None:
        return _MISSING
    if isinstance(value, bool | int | float):
        return (1, float(value), ())
    text = str(value)
    try:
        return (1, float(sizes.parse(text)), ())
    except (ValueError, OverflowError):
        return (2, 0, _natural(text))


def _natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return what sorts mac-2 before mac-10."""
    parts = _DIGITS.split(text)
    return tuple((1, int(p[:18]), p) if n % 2 else (0, 0, p) for n, p in enumerate(parts))
