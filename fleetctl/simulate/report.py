"""The report of a simulation: each step as text and as a tree, and which single Mac the fleet may lose. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleetctl.output.printers import align_columns
from fleetctl.simulate.simulated_fleet import (
    FleetSnapshot,
    MissingReplicas,
    NodeUsage,
    ReplicaPlace,
    natural_key,
)
from insight.mac_blocks import MacBlock, MacEntry, blocks_text
from manifests.trees import Tree
from schemas import duration


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationStep:
    """An event, and the state of the fleet after it."""

    event: str
    """Text such as "power loss of studio-1"."""
    took_s: float
    """Seconds from the event to the last change of the serving replicas."""
    state: FleetSnapshot
    before: FleetSnapshot | None = None
    """None for the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMove:
    """A replica that started, moved or was lost."""

    deployment: str
    before: ReplicaPlace | None
    after: ReplicaPlace | None
    because: str = ""
    """The cause, as the end of a sentence; empty if there is none to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutcome:
    """The state of the fleet after the loss of one Mac."""

    node: str
    step: SimulationStep

    @property
    def not_placed(self) -> tuple[MissingReplicas, ...]:
        """Return the deployments that have fewer replicas than before the loss."""
        assert self.step.before is not None
        before = {replicas.deployment: replicas.missing for replicas in self.step.before.missing}
        return tuple(
            replicas
            for replicas in self.step.state.missing
            if replicas.missing > before.get(replicas.deployment, 0)
        )

    @property
    def interrupted(self) -> tuple[str, ...]:
        """Return the deployments of which every replica that answered was on this Mac."""
        assert self.step.before is not None
        nodes: dict[str, set[str]] = {}
        for place in self.step.before.places:
            if place.is_serving:
                nodes.setdefault(place.deployment, set()).add(place.node)
        return tuple(sorted(name for name, found in nodes.items() if found == {self.node}))


def replica_moves(step: SimulationStep) -> list[ReplicaMove]:
    """Return all changes; a lost and a new replica of one deployment count as a move."""
    if step.before is None:
        return []
    previous = {place.uid: place for place in step.before.places}
    current = {place.uid: place for place in step.state.places}
    removed = sorted((p for uid, p in previous.items() if uid not in current), key=_by_replica)
    added = sorted((p for uid, p in current.items() if uid not in previous), key=_by_replica)
    newcomers = tuple(added)
    moves: list[ReplicaMove] = []
    for place in removed:
        same = [p for p in added if p.deployment == place.deployment]
        # Prefer the same name: a replica that is moved off a lost node keeps its name.
        to = min(same, key=lambda p: (p.replica != place.replica, p.replica), default=None)
        if to is not None:
            added.remove(to)
        because = _cause(step, place, newcomers)
        moves.append(
            ReplicaMove(deployment=place.deployment, before=place, after=to, because=because)
        )
    moves.extend(ReplicaMove(deployment=p.deployment, before=None, after=p) for p in added)
    return sorted(moves, key=lambda move: _by_replica(move.before or move.after))


def _cause(step: SimulationStep, place: ReplicaPlace, newcomers: Sequence[ReplicaPlace]) -> str:
    """Return why a replica left its Mac."""
    node = next((usage for usage in step.state.nodes if usage.name == place.node), None)
    if node is not None and not node.is_ready:
        return f"{place.node} is lost"
    reason, _, message = step.state.causes.get(place.uid, "").partition(": ")
    if reason == "Preempted":
        taken = [newcomer.replica for newcomer in newcomers if newcomer.node == place.node]
        by = f" by {', '.join(taken)}" if taken else ""
        return f"displaced{by}: {message}"
    return ": ".join(filter(None, (reason, message)))


def lost_places(step: SimulationStep) -> list[ReplicaPlace]:
    """Return replicas that served before and still exist, but no longer serve."""
    if step.before is None:
        return []
    served = {place.uid for place in step.before.places if place.is_serving}
    return [p for p in step.state.places if p.uid in served and not p.is_serving]


def step_text(step: SimulationStep) -> str:
    """Return a step as text: after the first one, only what it changed."""
    parts = [f"{step.event}: {_headline(step)}"]
    moves = replica_moves(step)
    if step.before is None:
        parts.append(blocks_text([_block(node, step.state.places) for node in step.state.nodes]))
    else:
        sentences = [*map(_move_sentence, moves), *map(_stranded_sentence, lost_places(step))]
        parts.append("\n".join(sentences) or "Nothing moved.")
        parts.append(_changes_text(step))
    parts.append(_missing_text(step.state.missing))
    return "\n\n".join(part for part in parts if part) + "\n"


def _changes_text(step: SimulationStep) -> str:
    """Return the blocks of the Macs that the step changed, and the number of others."""
    assert step.before is not None
    known = {node.name: node for node in step.before.nodes}
    changed: list[MacBlock] = []
    for node in step.state.nodes:
        block = _block(node, step.state.places, before=step.before.places)
        old = known.get(node.name)
        if block.has_changed or old is None or old.is_ready != node.is_ready:
            changed.append(block)
    others = len(step.state.nodes) - len(changed)
    if not changed:
        return ""
    return f"{blocks_text(changed)}\n\n{_count(others, 'other Mac')} unchanged."


def _block(
    node: NodeUsage,
    places: Iterable[ReplicaPlace],
    *,
    before: Iterable[ReplicaPlace] | None = None,
) -> MacBlock:
    """Return the block of a Mac; with `before`, replicas that came and went are marked."""
    here = {place.uid: place for place in places if place.node == node.name}
    past = (
        here
        if before is None
        else {
            replica_place.uid: replica_place
            for replica_place in before
            if replica_place.node == node.name
        }
    )
    entries = [
        MacEntry(
            label=one.replica,
            size_bytes=one.memory_bytes,
            mark="+" if uid not in past else "",
            note="" if one.is_serving else "does not answer",
        )
        for uid, one in here.items()
    ]
    entries += [
        MacEntry(label=one.replica, size_bytes=one.memory_bytes, mark="-")
        for uid, one in past.items()
        if uid not in here
    ]
    return MacBlock(
        name=node.name,
        chip=node.chip,
        offered_bytes=node.offered_bytes,
        reserved_bytes=node.reserved_bytes,
        entries=tuple(sorted(entries, key=lambda entry: (natural_key(entry.label), entry.mark))),
        is_ready=node.is_ready,
    )


def step_tree(step: SimulationStep) -> dict[str, Tree]:
    """Return a step for `-o json` and `-o yaml`."""
    nodes = {node.name: node for node in step.state.nodes}
    return {
        "event": step.event,
        "tookSeconds": round(step.took_s, 1),
        "isQuiet": step.state.is_quiet,
        "nodes": [_node_tree(node, step.state.places) for node in step.state.nodes],
        "placements": [
            {
                "deployment": place.deployment,
                "replica": place.replica,
                "node": place.node,
                "memoryBytes": place.memory_bytes,
                "shareOfNode": round(place.memory_bytes / nodes[place.node].offered_bytes, 3),
                "answers": place.is_serving,
            }
            for place in step.state.places
        ],
        "missing": [_missing_tree(replicas) for replicas in step.state.missing],
        "moves": [
            {
                "deployment": move.deployment,
                "from": _place_tree(move.before),
                "to": _place_tree(move.after),
                "because": move.because,
            }
            for move in replica_moves(step)
        ],
        "lost": [place.replica for place in lost_places(step)],
    }


def _node_tree(node: NodeUsage, places: Iterable[ReplicaPlace]) -> Tree:
    block = _block(node, places)
    return {
        "node": node.name,
        "chip": node.chip,
        "isReady": node.is_ready,
        "memoryBytes": node.offered_bytes,
        "reservedBytes": node.reserved_bytes,
        "usedBytes": block.used_bytes,
        "freeBytes": block.free_bytes,
    }


def _missing_tree(one: MissingReplicas) -> Tree:
    return {
        "deployment": one.deployment,
        "missing": one.missing,
        "wanted": one.wanted,
        "why": one.why,
    }


def losses_text(losses: Sequence[LossOutcome]) -> str:
    """Return which single Mac the fleet may lose."""
    rows = [
        (
            loss.node,
            "no" if loss.not_placed else "yes",
            ", ".join(_share_text(replicas) for replicas in loss.not_placed) or "-",
            ", ".join(loss.interrupted) or "-",
            duration.show(loss.step.took_s) if loss.step.took_s > 0 else "-",
        )
        for loss in losses
    ]
    safe = sum(not loss.not_placed for loss in losses)
    titles = ("MAC", "MAY BE LOST", "NOT PLACED WITHOUT IT", "INTERRUPTED", "TOOK")
    parts = [
        f"Which single Mac may I lose? {safe} of {len(losses)}",
        align_columns(rows, titles),
        "\n".join(
            f"{loss.node}: {_missing_text(loss.not_placed)}" for loss in losses if loss.not_placed
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def loss_tree(loss: LossOutcome) -> dict[str, Tree]:
    """Return the loss of a Mac for `-o json` and `-o yaml`."""
    return {
        "node": loss.node,
        "mayBeLost": not loss.not_placed,
        "notPlaced": [_missing_tree(replicas) for replicas in loss.not_placed],
        "interrupted": list(loss.interrupted),
        "tookSeconds": round(loss.step.took_s, 1),
    }


def _share_text(one: MissingReplicas) -> str:
    return f"{one.missing} of {one.wanted} {one.deployment}"


def _by_replica(place: ReplicaPlace | None) -> tuple[str, str]:
    return ("", "") if place is None else (place.deployment, place.replica)


def _headline(step: SimulationStep) -> str:
    serving = sum(place.is_serving for place in step.state.places)
    count = f"{serving} of {step.state.wanted} replicas answer"
    if not step.state.is_quiet:
        return f"{count}; the fleet still changed after a day"
    return f"{count} after {duration.show(step.took_s)}" if step.took_s > 0 else count


def _missing_text(missing: Iterable[MissingReplicas]) -> str:
    return "\n".join(
        f"{replicas.deployment}: {replicas.missing} of {replicas.wanted} replicas missing: {replicas.why}"
        for replicas in missing
    )


def _move_sentence(move: ReplicaMove) -> str:
    before, after = move.before, move.after
    if before is None:
        assert after is not None
        return f"{after.replica} starts on {after.node}"
    why = f" ({move.because})" if move.because else ""
    if after is None:
        return f"{before.replica} ends on {before.node}, and is not replaced{why}"
    name = (
        before.replica
        if before.replica == after.replica
        else f"{before.replica}, now {after.replica},"
    )
    return f"{name} moves from {before.node} to {after.node}{why}"


def _stranded_sentence(place: ReplicaPlace) -> str:
    return f"{place.replica} is lost with {place.node}, and no other node can take it"


def _place_tree(place: ReplicaPlace | None) -> Tree:
    return None if place is None else {"replica": place.replica, "node": place.node}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
