"""The engine's configuration: one JSON document that the agent writes to the engine's standard input.

    argv = [sys.executable, "-m", engine_config.MODULE, *config.identity.to_argv()]
    processes.spawn(argv, stdin=config.to_json(), ...)

Other users of a machine can read command lines, and environments stay readable for as long as a process lives. So the
command line holds nothing but the identity, by which `ps` and a restarted agent tell engines apart.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Self, TypeAlias

import platformdirs
from pydantic import Field, model_validator

from schemas.kv_cache import KvCache
from schemas.memory import Wired
from schemas.meta import ApiModel
from schemas.sampling import Performance, Sampling, UnknownParameters
from schemas.shardgroup import Backend, Parallelism
from schemas.vision import Vision
from schemas.wire.body_limits import MOST_LIMIT
from schemas.wire.engine_address import EngineAddress

MODULE: Final = "engine"
"""`python -m engine` runs one engine."""
GOLDEN_MODULE: Final = "engine.golden"
"""`python -m engine.golden` answers the golden question alone; it takes the same document."""
SHAPE_PROBE_MODULE: Final = "engine.shape_probe"
"""`python -m engine.shape_probe FOLDER PARENT` reports how a model can be split among ranks."""
QUANTIZE_MODULE: Final = "engine.quantize"
"""`python -m engine.quantize SOURCE INTO SCHEME MEMORY_BYTES AVAILABLE_BYTES PARENT` writes a quantized model."""
DEVICE_CHECK_MODULE: Final = "engine.device_check"
"""`python -m engine.device_check` computes once on the GPU."""

# Requests in the queue for each that runs.
_QUEUED_PER_RUNNING: Final = 4

Count: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Guesses: TypeAlias = Annotated[int, Field(ge=0, le=16)]
"""Tokens to guess at once. A guess is right only if all before it were: beyond 16 they cost more than they save."""


class GroupConfig(ApiModel):
    """The place of this process in the group of ranks that share one model."""

    rank: Count
    world_size: Annotated[int, Field(ge=2)]
    host: str
    """The host on which rank 0 listens to the other ranks."""
    port: Annotated[int, Field(ge=1, le=65535)]
    secret: str = Field(default="", repr=False)
    """A secret that only the ranks of one start of the group know."""
    epoch: Positive = 1
    """The number of this start of the group: ranks of another epoch are rejected."""
    backend: Backend = "ring"
    """MLX's backend that connects the ranks."""
    parallelism: Parallelism = "Tensor"
    layers: tuple[Positive, ...] = ()
    """Number of layers of each rank, in rank order; () splits them evenly. Pipeline only."""
    timeout_s: Seconds = 120.0
    """The time that each rank waits for the others, from the moment when it has imported MLX."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be less than worldSize: {self.rank} of {self.world_size}")
        if self.layers and self.parallelism != "Pipeline":
            raise ValueError("layers needs parallelism Pipeline: Tensor splits every layer")
        if self.layers and len(self.layers) != self.world_size:
            raise ValueError(f"layers must be {self.world_size} numbers, one for each rank")
        return self


class PrefixFile(ApiModel):
    """A request whose beginning is pinned (schemas/deployment.py: PinnedPrefix)."""

    name: str
    path: Path
    tokens: Positive


class EngineConfig(ApiModel):
    """The configuration of one engine process."""

    model_dir: Path
    replica: str = "engine"
    replica_uid: str = ""
    node: str = ""
    served_names: Annotated[tuple[str, ...], Field(min_length=1)] = ("model",)
    url: str = "http://127.0.0.1:4100"
    """Address of its API: http://HOST:PORT, https://HOST:PORT with `identity_dir`, or unix:/PATH in a folder of mode 0700."""
    context_length: Annotated[int, Field(ge=2)] = 4096
    """Most tokens of one request, prompt and answer together."""
    concurrency: Positive = 1
    """Most requests that run at once."""
    queue_depth: Count | None = None
    """Most requests that wait beside them. Default: 4 x concurrency."""
    drain_timeout_s: Seconds = 30.0
    """Time for running requests after a request to stop."""
    max_body_bytes: Positive = MOST_LIMIT
    """Largest body of a request."""
    input_limit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """CPU seconds in which a request's prompt is tokenized, and its schema compiled; long texts get more."""
    blas_cache: Path = Field(
        default_factory=lambda: platformdirs.user_cache_path("mlx-fleet") / "blas"
    )
    """Folder of compiled and cached files that speed up a start."""
    sampling: Sampling = Sampling()
    """Values for requests that leave them out."""
    unknown_parameters: UnknownParameters = "Warn"
    """Treatment of parameters that only other servers have."""
    performance: Performance = "OnRequest"
    """Answers that have the member `performance`."""
    vision: Vision | None = None
    """Limits of the images of requests; None for a model that reads text only."""
    kv_cache: KvCache = KvCache()
    """The memory proof has counted its tokens and its cached prompts."""
    prefixes: tuple[PrefixFile, ...] = ()
    """Beginnings of prompts to pin; the memory proof has counted their tokens."""
    prefix_disk_dir: Path = Field(
        default_factory=lambda: platformdirs.user_cache_path("mlx-fleet") / "prefix-cache"
    )
    """Folder of prompts cached on disk, which engines of one machine and user may share."""
    memory_limit_bytes: Positive | None = None
    """Memory that the memory proof promised this process, with weights and Python; None without a proof."""
    wired: Wired = "Auto"
    """Off: the model is never wired."""
    identity_dir: Path | None = None
    """Folder of the node's identity, with which the engine serves TLS; None: plain HTTP."""
    adapter: Path | None = None
    """Folder of a LoRA adapter for the model."""
    adapters: dict[str, Path] = Field(default_factory=dict)
    """Folders of LoRA adapters that requests choose, by served name."""
    draft_model: Path | None = None
    """Folder of a small model that proposes tokens."""
    draft_tokens: Guesses = 3
    """Number of tokens that it proposes at once."""
    ngram_tokens: Guesses = 0
    """Tokens to propose at once from earlier places of the same text; 0 proposes none."""
    mtp_tokens: Guesses = 0
    """Most tokens to propose at once with the model's multi-token prediction head; 0 proposes none."""
    group: GroupConfig | None = None
    """None if this process has the whole model."""

    @property
    def address(self) -> EngineAddress:
        """Address of its API."""
        return EngineAddress.parse(self.url, node=self.node)

    @property
    def queue_limit(self) -> int:
        """Most requests that wait beside those that run."""
        waiting = self.queue_depth
        return _QUEUED_PER_RUNNING * self.concurrency if waiting is None else waiting

    @property
    def window_setting(self) -> str | int | None:
        """The window, as it is named in fingerprints of the model with its settings."""
        cache = self.kv_cache
        return f"{cache.window} after {cache.keep}" if cache.keep else cache.window

    @property
    def identity(self) -> "EngineIdentity":
        """The words of its command line."""
        return EngineIdentity(
            replica=self.replica,
            uid=self.replica_uid,
            node=self.node,
            model=self.served_names[0],
            url=self.url,
            epoch=0 if self.group is None else self.group.epoch,
            rank=0 if self.group is None else self.group.rank,
            memory=self.memory_limit_bytes or 0,
        )

    def to_json(self) -> bytes:
        """Return the document."""
        return self.model_dump_json(by_alias=True, exclude_none=True).encode()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Refuse what an engine cannot do; schemas/deployment.py has the same rules for deployments."""
        cache = self.kv_cache
        if (self.identity_dir is not None) != bool(self.address.node):
            raise ValueError("identityDir and an https url with a node need each other")
        if cache.window is not None and cache.window >= self.context_length:
            raise ValueError("kvCache.window must be less than contextLength")
        if cache.tokens is not None and cache.tokens < self.context_length:
            raise ValueError("kvCache.tokens must be at least contextLength, for one request")
        taken = sorted(self.adapters.keys() & set(self.served_names))
        if taken:
            raise ValueError(f"adapters and servedNames both have {taken[0]}")
        values = {
            "draftModel": self.draft_model,
            "ngramTokens": self.ngram_tokens,
            "mtpTokens": self.mtp_tokens,
            "adapter": self.adapter,
            "adapters": self.adapters,
            "kvCache.bits": cache.bits,
            "kvCache.window": cache.window,
            "vision": self.vision,
            "prefixes": self.prefixes,
            "group": self.group,
        }
        given = [name for name, value in values.items() if value]
        for name, others, why in _EXCLUSIONS:
            other = next((other for other in given if other in others and other != name), "")
            if name in given and other:
                raise ValueError(f"{name} cannot be combined with {other}: {why}")
        return self


_GUESSES: Final = ("draftModel", "ngramTokens", "mtpTokens")
_OF_TEXT: Final = (*_GUESSES, "adapter", "adapters")
_EXCLUSIONS: Final = (
    *((name, _GUESSES, "choose one source of guesses") for name in _GUESSES),
    ("adapter", ("adapters",), "all requests use the former"),
    ("vision", (*_OF_TEXT, "kvCache.bits", "kvCache.window"), "it is for models of mlx-lm"),
    ("group", (*_OF_TEXT, "vision", "prefixes"), "a rank has a part of the model"),
)
"""Fields, those that each excludes, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """The command line of an engine, by which its agent adopts it."""

    replica: str
    uid: str = ""
    node: str = ""
    model: str = ""
    """The first name under which it serves."""
    url: str = ""
    epoch: int = 0
    """The start of its group; 0 where one process has all of the model."""
    rank: int = 0
    memory: int = 0
    """The memory that the proof grants it, in bytes; 0 without a proof."""

    @property
    def address(self) -> EngineAddress:
        """Address of its API."""
        return EngineAddress.parse(self.url, node=self.node)

    def to_argv(self) -> list[str]:
        """Return the words NAME=VALUE behind the module."""
        return [f"{name}={value}" for name, value in dataclasses.asdict(self).items()]

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self | None:
        """Return the identity in a whole command line; None if it is not that of an agent's engine."""
        if not _runs(argv, MODULE):
            return None
        words = dict(word.split("=", 1) for word in argv if "=" in word)
        try:
            EngineAddress.parse(words["url"], node=words["node"])
            return cls(
                replica=words["replica"],
                uid=words["uid"],
                node=words["node"],
                model=words["model"],
                url=words["url"],
                epoch=int(words["epoch"]),
                rank=int(words["rank"]),
                memory=int(words["memory"]),
            )
        except (KeyError, ValueError):
            return None


def is_golden(argv: Sequence[str]) -> bool:
    """Return whether a command line is that of a process which answers the golden question."""
    return _runs(argv, GOLDEN_MODULE)


def _runs(argv: Sequence[str], module: str) -> bool:
    """Return whether Python runs the module."""
    return ("-m", module) in pairwise(argv)
