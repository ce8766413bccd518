"""`fleetctl models` on the Macs of a fleet, through their agents. Each Mac that does not answer is told, and hides none."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, Literal

import click

from fleetctl.cli.connect import run
from fleetctl.cli.documents import print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.hub_options import hub_reference, pinned_hub, read_token
from fleetctl.cli.terminal import ProgressLine, confirm, paint
from fleetctl.fleets.hub_grants import HubGrants, granted, hub_token
from fleetctl.fleets.stored_models import FleetAgents, NodeAnswer, documents, open_agents
from fleetctl.objects.model_folders import TITLES, ModelFolder, model_folders
from fleetctl.output import printers
from fleetctl.output.columns import age
from machinery.clock import SystemClock
from models.hub.fleet_hub import FleetListings
from models.hub.hub_settings import hub_settings
from models.hub.model_hub import DEFAULT_ENDPOINT
from schemas import quantity
from schemas.deployment import HubReference
from schemas.replica import Replica
from schemas.wire.stored_models import (
    ModelChange,
    ModelCheck,
    NodeModels,
    QuantizationReport,
    StoredModelReport,
)
from store import object_trees, objects
from store.errors import StoreError
from store.model_listings import read_listings

_POLL_S: Final = 1.0
# Half a minute of silence, or more where a connection takes its time to fail: an agent restarts within seconds.
_MAX_MISSES: Final = 30
_MAX_USERS: Final = 3


def parse_nodes(text: str) -> tuple[str, ...]:
    """Return the names in `--nodes a,b`."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def targets(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the nodes to change; () for all. Raises UsageError unless exactly one of --nodes and --all is given."""
    nodes = parse_nodes(options["nodes"])
    if bool(nodes) == options["is_all"]:
        raise click.UsageError("give --nodes NAME,..., --all for every Mac, or --local")
    return nodes


def list_fleet(words: Sequence[str], options: dict[str, Any]) -> None:
    """List the models on every Mac. Raises Exit with code 1 if a Mac did not answer."""
    answers, folders = run(_models(options, parse_nodes(options["nodes"])))
    # A pin or a collection is of the fleet's own store only.
    is_whole = not (options["pinned"] or options["unused"])
    folders = [folder for folder in folders if is_whole and _is_named(folder.path, words)]
    rows = [
        (node, model)
        for node, document in documents(answers)
        for model in document.models
        if _is_chosen(model, words, options)
    ]
    output = options["output"]
    if output in ("json", "yaml"):
        tree: dict[str, Any] = {
            "nodes": [
                {"node": node_answer.node, "error": node_answer.problem}
                if node_answer.document is None
                else {
                    "node": node_answer.node,
                    "diskBytes": node_answer.document.disk_bytes,
                    "freeBytes": node_answer.document.free_bytes,
                    "quantizations": [
                        job.model_dump(mode="json", by_alias=True)
                        for job in node_answer.document.quantizations
                    ],
                    "models": [
                        model.model_dump(mode="json", by_alias=True)
                        for node, model in rows
                        if node == node_answer.node
                    ],
                    "folders": [
                        folder.tree() for folder in folders if folder.node == node_answer.node
                    ],
                }
                for node_answer in answers
            ]
        }
        print_tree(tree, output)
    elif rows or folders:
        if rows:
            _print_table(rows, is_wide=output == "wide")
        if folders:
            table = printers.align_columns([folder.cells() for folder in folders], TITLES)
            click.echo(f"\n{table}" if rows else table)
    else:
        some = any(document.models for _, document in documents(answers))
        found = "no such models" if some else "no models fetched"
        click.echo(f"{found} on the Macs that answered", err=True)
    if output in ("table", "wide"):
        _tell_quantizations(answers)
    _tell_silent(answers)


async def _models(
    options: dict[str, Any], nodes: Sequence[str]
) -> tuple[list[NodeAnswer[NodeModels]], list[ModelFolder]]:
    async with open_agents(options, nodes) as agents:
        answers = await agents.models()
        found = await object_trees.list_all(agents.transport, "Node")
        deployments = await object_trees.list_all(agents.transport, "ModelDeployment")
        return answers, model_folders(found, deployments, nodes)


def _is_named(text: str, words: Sequence[str]) -> bool:
    return not words or any(fnmatchcase(text, word) for word in words)


def _is_chosen(model: StoredModelReport, words: Sequence[str], options: dict[str, Any]) -> bool:
    if words and not any(_matches(model, word) for word in words):
        return False
    if options["pinned"] and not model.is_pinned:
        return False
    return not (options["unused"] and (model.used_by is None or model.used_by))


