"""Conditions that need a person: those whose documented reason has a remedy. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from schemas import reasons
from schemas.meta import Condition

Row: TypeAlias = dict[str, object]

CURES: Final[Mapping[str, str]] = {
    reason.name: reason.cure
    for section in reasons.SECTIONS
    for reason in section.reasons
    if reason.cure
}
"""The remedy of each reason that is a problem, from the tables of reasons."""

# What stands in a remedy for the name of the object, by its kind.
_PLACEHOLDERS: Final[Mapping[str, str]] = {
    "GitSource": "NAME",
    "ModelDeployment": "NAME",
    "Node": "NODE",
    "ShardGroup": "GROUP",
}


def problems(conditions: tuple[Condition, ...]) -> Iterator[Condition]:
    """Yield the conditions whose reason needs an action."""
    return (condition for condition in conditions if condition.reason in CURES)


def cure_of(kind: str, name: str, reason: str) -> str:
    """Return the remedy of a reason with the object's name in its commands; empty if nothing has to be done."""
    cure, placeholder = CURES.get(reason, ""), _PLACEHOLDERS.get(kind)
    return cure if placeholder is None else re.sub(rf"\b{placeholder}\b", lambda _: name, cure)


def condition_row(kind: str, name: str, found: Condition) -> Row:
    """Return one condition as a row."""
    changed = found.last_transition_time
    return {
        "name": f"{kind}/{name}/{found.type}",
        "kind": kind,
        "object": name,
        "type": found.type,
        "status": found.status.value,
        "reason": found.reason,
        "message": found.message,
        "cure": cure_of(kind, name, found.reason),
        "isProblem": found.reason in CURES,
        "since": None if changed is None else changed.isoformat(),
    }
