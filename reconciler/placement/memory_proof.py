"""The memory proof: the bytes that one rank of a model needs, and how they compare with an engine's peak. Pure.

Formulas and their sources: docs/internals/memory-proof.md; caches and activations: models/footprint.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from models import footprint
from models.footprint import ServingLoad
from reconciler.placement.concurrency import DecodeCost, describe_pace, requests_at_pace
from reconciler.placement.inputs import NodeView, PlacementRequest
from schemas import quantity
from schemas.deployment import ModelDeploymentSpec
from schemas.kv_cache import KvCache
from schemas.node import ModelGeometry
from schemas.quantity import DEFAULT_CONCURRENCY
from schemas.replica import MemoryProof, RankAssignment, RankStatus, Replica
from schemas.vision import Vision

# Python, MLX and buffers of one engine process; measured 0.5 to 0.8 GiB with an idle model.
_PROCESS_BYTES = 768 * 2**20


_LIMITS: Final = {
    "MemoryBandwidth": "the Mac's memory bandwidth",
    "GPUCores": "the Mac's GPU cores",
    "Memory": "the Mac's memory",
    "Most": "the limit of 64",
    "Least": "the least number",
    "UnknownHardware": "the default for unknown hardware",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofExtras:
    """Options of a deployment that take memory besides model, caches and activations."""

    kv_tokens: int | None = None
    kv_bits: int | None = None
    kv_window: int | None = None
    prefix_cache_bytes: int = 0
    pinned_tokens: tuple[int, ...] = ()
    """Tokens of each pinned prefix."""
    adapter_bytes: int = 0
    draft: ModelGeometry | None = None
    draft_tokens: int = 0
    """Tokens that a draft model, n-grams or a multi-token prediction head propose at once."""
    has_mtp: bool = False
    vision: Vision | None = None


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
    """Return the memory of one of `ranks` equal engines for `concurrency` requests of `context_length` tokens.

    `override_bytes` is spec.resources.memory: it replaces the sum, and the parts stay for comparison.
    """
    load = engine_load(context_length, concurrency, ranks=ranks, extras=extras)
    return MemoryProof(
        weights_bytes=_weights(geometry, ranks),
        kv_cache_bytes=footprint.cache_bytes(geometry, load)
        + footprint.mtp_bytes(geometry, load)
        + (footprint.kept_bytes(geometry, load, by_token=False) if load.draft_tokens else 0),
        activation_bytes=footprint.activation_bytes(geometry, load)
        + footprint.vision_bytes(geometry, load),
        overhead_bytes=_PROCESS_BYTES,
        prefix_cache_bytes=extras.prefix_cache_bytes + _pinned_bytes(geometry, extras),
        adapter_bytes=extras.adapter_bytes,
        draft_bytes=_draft_bytes(extras, load),
        override_bytes=override_bytes,
        concurrency=concurrency,
    )


def _pinned_bytes(geometry: ModelGeometry, extras: ProofExtras) -> int:
    """Return the memory of the pinned prefixes, each as large as the caches of a request of its tokens."""
    loads = (
        ServingLoad(context_length=tokens, concurrency=1, kv_bits=extras.kv_bits)
        for tokens in extras.pinned_tokens
    )
    kept = sum(footprint.cache_bytes(geometry, load) for load in loads)
    return kept + footprint.BLOCK_TOKEN_BYTES * sum(extras.pinned_tokens)


def engine_load(
    context_length: int, concurrency: int, *, ranks: int, extras: ProofExtras
) -> ServingLoad:
    """Return the load of an engine with `concurrency` requests of `context_length` tokens."""
    return ServingLoad(
        context_length=context_length,
        concurrency=concurrency,
        ranks=ranks,
        kv_tokens=extras.kv_tokens,
        kv_bits=extras.kv_bits,
        kv_window=extras.kv_window,
        draft_tokens=extras.draft_tokens,
        has_mtp=extras.has_mtp,
        image_pixels=0 if extras.vision is None else extras.vision.max_pixels,
        images=0 if extras.vision is None else extras.vision.max_images,
    )


def _weights(geometry: ModelGeometry, ranks: int) -> int:
    split = geometry.weights_bytes - geometry.replicated_bytes
    return -(-split // ranks) + geometry.replicated_bytes


def _draft_bytes(extras: ProofExtras, load: ServingLoad) -> int:
    """Return all memory of a draft model; every rank holds it whole, and its cache is never quantized."""
    if extras.draft is None:
        return 0
    # The draft model also reads the tokens that it proposes.
    alone = ServingLoad(
        context_length=load.context_length + load.draft_tokens, concurrency=load.concurrency
    )
    variable = (
        footprint.cache_bytes(extras.draft, alone)
        + footprint.kept_bytes(extras.draft, alone, by_token=True)
        + footprint.activation_bytes(extras.draft, alone)
    )
    return _weights(extras.draft, 1) + variable


def geometry_of(request: PlacementRequest, node: NodeView) -> ModelGeometry:
    """Return the geometry that the node reports for the model; the filters made sure that it has one."""
    geometry = node.models[request.path].geometry
    assert geometry is not None
    return geometry


def draft_of(request: PlacementRequest, node: NodeView) -> ModelGeometry | None:
    """Return the geometry of the draft model; None if the deployment has none."""
    draft = request.spec.model.draft
    return None if draft is None else node.models[draft.path].geometry


def extras_of(request: PlacementRequest, node: NodeView) -> ProofExtras:
    """Return the deployment's extras, as the node reports them."""
    source, kv_cache = request.spec.model, request.spec.kv_cache or KvCache()
    return ProofExtras(
        kv_tokens=kv_cache.tokens,
        kv_bits=kv_cache.bits,
        kv_window=kv_cache.window,
        prefix_cache_bytes=quantity.parse(kv_cache.prefix_bytes) if kv_cache.prefix_bytes else 0,
        pinned_tokens=tuple(prefix.tokens for prefix in request.spec.prefixes),
        adapter_bytes=sum(node.adapters[path].weights_bytes for path in source.adapter_paths),
        draft=draft_of(request, node),
        draft_tokens=source.guess_tokens,
        has_mtp=source.mtp is not None,
        vision=source.vision,
    )


