"""ShardGroup: Macs that are cabled into one bigger machine, and how a model is split over them."""

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.deployment import ModelPath
from schemas.meta import ApiModel, ApiObject, Examples, ObjectName, Status
from schemas.pools import NodeSelector

Backend = Literal["ring", "jaccl", "jaccl-ring"]
Parallelism = Literal["Tensor", "Pipeline"]

MOST_RANKS = 16
MOST_JACCL_RANKS = 8
FIRST_PORT = 20000
# What the fleet says itself: from a person it would only contradict.
_OURS = frozenset(
    {
        *("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING"),
        *("JACCL_RANK", "JACCL_IBV_DEVICES", "JACCL_COORDINATOR", "JACCL_RING"),
    }
)


def _numeric(address: str) -> str:
    """Refuse what MLX cannot connect to: to its ring all before the first colon is the address."""
    try:
        ipaddress.IPv4Address(address)
    except ValueError as error:
        raise ValueError(
            "is no IPv4 address such as 10.0.0.1; MLX's ranks know neither names nor IPv6"
        ) from error
    return address


Address = Annotated[
    str,
    StringConstraints(max_length=45),
    AfterValidator(_numeric),
    Examples(("10.0.0.1", "169.254.12.7", "192.168.1.20")),
]
Device = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,32}$")]


def _not_ours(environment: dict[str, str]) -> dict[str, str]:
    said = sorted(_OURS & environment.keys())
    if said:
        raise ValueError(
            f"sets {', '.join(said)}, which the fleet derives from the members itself; remove it"
        )
    return environment


Variable = Annotated[str, StringConstraints(pattern=r"^(MLX|JACCL)_[A-Z0-9_]{1,60}$")]
Environment = Annotated[
    dict[Variable, Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00]*$")]],
    AfterValidator(_not_ours),
]
Size = Annotated[int, Field(ge=2, le=MOST_RANKS)]


class GroupMember(ApiModel):
    """One Mac of a group; its place in the list is its rank."""

    node: ObjectName
    """The node."""
    addresses: tuple[Address, ...] = ()
    """Its addresses on the cables of the group, one per link; several are used side by side. Left out, the
    address that its agent reports."""
    rdma: dict[ObjectName, tuple[Device, ...]] = Field(default_factory=dict)
    """Its RDMA devices towards each other member, such as {studio-2: [rdma_en5]}. Left out, what agents report."""


class Fallback(ApiModel):
    """What to run instead while the group cannot be formed as it is; what is left out stays as it is."""

    parallelism: Parallelism | None = None
    """Another way to split the model."""
    size: Size | None = None
    """Fewer Macs."""
    model: ModelPath | None = None
    """A smaller model's folder, such as the same in 4 bits."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.parallelism is None and self.size is None and self.model is None:
            raise ValueError("is like the group itself; write parallelism, size or model")
        return self


class ShardGroupSpec(ApiModel):
    """Which Macs are cabled into one, and how they work together."""

    members: Annotated[tuple[GroupMember, ...], Field(max_length=64)] = ()
    """The Macs in rank order; those beyond `size` are spares."""
    selector: NodeSelector | None = None
    """Instead of members: any Macs that fit, `size` of them at a time."""
    size: Size | None = None
    """Over how many Macs a model is split; left out, over all members."""
    backend: Backend = "ring"
    """How they talk: `ring` over TCP works anywhere; `jaccl` is RDMA over Thunderbolt 5 with a cable between any
    two Macs, `jaccl-ring` with cables in a circle."""
    parallelism: Literal["Tensor", "Pipeline", "Auto"] = "Auto"
    """Tensor splits every layer, and is faster; Pipeline gives each Mac whole layers, in proportion to its memory.
    Auto takes Tensor where model and Macs allow it."""
    allow_unequal: bool = False
    """Tensor among Macs of unequal chips or memory: each then does as much as the weakest."""
    environment: Environment = Field(default_factory=dict)
    """Variables for every rank, such as MLX_METAL_FAST_SYNCH, which is off unless it is set here."""
    port: Annotated[int, Field(ge=1024, le=57_000)] = FIRST_PORT
    """Ranks listen to each other on ports from here to 8,192 above; each new epoch takes others."""
    fallbacks: Annotated[tuple[Fallback, ...], Field(max_length=8)] = ()
    """What to run while the group cannot be formed as it is, in order."""
    reservation: Literal["Shared", "Exclusive"] = "Shared"
    """Exclusive keeps single-Mac replicas off the members; Shared lets them in."""

    @model_validator(mode="after")
    def _names_its_macs(self) -> Self:
        if self.members and self.selector is not None:
            raise ValueError("has members and a selector; remove one of them")
        if not self.members and self.selector is None:
            raise ValueError(
                "names no Macs; write members in rank order, or a selector ({} takes any Mac) and a size"
            )
        if self.selector is not None and self.size is None:
            raise ValueError("has a selector and no size; say over how many Macs a model is split")
        if self.members and len(self.members) < (self.size or 2):
            raise ValueError(
                f"has {len(self.members)} members, and a group of {self.size or 2} needs as many; "
                "add members or make size smaller"
            )
        if self.wanted_size > MOST_RANKS:
            raise ValueError(
                f"splits over {self.wanted_size} Macs, and {MOST_RANKS} are the most; write a smaller size, "
                "and the other members are spares"
            )
        if self.backend != "ring" and self.wanted_size > MOST_JACCL_RANKS:
            raise ValueError(
                f"splits over {self.wanted_size} Macs, and JACCL connects {MOST_JACCL_RANKS} at most; write "
                "backend: ring, or a smaller size"
            )
        return self

    @property
    def wanted_size(self) -> int:
        """Return over how many Macs a model is split if all is well."""
        return self.size or len(self.members)


class ShardGroupStatus(Status):
    """What is true of a group."""

    members: int = 0
    """Macs that belong to it now: as listed, or as the selector finds them."""
    ready_members: int = 0
    """Members whose agent is alive."""
    replicas: tuple[ObjectName, ...] = ()
    """Replicas that run on it."""


class ShardGroup(ApiObject):
    """Macs that are cabled into one bigger machine."""

    kind: Literal["ShardGroup"] = "ShardGroup"
    spec: ShardGroupSpec
    """Which Macs are cabled into one."""
    status: ShardGroupStatus | None = None
    """What is true; written by the reconciler."""