def _matches(model: StoredModelReport, word: str) -> bool:
    return any(fnmatchcase(text, word) for text in (model.name, model.repo))


def _print_table(rows: Sequence[tuple[str, StoredModelReport]], *, is_wide: bool) -> None:
    now = SystemClock().now()
    titles = ["NODE", "NAME", "SIZE", "LOADED", "PINNED", "USED BY"]
    titles += ["COMMIT", "FILES", "FETCHED"] if is_wide else []
    cells = []
    for node, model in rows:
        used = model.used_by
        users = "<unknown>" if used is None else ",".join(used if is_wide else _short(used)) or "-"
        row = [
            node,
            model.name,
            show_size(model.size_bytes, model.absent_bytes),
            _age(model.loaded_at, now),
            "yes" if model.is_pinned else "-",
            users,
        ]
        wide = [model.commit, str(model.files), _age(model.fetched_at, now)]
        cells.append(row + (wide if is_wide else []))
    click.echo(printers.align_columns(cells, titles))


def show_size(size_bytes: int, absent_bytes: int) -> str:
    """Return the bytes of a model that are here, and of all of it if some are not."""
    here = quantity.show(size_bytes)
    return f"{here} of {quantity.show(size_bytes + absent_bytes)}" if absent_bytes else here


def _tell_quantizations(answers: Sequence[NodeAnswer[NodeModels]]) -> None:
    for node, document in documents(answers):
        for report in document.quantizations:
            if report.is_running:
                progress = quantization_progress(report)
                click.echo(f"{node}: {report.repo} of {report.source}: {progress}", err=True)


