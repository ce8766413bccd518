"""Replica: one complete copy of a model, assigned to nodes; and Endpoint: the address where a ready one answers."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from schemas import duration, sizes
from schemas.deployment import ModelSource
from schemas.formation import Formation, GoldenAnswer, Seat
from schemas.kv_cache import KvCache
from schemas.memory import EngineMemory
from schemas.meta import ApiModel, ApiObject, Condition, ObjectName, Status
from schemas.prefixes import PinnedPrefix
from schemas.sampling import Performance, Sampling, UnknownParameters


class MemoryProof(ApiModel):
    """The memory that a rank needs, part by part."""

    weights_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    overhead_bytes: int
    prefix_cache_bytes: int = 0
    """spec.kvCache.prefixBytes."""
    adapter_bytes: int = 0
    """Weights of the LoRA adapter."""
    draft_bytes: int = 0
    """Weights, caches and activations of the draft model."""
    override_bytes: int = 0
    """spec.resources.memory, which replaces the sum; 0 if it is not set."""
    concurrency: int = 0
    """Requests at the same time that it counts: spec.concurrency, or with Auto what the Mac's hardware allows. 0 in the
    proofs of an older release."""
    concurrency_limit: str = ""
    """With Auto, what keeps the number from being higher: MemoryBandwidth, GPUCores or Memory of the Mac; Most (64);
    Least (4, which cost hardly more than one); UnknownHardware; StatedMemory (spec.resources.memory is for 4)."""

    @property
    def overridden(self) -> bool:
        return self.override_bytes > 0

    @property
    def sum_bytes(self) -> int:
        """Return the sum of the parts, even where an override replaces it."""
        model = self.weights_bytes + self.kv_cache_bytes + self.activation_bytes
        # Not by `extra_bytes`: a new leader adds up the proof of every replica.
        extra = self.prefix_cache_bytes + self.adapter_bytes + self.draft_bytes
        return model + self.overhead_bytes + extra

    @property
    def extra_bytes(self) -> int:
        """Return the parts that only some deployments have: prefix cache, adapter, draft model."""
        return self.prefix_cache_bytes + self.adapter_bytes + self.draft_bytes

    @property
    def total_bytes(self) -> int:
        return self.override_bytes or self.sum_bytes


class RankAssignment(Seat):
    """One process of the replica and its Mac; the position in the list is the rank."""

    memory: MemoryProof
    """The proof that it fits."""
    layers: int = 0
    """In a Pipeline, the number of layers on this rank; rank 0 has the last layers, the last rank the first."""


class LeavingRank(ApiModel):
    """A rank of an earlier epoch, on a Mac that now has another rank or none."""

    node: ObjectName
    rank: int
    memory_bytes: int
    """The memory that was proven for it."""


class ReplicaSpec(ApiModel):
    """The engine that agents must run."""

    deployment: ObjectName
    template: str
    """Hash of every part of the deployment's spec that the engine depends on."""
    model: ModelSource
    served_names: tuple[str, ...]
    context_length: int
    concurrency: int
    queue_depth: int | None = None
    kv_cache: KvCache | None = None
    prefixes: tuple[PinnedPrefix, ...] = ()
    memory: EngineMemory | None = None
    sampling: Sampling | None = None
    unknown_parameters: UnknownParameters = "Warn"
    performance: Performance = "OnRequest"
    ranks: Annotated[tuple[RankAssignment, ...], Field(min_length=1)]
    formation: Formation | None = None
    """The cooperation of the ranks; None for a single rank."""
    leaving: tuple[LeavingRank, ...] = ()
    """Ranks of earlier epochs that may still be running: their memory counts until they have ended."""


class FetchStatus(ApiModel):
    """The progress of a Mac's fetch of the model, reported in steps of 5 % or ten seconds."""

    node: ObjectName
    """The Mac that fetches."""
    phase: Literal["Downloading", "Verifying"]
    present_bytes: int
    """Bytes that are on the disk, from earlier fetches too."""
    total_bytes: int
    """Bytes of all files that this Mac needs of the model."""
    bytes_per_second: int = 0
    """Rate of the last ten seconds."""
    eta_seconds: int | None = None
    """Seconds to the end at this rate; None if nothing arrives."""
    source: str = ""
    """Host that the bytes come from."""
    waiting: str = ""
    """Sentence about why nothing arrives, such as a rate limit; empty while bytes arrive."""

    @property
    def percent(self) -> int:
        """Return the whole percentage of bytes that are on the disk."""
        return 100 * self.present_bytes // self.total_bytes if self.total_bytes else 0

    @property
    def text(self) -> str:
        """Return the progress for people, as in `35 % of 4.2 GiB from huggingface.co, 12 MiB/s, 3m left`."""
        total = sizes.show(self.total_bytes)
        if self.phase == "Verifying":
            return f"{total} of its model are being verified"
        head = f"{self.percent} % of {total} from {self.source}"
        if self.waiting:
            return f"{head}; {self.waiting}"
        if self.eta_seconds is None:
            return head
        rate = sizes.show(self.bytes_per_second)
        return f"{head}, {rate}/s, {duration.show(self.eta_seconds)} left"


class ReplicaStatus(Status):
    """The observed state of a replica; the reconciler computes it from its ranks."""

    fetches: tuple[FetchStatus, ...] = ()
    """The fetches of its model that run, in the order of its ranks."""


