"""Remedies of a pending replica: milder forms of its deployment that would fit, tried with the planner's own filters. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from insight import memory_proof
from manifests.trees import Tree
from reconciler.deployments.snapshot import FleetSnapshot
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import request_for
from reconciler.placement.memory_proof import proof_of
from reconciler.placement.table import NodeTable
from schemas.deployment import ModelDeployment, ModelSource
from schemas.kv_cache import KvCache
from schemas.quantity import DEFAULT_CONCURRENCY
from schemas.replica import MemoryProof

_SMALLEST_CONTEXT: Final = 1024

Variant: TypeAlias = tuple[str, ModelDeployment, dict[str, Tree]]
"""A milder form of a deployment: in words, as an object, and the fields of its spec that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of a deployment with which one more replica would fit."""

    text: str
    node: str
    memory: MemoryProof | None
    patch: dict[str, Tree]
    """The fields of its spec."""

    @property
    def tree(self) -> dict[str, Tree]:
        """The remedy as a tree."""
        memory = None if self.memory is None else memory_proof.proof_tree(self.memory)
        return {"text": self.text, "node": self.node, "memory": memory, "patch": self.patch}


def find_proofs(seen: FleetSnapshot, name: str) -> dict[str, MemoryProof]:
    """Return what one more replica would need on each Mac that knows the model, whether it fits or not."""
    observed = seen.observe(name, table := seen.table())
    if observed.deployment is None:
        return {}
    request = request_for(observed.deployment, apart_from=observed.apart_from)
    source = observed.deployment.spec.model
    return {
        node.name: proof_of(request, node)
        for node in table.nodes
        if node.models.keys() >= set(_paths(source))
        and node.adapters.keys() >= set(source.adapter_paths)
        and all(node.models[path].geometry is not None for path in _paths(source))
        and all(node.adapters[path].reason == "" for path in source.adapter_paths)
    }


def _paths(source: ModelSource) -> tuple[str, ...]:
    return (source.folder,) if source.draft is None else (source.folder, source.draft.path)


def find_remedies(seen: FleetSnapshot, name: str) -> list[Remedy]:
    """Return changes with which one more replica would fit on a single Mac: of each sort, the mildest that helps."""
    table = seen.table()
    observed = seen.observe(name, table)
    if observed.deployment is None:
        return []
    remedies: list[Remedy] = []
    for variants in (_fewer_bits, _less_at_once, _shorter_contexts):
        remedies += _first_that_fits(variants(observed.deployment), observed.apart_from, table)
    return remedies or _first_that_fits(
        _all_together(observed.deployment), observed.apart_from, table
    )


def _first_that_fits(
    variants: Iterable[Variant], apart_from: frozenset[str], table: NodeTable
) -> list[Remedy]:
    """Return the first variant that fits on a Mac; empty if none does."""
    for text, variant, patch in variants:
        request = request_for(variant, apart_from=apart_from)
        node = next((view for view in table.nodes if (find_rejection(request, view) is None)), None)
        if node is not None:
            name = node.name
            line = f"{text} would fit on {name}"
            return [Remedy(text=line, node=name, memory=proof_of(request, node), patch=patch)]
    return []


def _changed(deployment: ModelDeployment, **fields: object) -> ModelDeployment:
    spec = deployment.spec.model_copy(update=fields)
    return deployment.model_copy(update={"spec": spec})


def _cache_of(deployment: ModelDeployment, bits: int) -> KvCache:
    return (deployment.spec.kv_cache or KvCache()).model_copy(update={"bits": bits})


def _fewer_bits(deployment: ModelDeployment) -> Iterator[Variant]:
    cache = deployment.spec.kv_cache
    now = 16 if cache is None or cache.bits is None else cache.bits
    for bits in (8, 4):
        if bits < now:
            variant = _changed(deployment, kv_cache=_cache_of(deployment, bits))
            yield f"{bits}-bit KV", variant, {"kvCache": {"bits": bits}}


def _less_at_once(deployment: ModelDeployment) -> Iterator[Variant]:
    asked = deployment.spec.concurrency
    # Auto is lowered to what fits already, unless a Mac is too full: then fewer may fit.
    number = (DEFAULT_CONCURRENCY if asked == "Auto" else asked) // 2
    while number >= 1:
        text = f"{number} {'request' if number == 1 else 'requests'} at once"
        yield text, _changed(deployment, concurrency=number), {"concurrency": number}
        number //= 2


def _shorter_contexts(deployment: ModelDeployment) -> Iterator[Variant]:
    length = deployment.spec.context_length // 2
    while length >= _SMALLEST_CONTEXT:
        text = f"a context of {length} tokens"
        yield text, _changed(deployment, context_length=length), {"contextLength": length}
        length //= 2


def _all_together(deployment: ModelDeployment) -> Iterator[Variant]:
    length = max(min(_SMALLEST_CONTEXT, deployment.spec.context_length), 16)
    variant = _changed(
        deployment, kv_cache=_cache_of(deployment, 4), concurrency=1, context_length=length
    )
    patch: dict[str, Tree] = {
        "kvCache": {"bits": 4},
        "concurrency": 1,
        "contextLength": length,
    }
    yield f"4-bit KV, 1 request at once and {length} tokens", variant, patch
