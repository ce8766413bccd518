"""The facts that tables show beside the objects themselves."""

from datetime import datetime
from typing import NamedTuple


class TableContext(NamedTuple):
    """The time and the ready nodes, which tables need beside the objects."""

    now: datetime
    ready_nodes: frozenset[str] = frozenset()
