"""The verb `fleetctl models quantize`: a Mac of the fleet makes a smaller model of one that it has."""

from collections.abc import Sequence
from typing import Any, Final

import click

from fleetctl.cli.arguments import output_option
from fleetctl.cli.connect import process_options, run
from fleetctl.cli.documents import print_tree
from fleetctl.cli.errors import FleetctlError, InterruptedByUser
from fleetctl.cli.terminal import ProgressLine
from fleetctl.fleets.stored_models import FleetAgents, NodeAnswer, documents, open_agents
from fleetctl.verbs.models_fleet import quantization_progress
from machinery.clock import SystemClock
from models import quantization
from models.quantization import QuantizationOrigin
from schemas import quantity
from schemas.wire.stored_models import NodeModels, QuantizationReport, StoredModelReport

_AFFINE: Final = quantization.MODES["affine"]
_SCHEME: Final = ("mode", "bits", "group_size", "quant_predicate")
_POLL_S: Final = 1.0
# An agent restarts within seconds; a job that it had is gone then, and is told.
_MAX_MISSES: Final = 30

_HELP = """Quantize a model on a Mac that has it, and wait for the result.

\b
  fleetctl models quantize Qwen/Qwen3-8B --bits 4
  fleetctl models quantize Qwen/Qwen3-8B --bits 8 --node mac-1 --name qwen3-8b-8bit
  fleetctl models quantize Qwen/Qwen3-8B --mode mxfp4
  fleetctl models quantize Qwen/Qwen3-8B --quant-predicate mixed_4_6
  fleetctl models quantize Qwen/Qwen3-8B --bits 4 --no-wait
  fleetctl models quantize Qwen/Qwen3-8B --bits 4 --cancel

SRC is a model of the list (`fleetctl models list`), by folder or repository. The result is fleet/NAME: a deployment names it as
spec.model.hub.repo, and the Macs of the fleet give it to each other. It is pinned on the Mac that made it, because no hub
can give it again. Then both models read a fixed text: perplexity and agreement are printed, and are in the result. An
interrupted command ends nothing: repeated, it finds the job, or the result.

Exit code 1 if there is no result. With --no-wait, the command ends when a Mac has accepted the job.
"""


