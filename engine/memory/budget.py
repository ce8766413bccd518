"""The memory budget: decides whether a request fits into this engine, at all and beside the running ones. Pure.

    promised = process + weights + activations + KV caches of requests + prefix cache

The memory proof promises the amount (`memoryLimitBytes`). Without a promise it is the machine's recommendation, and
requests get only the part below the high mark, because no proof has counted them.
"""

from collections.abc import Collection
from dataclasses import dataclass

from engine.errors import Refusal
from engine.memory.pressure import HIGH
from models.footprint import CACHE_STEP, KvFootprint, ServingLoad
from schemas.quantity import show

# Python and its libraries, and the input workers at rest, which share most of 100 MiB. The memory proof's 768 MiB
# (reconciler/placement/memory_proof.py) include unused buffers, which are counted separately here; the rest of the
# difference covers rounding, temporary copies of allocations, and input workers at work (`input_bytes`).
PROCESS_BYTES = 512 * 2**20
# An input worker at work: tokens with their places in the text take 600 bytes each, and a usual schema some megabytes.
_INPUT_BYTES, _INPUT_BYTES_PER_TOKEN = 192 * 2**20, 1024
# Without an explicit size, the prefix cache may grow to a quarter of the limit.
_PREFIX_DIVISOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The parts of the memory; all sizes in bytes."""

    footprint: KvFootprint
    limit_bytes: int
    """The limit of MLX: weights, activations, caches and unused buffers."""
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    """The KV caches of requests."""
    prefix_kept_bytes: int
    """Reserved for the prefix cache; requests never get it."""
    prefix_most_bytes: int
    """The most that the prefix cache may hold, together with memory that requests leave free."""
    load: ServingLoad
    pinned_bytes: int = 0
    """Of the prefix cache, the pinned prefixes; they are pinned only if `prefix_kept_bytes` holds them."""

    @property
    def longest(self) -> int:
        """The number of tokens that one request can have when it runs alone; 0 if none fits."""
        guesses = self.load.draft_tokens
        most = self.load.context_length + guesses
        return max(0, self.footprint.longest_within(self.kv_bytes, most) - guesses)

    @property
    def capacity_tokens(self) -> int:
        """The number of tokens for which there is room, up to the most that all requests together may have."""
        most = self.load.concurrency * (self.load.context_length + self.load.draft_tokens)
        return self.footprint.longest_within(self.kv_bytes, most)

    def needs(self, lengths: Collection[int]) -> int:
        """Return the most bytes that sequences of these lengths need together."""
        guesses = self.load.draft_tokens
        return self.footprint.batch_bytes([length + guesses for length in lengths])

    def fits(self, lengths: Collection[int]) -> bool:
        """Return whether sequences of these lengths can run together until they end."""
        return self.needs(lengths) <= self.kv_bytes

    def prefix_bytes(self, lengths: Collection[int]) -> int:
        """Return the bytes that the prefix cache may hold beside sequences of these lengths."""
        left = max(0, self.kv_bytes - self.needs(lengths))
        return min(self.prefix_kept_bytes + left, self.prefix_most_bytes)

    def refuse(self, prompt_tokens: int, max_tokens: int, *, param: str) -> Refusal | None:
        """Return the refusal of a request that can never run here; None if it fits when it runs alone.

        `param` is the field of the request to name in the message.
        """
        tokens = prompt_tokens + max_tokens
        if self.fits([tokens]):
            return None
        message = (
            f"This request needs {show(self.needs([tokens]))} of memory for the {tokens} tokens you requested "
            f"({prompt_tokens} in the {param}, {max_tokens} in the completion), and this replica has "
            f"{show(self.kv_bytes)} for all requests together, which is enough for {self.longest} tokens. "
            f"Please reduce the length of the {param} or completion."
        )
        return Refusal(status=400, message=message, param=param, code="kv_budget_exceeded")

    @property
    def unpinnable(self) -> str:
        """The reason why prefixes cannot be pinned; "" if there is memory for all of them."""
        if self.pinned_bytes <= self.prefix_kept_bytes:
            return ""
        return (
            f"prefixes need {show(self.pinned_bytes)}, and requests leave {show(self.prefix_kept_bytes)}; give the "
            "model more memory, or a smaller context or concurrency"
        )

    @property
    def shortage(self) -> str:
        """The reason why the memory is too small for any request; "" if it is large enough."""
        if self.longest >= min(CACHE_STEP, self.load.context_length):
            return ""
        return (
            f"the memory limit leaves {show(self.kv_bytes)} for requests, and one of {CACHE_STEP} tokens needs "
            f"{show(self.needs([CACHE_STEP]))}: MLX may hold {show(self.limit_bytes)} beside the process' own "
            f"{show(PROCESS_BYTES)}, of which weights take {show(self.weights_bytes)} and activations up to "
            f"{show(self.activation_bytes)}; give the model more memory, or a smaller context or concurrency"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """The memory flags of the command line, in bytes."""

    promised_bytes: int | None = None
    """The promise for the whole process; None if there is no memory proof."""
    pinned_bytes: int = 0
    """The size of the pinned prefixes, beside that of the prefix cache."""
    prefix_bytes: int | None = None
    """The size of the prefix cache; None for the memory that requests leave free."""


def make_budget(
    footprint: KvFootprint,
    load: ServingLoad,
    request: MemoryRequest,
    *,
    machine_bytes: int,
    held: tuple[int, int],
) -> MemoryBudget:
    """Divide the memory among its uses.

    `machine_bytes` is the memory that the machine recommends for models. `held` is the measured size of the weights,
    with adapters and draft models, and the most that activations may take.
    """
    weights, activations = held
    limit = max(0, (request.promised_bytes or machine_bytes) - PROCESS_BYTES)
    room = limit - weights
    if request.promised_bytes is None:
        room = int(HIGH * room)
    room = max(0, room - activations)
    full = full_bytes(footprint, load)
    cache_bytes = min((request.prefix_bytes or 0) + request.pinned_bytes, max(0, room - full))
    most = limit // _PREFIX_DIVISOR if request.prefix_bytes is None else request.prefix_bytes
    return MemoryBudget(
        footprint=footprint,
        limit_bytes=limit,
        weights_bytes=weights,
        activation_bytes=activations,
        kv_bytes=room - cache_bytes,
        prefix_kept_bytes=cache_bytes,
        prefix_most_bytes=most + request.pinned_bytes,
        pinned_bytes=request.pinned_bytes,
        load=load,
    )


def full_bytes(footprint: KvFootprint, load: ServingLoad) -> int:
    """Return the most bytes that the caches of all requests hold together."""
    return footprint.load_bytes(load)


def input_bytes(context_length: int) -> int:
    """Return the most memory that one input worker may use for a request, beyond what it starts with."""
    return max(_INPUT_BYTES, _INPUT_BYTES_PER_TOKEN * context_length)
