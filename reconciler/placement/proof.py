"""The memory proof: how many bytes one rank of a model needs. Pure.

Figures and formulas: docs/architecture.md, section 5, with their sources.
"""

from dataclasses import dataclass
from typing import Final

from reconciler.placement import cache
from reconciler.placement.cache import Use
from schemas import quantity
from schemas.deployment import KvCache, ModelDeploymentSpec
from schemas.node import ModelGeometry
from schemas.replica import MemoryProof

# Python, MLX and buffers of one engine process; measured 0.5 to 0.8 GiB with an idle model.
_PROCESS_BYTES = 768 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What only some deployments ask for."""

    kv_bits: int | None = None
    kv_window: int | None = None
    prefix_cache_bytes: int = 0
    adapter_bytes: int = 0
    draft: ModelGeometry | None = None
    draft_tokens: int = 0
    """How many tokens it guesses at once."""


NO_EXTRAS: Final = Extras()


def prove(
    geometry: ModelGeometry,
    *,
    context_length: int,
    concurrency: int,
    ranks: int = 1,
    override_bytes: int = 0,
    extras: Extras = NO_EXTRAS,
) -> MemoryProof:
    """Return what one of `ranks` equal engines needs for `concurrency` requests of `context_length` tokens.

    `override_bytes` is what a person says instead (spec.resources.memory): it counts, the parts stay to compare.
    """
    use = use_of(context_length, concurrency, ranks=ranks, extras=extras)
    return MemoryProof(
        weights_bytes=_weights(geometry, ranks),
        kv_cache_bytes=cache.cache_bytes(geometry, use),
        activation_bytes=cache.activation_bytes(geometry, use),
        overhead_bytes=_PROCESS_BYTES,
        prefix_cache_bytes=extras.prefix_cache_bytes,
        adapter_bytes=extras.adapter_bytes,
        draft_bytes=_draft(extras, use),
        override_bytes=override_bytes,
    )


def use_of(context_length: int, concurrency: int, *, ranks: int, extras: Extras) -> Use:
    """Return how an engine is used that works on `concurrency` requests of `context_length` tokens."""
    return Use(
        # The model reads the guesses before it knows which of them are right.
        context_length=context_length + extras.draft_tokens,
        concurrency=concurrency,
        ranks=ranks,
        kv_bits=extras.kv_bits,
        kv_window=extras.kv_window,
        decoded_at_once=1 + extras.draft_tokens,
    )


def _weights(geometry: ModelGeometry, ranks: int) -> int:
    split = geometry.weights_bytes - geometry.replicated_bytes
    return -(-split // ranks) + geometry.replicated_bytes


def _draft(extras: Extras, use: Use) -> int:
    """Return all that a draft model takes; it is whole on every rank, and its cache is never quantized."""
    if extras.draft is None:
        return 0
    alone = Use(context_length=use.context_length, concurrency=use.concurrency)
    held = cache.cache_bytes(extras.draft, alone) + cache.activation_bytes(extras.draft, alone)
    return _weights(extras.draft, 1) + held


def shown(proof: MemoryProof, spec: ModelDeploymentSpec) -> str:
    """Return of what the proof is the sum, or that somebody said it."""
    if proof.overridden:
        return "spec.resources.memory says so"
    show, kept = quantity.show, spec.kv_cache or KvCache()
    form = f" in {kept.bits} bits" if kept.bits is not None else ""
    form = f" in a window of {kept.window}" if kept.window is not None else form
    parts = [
        f"weights {show(proof.weights_bytes)}",
        f"KV cache {show(proof.kv_cache_bytes)} for {spec.concurrency} x {spec.context_length} tokens{form}",
        f"activations {show(proof.activation_bytes)}",
        f"process {show(proof.overhead_bytes)}",
        *(f"{name} {show(size)}" for name, size in extra_parts(proof)),
    ]
    return ", ".join(parts)


def extra_parts(proof: MemoryProof) -> list[tuple[str, int]]:
    """Return the parts that only some deployments have, by name, in bytes; those that are 0 are left out."""
    found = (
        ("prefix cache", proof.prefix_cache_bytes),
        ("adapter", proof.adapter_bytes),
        ("draft model", proof.draft_bytes),
    )
    return [(name, size) for name, size in found if size]
