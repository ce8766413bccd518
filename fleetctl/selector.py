"""`-l`: which labels objects must carry, as kubectl's equality selectors. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fleetctl.errors import FleetctlError
from schemas.meta import ApiObject
from schemas.node import Node, effective_labels

_REQUIREMENT = re.compile(
    r"(?P<no>!?)(?P<key>[A-Za-z0-9._/-]+)\s*((?P<op>==?|!=)\s*(?P<value>.*))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One part of a selector; without a value it is about the label being there."""

    key: str
    value: str | None
    is_negated: bool

    def holds(self, labels: dict[str, str]) -> bool:
        there = self.key in labels if self.value is None else labels.get(self.key) == self.value
        return there is not self.is_negated


def parse(text: str) -> tuple[Requirement, ...]:
    """Return what `-l key=value,key!=value,key,!key` asks for.

    Raises:
        FleetctlError: it is not of that form.

    """
    return tuple(_requirement(part.strip(), text) for part in text.split(",") if part.strip())


def _requirement(part: str, text: str) -> Requirement:
    found = _REQUIREMENT.fullmatch(part)
    if found is None or (found["no"] and found["op"]):
        raise FleetctlError(
            f"-l {text}: write key=value, key!=value, key or !key, with commas between several"
        )
    negated = bool(found["no"]) or found["op"] == "!="
    return Requirement(key=found["key"], value=found["value"], is_negated=negated)


def select(found: Sequence[ApiObject], selector: Sequence[Requirement]) -> list[ApiObject]:
    """Return the objects for which all of the selector holds."""
    return [obj for obj in found if all(part.holds(labels(obj)) for part in selector)]


def labels(obj: ApiObject) -> dict[str, str]:
    """Return the labels that selectors match: of nodes, derived ones as well."""
    return effective_labels(obj) if isinstance(obj, Node) else obj.metadata.labels
