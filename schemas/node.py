"""Node: one Mac, its inventory and cables as its agent reports them, and the owner's decisions about it."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, Field

from schemas.meta import ApiModel, ApiObject, LabelKey, Labels, LabelValue, Status
from schemas.trust import TlsReport


class FabricInterface(ApiModel):
    """A network interface with an address."""

    name: str
    """Such as "en5"."""
    address: str
    """Its IPv4 address."""
    is_thunderbolt: bool = False
    prefix_length: int = 0
    """Bits of its network, such as 24; 0 if unknown."""
    hardware_address: str = ""
    """Its MAC address, such as "a4:83:e7:00:11:22"; empty if unknown."""
    is_wireless: bool = False
    """True for Wi-Fi."""
    speed_mbps: int = 0
    """Megabits a second of its link; 0 if unknown, such as those of Wi-Fi."""


class ThunderboltPort(ApiModel):
    """A Thunderbolt port of the Mac, and the other end of its cable."""

    receptacle: str
    """The number that macOS gives it, such as "3"."""
    interface: str = ""
    """The network interface of the port; empty if unknown."""
    domain: str = ""
    """The UUID by which the other end knows this port; the same after a restart."""
    peer: str = ""
    """The UUID of the port at the other end, if that is a Mac without a dock between; else empty."""
    speed_gbps: int = 0
    """The speed of the cable in Gbit/s; 0 without a cable. RDMA needs Thunderbolt 5: 80 or more."""
    is_bridged: bool = False
    """True if its interface belongs to the Thunderbolt Bridge, which excludes RDMA."""


class RdmaDevice(ApiModel):
    """An RDMA device, which is one Thunderbolt port."""

    name: str
    """Such as "rdma_en5"."""
    interface: str = ""
    """The network interface of the same port; empty if unknown."""
    state: Literal["Active", "Down", "Unknown"] = "Unknown"
    """Active: a cable in the port leads to a Mac."""


class NodeFabric(ApiModel):
    """The cables of one Mac."""

    interfaces: tuple[FabricInterface, ...] = ()
    ports: tuple[ThunderboltPort, ...] = ()
    """Its Thunderbolt ports, in order of the numbers."""
    rdma: tuple[RdmaDevice, ...] = ()
    is_rdma_enabled: bool | None = None
    """True if `rdma_ctl` reports RDMA as enabled; None where there is no such command."""
    thunderbolt: int = 0
    """The newest Thunderbolt version of the Mac, such as 5; 0 if unknown."""
    os_build: str = ""
    """Such as "25C56": JACCL needs the same build everywhere."""


TaintEffect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class LayerGroup(ApiModel):
    """Layers whose caches have the same shape."""

    kind: Literal["Full", "Sliding", "Latent", "State"]
    """The cache of a layer. Full: keys and values of all tokens. Sliding: of the last ones. Latent: one compressed
    vector a token (MLA). State: a constant size."""
    count: int
    kv_heads: int = 0
    head_dim: int = 0
    """Numbers in one head's key."""
    value_dim: int = 0
    """Numbers in one head's value."""
    latent_dim: int = 0
    """Numbers that a token adds to a Latent layer; every rank of a sharded model keeps them all."""
    window: int = 0
    """Tokens that a Sliding layer keeps."""
    state_bytes: int = 0
    """Bytes that a State layer keeps for one request."""


class SplitOptions(ApiModel):
    """The ways in which the installed mlx-lm can split a model over several Macs."""

    tensor: tuple[int, ...] = ()
    """Numbers of ranks, from 2 to 16, over which it can split every layer."""
    is_pipelined: bool = False
    """True if it can give each rank whole layers."""
    basis: str = ""
    """The properties that decide, for people: "llama, 9 heads, 3 KV heads"."""
    layer_bytes: tuple[int, ...] = ()
    """Bytes of the weights of each layer, the first one first; empty where whole layers cannot be assigned."""
    rest_bytes: int = 0
    """Bytes of the weights that every rank holds besides its layers."""
    tensor_bytes: tuple[int, ...] = ()
    """Bytes of one rank's weights for each number in `tensor`."""
    layer_groups: tuple[int, ...] = ()
    """For each layer the index of its group in the geometry's `groups`; empty if unknown."""
    unknown: str = ""
    """The reason none of this is known."""


