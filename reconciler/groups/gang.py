"""Places whole replicas onto groups, on a draft of the fleet: which group, in which shape, at whose cost. Pure.

A group is tried as it is declared before its fallbacks, and what will be free soon is waited for rather than fallen
back from.
"""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TypeAlias

from reconciler.groups.epochs import TRIES, Epoch
from reconciler.groups.formation import (
    FormationAttempt,
    FormationRefusal,
    FormedGroup,
    Room,
    form_group,
)
from reconciler.groups.group_view import GroupShape, GroupView, group_shapes
from reconciler.placement import preemption, refusals
from reconciler.placement.assumed_state import AssumedState
from reconciler.placement.inputs import PlacementRequest, Rejection
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.views import Allocation, NodeView
from schemas.formation import Formation
from schemas.replica import RankAssignment, Replica

FormationOptions: TypeAlias = Sequence[tuple[GroupView, GroupShape]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredPlacement:
    """Where there will be room once others have ended, and whom that takes who does not drain yet."""

    formed: FormedGroup
    victims: tuple[Allocation, ...] = ()
    why: Unschedulable


class GangPlacer:
    """Finds Macs for all ranks of replicas at once."""

    def __init__(self, draft: AssumedState) -> None:
        self._draft = draft

    def now(
        self, want: PlacementRequest, tries: FormationOptions, *, waits: bool
    ) -> FormedGroup | Unschedulable:
        """Place a replica, and count its ranks; or say why not.

        `waits`: what only lacks memory that is on its way back does not fall back on anything less.
        """
        told: list[tuple[GroupShape, Unschedulable]] = []
        for group, shape in tries:
            stage = self._stage(want, group, shape, _free_now)
            found = form_group(stage)
            if isinstance(found, FormedGroup):
                self._assign(want, found.ranks)
                return found
            told.append((shape, refusal_of_group(group, found)))
            if waits and isinstance(form_group(replace(stage, room=_free_soon)), FormedGroup):
                break
        return _first(told)

    def later(
        self, want: PlacementRequest, tries: FormationOptions, why: Unschedulable
    ) -> DeferredPlacement | None:
        """Return where a replica could go once others have ended, and keep that room; None if nowhere.

        Who is lower in priority is made to end where that helps.
        """
        lower = _free_after(want.spec.priority, self._draft.victims)
        for group, shape in tries:
            for room in (_free_soon, lower):
                found = form_group(self._stage(want, group, shape, room))
                victims = self._victims(want, found) if isinstance(found, FormedGroup) else None
                if isinstance(found, FormedGroup) and victims is not None:
                    for row, victim in victims:
                        if victim.replica not in self._draft.victims:
                            self._draft.end(row, victim)
                    for rank in found.ranks:
                        self._draft.promise(self._row(rank.node), rank.memory.total_bytes)
                    ended = {one.replica: one for _, one in victims}
                    return DeferredPlacement(formed=found, victims=tuple(ended.values()), why=why)
        return None

    def again(
        self, want: PlacementRequest, replica: Replica, tries: FormationOptions
    ) -> FormedGroup | Unschedulable:
        """Form a replica anew that is on some Macs already, and count its ranks; or say why not.

        What it has counts as free, for a rank stops before the next one of its replica starts on a Mac. What the old
        ranks held beyond that stays counted until they have ended.
        """
        table = self._draft.table
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
            self._draft.release(row, want.name, size)
        told: list[tuple[GroupShape, Unschedulable]] = []
        for group, shape in tries:
            # On Macs that are free for it first; on those where it is already, however they are, if need be.
            stage = self._stage(want, group, shape, _free_now)
            found = form_group(stage)
            if isinstance(found, FormationRefusal):
                found = form_group(replace(stage, current=frozenset(old)))
            if isinstance(found, FormedGroup):
                self._swap(want, found.ranks, held)
                return found
            told.append((shape, refusal_of_group(group, found)))
        for row, size in held.items():
            self._draft.assign(row, want.name, size)
        return _first(told)

    def _row(self, node: str) -> int:
        return self._draft.table.rows[node]

    def _swap(
        self, want: PlacementRequest, ranks: Sequence[RankAssignment], held: dict[int, int]
    ) -> None:
        """Count the new ranks, and what the old ones hold beyond them until they have ended."""
        self._assign(want, ranks)
        new = {self._row(rank.node): rank.memory.total_bytes for rank in ranks}
        for row, size in held.items():
            self._draft.keep(row, max(0, size - new.get(row, 0)))

    def _assign(self, want: PlacementRequest, ranks: Sequence[RankAssignment]) -> None:
        for rank in ranks:
            self._draft.assign(self._row(rank.node), want.name, rank.memory.total_bytes)

    def _stage(
        self, want: PlacementRequest, group: GroupView, shape: GroupShape, room: Room
    ) -> FormationAttempt:
        rows = self._draft.table.rows
        nodes = {name: self._draft.view(rows[name]) for name in group.members if name in rows}
        return FormationAttempt(want=want, group=group, shape=shape, nodes=nodes, room=room)

    def _victims(
        self, want: PlacementRequest, formed: FormedGroup
    ) -> list[tuple[int, Allocation]] | None:
        """Return whom to displace so that every rank has room; None if that cannot be had."""
        chosen: dict[str, tuple[int, Allocation]] = {}
        for rank in formed.ranks:
            row = self._row(rank.node)
            node = self._draft.view(row)
            freed = sum(one.bytes for one in node.allocations if one.replica in chosen)
            short = rank.memory.total_bytes - _free_soon(node) - freed
            if short <= 0:
                continue
            others = [one for one in node.allocations if one.replica not in chosen]
            found = preemption.choose_victims(
                others, priority=want.spec.priority, short_bytes=short
            )
            if found is None:
                return None
            chosen.update({one.replica: (row, one) for one in found})
        return list(chosen.values())


def _free_now(node: NodeView) -> int:
    return node.room_bytes


def _free_soon(node: NodeView) -> int:
    return node.free_bytes + node.ending_bytes - node.promised_bytes


def _free_after(priority: int, victims: AbstractSet[str]) -> Room:
    """Return what there is on a node once all of a lower priority have ended as well."""

    def room(node: NodeView) -> int:
        lower = (
            one.bytes
            for one in node.allocations
            if one.priority < priority and not one.is_ending and one.replica not in victims
        )
        return _free_soon(node) + sum(lower)

    return room


def formation_options(groups: Sequence[GroupView]) -> FormationOptions:
    """Return what to try on the groups, in order: each as it is declared, then the fallbacks of each."""
    return [
        *((group, group_shapes(group.spec)[0]) for group in groups),
        *((group, shape) for group in groups for shape in group_shapes(group.spec)[1:]),
    ]


def refusal_of_group(group: GroupView, found: FormationRefusal) -> Unschedulable:
    """Return the refusals of a group's members, and its own, as those of a replica."""
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


def _first(told: Sequence[tuple[GroupShape, Unschedulable]]) -> Unschedulable:
    """Return why the group cannot be formed as it is declared, with a note on what else was tried."""
    (_, first), *others = told
    said = summary_line(first)
    notes = [
        f"{shape.title}: {'the same' if summary_line(why) == said else summary_line(why)}"
        for shape, why in others
    ]
    return first.noting("; ".join(notes)) if notes else first


def no_such_group(name: str) -> Unschedulable:
    """Return the refusal of a group that is not there."""
    message = "there is no such group; apply its manifest, or name another in spec.sharding"
    return _of_all(name, Rejection(reason="NoSuchGroup", message=message))


def given_up_refusal(formation: Formation, replica: str, epoch: Epoch) -> Unschedulable:
    """Return why there is no next epoch: everything that the group may run has failed."""
    what = f"fallback {formation.fallback}" if formation.fallback else "it"
    message = (
        f"{what} failed {TRIES} times in a row as {replica}, and there is no further fallback; at last "
        f"{epoch.message or epoch.over}. It is not started again until the deployment changes, or by "
        f"`fleetctl rollout restart`"
    )
    return _of_all(formation.group, Rejection(reason=refusals.CRASH_LOOPING, message=message))


def _of_all(name: str, why: Rejection) -> Unschedulable:
    return Unschedulable(nodes=0, tallies=(), refusals=(), group=name, whole=why)