def quantization_progress(report: QuantizationReport) -> str:
    """Return how far a quantization is."""
    if report.phase != "Converting" or not report.total_bytes:
        return report.phase.lower()
    share = min(99, 100 * report.done_bytes // report.total_bytes)
    return f"converting, {share} % of about {quantity.show(report.total_bytes)}"


def _short(users: Sequence[str]) -> list[str]:
    shown = list(users[:_MAX_USERS])
    return [*shown, f"+{len(users) - _MAX_USERS}"] if users[_MAX_USERS:] else shown


def _age(then: datetime | None, now: datetime) -> str:
    return "-" if then is None else age(then, now)


def _tell_silent(answers: Sequence[NodeAnswer[Any]]) -> None:
    """Tell which Macs did not answer. Raises Exit with code 1 if there is one."""
    silent = [answer for answer in answers if answer.problem and not answer.is_absent]
    for node_answer in silent:
        click.echo(f"error: {node_answer.problem}", err=True)
    if silent:
        raise click.exceptions.Exit(1)


def check_fleet(words: Sequence[str], options: dict[str, Any]) -> None:
    """Check the models that replicas need on their nodes, or those that words name. Exit code 1: one is not sound."""
    wanted, answers, folders = run(_check(words, options))
    is_bad = False
    for folder, is_needed in folders:
        is_usable = folder.weights_bytes is not None
        is_bad = is_bad or (is_needed and not is_usable)
        state = paint("present", "good") if is_usable else paint(folder.problem or "Unknown", "bad")
        click.echo(f"{folder.node}: {folder.path}: {state}")
    for model, answer in zip(wanted, answers, strict=True):
        node, name, check = model.node, model.name, answer.document
        if check is not None and not check.defects:
            is_lacking = model.needs_all and check.absent_files > 0
            is_bad = is_bad or is_lacking
            click.echo(f"{node}: {name}: {check_result(check.absent_files, is_lacking=is_lacking)}")
            continue
        is_bad = True
        for line in _check_lines(answer):
            click.echo(f"{node}: {name}{line}")
    if not (wanted or folders):
        click.echo("no replica needs a model", err=True)
    if is_bad:
        raise click.exceptions.Exit(1)


def check_result(absent_files: int, *, is_lacking: bool = False) -> str:
    """Return the result for a model without defects; `is_lacking`: something needs the files that are absent."""
    if not absent_files:
        return paint("whole", "good")
    count = "1 weight file" if absent_files == 1 else f"{absent_files} weight files"
    if is_lacking:
        return f"{paint('Partial', 'bad')}: {count} that a replica needs are not fetched yet"
    return f"{paint('sound', 'good')}, without {count} of other ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class _WantedModel:
    """A model to check on one Mac."""

    node: str
    name: str
    needs_all: bool = False
    """True if a replica needs all its weight files there."""


def _check_lines(answer: NodeAnswer[ModelCheck]) -> Iterator[str]:
    if answer.document is not None:
        for defect in answer.document.defects:
            yield f"/{defect.path}: {paint(defect.defect, 'bad')}: {defect.message}"
    elif answer.is_absent:
        yield f": {paint('Missing', 'bad')}: it is not on this Mac"
    else:
        yield f": {paint('Unknown', 'bad')}: {answer.problem}"


async def _check(
    words: Sequence[str], options: dict[str, Any]
) -> tuple[list[_WantedModel], list[NodeAnswer[ModelCheck]], list[tuple[ModelFolder, bool]]]:
    nodes = parse_nodes(options["nodes"])
    async with open_agents(options, nodes) as agents:
        # The folders that deployments name, on each Mac, and whether a replica needs each there.
        macs = await object_trees.list_all(agents.transport, "Node")
        found = model_folders(
            macs, await object_trees.list_all(agents.transport, "ModelDeployment"), ()
        )
        needed = {
            (rank.node, replica.spec.model.path)
            for replica in await objects.list_all(agents.transport, Replica)
            for rank in replica.spec.ranks
        }
        # A folder that no Mac can use is needed everywhere.
        usable = {folder.path for folder in found if folder.weights_bytes is not None}
        folders = [
            (folder, (folder.node, folder.path) in needed or folder.path not in usable)
            for folder in found
            if folder.used_by
            and (not nodes or folder.node in nodes)
            and _is_named(folder.path, words)
        ]
        wanted = await (
            _named(agents, words, may_be_none=bool(folders)) if words else _needed(agents)
        )
        if nodes:
            wanted = [model for model in wanted if model.node in nodes]
        places = [(model.node, model.name) for model in wanted]
        return wanted, await agents.check(places, hashes=options["hashes"]), folders


async def _named(
    agents: FleetAgents, words: Sequence[str], *, may_be_none: bool
) -> list[_WantedModel]:
    answers = await agents.models()
    wanted_models = [
        _WantedModel(node=node, name=model.name)
        for node, document in documents(answers)
        for model in document.models
        if any(_matches(model, word) for word in words)
    ]
    if not (wanted_models or may_be_none):
        raise FleetctlError(
            f"no Mac that answered has {', '.join(words)}; see `fleetctl models list`"
        )
    return wanted_models


async def _needed(agents: FleetAgents) -> list[_WantedModel]:
    """Return the hub models that replicas run or are to run, with the nodes of their ranks."""
    found: dict[tuple[str, str], bool] = {}
    for replica in await objects.list_all(agents.transport, Replica):
        hub, formation = replica.spec.model.hub, replica.spec.formation
        if hub is None or not hub.is_pinned:
            continue
        needs_all = formation is None or formation.parallelism != "Pipeline"
        for rank in replica.spec.ranks:
            place = rank.node, hub.folder
            found[place] = found.get(place, False) or needs_all
    return [
        _WantedModel(node=node, name=name, needs_all=needs_all)
        for (node, name), needs_all in sorted(found.items())
    ]


def change_fleet(words: Sequence[str], options: dict[str, Any], *, verb: str) -> None:
    """Pin, unpin or remove models on Macs (`verb`: pin, unpin, rm). Exit code 1: one did not do it."""
    problems = run(_change(words, options, verb))
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    if problems:
        raise click.exceptions.Exit(1)


async def _change(words: Sequence[str], options: dict[str, Any], verb: str) -> list[str]:
    nodes = targets(options)
    async with open_agents(options, nodes) as agents:
        before = await agents.models()
        problems = [node_answer.problem for node_answer in before if node_answer.problem]
        chosen = _select(before, words)
        if verb == "rm":
            kept = {(node, model.name): why for node, model in chosen if (why := _kept(model))}
            problems += [f"{node}: {name} {why}" for (node, name), why in kept.items()]
            chosen = [(node, model) for node, model in chosen if (node, model.name) not in kept]
            if not chosen:
                return problems
        if verb == "rm" and not options["yes"]:
            _print_table(chosen, is_wide=False)
            if options["is_dry_run"]:
                return problems
            confirm("Remove these models?", is_confirmed=False)
        for node, model in chosen:
            answer = await agents.change_one(node, model.name, verb)
            if answer.document is None:
                problems.append(answer.problem)
            else:
                click.echo(_changed_line(node, answer.document, verb))
    return problems


def _select(
    answers: Sequence[NodeAnswer[NodeModels]], words: Sequence[str]
) -> list[tuple[str, StoredModelReport]]:
    """Return the models that words name, each word on at least one Mac. Raises FleetctlError."""
    every = [(node, model) for node, document in documents(answers) for model in document.models]
    for word in words:
        if not any(word in (model.name, model.repo) for _, model in every):
            raise FleetctlError(f"no Mac that answered has {word}; see `fleetctl models list`")
    return [(node, model) for node, model in every if {model.name, model.repo} & {*words}]


def _kept(model: StoredModelReport) -> str:
    """Return why a model is not removed; "" if it may be. Its Mac checks again."""
    if model.is_pinned:
        return f"is pinned; run `fleetctl models unpin {model.name}` with the same --nodes first"
    return f"is used by {', '.join(_short(model.used_by))}; it stays" if model.used_by else ""


def _changed_line(node: str, change: ModelChange, verb: str) -> str:
    done = {"pin": "pinned", "unpin": "unpinned", "rm": "removed"}[verb]
    if verb == "rm":
        return f"{node}: {change.name} removed, {quantity.show(change.freed_bytes)} freed"
    before = "was pinned already" if verb == "pin" else "was not pinned"
    return f"{node}: {change.name} {done if change.is_changed else before}"


def pull_fleet(repo: str, options: dict[str, Any]) -> None:
    """Let agents fetch a commit until it is whole on each. Exit code 1: a Mac does not have it."""
    nodes = targets(options)
    if options["patterns"]:
        raise click.UsageError(
            "--files is for --to local: agents fetch the files that a deployment would"
        )
    failed = run(_pull(repo, nodes, options))
    for problem in failed:
        click.echo(f"error: {problem}", err=True)
    if failed:
        raise click.exceptions.Exit(1)


async def _pull(repo: str, nodes: Sequence[str], options: dict[str, Any]) -> list[str]:
    source, own_token = hub_reference(repo, options), read_token(options)
    endpoint = hub_settings(options).endpoint_of(source)
    async with open_agents(options, nodes) as agents:
        token = await hub_token(agents.transport, endpoint, own_token)
        text = "" if token is None else token.token.get_secret_value()
        # Once for all Macs: a branch that moves meanwhile would give them different commits.
        listings = FleetListings(
            read=partial(read_listings, agents.transport), errors=(StoreError,)
        )
        async with pinned_hub(source, options, text, listings) as (_, pinned):
            pass
        async with granted(
            agents.transport, tuple(agents.addresses), pinned.folder, token
        ) as grants:
            started = await agents.fetch(_fetch_params(pinned))
            problems = [answer.problem for answer in started if answer.problem]
            waiting = {answer.node for answer in started if not answer.problem}
            with ProgressLine() as progress:
                problems += await _wait_pulled(agents, grants, waiting, progress)
    return problems


def _fetch_params(pinned: HubReference) -> dict[str, str]:
    params = {"repo": pinned.repo, "commit": pinned.revision}
    if pinned.endpoint not in (None, DEFAULT_ENDPOINT):
        params["endpoint"] = pinned.endpoint
    if pinned.source != "huggingface":
        params |= {"source": pinned.source, "branch": pinned.branch or ""}
    return params


async def _wait_pulled(
    agents: FleetAgents, grants: HubGrants, waiting: set[str], progress: ProgressLine
) -> list[str]:
    """Wait until each Mac has the model or says why not; return the problems."""
    name = grants.folder
    clock = SystemClock()
    misses: dict[str, int] = {}
    problems: list[str] = []
    while waiting:
        lines = []
        for model in await agents.models():
            if model.node not in waiting:
                continue
            misses[model.node] = misses.get(model.node, 0) + 1 if model.problem else 0
            state, text = _pull_state(model, name)
            if state == "running" and misses[model.node] < _MAX_MISSES:
                lines.append(text)
                continue
            waiting.discard(model.node)
            await grants.withdraw(model.node)
            progress.clear()
            if state == "present":
                click.echo(f"{model.node}: {name} present")
            else:
                problems.append(text)
        if waiting:
            progress.show(", ".join(lines))
            await clock.sleep(_POLL_S)
    return problems


def _pull_state(
    answer: NodeAnswer[NodeModels], name: str
) -> tuple[Literal["running", "present", "failed"], str]:
    """Return how far a Mac is, with words about it."""
    node, models = answer.node, answer.document
    if models is None:
        return "running", answer.problem
    if any(model.name == name for model in models.models):
        return "present", ""
    fetch = next((report for report in models.fetches if report.name == name), None)
    if fetch is None:
        return "failed", f"node/{node}: its agent was restarted; pull again"
    if fetch.error:
        return "failed", f"node/{node}: {fetch.error}"
    share = 100 * fetch.present_bytes // fetch.total_bytes if fetch.total_bytes else 0
    return "running", f"{node} {share} %" + (f" ({fetch.waiting})" if fetch.waiting else "")