class VisionTower(ApiModel):
    """The sizes of the part of a model that reads images."""

    patch: int
    """Pixels of the side of a patch."""
    width: int
    """Numbers of a patch between two layers."""
    ffn: int
    """Numbers of a patch within a layer's feed-forward part."""
    heads: int
    added_rows: int = 0
    """Layers of the language model that get rows of their own (deepstack)."""
    side: int = 0
    """Pixels of the side of every image; 0 if images keep their shape."""


class ModelGeometry(ApiModel):
    """The properties of a model that the memory proof needs (models/footprint.py)."""

    model_type: str
    weights_bytes: int
    """Bytes of the weights in memory."""
    layers: int
    kv_heads: int
    head_dim: int
    kv_element_bytes: int
    """Bytes of one number in the KV cache."""
    vocab_size: int
    max_context: int | None = None
    """Longest context that the model supports, in tokens; None if its config does not say."""
    groups: tuple[LayerGroup, ...] = ()
    """The layers by the shape of their caches; empty means that all of them keep `kv_heads` keys and values."""
    replicated_bytes: int = 0
    """Bytes of the weights that every rank of a sharded model holds: embeddings, head, norms, routers."""
    parameters: int = 0
    """Number of parameters; 0 if unknown."""
    hidden_size: int = 0
    """Numbers of a token between two layers."""
    ffn_size: int = 0
    """Numbers of a token within a layer's feed-forward part, all of its experts together."""
    heads: int = 0
    """Attention heads."""
    prefill_batch: int = 4
    """Prompts of `prefill_step` tokens that this node's engine reads at once; of shorter ones it may read more."""
    prefill_step: int = 512
    """Tokens that it reads of one prompt before the next token of the others."""
    is_attention_fused: bool = True
    """True if attention scores are never materialised, as in Metal's kernels for some head sizes."""
    has_mtp_head: bool | None = None
    """True if the weights have a head for multi-token prediction that engines use; None if unknown."""
    expert_bytes: int = 0
    """Bytes of the routed experts of all layers; 0 without, and in reports of older agents."""
    experts: int = 0
    """Routed experts of a layer."""
    experts_of_token: int = 0
    """Experts of a layer that one token passes."""
    looked_up_bytes: int = 0
    """Bytes of tables of which a token reads one row, such as the embedding."""
    vision: VisionTower | None = None
    """None if the model reads text only, or an older agent reported it."""
    work_bytes: int = 0
    """Bytes of temporary arrays of a model that transcribes or speaks, whatever the number of requests; 0 for others."""
    unknown: str = ""
    """The part of the model that is not understood; its memory need is then unknown."""
    splitting: SplitOptions | None = None
    """None where no deployment asks for a split, so the node did not check."""


class ModelReport(ApiModel):
    """The state of one deployed model on a node: usable, or the reason why not."""

    path: str
    """The model's path as the deployment writes it."""
    geometry: ModelGeometry | None = None
    """Set if the model is present and usable."""
    reason: str = ""
    """The reason it cannot be used, for machines."""
    message: str = ""
    """The reason it cannot be used, for people."""
    missing_bytes: int = 0
    """Bytes of a hub's model that the node would have to fetch, in coarse steps while it fetches; 0 for a model that is
    whole on its disk."""
    fetch_problem: str = ""
    """The reason and sentence of a preload that fails; empty while it goes on."""


class LocalModel(ApiModel):
    """A folder with a model below an agent's models folder, whether or not a deployment names it."""

    path: str
    """Its path below the models folder, as a deployment would write it."""
    weights_bytes: int
    """Size of its weight files."""


class AdapterReport(ApiModel):
    """The state of one deployed LoRA adapter on a node: usable, or the reason why not."""

    path: str
    """The adapter's path as the deployment writes it."""
    weights_bytes: int = 0
    """Bytes of its weights in memory; 0 if it cannot be used."""
    reason: str = ""
    """The reason it cannot be used, for machines."""
    message: str = ""
    """The reason it cannot be used, for people."""


class Taint(ApiModel):
    """Keeps replicas without a matching toleration off a node, as in Kubernetes."""

    key: LabelKey
    """The property of the node, such as "owner-active"."""
    value: LabelValue = ""
    """A value that tolerations may compare."""
    effect: TaintEffect
    """NoSchedule: no new replicas. PreferNoSchedule: only if there is no better node.
    NoExecute: replicas that run here are moved away as well."""


