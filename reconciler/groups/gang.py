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
from reconciler.groups.form import Formed, Room, Stage, Unformed, form
from reconciler.groups.view import GroupView, Shape, shapes
from reconciler.observe import NodeView, Tenant
from reconciler.placement import preempt, refusals
from reconciler.placement.draft import Draft
from reconciler.placement.refusals import Unschedulable, one_line
from reconciler.placement.rejected import Rejected
from reconciler.placement.want import Want
from schemas.formation import Formation
from schemas.replica import RankAssignment, Replica

Tries: TypeAlias = Sequence[tuple[GroupView, Shape]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """Where there will be room once others have ended, and whom that takes who does not drain yet."""

    formed: Formed
    victims: tuple[Tenant, ...] = ()
    why: Unschedulable


class Gang:
    """Finds Macs for all ranks of replicas at once."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def now(self, want: Want, tries: Tries, *, waits: bool) -> Formed | Unschedulable:
        """Place a replica, and count its ranks; or say why not.

        `waits`: what only lacks memory that is on its way back does not fall back on anything less.
        """
        told: list[tuple[Shape, Unschedulable]] = []
        for group, shape in tries:
            stage = self._stage(want, group, shape, _free_now)
            found = form(stage)
            if isinstance(found, Formed):
                self._assign(want, found.ranks)
                return found
            told.append((shape, unschedulable(group, found)))
            if waits and isinstance(form(replace(stage, room=_free_soon)), Formed):
                break
        return _first(told)

    def later(self, want: Want, tries: Tries, why: Unschedulable) -> Later | None:
        """Return where a replica could go once others have ended, and keep that room; None if nowhere.

        Who is lower in priority is made to end where that helps.
        """
        lower = _free_after(want.spec.priority, self._draft.victims)
        for group, shape in tries:
            for room in (_free_soon, lower):
                found = form(self._stage(want, group, shape, room))
                victims = self._victims(want, found) if isinstance(found, Formed) else None
                if isinstance(found, Formed) and victims is not None:
                    for row, victim in victims:
                        if victim.replica not in self._draft.victims:
                            self._draft.end(row, victim)
                    for rank in found.ranks:
                        self._draft.promise(self._row(rank.node), rank.memory.total_bytes)
                    ended = {one.replica: one for _, one in victims}
                    return Later(formed=found, victims=tuple(ended.values()), why=why)
        return None

    def again(self, want: Want, replica: Replica, tries: Tries) -> Formed | Unschedulable:
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
                    for t in table.nodes[table.rows[name]].tenants
                    if t.replica == replica.name
                ),
                size,
            )
            for name, size in old.items()
            if name in table.rows
        }
        for row, size in held.items():
            self._draft.release(row, want.name, size)
        told: list[tuple[Shape, Unschedulable]] = []
        for group, shape in tries:
            # On Macs that are free for it first; on those where it is already, however they are, if need be.
            stage = self._stage(want, group, shape, _free_now)
            found = form(stage)
            if isinstance(found, Unformed):
                found = form(replace(stage, current=frozenset(old)))
            if isinstance(found, Formed):
                self._swap(want, found.ranks, held)
                return found
            told.append((shape, unschedulable(group, found)))
        for row, size in held.items():
            self._draft.assign(row, want.name, size)
        return _first(told)

    def _row(self, node: str) -> int:
        return self._draft.table.rows[node]

    def _swap(self, want: Want, ranks: Sequence[RankAssignment], held: dict[int, int]) -> None:
        """Count the new ranks, and what the old ones hold beyond them until they have ended."""
        self._assign(want, ranks)
        new = {self._row(rank.node): rank.memory.total_bytes for rank in ranks}
        for row, size in held.items():
            self._draft.keep(row, max(0, size - new.get(row, 0)))

    def _assign(self, want: Want, ranks: Sequence[RankAssignment]) -> None:
        for rank in ranks:
            self._draft.assign(self._row(rank.node), want.name, rank.memory.total_bytes)

    def _stage(self, want: Want, group: GroupView, shape: Shape, room: Room) -> Stage:
        rows = self._draft.table.rows
        nodes = {name: self._draft.view(rows[name]) for name in group.members if name in rows}
        return Stage(want=want, group=group, shape=shape, nodes=nodes, room=room)

    def _victims(self, want: Want, formed: Formed) -> list[tuple[int, Tenant]] | None:
        """Return whom to displace so that every rank has room; None if that cannot be had."""
        chosen: dict[str, tuple[int, Tenant]] = {}
        for rank in formed.ranks:
            row = self._row(rank.node)
            node = self._draft.view(row)
            freed = sum(one.bytes for one in node.tenants if one.replica in chosen)
            short = rank.memory.total_bytes - _free_soon(node) - freed
            if short <= 0:
                continue
            others = [one for one in node.tenants if one.replica not in chosen]
            found = preempt.victims_of(others, priority=want.spec.priority, short_bytes=short)
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
            for one in node.tenants
            if one.priority < priority and not one.is_ending and one.replica not in victims
        )
        return _free_soon(node) + sum(lower)

    return room


def tries_of(groups: Sequence[GroupView]) -> Tries:
    """Return what to try on the groups, in order: each as it is declared, then the fallbacks of each."""
    return [
        *((group, shapes(group.spec)[0]) for group in groups),
        *((group, shape) for group in groups for shape in shapes(group.spec)[1:]),
    ]


def unschedulable(group: GroupView, found: Unformed) -> Unschedulable:
    """Return the refusals of a group's members, and its own, as those of a replica."""
    counted = Counter(why for _, why in found.nodes)
    return Unschedulable(
        nodes=found.members,
        tallies=tuple(sorted(refusals.tallies_of(counted.items()), key=refusals.order)),
        refusals=found.nodes[: refusals.SHOWN],
        fitting=found.members - len(found.nodes),
        group=group.name,
        ranks=found.size,
        whole=found.whole,
    )


def _first(told: Sequence[tuple[Shape, Unschedulable]]) -> Unschedulable:
    """Return why the group cannot be formed as it is declared, with a note on what else was tried."""
    (_, first), *others = told
    said = one_line(first)
    notes = [
        f"{shape.title}: {'the same' if one_line(why) == said else one_line(why)}"
        for shape, why in others
    ]
    return first.noting("; ".join(notes)) if notes else first


def no_such_group(name: str) -> Unschedulable:
    """Return the refusal of a group that is not there."""
    message = "there is no such group; apply its manifest, or name another in spec.sharding"
    return _of_all(name, Rejected(reason="NoSuchGroup", message=message))


def given_up(formation: Formation, replica: str, epoch: Epoch) -> Unschedulable:
    """Return why there is no next epoch: everything that the group may run has failed."""
    what = f"fallback {formation.fallback}" if formation.fallback else "it"
    message = (
        f"{what} failed {TRIES} times in a row as {replica}, and there is no further fallback; at last "
        f"{epoch.message or epoch.over}. It is not started again until the deployment changes, or by "
        f"`fleetctl rollout restart`"
    )
    return _of_all(formation.group, Rejected(reason=refusals.CRASH_LOOPING, message=message))


def _of_all(name: str, why: Rejected) -> Unschedulable:
    return Unschedulable(nodes=0, tallies=(), refusals=(), group=name, whole=why)
