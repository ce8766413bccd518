"""Whether a request fits into what this engine may hold: ever, and now. Pure.

    promise = process + weights + activations + KV caches of requests + prefix cache

The promise is the memory proof's (`--memory-limit-bytes`). Where nobody made one it is what the machine recommends,
and requests get what lies below the high mark: nobody has counted for them, so something is kept back.
"""

from collections.abc import Collection
from dataclasses import dataclass

from engine.errors import Refusal
from engine.memory.pressure import HIGH
from models.footprint import CACHE_STEP, KvFootprint, ServingLoad
from schemas.quantity import show

# Python and its libraries. Less than the memory proof's 768 MiB (reconciler/placement/memory_proof.py), which has unused buffers
# in it: those are counted here, and what remains covers that allocations are rounded up and, for a moment, copied.
PROCESS_BYTES = 512 * 2**20
# The part of the limit that the prefix cache may grow to where nobody said how much: a quarter.
_PREFIX_DIVISOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How the memory is shared; all in bytes."""

    rule: KvFootprint
    limit_bytes: int
    """What MLX may hold: weights, activations, caches and unused buffers."""
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    """For the caches of requests."""
    prefix_kept_bytes: int
    """For the prefix cache alone; requests never get it."""
    prefix_most_bytes: int
    """What the prefix cache may grow to in what requests leave."""
    load: ServingLoad

    @property
    def longest(self) -> int:
        """Return how many tokens one request can have when it is alone; 0 if none can."""
        guesses = self.load.draft_tokens
        most = self.load.context_length + guesses
        return max(0, self.rule.longest_within(self.kv_bytes, most) - guesses)

    def needs(self, lengths: Collection[int]) -> int:
        """Return what sequences of these lengths need together at worst: each as much as the longest."""
        longest = max(lengths, default=0) + self.load.draft_tokens
        return self.rule.batch_bytes(len(lengths), longest)

    def fits(self, lengths: Collection[int]) -> bool:
        """Whether sequences of these lengths can run together to their ends."""
        return self.needs(lengths) <= self.kv_bytes

    def prefix_bytes(self, lengths: Collection[int]) -> int:
        """Return what the prefix cache may hold beside these sequences."""
        left = max(0, self.kv_bytes - self.needs(lengths))
        return min(self.prefix_kept_bytes + left, self.prefix_most_bytes)

    def refuse(self, prompt_tokens: int, max_tokens: int, *, param: str) -> Refusal | None:
        """Return why a request can never run here, or None: one that fits alone is never refused.

        `param` is the field of the request that is to blame.
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
    def complaint(self) -> str:
        """Say why nobody can be served with so little memory; "" if somebody can."""
        if self.longest >= min(CACHE_STEP, self.load.context_length):
            return ""
        return (
            f"the memory limit leaves {show(self.kv_bytes)} for requests, and one of {CACHE_STEP} tokens needs "
            f"{show(self.needs([CACHE_STEP]))}: {show(self.limit_bytes)} may be held beside the process' own "
            f"{show(PROCESS_BYTES)}, of which weights take {show(self.weights_bytes)} and activations up to "
            f"{show(self.activation_bytes)}; give the model more memory, or a smaller context or concurrency"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What the command line says of memory, in bytes."""

    promised_bytes: int | None = None
    """What the whole process may take; None: nobody counted."""
    prefix_bytes: int | None = None
    """What the prefix cache is promised; None: what requests leave."""


def make_budget(
    rule: KvFootprint,
    load: ServingLoad,
    wishes: MemoryRequest,
    *,
    machine_bytes: int,
    held: tuple[int, int],
) -> MemoryBudget:
    """Share the memory out.

    `machine_bytes` is what the machine recommends for models; `held` is what the weights take (measured, adapters and
    draft models included) and what activations may take at worst.
    """
    weights, activations = held
    limit = max(0, (wishes.promised_bytes or machine_bytes) - PROCESS_BYTES)
    room = limit - weights
    if wishes.promised_bytes is None:
        room = int(HIGH * room)
    room = max(0, room - activations)
    full = full_bytes(rule, load)
    kept = min(wishes.prefix_bytes or 0, max(0, room - full))
    most = limit // _PREFIX_DIVISOR if wishes.prefix_bytes is None else wishes.prefix_bytes
    return MemoryBudget(
        rule=rule,
        limit_bytes=limit,
        weights_bytes=weights,
        activation_bytes=activations,
        kv_bytes=room - kept,
        prefix_kept_bytes=kept,
        prefix_most_bytes=most,
        load=load,
    )


def full_bytes(rule: KvFootprint, load: ServingLoad) -> int:
    """Return what the caches of all requests hold together at worst."""
    return rule.batch_bytes(load.concurrency, load.context_length + load.draft_tokens)