def proof_of(request: PlacementRequest, node: NodeView) -> MemoryProof:
    """Return the memory of the whole replica on this node, for as many requests as it would work on at once there."""
    asked, geometry, extras = (
        request.spec.concurrency,
        geometry_of(request, node),
        extras_of(request, node),
    )

    def proof(concurrency: int) -> MemoryProof:
        return prove(
            geometry,
            context_length=request.spec.context_length,
            concurrency=concurrency,
            override_bytes=request.override_bytes,
            extras=extras,
        )

    if asked != "Auto":
        return proof(asked)
    if request.override_bytes:
        # The size was stated for the requests that a deployment has by default.
        return _with_limit(proof(DEFAULT_CONCURRENCY), "StatedMemory")
    cost = _decode_cost(request, node)
    pace = requests_at_pace(cost, bandwidth_gbps=node.bandwidth_gbps, gpu_cores=node.gpu_cores)
    memory_proof = _largest_within(proof, pace.requests, node.allocatable_bytes)
    return _with_limit(
        memory_proof, pace.limit if memory_proof.concurrency == pace.requests else "Memory"
    )


def _decode_cost(request: PlacementRequest, node: NodeView) -> DecodeCost:
    geometry = geometry_of(request, node)
    # With kvCache.tokens the requests share their caches; one alone may still have the whole context.
    alone = replace(extras_of(request, node), kv_tokens=None)
    load = engine_load(request.spec.context_length, 1, ranks=1, extras=alone)
    return DecodeCost(
        weights_bytes=geometry.weights_bytes,
        request_bytes=footprint.cache_bytes(geometry, load),
        parameters=geometry.parameters,
    )


