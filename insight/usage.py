"""Usage rows of nodes and models from two samples: what `fleetctl top` answers. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeAlias, TypeVar

from insight.usage_samples import DeploymentCounts, FleetSample, NodeSample, RankSample
from reconciler.deployments.demand.gateway_metrics import (
    GatewaySample,
    VersionMetrics,
    VersionSample,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that may be unknown or incomplete."""

    value: float | None = None
    """None if no process reported it."""
    is_complete: bool = True
    """True if all parts are known; if not, the true value is at least this."""

    @property
    def sort_key(self) -> float:
        """Return a key that sorts the largest first and unknown values last."""
        return float("inf") if self.value is None else -self.value


UNKNOWN = Figure(is_complete=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """Usage of one node."""

    name: str
    used_bytes: Figure
    total_bytes: Figure
    models_bytes: Figure
    """Memory in MLX arrays of the node's engines."""
    allocatable_bytes: Figure
    engines: Figure
    """Engines that accept requests."""
    in_flight: Figure
    queue: Figure
    tokens_per_second: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """Usage of one deployment."""

    name: str
    ready: int
    wanted: int
    memory_bytes: Figure
    in_flight: Figure
    """Sequences that engines generate."""
    queue: Figure
    """Requests that wait in engines, or at gateways because no endpoint is ready."""
    requests_per_second: Figure
    """Requests that ended, in any way."""
    tokens_per_second: Figure
    first_token_s: Figure
    """Median of the streams since the previous sample; None if there were none."""


def node_rows(before: FleetSample, now: FleetSample) -> list[NodeRow]:
    """Return one row per node, sorted by name."""
    return [_node(node, before, now) for node in sorted(now.nodes, key=lambda one: one.name)]


def model_rows(before: FleetSample, now: FleetSample) -> list[ModelRow]:
    """Return one row per deployment, sorted by name."""
    return [
        _model(counts, before, now)
        for counts in sorted(now.deployments, key=lambda deployment: deployment.name)
    ]


def node_reasons(now: FleetSample) -> tuple[str, ...]:
    """Return why values of `node_rows` are unknown, one sentence each; nothing about gateways, which no row counts."""
    return tuple(sorted(reason for found in now.node_reasons.values() for reason in found))


def model_reasons(now: FleetSample) -> tuple[str, ...]:
    """Return why values of `model_rows` are unknown: those of gateways, and those of nodes with replicas of these models."""
    models = {deployment.name for deployment in now.deployments}
    places = {
        node
        for placed in now.replicas.values()
        if placed.deployment in models
        for node in placed.nodes
    }
    gone = places - {node.name for node in now.nodes}
    found = [reason for node in places for reason in now.node_reasons.get(node, ())]
    found += [f"node/{name}: it has replicas, but it is not in the fleet any more" for name in gone]
    return tuple(sorted((*found, *now.gateway_reasons)))


def _node(node: NodeSample, before: FleetSample, now: FleetSample) -> NodeRow:
    memory, known = node.memory, node.is_complete
    # Only rank 0 counts requests; the other ranks of a replica report the same ones.
    heads = [rank for rank in node.ranks if rank.rank == 0]
    used = None if memory is None else memory.total_bytes - memory.available_bytes
    return NodeRow(
        name=node.name,
        used_bytes=_figure(used),
        total_bytes=_figure(None if memory is None else memory.total_bytes),
        models_bytes=_sum(node.ranks, lambda rank: rank.active_bytes, is_complete=known),
        allocatable_bytes=_figure(None if memory is None else memory.allocatable_bytes),
        engines=_sum(node.ranks, lambda rank: float(rank.state == "Ready"), is_complete=known),
        in_flight=_sum(heads, lambda rank: rank.in_flight, is_complete=known),
        queue=_sum(heads, lambda rank: rank.waiting, is_complete=known),
        tokens_per_second=_sum(heads, _speed(before, now), is_complete=known),
    )


def _model(one: DeploymentCounts, before: FleetSample, now: FleetSample) -> ModelRow:
    known = now.ranks()
    places = [
        (replica, number)
        for replica, placed in now.replicas.items()
        if placed.deployment == one.name
        for number in range(len(placed.nodes))
    ]
    ranks = [known[place] for place in places if place in known]
    is_complete = len(ranks) == len(places)
    heads = [rank for rank in ranks if rank.rank == 0]
    waiting_at_gateways = sum(sample.waiting.get(one.name, 0) for sample in now.gateways.values())
    waiting_in_engines = _sum(heads, lambda rank: rank.waiting, is_complete=is_complete)
    return ModelRow(
        name=one.name,
        ready=one.ready,
        wanted=one.wanted,
        memory_bytes=_sum(ranks, lambda rank: rank.active_bytes, is_complete=is_complete),
        in_flight=_sum(heads, lambda rank: rank.in_flight, is_complete=is_complete),
        queue=Figure(
            value=waiting_at_gateways
            if waiting_in_engines.value is None and now.gateways
            else _add(waiting_in_engines.value, waiting_at_gateways),
            is_complete=waiting_in_engines.is_complete and now.has_all_gateways,
        ),
        requests_per_second=_requests(one.name, before, now),
        tokens_per_second=_sum(heads, _speed(before, now), is_complete=is_complete),
        first_token_s=_first_token(one.name, before, now),
    )


def _figure(value: float | None) -> Figure:
    return UNKNOWN if value is None else Figure(value=value)


def _add(one: float | None, other: float) -> float | None:
    return None if one is None else one + other


def _sum(
    ranks: Sequence[RankSample], value: Callable[[RankSample], float | None], *, is_complete: bool
) -> Figure:
    """Return the sum over ranks; a rank whose engine is not ready adds nothing."""
    values = [(rank, value(rank)) for rank in ranks]
    known = [number for _, number in values if number is not None]
    if not known and not is_complete:
        return UNKNOWN
    silent = [rank for rank, number in values if number is None and rank.state == "Ready"]
    if silent and not known:
        return UNKNOWN
    return Figure(value=sum(known), is_complete=is_complete and not silent)


def _speed(before: FleetSample, now: FleetSample) -> Callable[[RankSample], float | None]:
    """Return a function that computes a rank's tokens per second between the samples."""
    before_ranks, elapsed_s = before.ranks(), now.at_s - before.at_s

    def speed(rank: RankSample) -> float | None:
        last = before_ranks.get((rank.replica, rank.rank))
        if rank.tokens is None or last is None or last.tokens is None or elapsed_s <= 0:
            return None
        # A lower count means that the engine restarted and counts from zero.
        generated = rank.tokens - last.tokens if rank.tokens >= last.tokens else rank.tokens
        return generated / elapsed_s

    return speed


def _requests(deployment: str, before: FleetSample, now: FleetSample) -> Figure:
    elapsed_s = now.at_s - before.at_s
    pairs = list(_pairs(before, now))
    if not pairs or elapsed_s <= 0:
        return UNKNOWN
    ended = 0.0
    for was, sample in pairs:
        done, had = sample.finished(deployment), was.finished(deployment)
        ended += done - had if done >= had else done
    return Figure(value=ended / elapsed_s, is_complete=now.has_all_gateways)


def _first_token(deployment: str, before: FleetSample, now: FleetSample) -> Figure:
    measured = VersionMetrics()
    for was, sample in _pairs(before, now):
        for template, version in sample.versions.get(deployment, {}).items():
            last = was.versions.get(deployment, {}).get(template, VersionSample()).measured()
            new = version.measured()
            measured = measured.plus(new.since(last) if new.is_after(last) else new)
    return Figure(value=measured.first_token_quantile(0.5), is_complete=now.has_all_gateways)


def _pairs(before: FleetSample, now: FleetSample) -> Iterable[tuple[GatewaySample, GatewaySample]]:
    """Yield the previous and the current sample of each gateway that has both."""
    for id_, sample in now.gateways.items():
        if id_ in before.gateways:
            yield before.gateways[id_], sample


UsageRow: TypeAlias = NodeRow | ModelRow
R = TypeVar("R", NodeRow, ModelRow)

# Values of --sort-by, and the field of a row that each one sorts by.
NODE_ORDERS: Final[Mapping[str, str]] = {
    "memory": "used_bytes",
    "models": "models_bytes",
    "in-flight": "in_flight",
    "queue": "queue",
    "tokens": "tokens_per_second",
}
MODEL_ORDERS: Final[Mapping[str, str]] = {
    "memory": "memory_bytes",
    "in-flight": "in_flight",
    "queue": "queue",
    "requests": "requests_per_second",
    "tokens": "tokens_per_second",
}


def sort_rows(rows: Sequence[R], orders: Mapping[str, str], by: str) -> list[R]:
    """Return the rows by name, or by a figure with the largest first."""
    if by == "name":
        return sorted(rows, key=lambda row: row.name)
    return sorted(rows, key=lambda row: (getattr(row, orders[by]).sort_key, row.name))


def row_tree(row: UsageRow) -> dict[str, object]:
    """Return a row for `-o json`: plain units, null for unknown values."""
    found: dict[str, object] = {}
    partial = []
    for field in fields(row):
        value = getattr(row, field.name)
        first, *rest = field.name.split("_")
        name = first + "".join(word.capitalize() for word in rest)
        if isinstance(value, Figure):
            found[name] = (
                int(value.value)
                if value.value is not None and float(value.value).is_integer()
                else value.value
            )
            if value.value is not None and not value.is_complete:
                partial.append(name)
        else:
            found[name] = value
    # These values are incomplete: the true ones are at least as large.
    return {**found, "partial": partial}
