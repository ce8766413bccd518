"""Generates the table of model sizes: disk, memory by the fleet's own memory proof, and the smallest Mac that fits."""

from fleetctl.simulate.fleet_file import model_geometry, nearest_shape
from nodeagent.hardware.macos import gpu_memory_limit
from reconciler.placement.memory_proof import prove
from schemas import quantity
from schemas.deployment import ModelDeploymentSpec, ModelSource

_GIB = 2**30
# Sizes of unified memory that Apple has sold with M1 to M5.
_MACS_GIB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
_BILLIONS = (0.5, 1.5, 3.2, 8.0, 14.0, 32.0, 70.0, 123.0)
_BITS = (4, 8)
_LONG_CONTEXT = 32_768


def table() -> str:
    """Return the table, with the default load and with one request of a long context."""
    spec = ModelDeploymentSpec(model=ModelSource(path="model"))
    loads = ((spec.context_length, quantity.requests_at_once(spec.concurrency)), (_LONG_CONTEXT, 1))
    titles = [f"{count} x {length:,} tokens" for length, count in loads]
    head = [
        "| parameters | bits | on disk | "
        + " | ".join(f"{t} | smallest Mac" for t in titles)
        + " |",
        "|---" * (3 + 2 * len(loads)) + "|",
    ]
    rows = [_row(billions, bits, loads) for billions in _BILLIONS for bits in _BITS]
    return "\n".join((*head, *rows))


def _row(billions: float, bits: int, loads: tuple[tuple[int, int], ...]) -> str:
    parameters = int(billions * 1e9)
    geometry = model_geometry(parameters, bits, nearest_shape(parameters), None)
    cells = [f"{billions:g} billion", str(bits), quantity.show(geometry.weights_bytes)]
    for length, concurrency in loads:
        need = prove(geometry, context_length=length, concurrency=concurrency).total_bytes
        cells += [quantity.show(need), _smallest_mac(need)]
    return "| " + " | ".join(cells) + " |"


def _smallest_mac(need_bytes: int) -> str:
    """Return the memory of the smallest Mac whose default limit for models holds the bytes."""
    for size in _MACS_GIB:
        if gpu_memory_limit(size * _GIB, None)[0] >= need_bytes:
            return f"{size} GB"
    return "ShardGroup"
