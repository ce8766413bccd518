"""Answers questions about ShardGroups: who belongs to them, and what runs there; changes nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

from reconciler.groups.view import GroupView
from reconciler.known.fleet import Fleet
from schemas.meta import ObjectKey
from schemas.node import Node
from schemas.pools import selects
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup


def all_groups(fleet: Fleet) -> list[ShardGroup]:
    """Return all groups by name."""
    return [one for one in fleet.of_kind("ShardGroup") if isinstance(one, ShardGroup)]


def view_of(fleet: Fleet, group: ShardGroup) -> GroupView:
    """Return a group as the planner sees it."""
    members = members_of(fleet, group)
    machines = ((name, fleet.node_status(name)) for name in members)
    return GroupView(
        name=group.name,
        spec=group.spec,
        members=tuple(members),
        machines={name: status for name, status in machines if status is not None},
    )


def views_of(fleet: Fleet, wishes: Iterable[str]) -> tuple[GroupView, ...]:
    """Return the groups that are wished for, by name; all of them if one of the wishes is Auto."""
    named = set(wishes)
    if "Auto" in named:
        return tuple(view_of(fleet, group) for group in all_groups(fleet))
    found = (fleet.spec(ObjectKey("ShardGroup", name)) for name in sorted(named - {"Never"}))
    return tuple(view_of(fleet, one) for one in found if isinstance(one, ShardGroup))


def members_of(fleet: Fleet, group: ShardGroup) -> list[str]:
    """Return the nodes of a group: as they are listed, or those that its selector finds, by name."""
    if group.spec.members:
        return [member.node for member in group.spec.members]
    return [name for name in fleet.node_names() if _is_selected(group, fleet.node(name))]


def replicas_on(fleet: Fleet, group: str) -> list[Replica]:
    """Return the replicas whose ranks work together on the group, by name."""
    return [
        found
        for found in fleet.replicas()
        if found.spec.formation is not None and found.spec.formation.group == group
    ]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Which nodes groups keep for themselves."""

    listed: dict[str, str]
    """Members that groups list, with the group's name."""
    selecting: tuple[ShardGroup, ...]
    """Groups that find theirs by what they are."""

    def group_of(self, fleet: Fleet, node: str) -> str:
        """Return the name of the group that keeps the node for itself; empty if none does."""
        found = self.listed.get(node, "")
        if found or not self.selecting:
            return found
        there = fleet.node(node)
        return next((one.name for one in self.selecting if _is_selected(one, there)), "")


def reserved(fleet: Fleet) -> Reserved:
    """Return the reservations as they are now."""
    exclusive = [one for one in all_groups(fleet) if one.spec.reservation == "Exclusive"]
    return Reserved(
        listed={member.node: one.name for one in exclusive for member in one.spec.members},
        selecting=tuple(one for one in exclusive if one.spec.selector is not None),
    )


def _is_selected(group: ShardGroup, node: Node) -> bool:
    return group.spec.selector is not None and selects(group.spec.selector, node)
