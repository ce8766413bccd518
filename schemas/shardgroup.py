"""ShardGroup: Macs that are cabled into one larger machine, and how a model is split over them."""

import ipaddress
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.duration import PositiveDuration, at_least
from schemas.meta import ApiModel, ApiObject, Examples, ModelPath, ObjectName, Status
from schemas.pools import NodeSelector

Backend = Literal["ring", "jaccl", "jaccl-ring"]
Parallelism = Literal["Tensor", "Pipeline"]

MOST_RANKS = 16
MOST_JACCL_RANKS = 8
FIRST_PORT = 20000
# The fleet sets these itself; a user's value could only contradict it.
_OURS = frozenset(
    {
        *("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING"),
        *("JACCL_RANK", "JACCL_IBV_DEVICES", "JACCL_COORDINATOR", "JACCL_RING"),
    }
)


def _numeric(address: str) -> str:
    """Refuse addresses that MLX cannot connect to: its ring splits at the first colon."""
    try:
        ipaddress.IPv4Address(address)
    except ValueError as error:
        raise ValueError(
            "is not an IPv4 address such as 10.0.0.1; MLX's ranks support neither names nor IPv6"
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
    reserved = sorted(_OURS & environment.keys())
    if reserved:
        raise ValueError(
            f"sets {', '.join(reserved)}, which the fleet derives from the members itself; remove it"
        )
    return environment


Variable = Annotated[str, StringConstraints(pattern=r"^(MLX|JACCL)_[A-Z0-9_]{1,60}$")]
VariableValue = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00]*$")]
Environment = Annotated[
    dict[Variable, VariableValue],
    AfterValidator(_not_ours),
]
Size = Annotated[int, Field(ge=2, le=MOST_RANKS)]


class GroupMember(ApiModel):
    """One Mac of a group; its position in the list is its rank."""

    node: ObjectName
    """The node."""
    addresses: tuple[Address, ...] = ()
    """Its addresses on the cables of the group, one per link; several are used in parallel. Default: the address
    that its agent reports, which is mostly one of a shared network (see allowUnencryptedRing)."""
    rdma: dict[ObjectName, tuple[Device, ...]] = Field(default_factory=dict)
    """Its RDMA devices towards each other member, such as {studio-2: [rdma_en5]}. Default: as agents report."""


class Fallback(ApiModel):
    """A variant to run while the group cannot be formed as declared; fields that are left out stay the same."""

    parallelism: Parallelism | None = None
    """Another way to split the model."""
    size: Size | None = None
    """Fewer Macs."""
    model: ModelPath | None = None
    """The folder of a smaller model, such as the same one in 4 bits."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.parallelism is None and self.size is None and self.model is None:
            raise ValueError("is the same as the group itself; write parallelism, size or model")
        return self


CheckInterval = Annotated[
    PositiveDuration,
    at_least("10m", "a check takes the cables for up to minutes"),
    Examples(("10m", "24h")),
]


class FabricPolicy(ApiModel):
    """Regular checks of the group's cables."""

    check_interval: CheckInterval = "24h"
    """Time between two checks, from 10m. A check waits, or ends, while a replica is placed on the group."""


class ShardGroupSpec(ApiModel):
    """The Macs of a group, and how they work together."""

    members: Annotated[tuple[GroupMember, ...], Field(max_length=64)] = ()
    """The Macs in rank order; those beyond `size` are spares."""
    selector: NodeSelector | None = None
    """Instead of members: any Macs that match, `size` of them at a time."""
    size: Size | None = None
    """Number of Macs that a model is split over. Default: all members."""
    backend: Backend = "ring"
    """The transport: `ring` over TCP works everywhere; `jaccl` is RDMA over Thunderbolt 5 with a cable between
    any two Macs, `jaccl-ring` with cables in a circle."""
    parallelism: Literal["Tensor", "Pipeline", "Auto"] = "Auto"
    """Tensor splits every layer, and is faster; Pipeline gives each Mac whole layers, in proportion to its memory.
    Auto takes Tensor where model and Macs allow it."""
    allow_unequal: bool = False
    """Allow Tensor on Macs of unequal chips or memory: each then works at the pace of the weakest."""
    environment: Environment = Field(default_factory=dict)
    """Variables for every rank, such as MLX_METAL_FAST_SYNCH, which is off unless it is set here."""
    port: Annotated[int, Field(ge=1024, le=57_000)] = FIRST_PORT
    """Ranks listen on ports from here to 8,192 above; each new epoch takes others."""
    fallbacks: Annotated[tuple[Fallback, ...], Field(max_length=8)] = ()
    """Variants to run while the group cannot be formed as declared, in order."""
    allow_unencrypted_ring: bool = False
    """Allow ranks to listen on a network that other machines share. They neither encrypt prompts nor authenticate each
    other, so they otherwise listen on Thunderbolt, link-local and loopback addresses only."""
    reservation: Literal["Shared", "Exclusive"] = "Shared"
    """Exclusive keeps single-Mac replicas off the members; Shared allows them."""
    fabric: FabricPolicy | None = None
    """Regular checks of the cables. Default: none; `fleetctl fabric bench` measures at once."""

    @model_validator(mode="after")
    def _names_its_macs(self) -> Self:
        if self.members and self.selector is not None:
            raise ValueError("has members and a selector; remove one of them")
        if not self.members and self.selector is None:
            raise ValueError(
                "names no Macs; write members in rank order, or a selector ({} takes any Mac) and a size"
            )
        if self.selector is not None and self.size is None:
            raise ValueError(
                "has a selector and no size; write the number of Macs to split a model over"
            )
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
        """Return the number of Macs that a model is split over when all are available."""
        return self.size or len(self.members)


MOST_CHECKS = 30


class FabricCheck(ApiModel):
    """The result of one regular check of a group's cables."""

    at: datetime
    """The end of the check."""
    nodes: tuple[ObjectName, ...]
    """The Macs that took part, in rank order."""
    backend: Backend
    outcome: Literal["Healthy", "Unhealthy", "Failed"]
    """Failed: the check did not finish, and says nothing about the cables."""
    reason: str
    """One CamelCase word for machines."""
    message: str = ""
    """One sentence for people."""
    gb_per_second: float | None = None
    """10^9 bytes of a 64 MB array per second, of the slowest rank; None if the check did not finish."""
    usual_gb_per_second: float | None = None
    """Median speed of the earlier healthy checks of the same Macs; None if there are fewer than three."""


class ShardGroupStatus(Status):
    """The observed state of a group."""

    members: int = 0
    """Macs that belong to it now: as listed, or as the selector matches."""
    ready_members: int = 0
    """Members whose agent is alive."""
    replicas: tuple[ObjectName, ...] = ()
    """Replicas that run on it."""
    fabric_checks: Annotated[tuple[FabricCheck, ...], Field(max_length=MOST_CHECKS)] = ()
    """The last regular checks of its cables, the newest last."""


class ShardGroup(ApiObject):
    """Macs that are cabled into one larger machine."""

    kind: Literal["ShardGroup"] = "ShardGroup"
    spec: ShardGroupSpec
    """The Macs of a group, and how they work together."""
    status: ShardGroupStatus | None = None
    """The observed state; written by the reconciler."""
