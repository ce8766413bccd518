"""Places all ranks of a replica on a group or none: which group, in which shape, with which victims. Pure.

The declared shape is tried before fallbacks. Memory that is free soon is waited for before a fallback is used.
"""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TypeAlias

from reconciler.groups.epochs import TRIES, Epoch, count_failures, next_attempt_text
from reconciler.groups.formation import (
    FormationAttempt,
    FormationRefusal,
    FormedGroup,
    Room,
    form_group,
)
from reconciler.groups.group_view import GroupShape, GroupView, group_shapes
from reconciler.placement import preemption, refusals
from reconciler.placement.inputs import Allocation, NodeView, PlacementRequest, Rejection
from reconciler.placement.ranking import AssumedState
from reconciler.placement.refusals import Unschedulable, summary_line
from schemas.formation import Formation
from schemas.replica import RankAssignment, Replica

FormationOptions: TypeAlias = Sequence[tuple[GroupView, GroupShape]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredPlacement:
    """A formation that has room once other replicas have ended, and the victims that do not drain yet."""

    formed: FormedGroup
    victims: tuple[Allocation, ...] = ()
    why: Unschedulable


class GangPlacer:
    """Finds Macs for all ranks of a replica at once."""

    def __init__(self, assumed: AssumedState) -> None:
        self._assumed = assumed

    def try_now(
        self, request: PlacementRequest, tries: FormationOptions, *, waits: bool
    ) -> FormedGroup | Unschedulable:
        """Place a replica and count its ranks, or return why that is not possible.

        With `waits`, a shape that lacks only memory which is free soon is not followed by a fallback.
        """
        failed: list[tuple[GroupShape, Unschedulable]] = []
        for group, shape in tries:
            attempt = self._attempt(request, group, shape, _free_now)
            formed_group = form_group(attempt)
            if isinstance(formed_group, FormedGroup):
                self._assign(request, formed_group.ranks)
                return formed_group
            failed.append((shape, refusal_of_group(group, formed_group)))
            if waits and isinstance(form_group(replace(attempt, room=_free_soon)), FormedGroup):
                break
        return _first_refusal(failed)

    def try_after(
        self, request: PlacementRequest, tries: FormationOptions, why: Unschedulable
    ) -> DeferredPlacement | None:
        """Return a formation that has room once others have ended, and reserve it; None if there is none.

        Replicas of a lower priority are preempted if that makes enough room.
        """
        lower = _free_after(request.spec.priority, self._assumed.victims)
        for group, shape in tries:
            for room in (_free_soon, lower):
                found = form_group(self._attempt(request, group, shape, room))
                victims = self._victims(request, found) if isinstance(found, FormedGroup) else None
                if isinstance(found, FormedGroup) and victims is not None:
                    for row, victim in victims:
                        if victim.replica not in self._assumed.victims:
                            self._assumed.end(row, victim)
                    for rank in found.ranks:
                        self._assumed.promise(self._row(rank.node), rank.memory.total_bytes)
                    by_name = {one.replica: one for _, one in victims}
                    return DeferredPlacement(formed=found, victims=tuple(by_name.values()), why=why)
        return None

    def reform(
        self, request: PlacementRequest, replica: Replica, tries: FormationOptions
    ) -> FormedGroup | Unschedulable:
        """Place the next epoch of a replica and count its ranks, or return why that is not possible.

        The memory of its old ranks counts as free, because a rank stops before the next one of its replica starts on
        a Mac. Memory that an old rank holds beyond the new one stays counted until it has ended.
        """
        table = self._assumed.table
        old = {rank.node: rank.memory.total_bytes for rank in replica.spec.ranks}
        held = {
            table.rows[name]: next(
                (
                    t.bytes
                    for t in table.nodes[table.rows[name]].allocations
                    if t.replica == replica.name
                ),
                size,
            )
            for name, size in old.items()
            if name in table.rows
        }
        for row, size in held.items():
            self._assumed.release(row, request.name, size)
        failed: list[tuple[GroupShape, Unschedulable]] = []
        for group, shape in tries:
            # First on healthy Macs; if that fails, also on its present Macs with their cordons and taints.
            attempt = self._attempt(request, group, shape, _free_now)
            formed_group = form_group(attempt)
            if isinstance(formed_group, FormationRefusal):
                formed_group = form_group(replace(attempt, current=frozenset(old)))
            if isinstance(formed_group, FormedGroup):
                self._swap(request, formed_group.ranks, held)
                return formed_group
            failed.append((shape, refusal_of_group(group, formed_group)))
        for row, size in held.items():
            self._assumed.assign(row, request.name, size)
        return _first_refusal(failed)

    def _row(self, node: str) -> int:
        return self._assumed.table.rows[node]

    def _swap(
        self, request: PlacementRequest, ranks: Sequence[RankAssignment], held: dict[int, int]
    ) -> None:
        """Count the new ranks, and the memory that old ranks hold beyond them."""
        self._assign(request, ranks)
        new = {self._row(rank.node): rank.memory.total_bytes for rank in ranks}
        for row, size in held.items():
            self._assumed.keep(row, max(0, size - new.get(row, 0)))

    def _assign(self, request: PlacementRequest, ranks: Sequence[RankAssignment]) -> None:
        for rank in ranks:
            self._assumed.assign(self._row(rank.node), request.name, rank.memory.total_bytes)

    def _attempt(
        self, request: PlacementRequest, group: GroupView, shape: GroupShape, room: Room
    ) -> FormationAttempt:
        rows = self._assumed.table.rows
        nodes = {name: self._assumed.view(rows[name]) for name in group.members if name in rows}
        return FormationAttempt(request=request, group=group, shape=shape, nodes=nodes, room=room)

    def _victims(
        self, request: PlacementRequest, formed: FormedGroup
    ) -> list[tuple[int, Allocation]] | None:
        """Return the victims that make room for every rank; None if they are not enough."""
        chosen: dict[str, tuple[int, Allocation]] = {}
        for rank in formed.ranks:
            row = self._row(rank.node)
            node = self._assumed.view(row)
            freed = sum(one.bytes for one in node.allocations if one.replica in chosen)
            short = rank.memory.total_bytes - _free_soon(node) - freed
            if short <= 0:
                continue
            others = [
                allocation for allocation in node.allocations if allocation.replica not in chosen
            ]
            victims = preemption.choose_victims(
                others, priority=request.spec.priority, short_bytes=short
            )
            if victims is None:
                return None
            chosen.update({victim.replica: (row, victim) for victim in victims})
        return list(chosen.values())


def _free_now(node: NodeView) -> int:
    return node.room_bytes


def _free_soon(node: NodeView) -> int:
    return node.free_bytes + node.ending_bytes - node.promised_bytes


def _free_after(priority: int, victims: AbstractSet[str]) -> Room:
    """Return a function for the memory on a node once all replicas of a lower priority have ended too."""

    def room(node: NodeView) -> int:
        lower = (
            allocation.bytes
            for allocation in node.allocations
            if allocation.priority < priority
            and not allocation.is_ending
            and allocation.replica not in victims
        )
        return _free_soon(node) + sum(lower)

    return room


def formation_options(groups: Sequence[GroupView]) -> FormationOptions:
    """Return the groups and shapes to try in order: every group as declared, then the fallbacks of each."""
    return [
        *((group, group_shapes(group.spec)[0]) for group in groups),
        *((group, shape) for group in groups for shape in group_shapes(group.spec)[1:]),
    ]


def refusal_of_group(group: GroupView, found: FormationRefusal) -> Unschedulable:
    """Return the rejections of a group and its members as the reason for a replica."""
    counted = Counter(why for _, why in found.nodes)
    return Unschedulable(
        nodes=found.members,
        tallies=tuple(sorted(refusals.count_refusals(counted.items()), key=refusals.sort_key)),
        refusals=found.nodes[: refusals.MAX_LISTED],
        fitting=found.members - len(found.nodes),
        group=group.name,
        ranks=found.size,
        whole=found.whole,
    )


def _first_refusal(failed: Sequence[tuple[GroupShape, Unschedulable]]) -> Unschedulable:
    """Return why the declared shape cannot be formed, with a note on the other shapes."""
    (_, first), *others = failed
    first_line = summary_line(first)
    notes = [
        f"{shape.title}: {'the same' if summary_line(why) == first_line else summary_line(why)}"
        for shape, why in others
    ]
    return first.noting("; ".join(notes)) if notes else first


def no_such_group(name: str) -> Unschedulable:
    """Return the reason for a group that does not exist."""
    message = "there is no such group; apply its manifest, or name another in spec.sharding"
    return _of_all(name, Rejection(reason="NoSuchGroup", message=message))


def given_up_refusal(formation: Formation, replica: str, epoch: Epoch) -> Unschedulable:
    """Return the reason why there is no next epoch: all shapes of the group have failed."""
    count = max(TRIES, count_failures(formation, epoch))
    message = (
        f"{replica} failed {count} times in a row, in every shape; the last reason: {epoch.message or epoch.over}. "
        f"{next_attempt_text(formation, epoch)}; a change of the deployment or `fleetctl rollout restart` starts it at once"
    )
    return _of_all(formation.group, Rejection(reason=refusals.CRASH_LOOPING, message=message))


def _of_all(name: str, why: Rejection) -> Unschedulable:
    return Unschedulable(nodes=0, tallies=(), refusals=(), group=name, whole=why)
