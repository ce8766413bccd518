"""`fleetctl set`: changes the model or the memory of deployments, as `kubectl set image` and `set resources` do."""

from collections.abc import Sequence
from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import result_options
from fleetctl.cli.connect import run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.objects import targets
from fleetctl.verbs.patch import PatchRequest, PatchVerb, patch_all
from manifests.trees import Tree
from schemas.deployment import ModelDeployment

_MODEL_HELP = """Set the model of deployments. This starts a rollout.

\b
  fleetctl set model md/qwen Qwen3-8B-4bit
  fleetctl set model md qwen phi /Volumes/models/Qwen3-8B-4bit --dry-run=server

FOLDER is a folder in MLX format on the Macs: absolute, or below their models folder. An adapter and a draft model of
the deployment stay; `fleetctl edit` changes them too.
"""
_RESOURCES_HELP = """Set the memory of each replica of deployments. This starts a rollout.

\b
  fleetctl set resources md/qwen --memory=24Gi
  fleetctl set resources md -l team=lab --memory=24Gi
  fleetctl set resources md/qwen --memory=auto

The value replaces the sum of the memory proof, which --memory=auto restores. A replica that needs more than this may
take its Mac down.
"""


@click.group("set", cls=SuggestingGroup)
def set_field() -> None:
    """Set the model or the memory of deployments."""


def _selection_options(command: Any) -> Any:
    for decorator in (
        store_options,
        result_options,
        arguments.all_option,
        arguments.selector_option,
    ):
        command = decorator(command)
    return command


@set_field.command(help=_MODEL_HELP)
@click.argument("words", nargs=-1, metavar="KIND NAME... FOLDER")
@_selection_options
def model(words: tuple[str, ...], **options: Any) -> None:
    """Set the model of deployments."""
    if len(words) < 2:
        raise click.UsageError("give a deployment and a folder: fleetctl set model md/NAME FOLDER")
    *names, folder = words
    _set(names, {"model": {"path": folder}}, "model updated", options)


@set_field.command(help=_RESOURCES_HELP)
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]")
@click.option(
    "--memory",
    required=True,
    metavar="QUANTITY|auto",
    help="Memory of one replica, such as 24Gi; auto: the sum of the memory proof.",
)
@_selection_options
def resources(words: tuple[str, ...], memory: str, **options: Any) -> None:
    """Set the memory of each replica of deployments."""
    wanted: Tree = None if memory == "auto" else {"memory": memory}
    _set(words, {"resources": wanted}, "resource requirements updated", options)


def _set(words: Sequence[str], spec: dict[str, Tree], done: str, options: dict[str, Any]) -> None:
    options = {**options, "files": (), "recursive": False}
    chosen = targets.parse_selections(words, options, verb="set", is_all=options["is_all"])
    for one in chosen:
        if one.kind.type is not ModelDeployment:
            raise FleetctlError(
                f"{one.kind.plural} have no model and no resources; give modeldeployments, such as md/NAME"
            )
    verb = PatchVerb(manager="fleetctl-set", done=done)
    run(patch_all(chosen, PatchRequest({"spec": spec}, "merge", "as set"), options, verb))
