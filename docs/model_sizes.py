"""Generates the table of model sizes: disk, memory by the fleet's own memory proof, and the smallest Mac that fits."""

from models import model_files
from models.catalogue import catalogue
from models.catalogue.catalogue import CatalogueEntry
from nodeagent.hardware.macos import smallest_mac
from reconciler.placement.memory_proof import prove
from schemas import quantity
from schemas.deployment import ModelDeploymentSpec, ModelSource

_MODELS = (
    "Qwen3-0.6B", "Llama-3.2-3B-Instruct", "Qwen3.5-4B", "Qwen3-8B", "gemma-3-12b-it", "gpt-oss-20b",
    "Mistral-Small-3.2-24B-Instruct-2506", "Qwen3.6-27B", "Qwen3.6-35B-A3B", "Llama-3.3-70B-Instruct",
    "Qwen3-Next-80B-A3B-Instruct", "gpt-oss-120b", "MiniMax-M2.5", "GLM-4.7", "DeepSeek-V3.2", "Kimi-K2.5",
)  # fmt: skip
_LONG_CONTEXT = 32_768


def table() -> str:
    """Return the table, with the default load and with one request of a long context."""
    spec = ModelDeploymentSpec(model=ModelSource(path="model"))
    loads = ((spec.context_length, quantity.requests_at_once(spec.concurrency)), (_LONG_CONTEXT, 1))
    titles = [f"{count} x {length:,} tokens" for length, count in loads]
    head = [
        "| model | billions | bits | on disk | "
        + " | ".join(f"{t} | smallest Mac" for t in titles)
        + " |",
        "|---" * (4 + 2 * len(loads)) + "|",
    ]
    listed = catalogue.entries(catalogue.shipped_catalogue())
    entries = [e for e in listed if e.name in _MODELS and e.bits in catalogue.BITS]
    ordered = sorted(entries, key=lambda entry: (_MODELS.index(entry.name), entry.bits))
    return "\n".join((*head, *(_row(entry, loads) for entry in ordered)))


def _row(entry: CatalogueEntry, loads: tuple[tuple[int, int], ...]) -> str:
    geometry = model_files.model_geometry(entry.facts, casts_to_float32=False)
    total, active = entry.facts.weights.parameters / 1e9, entry.active_parameters / 1e9
    billions = f"{total:.1f}" + (f", {active:.1f} active" if geometry.experts else "")
    cells = [entry.name, billions, str(entry.bits), quantity.show(geometry.weights_bytes)]
    for length, concurrency in loads:
        need = prove(geometry, context_length=length, concurrency=concurrency).total_bytes
        size = smallest_mac(need)
        cells += [quantity.show(need), f"{size} GB" if size else "ShardGroup"]
    return "| " + " | ".join(cells) + " |"
