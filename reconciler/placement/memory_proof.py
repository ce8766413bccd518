"""The memory proof: how many bytes one rank of a model needs. Pure.

Figures and formulas: docs/architecture.md, section 5, with their sources.

What an engine was seen to take, held against its memory proof. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from models import footprint
from models.footprint import ServingLoad
from schemas import quantity
from schemas.deployment import KvCache, ModelDeploymentSpec
from schemas.node import ModelGeometry
from schemas.replica import MemoryProof, RankAssignment, RankStatus, Replica

# Python, MLX and buffers of one engine process; measured 0.5 to 0.8 GiB with an idle model.
_PROCESS_BYTES = 768 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofExtras:
    """What only some deployments ask for."""

    kv_bits: int | None = None
    kv_window: int | None = None
    prefix_cache_bytes: int = 0
    adapter_bytes: int = 0
    draft: ModelGeometry | None = None
    draft_tokens: int = 0
    """How many tokens it guesses at once."""


NO_EXTRAS: Final = ProofExtras()


def prove(
    geometry: ModelGeometry,
    *,
    context_length: int,
    concurrency: int,
    ranks: int = 1,
    override_bytes: int = 0,
    extras: ProofExtras = NO_EXTRAS,
) -> MemoryProof:
    """Return what one of `ranks` equal engines needs for `concurrency` requests of `context_length` tokens.

    `override_bytes` is what a person says instead (spec.resources.memory): it counts, the parts stay to compare.
    """
    use = use_of(context_length, concurrency, ranks=ranks, extras=extras)
    return MemoryProof(
        weights_bytes=_weights(geometry, ranks),
        kv_cache_bytes=footprint.cache_bytes(geometry, use),
        activation_bytes=footprint.activation_bytes(geometry, use),
        overhead_bytes=_PROCESS_BYTES,
        prefix_cache_bytes=extras.prefix_cache_bytes,
        adapter_bytes=extras.adapter_bytes,
        draft_bytes=_draft(extras, use),
        override_bytes=override_bytes,
    )


def use_of(
    context_length: int, concurrency: int, *, ranks: int, extras: ProofExtras
) -> ServingLoad:
    """Return how an engine is used that works on `concurrency` requests of `context_length` tokens."""
    return ServingLoad(
        context_length=context_length,
        concurrency=concurrency,
        ranks=ranks,
        kv_bits=extras.kv_bits,
        kv_window=extras.kv_window,
        draft_tokens=extras.draft_tokens,
    )


def _weights(geometry: ModelGeometry, ranks: int) -> int:
    split = geometry.weights_bytes - geometry.replicated_bytes
    return -(-split // ranks) + geometry.replicated_bytes


def _draft(extras: ProofExtras, use: ServingLoad) -> int:
    """Return all that a draft model takes; it is whole on every rank, and its cache is never quantized."""
    if extras.draft is None:
        return 0
    # It reads the tokens that it drafts, too.
    alone = ServingLoad(
        context_length=use.context_length + use.draft_tokens, concurrency=use.concurrency
    )
    held = footprint.cache_bytes(extras.draft, alone) + footprint.activation_bytes(
        extras.draft, alone
    )
    return _weights(extras.draft, 1) + held


def describe_proof(proof: MemoryProof, spec: ModelDeploymentSpec) -> str:
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


# A proof is an estimate; within this nobody has to do anything.
_PERCENT: Final = 15
_GIB: Final = 2**30


def percent_over(memory: MemoryProof, peak_bytes: int) -> int:
    """Return by how many percent the peak is above the proof; less than 0 where it is below."""
    return round(100 * (peak_bytes - memory.total_bytes) / max(1, memory.total_bytes))


def proof_corrections(replica: Replica, reports: Sequence[RankStatus | None]) -> str:
    """Return what to say of the ranks that took much more than was proven; empty if none did."""
    pairs = zip(replica.spec.ranks, reports, strict=True)
    said = (_correction(replica, assigned, report) for assigned, report in pairs)
    return "; ".join(one for one in said if one)


def _correction(replica: Replica, assigned: RankAssignment, rank: RankStatus | None) -> str:
    memory, node = assigned.memory, assigned.node
    if rank is None or percent_over(memory, rank.peak_bytes) <= _PERCENT:
        return ""
    show, peak = quantity.show, rank.peak_bytes
    what = "spec.resources.memory says" if memory.overridden else "its memory proof says"
    return (
        f"{replica.name} took {show(peak)} on {node}, {percent_over(memory, peak)} % more than the "
        f"{show(memory.total_bytes)} that {what}. {show(peak)} count on {node} from now on; set "
        f"spec.resources.memory to {-(-peak // _GIB)}Gi, so that new replicas are placed with that as well"
    )


def compare_with_peak(memory: MemoryProof, peak_bytes: int) -> str:
    """Return how a peak compares with the proof, in a few words; empty if nobody measured."""
    if not peak_bytes:
        return ""
    over = percent_over(memory, peak_bytes)
    if over > _PERCENT:
        return f"{over} % more than proven: the measured figure counts"
    if over < -_PERCENT:
        return (
            f"{-over} % less than proven: the proof counts, for caches may not have been full yet"
        )
    return "as proven"
