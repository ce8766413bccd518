"""Conditions that need a person: those whose documented reason has a remedy. Pure."""

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
"""The remedy of each reason that is a problem, from the troubleshooting tables."""


def problems(conditions: tuple[Condition, ...]) -> Iterator[Condition]:
    """Yield the conditions whose reason needs an action."""
    return (one for one in conditions if one.reason in CURES)


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
        "cure": CURES.get(found.reason, ""),
        "isProblem": found.reason in CURES,
        "since": None if changed is None else changed.isoformat(),
    }
