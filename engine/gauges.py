"""The gauges of an engine: numbers that the worker thread writes and the event loop reads."""

from dataclasses import dataclass, field
from typing import Any

from machinery import footprint
from schemas.wire import metrics as wire


def _exported(name: str, help_: str, value: float = 0) -> Any:
    """Return a field that metrics.py exports under a name; one that ends with `_total` only grows."""
    full = name if name.startswith(wire.ENGINE_PREFIX) else f"{wire.ENGINE_PREFIX}{name}"
    return field(default=value, metadata={"name": full, "help": help_})


@dataclass(slots=True)
class Gauges:
    """Numbers written by the worker thread only. Each one is a single word, so no lock is needed.

    All start at 0. Those "so far" only grow, and may be written in any order: a reader may see the
    tokens of a step before its seconds.
    """

    loaded_bytes: int = _exported("model_loaded_bytes", "Memory of the loaded weights.")
    total_bytes: int = 0
    """Weights to load."""
    steps: int = _exported("steps_total", "Steps of the batch.")
    slowest_s: float = 0.0
    """Duration of the slowest step. A step that takes many times as long is stuck, for example in a collective."""
    is_waiting: bool = False
    """True if the worker waits for other ranks in a socket. The wait has no limit and makes no progress."""

    prefill_tokens: int = _exported(
        wire.ENGINE_PREFILL_TOKENS,
        "Prompt tokens computed; the last of each prompt counts as decoding.",
    )
    prefill_seconds: float = _exported("prefill_seconds_total", "Seconds of prefill.", 0.0)
    decode_tokens: int = _exported(wire.ENGINE_GENERATION_TOKENS, "Tokens generated.")
    decode_seconds: float = _exported("decode_seconds_total", "Seconds of decoding.", 0.0)
    draft_tokens: int = _exported(
        "draft_tokens_total", "Tokens that a draft model or n-grams proposed."
    )
    draft_accepted_tokens: int = _exported(
        "draft_accepted_tokens_total", "Proposed tokens that the model accepted."
    )
    faults: int = _exported("faults_total", "Steps whose error cost sequences.")

    running: int = _exported("num_sequences_running", "Sequences that decode.")
    prefilling: int = _exported(
        "num_sequences_prefilling", "Sequences whose prompt is not computed yet."
    )
    prompt_positions: tuple[tuple[int, int], ...] = ()
    """(job id, tokens of its prompt read so far) of each sequence in the batch; replaced as a whole."""
    chunk_tokens: int = _exported("prefill_chunk_tokens", "Prompt tokens computed in one chunk.")

    prefix_pinned_tokens: int = 0
    """Tokens of the prefix cache that are never evicted."""
    prefix_lookups: int = _exported("prefix_cache_lookups_total", "Prompts looked up.")
    prefix_query_tokens: int = _exported("prefix_cache_queries_total", "Prompt tokens looked up.")
    prefix_hit_tokens: int = _exported("prefix_cache_hits_total", "Prompt tokens found.")
    prefix_evictions: int = _exported(
        "prefix_cache_evictions_total", "Blocks evicted to free memory."
    )
    prefix_disk_written: int = _exported(
        "prefix_cache_disk_written_blocks_total", "Blocks of cached prefixes written to disk."
    )
    prefix_disk_read: int = _exported(
        "prefix_cache_disk_read_blocks_total", "Blocks of cached prefixes read from disk and used."
    )
    prefix_disk_dropped: int = _exported(
        "prefix_cache_disk_dropped_blocks_total",
        "Blocks not written, because the disk was too slow or full.",
    )
    prefix_disk_damaged: int = _exported(
        "prefix_cache_disk_damaged_blocks_total", "Files deleted because their content was wrong."
    )
    prefix_disk_evicted: int = _exported(
        "prefix_cache_disk_evictions_total", "Files deleted for lack of room."
    )
    prefix_disk_bytes: int = _exported(
        "prefix_cache_disk_bytes", "Size of the folder of cached prefixes, as last counted."
    )
    prefix_bytes: int = _exported(wire.ENGINE_PREFIX_CACHE_BYTES, "Memory of cached prefixes.")
    prefix_blocks: tuple[str, ...] = ()
    """Names of cached blocks, last used first: `PrefixCache.summary`, replaced as a whole."""

    active_bytes: int = _exported(wire.ENGINE_MEMORY_ACTIVE_BYTES, "Memory of MLX's arrays.")
    buffer_bytes: int = _exported(
        "memory_buffer_cache_bytes", "Freed memory that MLX keeps for reuse."
    )
    peak_bytes: int = 0
    """The most memory that MLX's arrays have used."""
    kv_bytes: int = _exported(
        "memory_kv_bytes", "Memory of the KV caches of running sequences, reservations included."
    )
    preemptions: int = _exported(
        "preemptions_total", "Sequences that gave up their memory to others, and continued later."
    )
    kv_limit_bytes: int = _exported(
        "memory_kv_limit_bytes", "Memory that these caches may have together."
    )
    kv_limit_tokens: int = 0
    """Tokens that fit into that memory, up to the most that all requests may have; 0 before it is known."""
    limit_bytes: int = _exported(wire.ENGINE_MEMORY_LIMIT_BYTES, "Memory that MLX may use.")

    @property
    def progress(self) -> int:
        """A number without a unit that grows while the worker makes progress: bytes, steps and tokens.

        It distinguishes a slow model from a stuck one. A live process with an idle event loop says nothing about the
        thread that owns the GPU.
        """
        return self.loaded_bytes + self.steps + self.prefill_tokens + self.decode_tokens

    @property
    def kv_usage(self) -> float:
        """The part of the memory for KV caches that is promised, from 0 to 1; a single job may exceed it."""
        return min(1.0, self.kv_bytes / self.kv_limit_bytes) if self.kv_limit_bytes else 0.0

    @property
    def process_peak_bytes(self) -> int:
        """The larger of MLX's peak and the peak memory of the process, which both systems count with MLX's arrays.

        MLX's own peak is the fallback where the system's cannot be read. A call takes microseconds.
        """
        return max(self.peak_bytes, footprint.peak_bytes())
