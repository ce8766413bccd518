"""What the planner sees of a ShardGroup: its Macs, and what is run on it if not all is well. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from reconciler.placement.inputs import PlacementRequest
from schemas.formation import GoldenAnswer
from schemas.node import NodeStatus
from schemas.shardgroup import Backend, Parallelism, ShardGroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One ShardGroup as it is now."""

    name: str
    spec: ShardGroupSpec
    members: tuple[str, ...]
    """Its nodes: in rank order as they are listed, else by name as its selector finds them."""
    machines: Mapping[str, NodeStatus] = field(default_factory=dict)
    """What the members' agents report, for the cables; one that never reported is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """One way to run on a group: as it is declared, or one of its fallbacks."""

    fallback: int = 0
    """0 as it is declared, n its n-th fallback."""
    size: int
    parallelism: str
    """Tensor, Pipeline or Auto."""
    model: str = ""
    """The folder of another model; empty for the deployment's own."""

    @property
    def title(self) -> str:
        return f"fallback {self.fallback}" if self.fallback else "as declared"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupForm:
    """How the ranks of a replica are to work together: all of a Formation that is decided, not drawn."""

    group: str
    backend: Backend
    parallelism: Parallelism
    port: int
    environment: tuple[tuple[str, str], ...] = ()
    """Variables for every rank, by name."""
    fallback: int = 0
    model: str
    """The folder of the model that is run."""
    fits_single: bool = False
    """Whether the Mac of rank 0 has room for the whole model."""
    golden: GoldenAnswer | None = None
    """What an epoch of this model answered before."""

    def with_golden(self, golden: GoldenAnswer | None) -> "GroupForm":
        """Return the same with an answer to check the next one by."""
        return replace(self, golden=golden)


def group_shapes(spec: ShardGroupSpec) -> tuple[GroupShape, ...]:
    """Return what is run on the group, in the order in which it is tried; never nothing."""
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


def with_shape(want: PlacementRequest, shape: GroupShape) -> PlacementRequest:
    """Return the want with the shape's model in place of its own, if it has one."""
    if not shape.model:
        return want
    model = want.spec.model.model_copy(update={"path": shape.model})
    return replace(want, spec=want.spec.model_copy(update={"model": model}))


def by_size(groups: Sequence[GroupView]) -> list[GroupView]:
    """Return the groups by how many Macs they take, the fewest first."""
    return sorted(groups, key=lambda group: (group.spec.wanted_size, group.name))
