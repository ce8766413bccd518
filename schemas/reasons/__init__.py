"""Every reason that the fleet writes into conditions, events and rejections, with its meaning and its cure.

`docs/generate.py` makes docs/reference/reasons.md from these tables. `tests/lint/test_reasons.py` compares them with the
reasons in the code: a reason without a row fails the tests, and so does a row without a reason.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from schemas.reasons import (
    deployments,
    groups,
    joins,
    model_fetches,
    nodes,
    placement,
    replicas,
    sources,
)
from schemas.reasons.reason import Reason, ReasonSection

SECTIONS: Final[tuple[ReasonSection, ...]] = (
    placement.SECTION,
    deployments.SECTION,
    replicas.SECTION,
    nodes.SECTION,
    joins.SECTION,
    model_fetches.SECTION,
    sources.SECTION,
    groups.SECTION,
    groups.CABLES,
    deployments.OTHER_KINDS,
    deployments.ON_DEMAND,
    deployments.EVENTS,
)
"""All reasons, in the order in which most people need them."""

PLACEMENT: Final = "Placement"
"""Stands for the kind of reasons why a node, or a group, cannot take a replica."""
_OF_KIND: Final[Mapping[str, tuple[ReasonSection, ...]]] = MappingProxyType(
    {
        PLACEMENT: (placement.SECTION, groups.SECTION, groups.CABLES),
        "ModelDeployment": (deployments.SECTION, model_fetches.SECTION),
        "Replica": (replicas.SECTION, model_fetches.SECTION),
        "Node": (nodes.SECTION,),
        "ShardGroup": (deployments.OTHER_KINDS, groups.SECTION, groups.CABLES),
        "GitSource": (sources.SECTION,),
    }
)
_ANYWHERE: Final = {row.name: row for section in reversed(SECTIONS) for row in section.reasons}
_KNOWN: Final = {
    (kind, row.name): row
    for kind, sections in _OF_KIND.items()
    for section in reversed(sections)
    for row in section.reasons
}


def reason_of(kind: str, name: str) -> Reason | None:
    """Return the documentation of a reason of an object's kind: ModelUnusable of a replica is not that of a placement."""
    return _KNOWN.get((kind, name)) or _ANYWHERE.get(name)
