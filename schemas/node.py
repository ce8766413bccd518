"""What an agent reports of its Mac's cables: addresses, Thunderbolt, RDMA.

Node: one Mac; what its agent found out about it, and whether new work may go there.

NodeLife: what the leading reconciler found out about a node, beside what its agent says of itself.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from schemas.meta import ApiModel, ApiObject, LabelKey, Labels, LabelValue, Status


class FabricInterface(ApiModel):
    """A network interface with an address."""

    name: str
    """Such as "en5"."""
    address: str
    """Its IPv4 address."""
    is_thunderbolt: bool = False


class ThunderboltPort(ApiModel):
    """A Thunderbolt port of the Mac, and what is at the other end of its cable."""

    receptacle: str
    """The number that macOS gives it, such as "3"."""
    interface: str = ""
    """The network interface of the port; empty if nobody could tell."""
    domain: str = ""
    """The UUID by which the other end knows this port; the same after a restart."""
    peer: str = ""
    """The UUID of the port at the other end, if that is a Mac's and no dock is between; else empty."""
    speed_gbps: int = 0
    """What the cable carries, in Gbit/s; 0 where there is none. RDMA needs Thunderbolt 5: 80 or more."""
    is_bridged: bool = False
    """Whether its interface belongs to the Thunderbolt Bridge, which RDMA does not go with."""


class RdmaDevice(ApiModel):
    """An RDMA device, which is one Thunderbolt port."""

    name: str
    """Such as "rdma_en5"."""
    interface: str = ""
    """The network interface of the same port; empty if nobody could tell."""
    state: Literal["Active", "Down", "Unknown"] = "Unknown"
    """Active means that a cable with a Mac at its other end is in the port."""


class NodeFabric(ApiModel):
    """The cables of one Mac."""

    interfaces: tuple[FabricInterface, ...] = ()
    ports: tuple[ThunderboltPort, ...] = ()
    """Its Thunderbolt ports, in order of the numbers."""
    rdma: tuple[RdmaDevice, ...] = ()
    is_rdma_enabled: bool | None = None
    """Whether `rdma_ctl` says that RDMA is on; None where there is no such command."""
    thunderbolt: int = 0
    """The newest Thunderbolt that the Mac speaks, such as 5; 0 if nobody could tell."""
    os_build: str = ""
    """Such as "25C56": JACCL wants the same build everywhere."""


TaintEffect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class LayerGroup(ApiModel):
    """Layers whose caches have the same shape."""

    kind: Literal["Full", "Sliding", "Latent", "State"]
    """What a layer keeps: keys and values of all tokens, or of the last ones, one compressed vector a token
    (MLA), or a state that does not grow."""
    count: int
    kv_heads: int = 0
    head_dim: int = 0
    """Numbers in one head's key."""
    value_dim: int = 0
    """Numbers in one head's value."""
    latent_dim: int = 0
    """Numbers that a token leaves behind in a Latent layer; every rank of a sharded model keeps them all."""
    window: int = 0
    """Tokens that a Sliding layer looks back."""
    state_bytes: int = 0
    """What a State layer keeps for one request."""


class SplitOptions(ApiModel):
    """Over how many Macs the installed mlx-lm can split a model."""

    tensor: tuple[int, ...] = ()
    """Numbers of ranks, from 2 to 16, over which it splits every layer."""
    is_pipelined: bool = False
    """Whether it can give each rank whole layers."""
    basis: str = ""
    """What decides, for people: "llama, 9 heads, 3 KV heads"."""
    layer_bytes: tuple[int, ...] = ()
    """Bytes of the weights of each layer, the first one first; none where whole layers cannot be dealt out."""
    rest_bytes: int = 0
    """Bytes of the weights that every rank holds besides its layers."""
    tensor_bytes: tuple[int, ...] = ()
    """Bytes of one rank's weights for each number in `tensor`."""
    layer_groups: tuple[int, ...] = ()
    """For each layer which of the geometry's `groups` it is of, from 0; empty if nobody could tell."""
    unknown: str = ""
    """Why nothing of this could be found out."""


class ModelGeometry(ApiModel):
    """What the memory proof needs to know of a model (see reconciler/placement/memory_proof.py)."""

    model_type: str
    weights_bytes: int
    """Bytes of the weights as they will lie in memory."""
    layers: int
    kv_heads: int
    head_dim: int
    kv_element_bytes: int
    """Bytes of one number in the KV cache."""
    vocab_size: int
    max_context: int | None = None
    """Longest context that the model was made for, in tokens; None if its config does not say."""
    groups: tuple[LayerGroup, ...] = ()
    """The layers by what they keep; empty means that all of them keep `kv_heads` keys and values."""
    replicated_bytes: int = 0
    """Bytes of the weights that every rank of a sharded model holds: embeddings, head, norms, routers."""
    parameters: int = 0
    """How many parameters the model has; 0 if nobody counted."""
    hidden_size: int = 0
    """Numbers of a token between two layers."""
    ffn_size: int = 0
    """Numbers of a token within a layer's feed-forward part, all of its experts together."""
    heads: int = 0
    """Attention heads."""
    prefill_batch: int = 4
    """Prompts of `prefill_step` tokens that this node's engine reads at once; shorter ones may be more."""
    prefill_step: int = 512
    """Tokens that it reads of one before the next token of the others."""
    is_attention_fused: bool = True
    """Whether attention scores are never written out, as in Metal's kernels for some head sizes."""
    unknown: str = ""
    """What nobody could understand of the model; what it needs is then not known."""
    splitting: SplitOptions | None = None
    """None where nobody looked: no deployment wants it split."""


