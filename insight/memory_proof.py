"""Texts and trees of memory proofs, and of what nodes are short of. Pure."""

from manifests.trees import Tree
from reconciler.placement.inputs import Rejection
from reconciler.placement.memory_proof import extra_parts
from schemas import quantity
from schemas.replica import MemoryProof

# Reasons whose amounts are not bytes.
_COUNTS = frozenset({"TooFewGpuCores", "ContextTooLong", "ReplicaLimit"})

TITLES = ("WEIGHTS", "KV CACHE", "ACTIVATIONS", "PROCESS")


def size_text(size_bytes: int) -> str:
    """Return a size as text; a negative size (overcommitted) is 0."""
    return quantity.show(max(0, size_bytes))


def amount_text(why: Rejection, number: int) -> str:
    """Return an amount in the unit of the refusal; "-" if the refusal has no amount."""
    if not why.need and not why.have:
        return "-"
    return str(number) if why.reason in _COUNTS else size_text(number)


def part_texts(proof: MemoryProof) -> list[str]:
    """Return the parts of the proof, in the order of TITLES."""
    return [
        size_text(proof.weights_bytes),
        size_text(proof.kv_cache_bytes),
        size_text(proof.activation_bytes),
        size_text(proof.overhead_bytes),
    ]


def extra_text(proof: MemoryProof) -> str:
    """Return the optional parts of the proof with their names; "-" if there are none."""
    found = [f"{name} {size_text(number)}" for name, number in extra_parts(proof)]
    return ", ".join(found) or "-"


def proof_tree(proof: MemoryProof) -> dict[str, Tree]:
    """Return the proof as a tree with its total, in bytes."""
    trees: dict[str, Tree] = proof.model_dump(mode="json", by_alias=True)
    return {**trees, "totalBytes": proof.total_bytes}
