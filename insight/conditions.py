"""Conditions of a fleet's objects, and the remedies of those that need a person. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from insight.fleet_caches import FleetCaches
from schemas.meta import Condition
from schemas.reasons import reason_of
from schemas.reasons.reason import Reason
from schemas.replica import Replica
from store import keys

Row: TypeAlias = dict[str, object]

# What the name of an object stands for in the remedies of its kind, beside NAME.
_PLACEHOLDERS: Mapping[str, str] = {
    "ModelDeployment": "DEPLOYMENT",
    "Node": "NODE",
    "ShardGroup": "GROUP",
}


class ObjectCondition(NamedTuple):
    """A condition with its object."""

    kind: str
    name: str
    condition: Condition

    @property
    def id(self) -> str:
        """The name of its row: kind, object and type."""
        return f"{self.kind}/{self.name}/{self.condition.type}"

    @property
    def reason(self) -> Reason | None:
        """The documentation of its reason."""
        return reason_of(self.kind, self.condition.reason)

    @property
    def is_problem(self) -> bool:
        """True if its reason has a remedy."""
        return bool((reason := self.reason) and reason.cure)


def conditions_of(caches: FleetCaches, kind: str, name: str) -> Iterator[ObjectCondition]:
    """Yield the conditions of one object: its own, and those of a node's life."""
    objects = caches.objects
    statuses = [objects.statuses.items.get(keys.status_key(kind, name))]
    if kind == "Node":
        statuses.append(objects.lives.items.get(keys.node_life_key(name)))
    for status in statuses:
        for condition in () if status is None else status.conditions:
            yield ObjectCondition(kind, name, condition)


def all_conditions(caches: FleetCaches) -> Iterator[ObjectCondition]:
    """Yield the conditions of all objects, in the order of their names."""
    pairs = {keys.kind_and_name(key) for key in caches.objects.statuses.items}
    prefix = keys.NODE_LIFE_PREFIX
    pairs |= {("Node", key.removeprefix(prefix)) for key in caches.objects.lives.items}
    for kind, name in sorted(pairs):
        yield from conditions_of(caches, kind, name)


def names_of(caches: FleetCaches, kind: str, name: str) -> dict[str, str]:
    """Return the names that the commands of an object's remedies need."""
    names = {"NAME": name, _PLACEHOLDERS.get(kind, "NAME"): name}
    replica = caches.objects.specs.items.get(keys.spec_key(kind, name))
    if isinstance(replica, Replica):
        formation = replica.spec.formation
        names |= {"DEPLOYMENT": replica.spec.deployment, "NODE": replica.spec.ranks[0].node}
        names |= {} if formation is None else {"GROUP": formation.group}
    return names


def fill_names(cure: str, names: Mapping[str, str]) -> str:
    """Return a remedy with names in its commands."""
    return re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], cure)


def condition_row(found: ObjectCondition, caches: FleetCaches) -> Row:
    """Return one condition as a row."""
    kind, name, condition = found
    changed, reason = condition.last_transition_time, found.reason
    return {
        "name": found.id,
        "kind": kind,
        "object": name,
        "type": condition.type,
        "status": condition.status.value,
        "reason": condition.reason,
        "message": condition.message,
        "cure": "" if reason is None else fill_names(reason.cure, names_of(caches, kind, name)),
        "isProblem": found.is_problem,
        "since": None if changed is None else changed.isoformat(),
    }


def names_text(names: Sequence[str], most: int) -> str:
    """Return the first names in one line, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
