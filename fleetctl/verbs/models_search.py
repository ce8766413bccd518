"""The verb `fleetctl models search`: the shipped list of well-known MLX repositories, with the memory that each needs."""

from typing import Any, Final

import click
import orjson

from fleetctl.output import printers
from manifests.trees import Tree
from models import model_files
from models.catalogue.catalogue import CatalogueEntry, read_catalogue, search
from nodeagent.hardware.macos import gpu_memory_limit
from reconciler.placement.memory_proof import prove
from schemas import quantity
from schemas.deployment import ModelDeploymentSpec, ModelSource

_HELP = """Search a list of well-known MLX repositories, which is part of this release. No hub is asked.

\b
  fleetctl models search qwen3
  fleetctl models search llama 4bit

Every word must be in the name, the architecture or the licence. MEMORY is the proof with the default context and
concurrency, and MAC the smallest Mac whose limit for models holds it; both are computed from the architecture.
`fleetctl models fit NAME` asks the hub and this fleet.
"""
_MACS_GIB: Final = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)


@click.command("search", help=_HELP)
@click.argument("words", nargs=-1, metavar="[WORD...]")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
def search_models(words: tuple[str, ...], output: str) -> None:
    """Search a list of well-known MLX repositories, which is part of this release."""
    entries = search(words)
    day = read_catalogue().date.isoformat()
    if output == "json":
        tree: dict[str, Any] = {"date": day, "models": [_tree(entry) for entry in entries]}
        click.echo(orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode())
        return
    if entries:
        titles = ["NAME", "PARAMETERS", "BITS", "SIZE", "CONTEXT", "LICENCE", "MEMORY", "MAC"]
        click.echo(printers.align_columns([_row(entry) for entry in entries], titles))
    else:
        click.echo(
            f"no repository of the list has {' and '.join(words)}; a hub has thousands more, and "
            "`fleetctl models fit ORGANISATION/NAME` answers for each",
            err=True,
        )
    click.echo(f"list of {day}; sizes are computed, the hub was not asked", err=True)


def _row(one: CatalogueEntry) -> list[str]:
    need = _need_bytes(one)
    return [
        one.repo,
        f"{one.facts.weights.parameters / 1e9:.1f} billion",
        str(one.bits),
        quantity.show(one.facts.weight_bytes),
        str(one.config.max_position_embeddings),
        one.license,
        quantity.show(need),
        next((f"{size} GB" for size, is_enough in _macs(need) if is_enough), "ShardGroup"),
    ]


def _need_bytes(one: CatalogueEntry) -> int:
    spec = ModelDeploymentSpec(model=ModelSource(path="model"))
    geometry = model_files.model_geometry(one.facts, casts_to_float32=False)
    length, concurrency = spec.context_length, quantity.requests_at_once(spec.concurrency)
    return prove(geometry, context_length=length, concurrency=concurrency).total_bytes


def _macs(need_bytes: int) -> list[tuple[int, bool]]:
    """Return each size of a Mac in GB, and whether its default limit for models holds the bytes."""
    return [(size, gpu_memory_limit(size << 30, None)[0] >= need_bytes) for size in _MACS_GIB]


def _tree(one: CatalogueEntry) -> dict[str, Tree]:
    need = _need_bytes(one)
    return {
        "repo": one.repo,
        "parameters": one.facts.weights.parameters,
        "bits": one.bits,
        "bytes": one.facts.weight_bytes,
        "architecture": one.config.model_type,
        "maxContext": one.config.max_position_embeddings,
        "license": one.license,
        "memoryBytes": need,
        "macs": [{"memoryGigabytes": size, "fits": is_enough} for size, is_enough in _macs(need)],
    }