class ModelReport(ApiModel):
    """What a node says of one model that somebody deployed: it has it, or why not."""

    path: str
    """The model's path as the deployment writes it."""
    geometry: ModelGeometry | None = None
    """Set if the model is there and sound."""
    reason: str = ""
    """Why it cannot be used, for machines."""
    message: str = ""
    """Why it cannot be used, for people."""


class AdapterReport(ApiModel):
    """What a node says of one LoRA adapter that somebody deployed: it has it, or why not."""

    path: str
    """The adapter's path as the deployment writes it."""
    weights_bytes: int = 0
    """Bytes of its weights as they will lie in memory; 0 if it cannot be used."""
    reason: str = ""
    """Why it cannot be used, for machines."""
    message: str = ""
    """Why it cannot be used, for people."""


class Taint(ApiModel):
    """Keeps replicas off a node that do not tolerate it, as in Kubernetes."""

    key: LabelKey
    """What is special about the node, such as "owner-active"."""
    value: LabelValue = ""
    """More about it; tolerations may ask for it."""
    effect: TaintEffect
    """NoSchedule: nothing new comes here. PreferNoSchedule: only if there is no better node.
    NoExecute: what runs here is moved away as well."""


def _taints_differ(taints: tuple[Taint, ...]) -> tuple[Taint, ...]:
    seen = [(taint.key, taint.effect) for taint in taints]
    twice = sorted({f"{key}:{effect}" for key, effect in seen if seen.count((key, effect)) > 1})
    if twice:
        raise ValueError(f"has {', '.join(twice)} more than once; a key may have each effect once")
    return taints


class NodeSpec(ApiModel):
    """What the fleet's owner decided about a node."""

    unschedulable: bool = False
    """Cordoned: nothing new is placed here; what runs goes on."""
    draining: bool = False
    """Nothing new is placed here, and what runs is moved away as far as its deployments' minAvailable allows."""
    taints: Annotated[tuple[Taint, ...], AfterValidator(_taints_differ)] = ()
    """What keeps replicas away unless their deployment tolerates it."""


class NodeStatus(Status):
    """What the agent found out."""

    uid: str
    """Stable identity of the node, from its hardware and its name."""
    hostname: str
    address: str
    """Where gateways reach the node's engines."""
    agent_url: str = ""
    """Where the agent answers about its health, its figures and its logs; empty if it does not."""
    agent_version: str
    os: str
    os_version: str
    machine: str
    chip: str
    cpu_cores: int
    gpu_cores: int
    memory_bytes: int
    """Unified memory of the machine."""
    allocatable_bytes: int
    """What models may use of it."""
    hardware_uuid: str = ""
    """The machine's own identity; two nodes with one are a clone, unless both are parts of one machine."""
    is_part: bool = False
    """Whether the agent was told that it shares its machine with others (`fleetctl up --nodes`)."""
    mlx_version: str = ""
    mlx_lm_version: str = ""
    disk_bytes: int = 0
    """Size of the disk that holds models; 0 if nobody could tell."""
    disk_free_bytes: int = 0
    """What is free of it, in coarse steps so that it is not news all the time."""
    power: Literal["Mains", "Battery", "Unknown"] = "Unknown"
    """What the machine runs on."""
    is_owner_active: bool = False
    """Whether somebody sits at the machine: keyboard or mouse within the last minutes."""
    labels: Labels = Field(default_factory=dict)
    """Labels the agent was started with."""
    fabric: NodeFabric = NodeFabric()
    """Its cables."""
    models: tuple[ModelReport, ...] = ()
    """Every deployed model, and every draft model, as this node sees it."""
    adapters: tuple[AdapterReport, ...] = ()
    """Every deployed adapter as this node sees it."""


class Node(ApiObject):
    """One Mac of the fleet."""

    kind: Literal["Node"] = "Node"
    spec: NodeSpec = NodeSpec()
    """What the fleet's owner decided about the node."""
    status: NodeStatus | None = None
    """What its agent found out."""


class NodeLease(ApiModel):
    """The value of a node's lease key; that the key exists is the sign of life."""

    uid: str
    """The node's identity."""
    session: str
    """Tells one run of the agent from the next."""


def effective_labels(node: Node) -> dict[str, str]:
    """Return the labels that selectors match: derived from hardware, the agent's, the owner's."""
    derived: dict[str, str] = {"fleet/node": node.metadata.name}
    given: Labels = {}
    if node.status is not None:
        derived["fleet/os"] = node.status.os
        derived["fleet/chip"] = node.status.chip.replace(" ", "-")
        given = node.status.labels
    return {**derived, **given, **node.metadata.labels}


def matches(labels: dict[str, str], wanted: dict[str, str]) -> bool:
    """Return whether all wanted labels are there."""
    return all(labels.get(key) == value for key, value in wanted.items())


class NodeLifeStatus(Status):
    """Conditions Ready, Flapping, VersionSkew, DuplicateHardware and Withheld of one node."""