def describe_concurrency(request: PlacementRequest, node: NodeView, proof: MemoryProof) -> str:
    """Return which figures of the Mac give the number of `concurrency: Auto`; "" for a number that was declared."""
    if request.spec.concurrency != "Auto" or request.override_bytes:
        return ""
    figures = describe_pace(
        _decode_cost(request, node), bandwidth_gbps=node.bandwidth_gbps, gpu_cores=node.gpu_cores
    )
    memory = quantity.show(node.allocatable_bytes // 2)
    limit = _LIMITS.get(proof.concurrency_limit, proof.concurrency_limit)
    return (
        f"concurrency Auto is {proof.concurrency} on {node.name} by {limit}: {figures}; more than "
        f"{DEFAULT_CONCURRENCY} only in half of its memory, {memory}"
    )


def _with_limit(proof: MemoryProof, limit: str) -> MemoryProof:
    return proof.model_copy(update={"concurrency_limit": limit})


def _largest_within(
    proof: Callable[[int], MemoryProof], most: int, allocatable_bytes: int
) -> MemoryProof:
    """Return the proof for the most requests that the Mac holds, without regard to what runs there now.

    Beyond DEFAULT_CONCURRENCY requests a replica takes at most half of the Mac, so that other models find room.
    """
    least, limit = DEFAULT_CONCURRENCY, allocatable_bytes // 2
    if most == least or proof(least + 1).total_bytes > limit:
        least, most, limit = 1, least, allocatable_bytes
    else:
        least += 1
    while least < most:
        middle = (least + most + 1) // 2
        if proof(middle).total_bytes <= limit:
            least = middle
        else:
            most = middle - 1
    return proof(least)


def describe_proof(proof: MemoryProof, spec: ModelDeploymentSpec) -> str:
    """Describe the parts of a proof in one line, or say that spec.resources.memory sets it."""
    if proof.overridden:
        shortfall = override_shortfall(proof)
        return "set by spec.resources.memory" + (f". {shortfall}" if shortfall else "")
    requests = proof.concurrency or spec.concurrency
    # Without a limit: a rank of a group, whose links decide how fast it is (reconciler/groups/formation.py).
    limit = _LIMITS.get(proof.concurrency_limit, "the default for shard groups")
    source = f", requests by {limit}" if spec.concurrency == "Auto" else ""
    show, kv_cache = quantity.show, spec.kv_cache or KvCache()
    form = f" in {kv_cache.bits} bits" if kv_cache.bits is not None else ""
    form = f" in a window of {kv_cache.window}" if kv_cache.window is not None else form
    tokens = f"{requests} x {spec.context_length} tokens"
    if kv_cache.tokens is not None:
        tokens = f"{kv_cache.tokens} tokens of {requests} requests"
    parts = [
        f"weights {show(proof.weights_bytes)}",
        f"KV cache {show(proof.kv_cache_bytes)} for {tokens}{form}{source}",
        f"activations {show(proof.activation_bytes)}",
        f"process {show(proof.overhead_bytes)}",
        *(f"{name} {show(size)}" for name, size in extra_parts(proof)),
    ]
    return ", ".join(parts)


def extra_parts(proof: MemoryProof) -> list[tuple[str, int]]:
    """Return the optional parts that are not 0, as name and bytes."""
    found = (
        ("prefix cache", proof.prefix_cache_bytes),
        ("adapter", proof.adapter_bytes),
        ("draft model", proof.draft_bytes),
    )
    return [(name, size) for name, size in found if size]


# A proof is an estimate: a difference within this many percent needs no action.
_PERCENT: Final = 15
_GIB: Final = 2**30


def percent_over(memory: MemoryProof, peak_bytes: int) -> int:
    """Return by how many percent the peak exceeds the proof; negative if it is below."""
    return round(100 * (peak_bytes - memory.total_bytes) / max(1, memory.total_bytes))


def override_shortfall(memory: MemoryProof, ranks: int = 1) -> str:
    """Describe a spec.resources.memory below the proof's sum, and what to set; empty if it is enough."""
    if not memory.overridden or memory.override_bytes >= memory.sum_bytes:
        return ""
    show, weights = quantity.show, memory.weights_bytes
    least = f", less than the weights ({show(weights)})" if memory.override_bytes < weights else ""
    return (
        f"spec.resources.memory is {show(memory.override_bytes * ranks)}{least}, and the memory proof says "
        f"{show(memory.sum_bytes * ranks)}: remove it, or set {_gibibytes(memory.sum_bytes * ranks)}"
    )


def proof_corrections(replica: Replica, reports: Sequence[RankStatus | None]) -> str:
    """Describe the ranks of a ready replica whose peak far exceeds their proof; empty if there are none.

    The peak of an engine that ended while it loaded says nothing about the memory that it would need.
    """
    pairs = zip(replica.spec.ranks, reports, strict=True)
    messages = (_correction(replica, assigned, report) for assigned, report in pairs)
    return "; ".join(message for message in messages if message)


def _correction(replica: Replica, assigned: RankAssignment, rank: RankStatus | None) -> str:
    memory, node, ranks = assigned.memory, assigned.node, len(replica.spec.ranks)
    if rank is None or percent_over(memory, rank.peak_bytes) <= _PERCENT:
        return ""
    show, peak = quantity.show, rank.peak_bytes
    source = "spec.resources.memory" if memory.overridden else "its memory proof"
    need = max(peak, memory.sum_bytes) * ranks
    return (
        f"{replica.name} used {show(peak)} on {node}, {percent_over(memory, peak)} % more than the "
        f"{show(memory.total_bytes)} of {source}. {node} counts {show(peak)} for it from now on; set "
        f"spec.resources.memory to {_gibibytes(need)}, so that new replicas are placed with that too"
    )


def _gibibytes(size_bytes: int) -> str:
    return f"{-(-size_bytes // _GIB)}Gi"


def compare_with_peak(memory: MemoryProof, peak_bytes: int) -> str:
    """Describe how a peak compares with the proof, in a few words; empty without a measurement."""
    if not peak_bytes:
        return ""
    over = percent_over(memory, peak_bytes)
    if over > _PERCENT:
        return f"{over} % more than proven: the measured value counts"
    if over < -_PERCENT:
        return f"{-over} % less than proven: the proof counts, because caches may not be full yet"
    return "as proven"
