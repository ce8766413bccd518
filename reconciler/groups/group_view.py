"""ShardGroups as the planner sees them: members, shapes to try, and the form of a placed replica. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from reconciler.placement.inputs import PlacementRequest
from schemas.formation import GoldenAnswer
from schemas.node import NodeStatus
from schemas.shardgroup import Backend, Parallelism, ShardGroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One ShardGroup with the reports of its members."""

    name: str
    spec: ShardGroupSpec
    members: tuple[str, ...]
    """Its nodes: in rank order if it lists them, else those that its selector matches, by name."""
    machines: Mapping[str, NodeStatus] = field(default_factory=dict)
    """Node statuses of the members, for their cables; a member that never reported is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """One way to run on a group: as declared, or one of its fallbacks."""

    fallback: int = 0
    """0 for the declared shape, n for the n-th fallback."""
    size: int
    parallelism: str
    """Tensor, Pipeline or Auto."""
    model: str = ""
    """Folder of another model; empty for the deployment's own."""

    @property
    def title(self) -> str:
        return f"fallback {self.fallback}" if self.fallback else "as declared"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupForm:
    """The form in which the ranks of a replica work together: a Formation without its secret and its start time."""

    group: str
    backend: Backend
    parallelism: Parallelism
    port: int
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables of every rank, by name."""
    fallback: int = 0
    model: str
    """Folder of the model that runs."""
    fits_single: bool = False
    """True if the Mac of rank 0 has room for the whole model."""
    golden: GoldenAnswer | None = None
    """Golden answer of an earlier epoch of this model."""

    def with_golden(self, golden: GoldenAnswer | None) -> "GroupForm":
        """Return a copy with the golden answer that the next epoch is checked against."""
        return replace(self, golden=golden)


def group_shapes(spec: ShardGroupSpec) -> tuple[GroupShape, ...]:
    """Return the shapes of a group in the order in which they are tried; at least one."""
    own = GroupShape(size=spec.wanted_size, parallelism=spec.parallelism)
    return (
        own,
        *(
            GroupShape(
                fallback=number,
                size=one.size or own.size,
                parallelism=one.parallelism or own.parallelism,
                model=one.model or "",
            )
            for number, one in enumerate(spec.fallbacks, start=1)
        ),
    )


def with_shape(request: PlacementRequest, shape: GroupShape) -> PlacementRequest:
    """Return the request with the shape's model, if the shape has one."""
    if not shape.model:
        return request
    model = request.spec.model.model_copy(update={"path": shape.model, "hub": None})
    return replace(request, spec=request.spec.model_copy(update={"model": model}))


def by_size(groups: Sequence[GroupView]) -> list[GroupView]:
    """Sort groups by their number of Macs, the fewest first."""
    return sorted(groups, key=lambda group: (group.spec.wanted_size, group.name))
