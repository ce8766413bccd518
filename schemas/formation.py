"""Formation: how the ranks of one replica work together, from one epoch to the next."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from schemas.meta import ApiModel, ObjectName
from schemas.shardgroup import FIRST_PORT, Backend, Environment, Parallelism


class Seat(ApiModel):
    """One rank's Mac, and how the others reach it; the place in the list is the rank."""

    node: ObjectName
    addresses: tuple[str, ...] = ()
    """Its addresses on the cables of the group, one per link; at least one where there are several ranks."""
    rdma: tuple[tuple[str, ...], ...] = ()
    """Its RDMA devices towards each rank, in rank order and empty towards itself; () for a ring."""
    meeting: str = ""
    """Where every rank reaches this one if it is the first; empty for the first of its addresses. A cable's address
    is known at its two ends alone."""


class Golden(ApiModel):
    """The answer by which a group's is checked before it serves: greedy tokens of a fixed prompt."""

    pieces: tuple[str, ...]
    """The text of each token."""
    logprobs: tuple[float, ...]
    """The natural logarithm of each token's probability."""
    is_reference: bool = False
    """Whether one process made it, alone, with all of the model; else it is an earlier epoch's."""


class Formation(ApiModel):
    """How the ranks of one replica work together. A new epoch is a new start of all of them."""

    group: ObjectName
    """The ShardGroup."""
    epoch: Annotated[int, Field(ge=1)] = 1
    """Counts up with every start of all ranks: one of an older epoch can neither join nor serve."""
    backend: Backend = "ring"
    parallelism: Parallelism = "Tensor"
    port: int = FIRST_PORT
    """The lowest port that ranks of the group listen on (schemas/rendezvous.py says which)."""
    environment: Environment = Field(default_factory=dict)
    """Variables for every rank."""
    secret: str = ""
    """What the ranks of this epoch know each other by; worth nothing once it is over."""
    formed_at: datetime
    """When the epoch began."""
    failures: int = 0
    """Epochs in a row that ended before they had served for a minute."""
    fallback: int = 0
    """What is run: 0 the group as it is declared, n its n-th fallback."""
    because: str = ""
    """Why the epoch before this one ended."""
    fits_single: bool = False
    """Whether the Mac of rank 0 has room for the whole model: then the golden answer is made there first."""
    golden: Golden | None = None
    """What an earlier epoch answered, if there was one of this model."""
