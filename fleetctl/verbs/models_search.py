"""The verb `fleetctl models search`: the catalogue of well-known models, with the memory that each needs."""

from typing import Any

import click

from fleetctl.catalogue_file import current_catalogue
from fleetctl.cli.arguments import output_option
from fleetctl.cli.documents import print_tree
from fleetctl.output import printers
from insight.catalogue_fit import entry_tree
from manifests.trees import Tree
from models import model_files
from models.catalogue import catalogue
from models.catalogue.catalogue import CatalogueEntry
from nodeagent.hardware.macos import gpu_memory_limit, smallest_mac
from reconciler.placement.memory_proof import prove
from schemas import chips, quantity
from schemas.deployment import ModelDeploymentSpec, ModelSource

_HELP = """Search a catalogue of well-known models. No hub and no fleet is asked.

\b
  fleetctl models search qwen3.5
  fleetctl models search image 4bit --memory 24Gi
  fleetctl models search embed

Every word must be in the name, the architecture, the licence, the bits, the task (generate, embed, transcribe) or the inputs
(text, image, video, audio). MEMORY is the proof with the default context and concurrency, and MAC the smallest Mac whose
limit for models holds it; both are computed from the architecture. A name with (quantize) is the original:
`fleetctl models quantize` makes the bits. One with (convert) has no safetensors. All others run as they are.
`fleetctl models fit` says what fits on your Macs, and how fast it is.
"""


@click.command("search", help=_HELP)
@click.argument("words", nargs=-1, metavar="[WORD...]")
@click.option(
    "--memory",
    metavar="SIZE",
    help="Only models that fit on a Mac of this unified memory, such as 24Gi.",
)
@output_option("table", "json")
def search_models(words: tuple[str, ...], memory: str | None, output: str) -> None:
    """Search a catalogue of well-known models. No hub and no fleet is asked."""
    listed = current_catalogue()
    needs = [(entry, _need_bytes(entry)) for entry in catalogue.search(words, listed)]
    if memory is not None:
        limit, _ = gpu_memory_limit(mac_memory(memory), None)
        needs = [(entry, need) for entry, need in needs if need <= limit]
    if output == "json":
        models = [_tree(entry, need) for entry, need in needs]
        tree: dict[str, Any] = {"date": listed.date.isoformat(), "models": models}
        print_tree(tree, "json")
        return
    if needs:
        titles = ["NAME", "PARAMETERS", "BITS", "SIZE", "CONTEXT", "LICENCE", "MEMORY", "MAC"]
        click.echo(printers.align_columns([_row(entry, need) for entry, need in needs], titles))
    else:
        small = f" and fits in {memory}" if memory is not None else ""
        click.echo(
            f"no model of the list has {' and '.join(words) or 'a name'}{small}; a hub has thousands more, and "
            "`fleetctl models fit ORGANISATION/NAME` answers for each",
            err=True,
        )
    click.echo(f"list of {listed.date}; sizes are computed, the hub was not asked", err=True)


def mac_memory(text: str) -> int:
    """Return the bytes of --memory. Raises click.UsageError: it is no size of a Mac."""
    try:
        size = quantity.parse(text)
    except ValueError as error:
        raise click.UsageError(f"--memory {text}: {error}") from error
    if size < 1 << 30:
        raise click.UsageError(
            f'--memory {text}: less than any Mac has; write a unit, as in "64Gi"'
        )
    return size


def parameters_text(entry: CatalogueEntry) -> str:
    """Return the number of parameters, with those of one token for a mixture of experts: "30.5 billion, 3.3 active"."""
    total, active = entry.facts.weights.parameters, entry.active_parameters
    is_moe = entry.model.weights.experts > 0
    if total < 10**9:
        return f"{total / 1e6:.0f} million"
    return f"{total / 1e9:.1f} billion" + (f", {active / 1e9:.1f} active" if is_moe else "")


def _row(entry: CatalogueEntry, need: int) -> list[str]:
    return [
        entry.title,
        parameters_text(entry),
        str(entry.bits),
        quantity.show(entry.facts.weight_bytes),
        str(entry.facts.max_context or "-"),
        entry.model.license,
        quantity.show(need),
        f"{smallest_mac(need)} GB" if smallest_mac(need) else "ShardGroup",
    ]


def _need_bytes(entry: CatalogueEntry) -> int:
    spec = ModelDeploymentSpec(model=ModelSource(path="model"))
    geometry = model_files.model_geometry(entry.facts, casts_to_float32=False)
    length, concurrency = spec.context_length, quantity.requests_at_once(spec.concurrency)
    return prove(geometry, context_length=length, concurrency=concurrency).total_bytes


def _tree(entry: CatalogueEntry, need: int) -> dict[str, Tree]:
    smallest = smallest_mac(need)
    macs: list[Tree] = [
        {"memoryGigabytes": size, "fits": 0 < smallest <= size} for size in chips.MEMORY_GIB
    ]
    return {**entry_tree(entry), "memoryBytes": need, "macs": macs}
