"""Replica and Endpoint: one complete copy of a model on its way to serving, and where it answers."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.deployment import KvCache, ModelSource
from schemas.formation import Formation, GoldenAnswer, Seat
from schemas.meta import ApiModel, ApiObject, Condition, ObjectName, Status


class MemoryProof(ApiModel):
    """Why a rank fits: what it needs, part by part."""

    weights_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    overhead_bytes: int
    prefix_cache_bytes: int = 0
    """What spec.kvCache.prefixBytes says."""
    adapter_bytes: int = 0
    """Weights of the LoRA adapter."""
    draft_bytes: int = 0
    """Weights, caches and activations of the draft model."""
    override_bytes: int = 0
    """What spec.resources.memory says instead of the sum; 0 if it says nothing."""

    @property
    def overridden(self) -> bool:
        return self.override_bytes > 0

    @property
    def sum_bytes(self) -> int:
        """Return what the parts add up to, whether or not it counts."""
        model = self.weights_bytes + self.kv_cache_bytes + self.activation_bytes
        return model + self.overhead_bytes + self.extra_bytes

    @property
    def extra_bytes(self) -> int:
        """Return what only some deployments ask for: a prefix cache of its own size, an adapter, a draft model."""
        return self.prefix_cache_bytes + self.adapter_bytes + self.draft_bytes

    @property
    def total_bytes(self) -> int:
        return self.override_bytes or self.sum_bytes


class RankAssignment(Seat):
    """One process of the replica and its Mac; the place in the list is the rank."""

    memory: MemoryProof
    """The proof that it fits."""
    layers: int = 0
    """In a Pipeline, how many of the model's layers it has: rank 0 the last ones, the last rank the first."""


class LeavingRank(ApiModel):
    """A rank of an earlier epoch, on a Mac that has another one now, or none."""

    node: ObjectName
    rank: int
    memory_bytes: int
    """What was proven for it."""


class ReplicaSpec(ApiModel):
    """What an agent must run."""

    deployment: ObjectName
    template: str
    """Hash of everything in the deployment's spec that the engine depends on."""
    model: ModelSource
    served_names: tuple[str, ...]
    context_length: int
    concurrency: int
    queue_depth: int | None = None
    kv_cache: KvCache | None = None
    ranks: Annotated[tuple[RankAssignment, ...], Field(min_length=1)]
    formation: Formation | None = None
    """How the ranks work together; None where there is one."""
    leaving: tuple[LeavingRank, ...] = ()
    """Ranks of earlier epochs that may still be there: their memory counts until they have ended."""


class ReplicaStatus(Status):
    """What is true of a replica; computed from its ranks by the reconciler."""


class Replica(ApiObject):
    """One complete copy of a model, assigned to its node."""

    kind: Literal["Replica"] = "Replica"
    spec: ReplicaSpec
    status: ReplicaStatus | None = None


class RankStatus(ApiModel):
    """What the agent says of the rank it runs: condition Ready, and in a group EpochOver once it cannot go on."""

    replica_uid: str
    """The very replica this speaks of; a status of an earlier one of the same name is void."""
    node: ObjectName
    epoch: int = 0
    """The epoch that this speaks of; 0 where there is one rank."""
    golden: GoldenAnswer | None = None
    """What rank 0 answered when this epoch was checked; None before, and from other ranks."""
    restarts: int = 0
    """How often the engine was started again after it had ended by itself."""
    peak_bytes: int = 0
    """Most memory that the engine was seen to take, in coarse steps; 0 if nobody measured."""
    conditions: tuple[Condition, ...] = ()


class EndpointHardware(ApiModel):
    """The Mac that answers, as far as it matters for who is asked."""

    chip: str = ""
    """Such as "Apple M4 Pro"; empty on what is no Mac."""
    gpu_cores: int = 0
    memory_bytes: int = 0
    """All of the machine's memory."""


class EndpointSpec(ApiModel):
    """Where requests go."""

    deployment: ObjectName
    replica_uid: str
    node: ObjectName
    template: str = ""
    """The version of the deployment that answers here."""
    url: str
    """Base address of the engine, such as http://10.0.0.5:4100."""
    served_names: tuple[str, ...]
    site: str = ""
    """The node's label `site`, if its agent was given one."""
    concurrency: int = 0
    """How many requests the engine works on at once; 0 if its agent did not say."""
    parameters: int = 0
    """How many weights the model has, in millions; 0 if nobody knows."""
    hardware: EndpointHardware = EndpointHardware()
    """The Mac of the first rank."""


class Endpoint(ApiObject):
    """Where a ready replica answers; lives as long as its agent's lease."""

    kind: Literal["Endpoint"] = "Endpoint"
    spec: EndpointSpec


def replica_name(deployment: ObjectName, ordinal: int) -> ObjectName:
    """Return the name of a deployment's replica: derived, so that creating it twice collides."""
    return f"{deployment}-{ordinal}"
