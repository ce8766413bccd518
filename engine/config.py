"""What one engine process was told on its command line. Values only; nothing here reads or decides."""

from dataclasses import dataclass
from pathlib import Path

from schemas.shardgroup import Backend, Parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """The place of this process among those that share one model."""

    rank: int
    world_size: int
    host: str
    """Where rank 0 listens to the others, and they find it."""
    port: int
    secret: str
    """What the ranks of one start know, and nobody else."""
    epoch: int = 1
    """Which start of the group this is: ranks of another one are turned away."""
    backend: Backend = "ring"
    """How MLX connects the ranks."""
    parallelism: Parallelism = "Tensor"
    layers: tuple[int, ...] = ()
    """How many layers each rank has, in rank order; () splits them evenly. Pipeline only."""
    timeout_s: float = 120.0
    """How long ranks wait for each other to come, from the moment at which each has imported MLX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One rank's orders, complete: no default is filled in after this point."""

    model_dir: Path
    replica: str
    replica_uid: str
    node: str
    served_names: tuple[str, ...]
    host: str
    port: int
    context_length: int
    """Tokens of one request at most, prompt and answer."""
    concurrency: int
    """Requests that are worked on at once."""
    queue_limit: int
    """Requests that may wait beside them."""
    drain_timeout_s: float
    max_body_bytes: int
    blas_cache: Path
    kv_bits: int | None = None
    """Bits (4 or 8) of a number in the KV cache; None keeps it as the model computes it. Never with `kv_window`."""
    kv_window: int | None = None
    """Tokens that every layer looks back at most, whatever the model does itself; None: it alone decides."""
    prefix_cache_bytes: int | None = None
    """What cached prefixes may hold, which the memory proof has counted; None: only what others leave free."""
    memory_limit_bytes: int | None = None
    """What the memory proof promised this process, its weights and Python included; None: nobody counted."""
    adapter: Path | None = None
    """A folder with a LoRA adapter for the model."""
    draft_model: Path | None = None
    """A folder with a small model that guesses tokens. Never with `kv_window`: guesses could not be taken back."""
    draft_tokens: int = 3
    """How many tokens it guesses at once."""
    group: GroupConfig | None = None
    """None: this process has the whole model."""
