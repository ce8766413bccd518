"""The verb `fleetctl models fit`: which Macs and groups can serve a model, before a byte of its weights is fetched."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from fleetctl.catalogue_file import current_catalogue
from fleetctl.cli.arguments import output_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.documents import print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.hub_options import hub_options, hub_reference, pinned_hub, read_token
from fleetctl.objects.kind_args import kind_of
from fleetctl.output import printers
from fleetctl.verbs.models_fit_catalogue import catalogue_lines
from fleetctl.verbs.models_search import mac_memory
from fleetctl.verbs.run_hub_model import is_hub_id
from insight import catalogue_fit, memory_proof
from insight.catalogue_fit import MacKind
from machinery.clock import SystemClock
from manifests.suggestions import not_found_message
from manifests.trees import Tree
from models import inspection_process, model_files
from models.catalogue import catalogue
from models.hub.errors import HubUnreachableError, ModelFetchError
from models.hub.remote_inspection import inspect_remote, snapshot_facts
from models.model_files import ModelFacts, ModelUnusableError
from nodeagent.hardware.macos import gpu_memory_limit
from reconciler.deployments import snapshot
from reconciler.deployments.model_fit import (
    FitLimits,
    GroupFit,
    NodeFit,
    fit_group,
    fit_nodes,
    with_facts,
)
from reconciler.deployments.snapshot import FleetSnapshot
from reconciler.placement.inputs import NodeView, PlacementRequest, Rejection, request_for
from schemas import chips, quantity
from schemas.deployment import (
    ModelDeploymentSpec,
)

_HELP = """Show which Macs and groups can serve a model, with which context and concurrency. Nothing is fetched or written.

\b
  fleetctl models fit mlx-community/Qwen3-8B-4bit
  fleetctl models fit mlx-community/Qwen3-8B-4bit --context-length 32768 --concurrency 1
  fleetctl models fit ./Qwen3-8B-4bit --memory 16Gi --memory 64Gi
  fleetctl models fit qwen
  fleetctl models fit
  fleetctl models fit --memory 16Gi --memory 512Gi

Without MODEL it lists the catalogue of `fleetctl models search` against the Macs, with the most bits that a repository
has, that fit and that keep 10 tokens a second, and the rate of one request that the memory bandwidth allows; no hub is
asked.

MODEL is a repository ORGANISATION/NAME, of which config.json and the headers of the weight files are read; a folder on
this machine, which begins with /, ./ or ~; or the name of a deployment, for one more replica of it. The fleet's own
placement and memory proof answer, with the memory that is free now. With --memory no fleet is asked: the answer is for
Macs with nothing else on them.