class Replica(ApiObject):
    """One complete copy of a model, assigned to its nodes."""

    kind: Literal["Replica"] = "Replica"
    spec: ReplicaSpec
    status: ReplicaStatus | None = None


MODEL_PRESENT = "ModelPresent"
PREFIXES_PINNED = "PrefixesPinned"
"""The condition of a rank whose deployment has prefixes: whether its engine has read and pinned all of them."""
UNSTARTABLE = "Unstartable"
"""The condition of a rank whose engine could not be started on its Mac several times in a row: another Mac may."""
"""The condition of a rank whose model comes from a hub: whether the files that it needs are on the Mac's disk."""
WAITING_FOR_FILES = "WaitingForFiles"
"""The reason of Ready of a rank that has its files, while another rank of the group has not."""
FETCHING_REASONS = ("Downloading", "Verifying")
"""Reasons of ModelPresent while a fetch goes on."""


def order_of_reason(reason: str) -> int:
    """Return the place of a rank's reason among those of its group: what a person can mend comes before what ends by itself."""
    if reason == WAITING_FOR_FILES:
        return 2
    return 1 if reason in FETCHING_REASONS else 0


class RankStatus(ApiModel):
    """The agent's report about a rank: condition Ready, and in a group EpochOver once the epoch cannot continue."""

    replica_uid: str
    """The replica that is reported; a report about an earlier one of the same name is ignored."""
    node: ObjectName
    epoch: int = 0
    """The epoch that is reported; 0 for a single rank."""
    golden: GoldenAnswer | None = None
    """The answer of rank 0 when this epoch was checked; None before, and from other ranks."""
    restarts: int = 0
    """Number of restarts of the engine after it had ended by itself."""
    peak_bytes: int = 0
    """Most memory that the engine used, in coarse steps; 0 if unknown."""
    fetch: FetchStatus | None = None
    """The fetch of the model that runs; None before it begins and after it ends."""
    conditions: tuple[Condition, ...] = ()


class EndpointHardware(ApiModel):
    """The hardware of the Mac that answers, for routing."""

    chip: str = ""
    """Such as "Apple M4 Pro"; empty on other machines."""
    gpu_cores: int = 0
    memory_bytes: int = 0
    """All of the machine's memory."""


class EndpointSpec(ApiModel):
    """The address of an engine, and the requests that it accepts."""

    deployment: ObjectName
    replica_uid: str
    node: ObjectName
    template: str = ""
    """The version of the deployment that answers here."""
    url: str
    """Address of the engine, such as http://10.0.0.5:4100, or unix:/PATH for gateways on the same machine."""
    served_names: tuple[str, ...]
    site: str = ""
    """The node's label `site`, if its agent was given one."""
    concurrency: int = 0
    """Requests that the engine works on at once; 0 if unknown."""
    parameters: int = 0
    """Parameters of the model in millions; 0 if unknown."""
    hardware: EndpointHardware = EndpointHardware()
    """The Mac of the first rank."""
    start_seconds: float = 0.0
    """Seconds in which the engine started and loaded its model; 0 if unknown. Clients wait about as long for the next."""
    is_leaving: bool = False
    """True while its Mac goes to sleep: gateways send nothing there, and do not keep it as a last resort."""


class Endpoint(ApiObject):
    """The address where a ready replica answers; it exists as long as its agent's lease."""

    kind: Literal["Endpoint"] = "Endpoint"
    spec: EndpointSpec


class EndpointPublisher(NamedTuple):
    """The part of a replica that decides which node may publish its endpoint. A gateway keeps it for each replica."""

    uid: str
    node: str
    """The node of rank 0."""
    deployment: str


def publisher_of(replica: Replica) -> EndpointPublisher:
    """Return the node that may publish the replica's endpoint."""
    spec = replica.spec
    return EndpointPublisher(replica.metadata.uid, spec.ranks[0].node, spec.deployment)


def unassigned_reason(endpoint: Endpoint, publisher: EndpointPublisher | None) -> str:
    """Return why an endpoint does not speak for its replica; empty if it does.

    `publisher`: that of the replica of the endpoint's name, None if there is none. An agent may write endpoints below its
    own node only; this tells whether the reconciler gave that node the replica.
    """
    name, node = endpoint.metadata.name, endpoint.spec.node
    if publisher is None:
        return f"there is no replica {name}"
    if publisher.node != node:
        return f"replica {name} is assigned to node {publisher.node}, not to {node}"
    if endpoint.spec.replica_uid != publisher.uid:
        return f"it is of an earlier replica {name}"
    if endpoint.spec.deployment != publisher.deployment:
        return f"replica {name} belongs to deployment {publisher.deployment}, not to {endpoint.spec.deployment}"
    return ""


def concerned_nodes(replica: "Replica") -> tuple[ObjectName, ...]:
    """Return the nodes whose agents act on a replica, each once: those of its ranks, and those that a rank leaves."""
    spec = replica.spec
    there, left = [rank.node for rank in spec.ranks], [rank.node for rank in spec.leaving]
    return tuple(dict.fromkeys(there + left))


def replica_name(deployment: ObjectName, ordinal: int) -> ObjectName:
    """Return the name of a deployment's replica: derived, so that creating it twice collides."""
    return f"{deployment}-{ordinal}"
