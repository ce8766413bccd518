"""The gauges of an engine: numbers that the worker thread writes and the event loop reads."""

from dataclasses import dataclass

from machinery import footprint


@dataclass(slots=True)
class Gauges:
    """Numbers written by the worker thread only. Each one is a single word, so no lock is needed.

    All start at 0. Those "so far" only grow, and may be written in any order: a reader may see the
    tokens of a step before its seconds.
    """

    loaded_bytes: int = 0
    """Weights loaded so far."""
    total_bytes: int = 0
    """Weights to load."""
    steps: int = 0
    """Batch steps so far: pieces of prompts or embeddings, tokens, or both in one."""
    slowest_s: float = 0.0
    """Duration of the slowest step. A step that takes many times as long is stuck, for example in a collective."""
    is_waiting: bool = False
    """True if the worker waits for other ranks in a socket. The wait has no limit and makes no progress."""

    prefill_tokens: int = 0
    """Prompt tokens computed so far, without those from the prefix cache."""
    prefill_seconds: float = 0.0
    """Seconds spent on `prefill_tokens` so far."""
    decode_tokens: int = 0
    """Tokens generated so far, including the first one of each sequence."""
    decode_seconds: float = 0.0
    """Seconds spent on `decode_tokens` so far."""
    draft_tokens: int = 0
    """Tokens proposed by a draft model or n-grams so far."""
    draft_accepted_tokens: int = 0
    """Proposed tokens, so far, that the model would have chosen itself."""
    faults: int = 0
    """Steps, so far, that lost jobs to an exception."""

    running: int = 0
    """Sequences in the batch that generate."""
    prefilling: int = 0
    """Sequences in the batch whose prompt is being read or waits to be read."""
    prompt_positions: tuple[tuple[int, int], ...] = ()
    """(job id, tokens of its prompt read so far) of each sequence in the batch; replaced as a whole."""
    chunk_tokens: int = 0
    """Prompt tokens that one step reads now: fewer under memory pressure or beside generating sequences."""

    prefix_pinned_tokens: int = 0
    """Tokens of the prefix cache that are never evicted."""
    prefix_lookups: int = 0
    """Prompts looked up in the prefix cache so far."""
    prefix_query_tokens: int = 0
    """Tokens of these prompts so far."""
    prefix_hit_tokens: int = 0
    """Tokens found in the prefix cache so far."""
    prefix_evictions: int = 0
    """Blocks and parts of blocks evicted for lack of room so far."""
    prefix_disk_written: int = 0
    """Blocks of prefixes written to disk so far."""
    prefix_disk_read: int = 0
    """Blocks of prefixes read from disk and used so far."""
    prefix_disk_dropped: int = 0
    """Blocks not written so far, because the disk was too slow or full."""
    prefix_disk_damaged: int = 0
    """Files deleted so far because their content was wrong."""
    prefix_disk_evicted: int = 0
    """Files deleted so far for lack of room."""
    prefix_disk_bytes: int = 0
    """Size of the folder of prefixes, as last counted."""
    prefix_bytes: int = 0
    """Size of the prefix cache."""
    prefix_blocks: tuple[str, ...] = ()
    """Names of cached blocks, last used first: `PrefixCache.summary`, replaced as a whole."""

    active_bytes: int = 0
    """Memory of MLX's arrays now."""
    buffer_bytes: int = 0
    """Memory of freed arrays that MLX keeps for new ones (`mx.get_cache_memory`)."""
    peak_bytes: int = 0
    """The most memory that MLX's arrays have used."""
    kv_bytes: int = 0
    """Memory promised to the caches of running sequences."""
    preemptions: int = 0
    """Sequences that gave up their memory to others so far, and continued later."""
    kv_limit_bytes: int = 0
    """Memory that all of them may have together; 0 before it is known."""
    kv_limit_tokens: int = 0
    """Tokens that fit into that memory, up to the most that all requests may have; 0 before it is known."""
    limit_bytes: int = 0
    """The limit of MLX's memory; 0 before it is known."""

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
