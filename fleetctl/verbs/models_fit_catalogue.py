"""`fleetctl models fit` without a model: the whole catalogue against the Macs."""

from typing import Final

from fleetctl.output import printers
from fleetctl.verbs.models_search import parameters_text
from insight.catalogue_fit import MacFit, MacKind, ModelFit
from models.catalogue.catalogue import CatalogueFile
from schemas import quantity
from schemas.deployment import ModelDeploymentSpec

_MOST_COLUMNS: Final = 6


def catalogue_lines(
    listed: CatalogueFile,
    spec: ModelDeploymentSpec,
    kinds: tuple[MacKind, ...],
    models: tuple[ModelFit, ...],
    *,
    is_wide: bool,
) -> list[str]:
    """Return the answers as lines: a column for each kind of Mac. Pure."""
    shown = kinds[:_MOST_COLUMNS]
    asked = f"{spec.concurrency} x {spec.context_length} tokens"
    titles = ["MODEL", "PARAMETERS", "CONTEXT", *(_title(kind) for kind in shown)]
    titles += ["TOOLS", "INPUTS", "LICENCE", "REPOSITORY"] if is_wide else []
    rows = [_row(model, len(shown), is_wide=is_wide) for model in models]
    lines = [
        f"catalogue of {listed.date}: bits, memory and tokens/s of one request; asked: {asked}",
        "",
    ]
    lines.append(printers.align_columns(rows, titles))
    if len(kinds) > len(shown):
        lines.append(f"{len(kinds) - len(shown)} more kinds of Macs: see -o json")
    return [*lines, "", "rates are computed from the memory bandwidth, and are upper bounds"]


def _title(kind: MacKind) -> str:
    size = f"{kind.node.memory_bytes / 2**30:.0f} GiB"
    return kind.name if kind.name.endswith(("Gi", "GB")) else f"{kind.name} {size}"


def _row(model: ModelFit, count: int, *, is_wide: bool) -> list[str]:
    entry = next((fit.entry for fit in model.fits if fit.refusal is None), model.fits[0].entry)
    cells = [
        model.name,
        parameters_text(entry),
        str(entry.facts.max_context or "-"),
        *map(_cell, model.fits[:count]),
    ]
    if not is_wide:
        return cells
    about = entry.model
    return [*cells, about.format or "-", ",".join(about.inputs), about.license, entry.title]


def _cell(fit: MacFit) -> str:
    """Describe one answer: "4 bit 5.1 GiB 20/s", or "-" with the reason if it is not memory."""
    if fit.streamed_rate:
        return f"- (disk {fit.streamed_rate:.1f}/s)"
    if fit.refusal is not None:
        return "-" if fit.refusal.reason == "InsufficientMemory" else f"- {fit.refusal.reason}"
    need = "" if fit.memory is None else f" {quantity.show(fit.memory.total_bytes)}"
    return f"{fit.entry.bits} bit{need}{_rate_text(fit.rates)}"


def _rate_text(rates: tuple[float, float]) -> str:
    low, high = (f"{rate:.1f}" if rate < 10 else f"{rate:.0f}" for rate in rates)
    if not rates[1]:
        return ""
    return f" {low}/s" if low == high else f" {low}-{high}/s"
