"""From what mlx-lm said of a model to what the agent reports: over how many Macs it can be split. Pure."""

from typing import Final

from nodeagent.geometry import rules
from nodeagent.geometry.layers import NotUnderstoodError
from nodeagent.geometry.splitting import Failed, Found
from nodeagent.modeldir import ModelFacts
from schemas.node import ModelGeometry, Splitting

# A complaint of mlx-lm is quoted up to here.
_QUOTED: Final = 120


def report(
    facts: ModelFacts,
    geometry: ModelGeometry,
    found: Found | Failed | None,
    *,
    casts_to_float32: bool,
) -> Splitting | None:
    """Return how the model can be split; None while nobody knows."""
    if found is None:
        return None
    if isinstance(found, Failed):
        return Splitting(unknown=found.why, basis=facts.model_type)
    sizes = sorted(found.tensor)
    return Splitting(
        tensor=tuple(sizes),
        tensor_bytes=tuple(
            found.tensor[size].in_memory(casts_to_float32=casts_to_float32) for size in sizes
        ),
        is_pipelined=bool(found.layers),
        layer_bytes=tuple(
            layer.in_memory(casts_to_float32=casts_to_float32) for layer in found.layers
        ),
        rest_bytes=found.rest.in_memory(casts_to_float32=casts_to_float32),
        layer_groups=_order(facts, geometry) if found.layers else (),
        basis=_basis(facts, geometry, found),
    )


def _order(facts: ModelFacts, geometry: ModelGeometry) -> tuple[int, ...]:
    try:
        return rules.layer_order(
            facts.module, facts.config, element_bytes=geometry.kv_element_bytes
        )
    except NotUnderstoodError:
        return ()


def _basis(facts: ModelFacts, geometry: ModelGeometry, found: Found) -> str:
    """Return what decides: heads, and what else stands in the way of sizes that divide the heads."""
    heads, kv_heads = facts.config.num_attention_heads or 0, geometry.kv_heads
    said = [
        facts.model_type,
        *([f"{heads} heads"] if heads else []),
        *([f"{kv_heads} KV heads"] if kv_heads else []),
    ]
    basis = ", ".join(said)
    dividing = [n for n in found.refused if heads % n == 0 and kv_heads % n == 0]
    if not heads or not dividing:
        return basis
    first = min(dividing)
    return f"{basis} (with {first}: {found.refused[first][:_QUOTED]})"
