"""Every reason that the fleet writes into conditions, events and rejections, with its meaning and its cure.

`docs/generate.py` makes docs/reference/reasons.md from these tables. `tests/lint/test_reasons.py` compares them with the
reasons in the code: a reason without a row fails the tests, and so does a row without a reason.
"""

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
from schemas.reasons.reason import ReasonSection

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
    deployments.EVENTS,
)
"""All reasons, in the order in which most people need them."""