@click.command("quantize", help=_HELP)
@click.argument("source", metavar="SRC")
@click.option(
    "--mode",
    type=click.Choice(tuple(quantization.MODES)),
    default="affine",
    show_default=True,
    help="Numbers of the result: integers with scale and bias, or the formats of OCP (mx) and NVIDIA.",
)
@click.option(
    "--bits",
    type=int,
    help=f"Bits of a weight: {', '.join(map(str, _AFFINE.bits))} (default: {_AFFINE.default_bits}; other modes have one).",
)
@click.option(
    "--group-size",
    type=int,
    help=(
        f"Weights that share a scale: {', '.join(map(str, _AFFINE.group_sizes))} (default: {_AFFINE.default_group_size}; "
        "other modes have one)."
    ),
)
@click.option(
    "--quant-predicate",
    type=click.Choice(quantization.RECIPES),
    help="Recipe of mlx-lm with mixed bits: the most sensitive layers get the second number.",
)
@click.option(
    "--node",
    default="",
    metavar="MAC",
    help="Mac that does it (default: of those with SRC, the one with the most free memory).",
)
@click.option(
    "--name",
    default="",
    help="Name of the result below fleet/ (default: SRC's, with commit and scheme).",
)
@click.option("--cancel", "is_cancel", is_flag=True, help="End the job instead.")
@click.option(
    "--wait/--no-wait", "waits", default=True, show_default=True, help="Wait for the result."
)
@output_option("table", "json")
@process_options
def quantize(source: str, **options: Any) -> None:
    """Quantize a model on a Mac that has it, and wait for the result."""
    try:
        scheme = options["scheme"] = quantization.choose_scheme(
            *(options[name] for name in _SCHEME)
        )
        if options["name"]:
            any_origin = QuantizationOrigin(repo="a/b", commit="0" * 40, scheme=scheme)
            quantization.result_repo(any_origin, options["name"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        node, report = run(_quantize(source, options))
    except InterruptedByUser:
        click.echo(
            "The Mac goes on. Repeat the command to watch it; --cancel ends the job.", err=True
        )
        raise
    if options["output"] == "json":
        tree = {"node": node, **report.model_dump(mode="json", by_alias=True)}
        print_tree(tree, "json")
    elif report.result or report.is_running or options["is_cancel"]:
        click.echo(f"{node}: {report.result or report.repo} {report.phase.lower()}")
        if report.quality is not None:
            click.echo(f"quality: {report.quality.summary}")
    # Say on standard error what can be done next.
    if report.result is not None:
        click.echo(f"Serve it with `fleetctl run {report.repo}`.", err=True)
    elif report.is_running:
        click.echo("Repeat the command to wait for it; --cancel ends the job.", err=True)
    elif report.phase == "Failed":
        raise FleetctlError(f"node/{node}: {report.error}")
    elif not options["is_cancel"]:
        raise FleetctlError(f"node/{node}: the job for {report.repo} was cancelled")


async def _quantize(source: str, options: dict[str, Any]) -> tuple[str, QuantizationReport]:
    """Start, find or cancel the job; return its Mac and its last state. Raises FleetctlError."""
    async with open_agents(options) as agents:
        answers = await agents.models()
        model = _find_source(answers, source)
        repo = _result_repo(model, options)
        if options["is_cancel"]:
            return await _cancel(agents, answers, repo)
        # The first Mac that has the result, and its folder; two empty words if none has.
        found = [
            (node, model.name)
            for node, document in documents(answers)
            for model in document.models
            if model.repo == repo
        ]
        made_on, made = found[0] if found else ("", "")
        if made and not options["name"]:
            return made_on, QuantizationReport(
                repo=repo,
                source=model.name,
                scheme=options["scheme"],
                phase="Present",
                result=made,
            )
        # Of a chosen name, the Mac that has it knows what it was made of.
        node = made_on or _running_on(answers, repo)
        node = node or _choose_node(answers, model, options["node"])
        params = {
            "source": model.name,
            "name": options["name"],
            **{name: str(options[name]) for name in _SCHEME if options[name] is not None},
        }
        started = await agents.quantize(node, params)
        if started.document is None:
            raise FleetctlError(started.problem)
        if not options["waits"]:
            return node, started.document
        with ProgressLine() as progress:
            return node, await _wait(agents, node, started.document, progress)


def _find_source(answers: Sequence[NodeAnswer[NodeModels]], word: str) -> StoredModelReport:
    """Return the one model that the word names on the Macs that answered. Raises FleetctlError."""
    every = (model for _, document in documents(answers) for model in document.models)
    reports = {model.name: model for model in every if word in (model.name, model.repo)}
    if len(reports) == 1:
        return next(iter(reports.values()))
    if reports:
        raise FleetctlError(
            f"{word} has {len(reports)} commits on the Macs; name one: {', '.join(sorted(reports))}"
        )
    silent = [answer.problem for answer in answers if answer.problem]
    more = f" ({'; '.join(silent)})" if silent else ""
    raise FleetctlError(
        f"no Mac that answered has {word}{more}; `fleetctl models list` shows the models, and "
        "`fleetctl models pull ORGANISATION/NAME --nodes MAC` fetches one"
    )


def _result_repo(model: StoredModelReport, options: dict[str, Any]) -> str:
    origin = QuantizationOrigin(repo=model.repo, commit=model.commit, scheme=options["scheme"])
    try:
        return quantization.result_repo(origin, options["name"])
    except ValueError as error:
        raise FleetctlError(str(error)) from error


def _running_on(answers: Sequence[NodeAnswer[NodeModels]], repo: str) -> str:
    """Return the Mac on which the same job runs; "" if none does."""
    for node, document in documents(answers):
        if any(report.repo == repo and report.is_running for report in document.quantizations):
            click.echo(f"{node} makes {repo} already", err=True)
            return node
    return ""


def _choose_node(
    answers: Sequence[NodeAnswer[NodeModels]], model: StoredModelReport, asked: str
) -> str:
    """Return the Mac that is to do it, and say why. Raises FleetctlError."""
    having = {
        node: document.available_memory_bytes
        for node, document in documents(answers)
        if any(report.name == model.name for report in document.models)
    }
    if not asked:
        node = max(sorted(having), key=lambda one: having[one])
        free = quantity.show(having[node])
        why = "the only Mac with" if len(having) == 1 else f"of {len(having)} Macs with"
        rest = "" if len(having) == 1 else " the one with the most available memory"
        click.echo(f"{node} was chosen: {why} {model.name}{rest}, {free} available", err=True)
        return node
    if asked in having:
        return asked
    answer = next((node_answer for node_answer in answers if node_answer.node == asked), None)
    if answer is None:
        known = ", ".join(node_answer.node for node_answer in answers) or "none"
        raise FleetctlError(f"no node {asked}; this fleet has {known}")
    if answer.document is None:
        raise FleetctlError(answer.problem)
    raise FleetctlError(
        f"node/{asked} does not have {model.name}, which {', '.join(sorted(having))} has; leave --node out, or run "
        f"`fleetctl models pull {model.repo} --nodes {asked}` first"
    )


async def _wait(
    agents: FleetAgents, node: str, report: QuantizationReport, progress: ProgressLine
) -> QuantizationReport:
    """Wait until the job has ended. Raises FleetctlError if the Mac is away, or forgot the job."""
    clock, misses = SystemClock(), 0
    while report.is_running:
        progress.show(f"{node}: {quantization_progress(report)}")
        await clock.sleep(_POLL_S)
        answer = await agents.models_of(node)
        if answer.document is None:
            misses += 1
            if misses >= _MAX_MISSES:
                raise FleetctlError(f"{answer.problem}. Repeat the command when the Mac is back")
            continue
        misses = 0
        quantization_report = next(
            (o for o in answer.document.quantizations if o.repo == report.repo), None
        )
        if quantization_report is None:
            raise FleetctlError(
                f"node/{node}: its agent was restarted, and the job ended with it; repeat the command"
            )
        report = quantization_report
    return report


async def _cancel(
    agents: FleetAgents, answers: Sequence[NodeAnswer[NodeModels]], repo: str
) -> tuple[str, QuantizationReport]:
    node = _running_on(answers, repo)
    if not node:
        raise FleetctlError(f"no Mac that answered makes {repo}")
    answer = await agents.cancel_quantization(node, repo.partition("/")[2])
    if answer.document is None:
        raise FleetctlError(answer.problem)
    return node, answer.document
