"""From two looks to rows of figures: what is summed over what, and what is not known. Pure.

Rows of figures as people and programs read them. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeAlias, TypeVar

from fleetctl.output import printers
from fleetctl.top.collector import DeploymentCounts, FleetSample, NodeSample, RankSample
from reconciler.demand.gateway_metrics import GatewaySample, VersionMetrics, VersionSample
from schemas import sizes


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


UNKNOWN = Figure(is_whole=False)


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


def node_rows(before: FleetSample, now: FleetSample) -> list[NodeRow]:
    """Return a row for each node, by name."""
    return [_node(node, before, now) for node in sorted(now.nodes, key=lambda one: one.name)]


def model_rows(before: FleetSample, now: FleetSample) -> list[ModelRow]:
    """Return a row for each deployment, by name."""
    return [_model(one, before, now) for one in sorted(now.deployments, key=lambda one: one.name)]


def _node(node: NodeSample, before: FleetSample, now: FleetSample) -> NodeRow:
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


def _model(one: DeploymentCounts, before: FleetSample, now: FleetSample) -> ModelRow:
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
            value=held if queued.value is None and now.gateways else _add(queued.value, held),
            is_whole=queued.is_whole and now.has_all_gateways,
        ),
        requests_per_second=_requests(one.name, before, now),
        tokens_per_second=_sum(heads, _speed(before, now), is_whole=is_whole),
        first_token_s=_first_token(one.name, before, now),
    )


def _figure(value: float | None) -> Figure:
    return UNKNOWN if value is None else Figure(value=value)


def _add(one: float | None, other: float) -> float | None:
    return None if one is None else one + other


def _sum(
    ranks: Sequence[RankSample], value: Callable[[RankSample], float | None], *, is_whole: bool
) -> Figure:
    """Return a sum over ranks; an engine that is starting has no figures, and adds nothing."""
    values = [(rank, value(rank)) for rank in ranks]
    told = [number for _, number in values if number is not None]
    if not told and not is_whole:
        return UNKNOWN
    silent = [rank for rank, number in values if number is None and rank.state == "Ready"]
    if silent and not told:
        return UNKNOWN
    return Figure(value=sum(told), is_whole=is_whole and not silent)


def _speed(before: FleetSample, now: FleetSample) -> Callable[[RankSample], float | None]:
    """Return what tells how many tokens a second a rank made between the looks."""
    was, spent_s = before.ranks(), now.at_s - before.at_s

    def speed(rank: RankSample) -> float | None:
        last = was.get((rank.replica, rank.rank))
        if rank.tokens is None or last is None or last.tokens is None or spent_s <= 0:
            return None
        # Fewer than before: its engine was started again, and counts anew.
        made = rank.tokens - last.tokens if rank.tokens >= last.tokens else rank.tokens
        return made / spent_s

    return speed


def _requests(deployment: str, before: FleetSample, now: FleetSample) -> Figure:
    spent_s = now.at_s - before.at_s
    pairs = list(_pairs(before, now))
    if not pairs or spent_s <= 0:
        return UNKNOWN
    ended = 0.0
    for was, sample in pairs:
        done, had = sample.finished(deployment), was.finished(deployment)
        ended += done - had if done >= had else done
    return Figure(value=ended / spent_s, is_whole=now.has_all_gateways)


def _first_token(deployment: str, before: FleetSample, now: FleetSample) -> Figure:
    measured = VersionMetrics()
    for was, sample in _pairs(before, now):
        for template, version in sample.versions.get(deployment, {}).items():
            last = was.versions.get(deployment, {}).get(template, VersionSample()).measured()
            new = version.measured()
            measured = measured.plus(new.since(last) if new.is_after(last) else new)
    return Figure(value=measured.first_token_quantile(0.5), is_whole=now.has_all_gateways)


def _pairs(before: FleetSample, now: FleetSample) -> Iterable[tuple[GatewaySample, GatewaySample]]:
    """Yield what each gateway said in the look before and in this one."""
    for id_, sample in now.gateways.items():
        if id_ in before.gateways:
            yield before.gateways[id_], sample


UsageRow: TypeAlias = NodeRow | ModelRow
R = TypeVar("R", NodeRow, ModelRow)
_UNKNOWN_TEXT = "?"

# What --sort-by takes, and what of a row it means.
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
    """Return the rows by name, or the largest figure first."""
    if by == "name":
        return sorted(rows, key=lambda row: row.name)
    return sorted(rows, key=lambda row: (getattr(row, orders[by]).rank, row.name))


def node_table(rows: Sequence[NodeRow], *, headers: bool = True) -> str:
    """Return the table of nodes."""
    titles = (
        *("NAME", "MEMORY", "MEMORY%", "MODELS", "MODELS%", "ENGINES"),
        *("IN FLIGHT", "QUEUE", "TOKENS/S"),
    )
    cells = [
        (
            row.name,
            figure_text(row.used_bytes, _size_text),
            _share_text(row.used_bytes, row.total_bytes),
            figure_text(row.models_bytes, _size_text),
            _share_text(row.models_bytes, row.allocatable_bytes),
            figure_text(row.engines, _count_text),
            figure_text(row.in_flight, _count_text),
            figure_text(row.queue, _count_text),
            figure_text(row.tokens_per_second, _rate_text),
        )
        for row in rows
    ]
    return printers.align_columns(cells, titles if headers else ())


def model_table(rows: Sequence[ModelRow], *, headers: bool = True) -> str:
    """Return the table of models."""
    titles = (
        *("NAME", "READY", "MEMORY", "IN FLIGHT", "QUEUE"),
        *("REQUESTS/S", "TOKENS/S", "FIRST TOKEN"),
    )
    cells = [
        (
            row.name,
            f"{row.ready}/{row.wanted}",
            figure_text(row.memory_bytes, _size_text),
            figure_text(row.in_flight, _count_text),
            figure_text(row.queue, _count_text),
            figure_text(row.requests_per_second, _rate_text),
            figure_text(row.tokens_per_second, _rate_text),
            "-" if row.first_token_s.value is None else figure_text(row.first_token_s, _time_text),
        )
        for row in rows
    ]
    return printers.align_columns(cells, titles if headers else ())


def row_tree(row: UsageRow) -> dict[str, object]:
    """Return a row as `-o json` has it: plain units, null for what nobody knows."""
    found: dict[str, object] = {}
    partial = []
    for one in fields(row):
        value = getattr(row, one.name)
        name = _camel(one.name)
        if isinstance(value, Figure):
            found[name] = _plain(value.value)
            if value.value is not None and not value.is_whole:
                partial.append(name)
        else:
            found[name] = value
    # Of these some part is not known: they are at least what they are.
    return {**found, "partial": partial}


def _plain(value: float | None) -> float | None:
    return int(value) if value is not None and float(value).is_integer() else value


def figure_text(figure: Figure, spell: Callable[[float], str]) -> str:
    """Return a figure: `?` if nobody knows it, with a plus if it is at least that much."""
    if figure.value is None:
        return _UNKNOWN_TEXT
    return f"{spell(figure.value)}{'' if figure.is_whole else '+'}"


def _share_text(part: Figure, whole: Figure) -> str:
    if part.value is None or not whole.value:
        return _UNKNOWN_TEXT
    return f"{part.value / whole.value:.0%}"


def _size_text(value: float) -> str:
    return sizes.show(int(value))


def _count_text(value: float) -> str:
    return f"{value:.0f}"


def _rate_text(value: float) -> str:
    return f"{value:.1f}"


def _time_text(value: float) -> str:
    return f"{value * 1000:.0f}ms" if value < 10 else f"{value:.1f}s"


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
