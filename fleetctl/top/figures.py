"""From two looks to rows of figures: what is summed over what, and what is not known. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fleetctl.top.seen import Deployed, Look, NodeSeen, Rank
from reconciler.demand.exposition import Sample, VersionSample
from reconciler.demand.measured import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number, as far as it is known."""

    value: float | None = None
    """None if nobody said anything."""
    is_whole: bool = True
    """Whether everybody who is part of it has said so; else it is at least this."""

    @property
    def rank(self) -> float:
        """Return by what the largest come first, and those that nobody knows last."""
        return float("inf") if self.value is None else -self.value


NOTHING = Figure(is_whole=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """What one node uses and does."""

    name: str
    used_bytes: Figure
    total_bytes: Figure
    models_bytes: Figure
    """What its engines hold in MLX's arrays."""
    allocatable_bytes: Figure
    engines: Figure
    """Those that take requests."""
    in_flight: Figure
    queue: Figure
    tokens_per_second: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """What one deployment uses and does."""

    name: str
    ready: int
    wanted: int
    memory_bytes: Figure
    in_flight: Figure
    """Sequences that engines work on."""
    queue: Figure
    """Requests that wait in engines, or at gateways because nothing is ready."""
    requests_per_second: Figure
    """That ended, however they did."""
    tokens_per_second: Figure
    first_token_s: Figure
    """The median of streams since the look before; None if there were none."""


def nodes(before: Look, now: Look) -> list[NodeRow]:
    """Return a row for each node, by name."""
    return [_node(node, before, now) for node in sorted(now.nodes, key=lambda one: one.name)]


def models(before: Look, now: Look) -> list[ModelRow]:
    """Return a row for each deployment, by name."""
    return [_model(one, before, now) for one in sorted(now.deployments, key=lambda one: one.name)]


def _node(node: NodeSeen, before: Look, now: Look) -> NodeRow:
    memory, known = node.memory, node.is_known
    # Of a replica's ranks the first one tells of requests: what the others say of them is the same.
    heads = [rank for rank in node.ranks if rank.rank == 0]
    used = None if memory is None else memory.total_bytes - memory.available_bytes
    return NodeRow(
        name=node.name,
        used_bytes=_figure(used),
        total_bytes=_figure(None if memory is None else memory.total_bytes),
        models_bytes=_sum(node.ranks, lambda rank: rank.active_bytes, is_whole=known),
        allocatable_bytes=_figure(None if memory is None else memory.allocatable_bytes),
        engines=_sum(node.ranks, lambda rank: float(rank.state == "Ready"), is_whole=known),
        in_flight=_sum(heads, lambda rank: rank.in_flight, is_whole=known),
        queue=_sum(heads, lambda rank: rank.waiting, is_whole=known),
        tokens_per_second=_sum(heads, _speed(before, now), is_whole=known),
    )


def _model(one: Deployed, before: Look, now: Look) -> ModelRow:
    known = now.ranks()
    places = [
        (replica, number)
        for replica, placed in now.replicas.items()
        if placed.deployment == one.name
        for number in range(len(placed.nodes))
    ]
    ranks = [known[place] for place in places if place in known]
    is_whole = len(ranks) == len(places)
    heads = [rank for rank in ranks if rank.rank == 0]
    held = sum(sample.waiting.get(one.name, 0) for sample in now.gateways.values())
    queued = _sum(heads, lambda rank: rank.waiting, is_whole=is_whole)
    return ModelRow(
        name=one.name,
        ready=one.ready,
        wanted=one.wanted,
        memory_bytes=_sum(ranks, lambda rank: rank.active_bytes, is_whole=is_whole),
        in_flight=_sum(heads, lambda rank: rank.in_flight, is_whole=is_whole),
        queue=Figure(
            value=held if queued.value is None and now.gateways else _plus(queued.value, held),
            is_whole=queued.is_whole and now.has_all_gateways,
        ),
        requests_per_second=_requests(one.name, before, now),
        tokens_per_second=_sum(heads, _speed(before, now), is_whole=is_whole),
        first_token_s=_first_token(one.name, before, now),
    )


def _figure(value: float | None) -> Figure:
    return NOTHING if value is None else Figure(value=value)


def _plus(one: float | None, other: float) -> float | None:
    return None if one is None else one + other


def _sum(ranks: Sequence[Rank], value: Callable[[Rank], float | None], *, is_whole: bool) -> Figure:
    """Return a sum over ranks; an engine that is starting has no figures, and adds nothing."""
    values = [(rank, value(rank)) for rank in ranks]
    told = [number for _, number in values if number is not None]
    if not told and not is_whole:
        return NOTHING
    silent = [rank for rank, number in values if number is None and rank.state == "Ready"]
    if silent and not told:
        return NOTHING
    return Figure(value=sum(told), is_whole=is_whole and not silent)


def _speed(before: Look, now: Look) -> Callable[[Rank], float | None]:
    """Return what tells how many tokens a second a rank made between the looks."""
    was, spent_s = before.ranks(), now.at_s - before.at_s

    def speed(rank: Rank) -> float | None:
        last = was.get((rank.replica, rank.rank))
        if rank.tokens is None or last is None or last.tokens is None or spent_s <= 0:
            return None
        # Fewer than before: its engine was started again, and counts anew.
        made = rank.tokens - last.tokens if rank.tokens >= last.tokens else rank.tokens
        return made / spent_s

    return speed


def _requests(deployment: str, before: Look, now: Look) -> Figure:
    spent_s = now.at_s - before.at_s
    pairs = list(_pairs(before, now))
    if not pairs or spent_s <= 0:
        return NOTHING
    ended = 0.0
    for was, sample in pairs:
        done, had = sample.finished(deployment), was.finished(deployment)
        ended += done - had if done >= had else done
    return Figure(value=ended / spent_s, is_whole=now.has_all_gateways)


def _first_token(deployment: str, before: Look, now: Look) -> Figure:
    measured = Measured()
    for was, sample in _pairs(before, now):
        for template, version in sample.versions.get(deployment, {}).items():
            last = was.versions.get(deployment, {}).get(template, VersionSample()).measured()
            new = version.measured()
            measured = measured.plus(new.since(last) if new.is_after(last) else new)
    return Figure(value=measured.first_token_quantile(0.5), is_whole=now.has_all_gateways)


def _pairs(before: Look, now: Look) -> Iterable[tuple[Sample, Sample]]:
    """Yield what each gateway said in the look before and in this one."""
    for id_, sample in now.gateways.items():
        if id_ in before.gateways:
            yield before.gateways[id_], sample
