"""Order of test files in a run: whole fleets first, then engines, then etcd, so that no worker ends with a long file alone."""

from collections.abc import Sequence

import pytest

_MARKERS_BY_LENGTH = ("soak", "fleet", "mlx", "etcd")


def sort_by_length(items: list[pytest.Item]) -> None:
    """Sort items in place by the longest kind of test that their file holds; keep the order within a file."""
    ranks: dict[str, int] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        ranks[file] = min(ranks.get(file, len(_MARKERS_BY_LENGTH)), _rank(item))
    items.sort(key=lambda item: ranks[item.nodeid.partition("::")[0]])


def _rank(item: pytest.Item) -> int:
    names: Sequence[str] = [marker.name for marker in item.iter_markers()]
    return next(
        (rank for rank, name in enumerate(_MARKERS_BY_LENGTH) if name in names),
        len(_MARKERS_BY_LENGTH),
    )
