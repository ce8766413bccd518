"""Macs that do not exist: how users describe them, and the status that their agents would report."""

import difflib
from typing import Annotated

from pydantic import AfterValidator, Field

from nodeagent.hardware.hollow_status import hollow_status
from schemas import chips, quantity
from schemas.meta import ApiModel, Labels, ObjectName
from schemas.node import NodeStatus, Taint
from schemas.quantity import PositiveQuantity


def _check_chip(name: str) -> str:
    known = sorted({chip.name for chip in chips.CHIPS})
    full = name if name.startswith("Apple ") else f"Apple {name}"
    if full in known:
        return full
    near = difflib.get_close_matches(full, known, n=1)
    raise ValueError(f"is not the chip of a Mac; write one such as {(near or known)[0]!r}")


Chip = Annotated[str, AfterValidator(_check_chip)]


def _check_memory(text: str) -> str:
    if quantity.parse(text) < 2**30:
        raise ValueError(f'is {text} bytes, less than any Mac has; write a unit, as in "{text}Gi"')
    return text


class FleetNode(ApiModel):
    """One Mac, or several identical ones."""

    name: ObjectName
    """Name of the node; with `count` above 1 the nodes are named NAME-1, NAME-2 and so on."""
    chip: Chip
    """Chip, such as "Apple M4 Pro"."""
    memory: Annotated[PositiveQuantity, AfterValidator(_check_memory)]
    """Unified memory, such as "48Gi"."""
    gpu_cores: Annotated[int, Field(ge=1, le=1024)] | None = None
    """GPU cores; default: the smallest number that Apple sells with this chip."""
    allocatable: PositiveQuantity | None = None
    """Memory that models may use; default: the limit of macOS."""
    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of Macs."""
    labels: Labels = Field(default_factory=dict)
    """Labels of the node; pools and selectors match them."""
    taints: tuple[Taint, ...] = ()
    """Taints of the node; replicas without a matching toleration are not placed on it."""

    def names(self) -> list[str]:
        """Return the names of the nodes."""
        if self.count == 1:
            return [self.name]
        return [f"{self.name}-{number}" for number in range(1, self.count + 1)]


def node_status(node: FleetNode, name: str) -> NodeStatus:
    """Return the status that the agent of such a Mac would report."""
    memory = quantity.parse(node.memory)
    row = chips.find_chip(node.chip, gpu_cores=node.gpu_cores, memory_bytes=memory)
    fewest = min(row.gpu_cores) if row is not None else 1
    return hollow_status(
        name,
        chip=node.chip,
        memory_bytes=memory,
        gpu_cores=node.gpu_cores or fewest,
        labels=node.labels,
        allocatable_bytes=quantity.parse(node.allocatable) if node.allocatable else None,
    )
