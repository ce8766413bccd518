"""The config of one engine process, as its command line says. Values only; no logic."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from schemas.sampling import Sampling
from schemas.shardgroup import Backend, Parallelism
from schemas.vision import Vision
from schemas.wire.engine_address import EngineAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """The place of this process in the group of ranks that share one model."""

    rank: int
    world_size: int
    host: str
    """The host on which rank 0 listens to the other ranks."""
    port: int
    secret: str = field(repr=False)
    """A secret that only the ranks of one start of the group know."""
    epoch: int = 1
    """The number of this start of the group: ranks of another epoch are rejected."""
    backend: Backend = "ring"
    """MLX's backend that connects the ranks."""
    parallelism: Parallelism = "Tensor"
    layers: tuple[int, ...] = ()
    """Number of layers of each rank, in rank order; () splits them evenly. Pipeline only."""
    timeout_s: float = 120.0
    """The time that each rank waits for the others, from the moment when it has imported MLX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The complete config of one rank: all defaults are filled in."""

    model_dir: Path
    replica: str
    replica_uid: str
    node: str
    served_names: tuple[str, ...]
    address: EngineAddress
    """Address of its API."""
    context_length: int
    """Most tokens of one request, prompt and answer together."""
    concurrency: int
    """Most requests that run at once."""
    queue_limit: int
    """Most requests that wait beside them."""
    drain_timeout_s: float
    max_body_bytes: int
    input_limit_s: float = 2.0
    """CPU seconds in which a request's prompt is tokenized, and its schema compiled; long texts get more."""
    blas_cache: Path
    """Folder of compiled and cached files that speed up a start."""
    sampling: Sampling = field(default_factory=Sampling)
    """Values for requests that leave them out."""
    refuses_unknown: bool = False
    """True if parameters that only other servers have are refused; they are left out otherwise."""
    always_performance: bool = False
    """True if every chat and completion has the member `performance`."""
    vision: Vision | None = None
    """Limits of the images of requests; None for a model that reads text only."""
    kv_tokens: int | None = None
    """Tokens of all requests for which the memory proof has counted caches; None for `concurrency` full contexts."""
    kv_bits: int | None = None
    """Bits (4 or 8) of a number in the KV cache; None keeps the model's own. Excludes `kv_window`."""
    kv_window: int | None = None
    """Most tokens that every layer looks back; None leaves this to the model."""
    kv_keep: int = 0
    """First tokens of a request that the window keeps, as a part of it."""
    prefix_cache_bytes: int | None = None
    """Memory of the prefix cache that the memory proof has counted; None for memory that requests leave free."""
    prefix_disk_bytes: int = 0
    """Most bytes of the prefix cache on disk; 0 turns it off."""
    prefix_disk_dir: Path = Path()
    """Its folder, which engines of one machine and user may share."""
    memory_limit_bytes: int | None = None
    """Memory that the memory proof promised this process, with weights and Python; None without a proof."""
    identity_dir: Path | None = None
    """Folder of the node's identity, with which the engine serves TLS; None: plain HTTP."""
    adapter: Path | None = None
    """Folder of a LoRA adapter for the model."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of LoRA adapters that requests choose, by served name. Excludes `adapter`."""
    draft_model: Path | None = None
    """Folder of a small model that proposes tokens. Excludes `kv_window`: rejected tokens could not be dropped."""
    draft_tokens: int = 3
    """Number of tokens that it proposes at once."""
    ngram_tokens: int = 0
    """Tokens to propose at once from earlier places of the same text; 0 proposes none."""
    mtp_tokens: int = 0
    """Most tokens to propose at once with the model's multi-token prediction head; 0 proposes none."""
    group: GroupConfig | None = None
    """None if this process has the whole model."""

    @property
    def window_setting(self) -> str | int | None:
        """The window, as it is named in fingerprints of the model with its settings."""
        return f"{self.kv_window} after {self.kv_keep}" if self.kv_keep else self.kv_window