CONTEXT is the longest context at the asked concurrency, REQUESTS the highest concurrency at the asked context, TOKENS/S
the rate of one request that the memory bandwidth allows (with --memory that of the slowest chip of that size). Exit
code 1: nothing fits. If the hub cannot be reached, the list of `fleetctl models search` answers.
"""

_PATH: Final = "model"
_SPLIT_NOTE: Final = (
    "how mlx-lm splits the model over a group is estimated until an agent has inspected it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """The answers for all nodes and groups."""

    model: str
    spec: ModelDeploymentSpec
    """The asked load."""
    facts: ModelFacts | None
    """None if only agents know the model."""
    nodes: tuple[NodeFit, ...]
    groups: tuple[GroupFit, ...] = ()

    @property
    def fits(self) -> bool:
        refusals = (*(n.refusal for n in self.nodes), *(g.refusal for g in self.groups))
        return None in refusals


@click.command("fit", help=_HELP)
@click.argument("model", required=False)
@click.option(
    "--context-length",
    type=click.IntRange(16, 16_777_216),
    help="Tokens of one request (default: the deployment's, else 4096).",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    help="Requests at the same time (default: the deployment's, else 4).",
)
@click.option(
    "--memory",
    "memories",
    multiple=True,
    metavar="SIZE",
    help="Unified memory of a Mac to answer for in place of a fleet, such as 64Gi; repeatable.",
)
@hub_options
@output_option("table", "wide", "json", "yaml")
@store_options
def fit(model: str | None, output: str, **options: Any) -> None:
    """Show which Macs and groups can serve a model, with which context and concurrency."""
    if model is None:
        _fit_catalogue(output, options)
        return
    try:
        report = run(_report(model, options))
    except (ModelFetchError, ModelUnusableError) as error:
        raise FleetctlError(f"{error.reason}: {error}") from error
    except (OSError, ValueError) as error:
        raise FleetctlError(str(error)) from error
    if output in ("json", "yaml"):
        print_tree(report_tree(report), output)
    else:
        click.echo("\n".join(report_lines(report, is_wide=output == "wide")))
    if not report.fits:
        raise click.exceptions.Exit(1)


def _fit_catalogue(output: str, options: dict[str, Any]) -> None:
    """Print the catalogue against the Macs of the fleet, or of --memory."""
    request, listed = _with_load(catalogue_fit.usual_request(), options), current_catalogue()
    kinds = run(_kinds(options))
    if not kinds:
        raise FleetctlError("no Mac has joined the fleet yet; --memory 64Gi answers without one")
    models = catalogue_fit.fit_catalogue(listed, request, kinds)
    if output in ("json", "yaml"):
        print_tree(catalogue_fit.catalogue_tree(listed, models), output)
    else:
        is_wide = output == "wide"
        lines = catalogue_lines(listed, request.spec, kinds, models, is_wide=is_wide)
        click.echo("\n".join(lines))
    if not any(model.is_possible for model in models):
        raise click.exceptions.Exit(1)


async def _kinds(options: dict[str, Any]) -> tuple[MacKind, ...]:
    if options["memories"]:
        return tuple(catalogue_fit.kind_of_size(_empty_mac(size)) for size in options["memories"])
    async with open_store(options) as transport:
        fleet_snapshot = await snapshot.take(transport, SystemClock())
    return catalogue_fit.kinds_of(fleet_snapshot.table().nodes)


async def _report(model: str, options: dict[str, Any]) -> FitReport:
    facts: ModelFacts | None = None
    is_deployment = not is_hub_id(model) and not model.startswith(("/", ".", "~"))
    if is_deployment and options["memories"]:
        raise FleetctlError(
            f"--memory asks no fleet, and {model} would be a deployment of one; name a repository "
            f"ORGANISATION/NAME, or a folder as ./{model}"
        )
    if not is_deployment:
        facts = await _read_facts(model, options)
    if options["memories"]:
        request = _with_load(catalogue_fit.usual_request(), options)
        assert facts is not None
        nodes = [with_facts(_empty_mac(size), _PATH, facts) for size in options["memories"]]
        asked = [node.name for node in nodes]
        in_order = sorted(fit_nodes(request, nodes), key=lambda one: asked.index(one.node))
        return FitReport(model=model, spec=request.spec, facts=facts, nodes=tuple(in_order))
    async with open_store(options) as transport:
        fleet_snapshot = await snapshot.take(transport, SystemClock())
    request = catalogue_fit.usual_request()
    if is_deployment:
        deployments = {deployment.name: deployment for deployment in fleet_snapshot.deployments()}
        if model not in deployments:
            missing = not_found_message(kind_of("md"), model, sorted(deployments))
            raise FleetctlError(
                f"{missing}\nA repository is ORGANISATION/NAME, and a folder begins with /, ./ or ~"
            )
        model_deployment = deployments[model]
        request = request_for(model_deployment)
        known = fleet_snapshot.lister.snapshot(model_deployment.name)
        facts = (
            snapshot_facts(known)
            if known is not None and known.resolves(model_deployment)
            else None
        )
    return _fleet_report(model, _with_load(request, options), facts, fleet_snapshot)


def _fleet_report(
    model: str, request: PlacementRequest, facts: ModelFacts | None, seen: FleetSnapshot
) -> FitReport:
    nodes: Sequence[NodeView] = seen.table().nodes
    if facts is not None:
        nodes = [with_facts(node, request.path, facts) for node in nodes]
    by_name = {node.name: node for node in nodes}
    groups = seen.lister.group_views(("Auto",))
    return FitReport(
        model=model,
        spec=request.spec,
        facts=facts,
        nodes=fit_nodes(request, nodes),
        groups=tuple(fit_group(request, group, by_name) for group in groups),
    )


async def _read_facts(model: str, options: dict[str, Any]) -> ModelFacts:
    if not is_hub_id(model):
        return inspection_process.inspect_model(Path(model).expanduser())
    source = hub_reference(model, options)
    try:
        async with pinned_hub(source, options, read_token(options)) as (hub, pinned):
            remote = await inspect_remote(hub, model, pinned.revision)
    except HubUnreachableError as error:
        listed = catalogue.find(model, current_catalogue())
        if listed is None or options["revision"]:
            raise
        click.echo(f"{error}. The list of `fleetctl models search` answers", err=True)
        return listed.facts
    return model_files.model_facts(remote.config, remote.weights)


def _with_load(request: PlacementRequest, options: dict[str, Any]) -> PlacementRequest:
    asked = {name: options[name] for name in ("context_length", "concurrency")}
    load = {name: value for name, value in asked.items() if value is not None}
    spec = request.spec.model_copy(update=load)
    return PlacementRequest(name=request.name, spec=spec, apart_from=request.apart_from)


def _empty_mac(text: str) -> NodeView:
    size = mac_memory(text)
    limit, _ = gpu_memory_limit(size, None)
    slowest, _ = chips.bandwidths_with(size)
    return NodeView(
        name=text,
        is_ready=True,
        memory_bytes=size,
        allocatable_bytes=limit,
        bandwidth_gbps=slowest,
    )


def report_lines(report: FitReport, *, is_wide: bool) -> list[str]:
    """Return the report as lines. Pure."""
    parts = memory_proof.TITLES if is_wide else ()
    lines = [_head(report), ""]
    titles = ["NODE", "FITS", "CONTEXT", "REQUESTS", "NEED", "FREE", "TOKENS/S"]
    titles += [*parts, "WHY NOT"]
    lines.append(
        printers.align_columns([_node_row(node, is_wide) for node in report.nodes], titles)
    )
    if report.groups:
        titles = ["GROUP", "FITS", "CONTEXT", "REQUESTS", "NEED/RANK", "RANKS", *parts, "WHY NOT"]
        rows = [_group_row(group, is_wide) for group in report.groups]
        lines += ["", printers.align_columns(rows, titles)]
        if report.facts is not None:
            lines.append(_SPLIT_NOTE)
    return lines


def _head(report: FitReport) -> str:
    load = f"{report.spec.concurrency} x {report.spec.context_length} tokens"
    if report.facts is None:
        return f"{report.model}: {load}"
    longest = report.facts.max_context
    most = f", context up to {longest}" if longest is not None else ""
    return (
        f"{report.model}: weights {quantity.show(report.facts.weight_bytes)}{most}; asked: {load}"
    )


def _node_row(one: NodeFit, is_wide: bool) -> list[str]:
    shared = _shared_cells(one, is_wide)
    room = memory_proof.size_text(one.room_bytes)
    rate = f"{one.tokens_per_s:.0f}" if one.tokens_per_s else "-"
    return [one.node, *shared[:4], room, rate, *shared[4:]]


def _group_row(one: GroupFit, is_wide: bool) -> list[str]:
    shared = _shared_cells(one, is_wide)
    ranks = f"{one.parallelism} {','.join(one.nodes)}" if one.nodes else "-"
    return [one.group, *shared[:4], ranks, *shared[4:]]


def _shared_cells(one: NodeFit | GroupFit, is_wide: bool) -> list[str]:
    proof = one.memory
    parts = ["-"] * len(memory_proof.TITLES) if proof is None else memory_proof.part_texts(proof)
    return [
        "no" if one.refusal is not None else "yes",
        *(str(number or "-") for number in _limit_numbers(one.limits)),
        "-" if proof is None else memory_proof.size_text(proof.total_bytes),
        *(parts if is_wide else ()),
        "-" if one.refusal is None else f"{one.refusal.reason}: {one.refusal.message}",
    ]


def _limit_numbers(limits: FitLimits) -> tuple[int, int]:
    return limits.longest_context, limits.highest_concurrency


def report_tree(report: FitReport) -> dict[str, Tree]:
    """Return the report as a tree; sizes are in bytes. Pure."""
    facts = report.facts
    return {
        "model": report.model,
        "contextLength": report.spec.context_length,
        "concurrency": report.spec.concurrency,
        "weightsBytes": facts.weight_bytes if facts is not None else None,
        "maxContext": facts.max_context if facts is not None else None,
        "nodes": [
            {
                "node": node.node,
                "roomBytes": node.room_bytes,
                "tokensPerSecond": round(node.tokens_per_s, 1) or None,
                **_shared_tree(node),
            }
            for node in report.nodes
        ],
        "groups": [
            {
                "group": group.group,
                "nodes": list(group.nodes),
                "parallelism": group.parallelism or None,
                **_shared_tree(group),
            }
            for group in report.groups
        ],
    }


def _shared_tree(one: NodeFit | GroupFit) -> dict[str, Tree]:
    return {
        "fits": one.refusal is None,
        "longestContext": one.limits.longest_context,
        "highestConcurrency": one.limits.highest_concurrency,
        "memory": None if one.memory is None else memory_proof.proof_tree(one.memory),
        "refusal": _refusal_tree(one.refusal),
    }


def _refusal_tree(why: Rejection | None) -> Tree:
    if why is None:
        return None
    return {"reason": why.reason, "message": why.message, "need": why.need, "have": why.have}