def _taints_differ(taints: tuple[Taint, ...]) -> tuple[Taint, ...]:
    seen = [(taint.key, taint.effect) for taint in taints]
    twice = sorted({f"{key}:{effect}" for key, effect in seen if seen.count((key, effect)) > 1})
    if twice:
        raise ValueError(
            f"has {', '.join(twice)} more than once; each pair of key and effect may occur only once"
        )
    return taints


class NodeSpec(ApiModel):
    """Decisions of the fleet's owner about a node."""

    unschedulable: bool = False
    """Cordoned: no new replicas; running ones continue."""
    draining: bool = False
    """No new replicas, and running ones are moved away as far as their deployments' minAvailable allows."""
    taints: Annotated[tuple[Taint, ...], AfterValidator(_taints_differ)] = ()
    """Keep replicas away unless their deployment tolerates them."""
    awake_until: AwareDatetime | None = None
    """The Mac does not sleep before this time, and is woken if it does (`fleetctl node wake`)."""


class MemoryLimitSource(StrEnum):
    """The origin of the memory for models (omlx#1533: users cannot tell a wired limit from a default)."""

    ESTIMATE = "Estimate"
    METAL = "Metal"
    WIRED_LIMIT = "WiredLimit"
    CGROUP = "Cgroup"
    CHOSEN = "Chosen"


class KernelPanic(ApiModel):
    """A panic of the kernel, after which the Mac restarted by itself."""

    at: datetime
    """Time of the report."""
    text: str = ""
    """The beginning of the panic string, such as "completeMemory() prepare count underflow" @IOGPUMemory.cpp:550; empty if
    the agent may not read the report."""


class MetalDevice(ApiModel):
    """The GPU as Metal describes it, without what an owner has changed since the agent started."""

    architecture: str = ""
    """Such as "applegpu_g17s"."""
    memory_bytes: int = 0
    """Unified memory; 0 if unknown."""
    recommended_bytes: int = 0
    """The working set that Metal recommends, with any `iogpu.wired_limit_mb` of that moment; 0 if unknown."""
    max_buffer_bytes: int = 0
    """The largest single buffer, and so the largest array; 0 if unknown."""
    copy_gbps: float = 0.0
    """Memory bandwidth of a chip that is not listed, in GB/s, as a copy measured it once; 0 for a listed chip."""


class WiredLimit(ApiModel):
    """The limit of memory that the GPU may wire, `sysctl iogpu.wired_limit_mb`."""

    mebibytes: int
    """The effective limit; 0 is macOS's default."""
    set_by: Literal["Default", "Service", "Other"]
    """Service: the job of `fleetctl service install --wired-limit`. Other: a person or another program."""


class MlxBuild(ApiModel):
    """The build of MLX that engines use. The wheels of one release for macOS 14, 15 and 26 differ in what they contain."""

    tag: str = ""
    """The platform of its wheel, such as "macosx_26_0_arm64"; empty if it was not installed from one."""
    minimum_system: str = ""
    """The oldest macOS that it is built for, such as "26.2"; empty if unknown."""
    has_jaccl: bool = False
    """True if it can do RDMA over Thunderbolt on this macOS."""
    has_nax: bool = False
    """True if it has the kernels of the M5's neural accelerators."""


