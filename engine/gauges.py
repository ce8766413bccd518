"""Where the engine is in its life, and the numbers it shows while there. Decides nothing."""

from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """The words of `/health`; only `Ready` takes requests."""

    JOINING = "Joining"
    """A rank that waits for the others of its group, before MLX connects them."""
    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"


@dataclass(slots=True)
class Gauges:
    """Written by the worker thread alone and read by the event loop: single words, so no lock.

    All start at 0. Those with "so far" only grow, and may be written in any order: a reader may see the
    tokens of a step before its seconds.
    """

    loaded_bytes: int = 0
    """Of the weights, so far."""
    total_bytes: int = 0
    """Of the weights, to be loaded."""
    steps: int = 0
    """What the worker did with the batch so far: pieces of prompts or embeddings, tokens, or both in one."""
    slowest_s: float = 0.0
    """What the slowest of them took. One that takes many times as long is stuck, in a collective perhaps."""
    is_waiting: bool = False
    """Whether the worker waits for other ranks, in a socket: for as long as it takes, and without getting anywhere."""

    prefill_tokens: int = 0
    """Of prompts, computed so far: what came from the prefix cache is not in it."""
    prefill_seconds: float = 0.0
    """Spent so far on the computation of `prefill_tokens`."""
    decode_tokens: int = 0
    """Made so far, the first of each sequence included."""
    decode_seconds: float = 0.0
    """Spent so far on steps that made `decode_tokens`."""
    draft_tokens: int = 0
    """Guessed by a draft model so far."""
    draft_accepted_tokens: int = 0
    """Those of them, so far, that the model would have chosen itself."""
    faults: int = 0
    """Steps, so far, whose exception cost jobs."""

    running: int = 0
    """Sequences in the batch that decode."""
    prefilling: int = 0
    """Sequences in the batch whose prompt is being read, or waits to be read."""
    chunk_tokens: int = 0
    """How many tokens of a prompt are read at once now: less under pressure of memory or of others that decode."""

    prefix_lookups: int = 0
    """Prompts that were looked up in the prefix cache so far."""
    prefix_query_tokens: int = 0
    """Tokens of the prompts that were looked up so far."""
    prefix_hit_tokens: int = 0
    """Those of them, so far, that need not be computed."""
    prefix_evictions: int = 0
    """Blocks and parts of blocks that were forgotten for want of room so far."""
    prefix_bytes: int = 0
    """What the prefix cache holds."""
    prefix_blocks: tuple[str, ...] = ()
    """Names of cached prefixes' blocks, the last used first: `PrefixCache.summary`, replaced as a whole."""

    active_bytes: int = 0
    """What MLX's arrays take now."""
    buffer_bytes: int = 0
    """What MLX keeps of freed arrays for the next ones (`mx.get_cache_memory`)."""
    peak_bytes: int = 0
    """The most that MLX's arrays took."""
    kv_bytes: int = 0
    """What the caches of running sequences take, or are promised."""
    limit_bytes: int = 0
    """What MLX may take; 0 before it is known."""

    @property
    def progress(self) -> int:
        """What was done so far, in no unit: loaded bytes, steps, tokens read and tokens made.

        It grows for as long as the worker gets anywhere, which tells a slow model from a stuck one: a live
        process with an idle event loop proves nothing about the thread that owns the GPU.
        """
        return self.loaded_bytes + self.steps + self.prefill_tokens + self.decode_tokens