class NodeStatus(Status):
    """The agent's report."""

    uid: str
    """Stable identity of the node, from its hardware and its name."""
    hostname: str
    address: str
    """Address at which gateways reach the node's engines."""
    agent_url: str = ""
    """Base address of the agent's API for health, metrics and logs; empty if it has none."""
    agent_version: str
    os: str
    os_version: str
    machine: str
    chip: str
    cpu_cores: int
    performance_cores: int = 0
    """CPU cores of the fastest level; 0 if unknown. The others are efficiency cores."""
    gpu_cores: int
    metal: str = ""
    """The newest Metal family of the GPU, such as "Metal 4"; empty if unknown, and where there is no Metal."""
    memory_bytes: int
    """Unified memory of the machine."""
    allocatable_bytes: int
    """The part of it that models may use."""
    allocatable_source: MemoryLimitSource | None = None
    """The origin of that part. Metal: the working set that Metal recommends, less a reserve for macOS. Estimate: the
    usual share, until Metal was asked. WiredLimit: `iogpu.wired_limit_mb`. Cgroup: the limit of a container. Chosen: the
    agent's --memory."""
    metal_device: MetalDevice | None = None
    """The GPU as Metal describes it; None before it was asked, and where there is no Metal."""
    hardware_uuid: str = ""
    """The machine's own identity; two nodes with the same one are a clone, unless both are parts of one machine."""
    is_part: bool = False
    """True if the agent shares its machine with others (`fleetctl up --nodes`)."""
    mlx_version: str = ""
    mlx_lm_version: str = ""
    mlx_build: MlxBuild | None = None
    """The build of MLX; None where engines compute on the processor and before the first check."""
    disk_bytes: int = 0
    """Size of the disk that holds models; 0 if unknown."""
    disk_free_bytes: int = 0
    """Free space on it, rounded to coarse steps so that the status changes rarely."""
    disk_read_gbps: float = 0.0
    """Rate in GB/s at which it reads blocks of 4 MiB, one after another; 0 until a model needs to know it."""
    power: Literal["Mains", "Battery", "Unknown"] = "Unknown"
    """The machine's power source."""
    is_owner_active: bool = False
    """True while someone uses the machine: keyboard or mouse within the last minutes."""
    is_in_meeting: bool = False
    """True while a program uses the camera or the microphone."""
    is_lid_shut: bool = False
    """True while the lid is shut and macOS may sleep because of it: without an external display, or on battery."""
    wakes_on_lan: bool | None = None
    """True if a magic packet wakes the Mac on mains power (`womp` of pmset); None if it cannot be put to sleep."""
    runs_etcd: bool = False
    """True if a process named etcd runs on the machine."""
    asleep_since: datetime | None = None
    """The time at which the agent put the machine to sleep; None while it is awake."""
    wired_limit: WiredLimit | None = None
    """The limit of memory that the GPU may wire; None where there is none, as on Linux, or if it is unknown."""
    panics: tuple[KernelPanic, ...] = ()
    """The last five kernel panics of which macOS has reports, the newest first."""
    labels: Labels = Field(default_factory=dict)
    """Labels the agent was started with."""
    fabric: NodeFabric = NodeFabric()
    """Its cables."""
    models: tuple[ModelReport, ...] = ()
    """Every deployed model and draft model, as this node sees it."""
    adapters: tuple[AdapterReport, ...] = ()
    """Every deployed adapter, as this node sees it."""
    local_models: tuple[LocalModel, ...] | None = None
    """Folders with models, up to 100, without those fetched from a hub; None if they are not known."""


class Node(ApiObject):
    """One Mac of the fleet."""

    kind: Literal["Node"] = "Node"
    spec: NodeSpec = NodeSpec()
    """Decisions of the fleet's owner about the node."""
    status: NodeStatus | None = None
    """The agent's report."""


class NodeLease(ApiModel):
    """The value of a node's lease key. The node's agent is alive while the key exists."""

    uid: str
    """The node's identity."""
    session: str
    """Distinguishes one run of the agent from the next."""
    has_store_password: bool = False
    """True if the agent was started with a password for the store."""
    tls: TlsReport | None = None
    """Its identity and TLS mode; None if it has no certificate."""
    insecure_flags: tuple[str, ...] = ()
    """The agent's flags that switch protection off, such as --insecure-http."""


class NodeLoad(ApiModel):
    """The load of a Mac that gateways cannot see in the answers of its engines."""

    gpu_percent: Annotated[int, Field(ge=0, le=100)]
    """Busy share of the GPU, by all programs."""


def effective_labels(node: Node) -> dict[str, str]:
    """Return the labels that selectors match: derived from hardware, then the agent's, then the owner's."""
    derived: dict[str, str] = {"fleet/node": node.metadata.name}
    given: Labels = {}
    if node.status is not None:
        derived["fleet/os"] = node.status.os
        derived["fleet/chip"] = node.status.chip.replace(" ", "-")
        given = node.status.labels
    return {**derived, **given, **node.metadata.labels}


def matches(labels: dict[str, str], wanted: dict[str, str]) -> bool:
    """Return whether all wanted labels are present."""
    return all(labels.get(key) == value for key, value in wanted.items())


class NodeLifeStatus(Status):
    """The reconciler's conditions of one node: Ready, Asleep, Flapping, VersionSkew and others."""
