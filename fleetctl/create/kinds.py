"""The kinds that `fleetctl create` makes from flags: what is asked for most; the rest of a spec is for manifests."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import click

from fleetctl.connect import store_options
from fleetctl.create import generated
from fleetctl.results import result_options
from fleetctl.targets import manager_option
from manifests.load import Loaded

Make: TypeAlias = Callable[[list[Loaded], dict[str, Any], Mapping[str, str]], None]

_NOTES = {"metadata.name": "NAME", "metadata.labels": "--label", "metadata": "--annotation"}
_DEPLOYMENT = {
    **_NOTES,
    "spec.model.path": "--model",
    "spec.model.adapter": "--adapter",
    "spec.model.draft": "--draft",
    "spec.replicas": "--replicas",
    "spec.contextLength": "--context-length",
    "spec.concurrency": "--concurrency",
    "spec.servedNames": "--served-name",
    "spec.placement.pools": "--pool",
    "spec.placement.nodeSelector": "--node-selector",
    "spec.sharding": "--sharding",
    "spec.priority": "--priority",
    "spec.minAvailable": "--min-available",
    "spec.autoscaling.minReplicas": "--min-replicas",
    "spec.autoscaling": "--max-replicas",
}
_POOL = {
    **_NOTES,
    "spec.nodes": "--node",
    "spec.selector.matchLabels": "--match-label",
    "spec.selector.chips": "--chip",
    "spec.selector.minMemory": "--min-memory",
    "spec.reserved.memory": "--reserved-memory",
    "spec.reserved.disk": "--reserved-disk",
    "spec.priority": "--priority",
}
_ROUTE = {
    **_NOTES,
    "spec.model": "--model",
    "spec.backends": "--backend",
    "spec.fallbacks": "--fallback",
}


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every kind takes."""
    command = store_options(result_options(manager_option(command)))
    for flag, name, help_ in (
        ("--annotation", "annotations", "A note on it: KEY=VALUE; may be repeated."),
        ("--label", "labels", "A label of it: KEY=VALUE; may be repeated."),
    ):
        command = click.option(flag, name, multiple=True, help=help_)(command)
    return click.argument("name")(command)


def _repeated(flag: str, name: str, help_: str) -> Callable[..., Any]:
    return click.option(flag, name, multiple=True, help=f"{help_}; may be repeated.")


def _notes(options: dict[str, Any]) -> dict[str, dict[str, str]]:
    # A note may hold commas of its own.
    notes = {}
    for word in options["annotations"]:
        key, equals, value = word.partition("=")
        if not equals:
            raise click.UsageError(f"--annotation: {word!r} is no pair; write KEY=VALUE")
        notes[key] = value
    return {"labels": generated.pairs(options["labels"], "--label"), "annotations": notes}


def commands(make: Make) -> list[click.Command]:
    """Return a command for each kind; `make` creates what one has read."""
    return [_modeldeployment(make), _nodepool(make), _modelroute(make)]


def _modeldeployment(make: Make) -> click.Command:
    @click.command()
    @click.option("--model", required=True, help="Folder of the model on the nodes.")
    @click.option("--adapter", help="Folder of a LoRA adapter for it.")
    @click.option("--draft", help="Folder of a small model that guesses tokens.")
    @click.option("--replicas", type=int, help="How many copies should serve.")
    @click.option("--context-length", type=int, help="Longest prompt plus answer, in tokens.")
    @click.option("--concurrency", type=int, help="Requests that a replica works on at once.")
    @_repeated("--served-name", "served_names", "Another name that clients may use")
    @_repeated("--pool", "pools", "A NodePool that may run it")
    @_repeated("--node-selector", "node_selector", "A label that its nodes must carry: KEY=VALUE")
    @click.option("--sharding", help="Never, Auto, or a ShardGroup.")
    @click.option("--priority", type=int, help="Higher ones displace lower ones.")
    @click.option("--min-available", help="How many must go on answering: a number, or 50%.")
    @click.option("--min-replicas", type=int, help="Fewest replicas, where load decides.")
    @click.option("--max-replicas", type=int, help="Most replicas, where load decides.")
    @_common
    def modeldeployment(name: str, **options: Any) -> None:
        """Deploy a model: md NAME --model=FOLDER. The rest of its spec is for manifests."""
        least = options["min_available"]
        is_number = least is not None and least.isdecimal()
        spec = {
            "model": {
                "path": options["model"],
                "adapter": options["adapter"],
                "draft": {"path": options["draft"]},
            },
            "servedNames": list(options["served_names"]),
            "replicas": options["replicas"],
            "contextLength": options["context_length"],
            "concurrency": options["concurrency"],
            "placement": {
                "pools": list(options["pools"]),
                "nodeSelector": {**generated.pairs(options["node_selector"], "--node-selector")},
            },
            "sharding": options["sharding"],
            "priority": options["priority"],
            "minAvailable": int(least) if is_number else least,
            "autoscaling": {
                "minReplicas": options["min_replicas"],
                "maxReplicas": options["max_replicas"],
            },
        }
        tree = generated.manifest("ModelDeployment", name, spec, _notes(options))
        make([generated.loaded(tree, _DEPLOYMENT)], options, _DEPLOYMENT)

    return modeldeployment


def _nodepool(make: Make) -> click.Command:
    @click.command()
    @_repeated("--node", "nodes", "A node that is in it")
    @_repeated("--match-label", "labelled", "A label that its nodes carry: KEY=VALUE")
    @_repeated("--chip", "chips", 'A chip that its nodes have, such as "Apple M4 Pro"')
    @click.option("--min-memory", help="Least memory of its nodes, such as 64Gi.")
    @click.option("--reserved-memory", help="Memory left to the owners, such as 8Gi.")
    @click.option("--reserved-disk", help="Disk left to the owners, such as 50Gi.")
    @click.option("--priority", type=int, help="Pools of a higher one are filled first.")
    @_common
    def nodepool(name: str, **options: Any) -> None:
        """Put nodes into a pool: np NAME --node=mac-1, or by what they have."""
        spec = {
            "nodes": list(options["nodes"]),
            "selector": {
                "matchLabels": {**generated.pairs(options["labelled"], "--match-label")},
                "chips": list(options["chips"]),
                "minMemory": options["min_memory"],
            },
            "reserved": {"memory": options["reserved_memory"], "disk": options["reserved_disk"]},
            "priority": options["priority"],
        }
        tree = generated.manifest("NodePool", name, spec, _notes(options))
        make([generated.loaded(tree, _POOL)], options, _POOL)

    return nodepool


def _modelroute(make: Make) -> click.Command:
    @click.command()
    @click.option("--model", help="The name that clients ask for; left out, NAME.")
    @_repeated(
        "--backend", "backends", "A deployment that answers, and its weight: qwen or qwen=80"
    )
    @_repeated("--fallback", "fallbacks", "A deployment for when none of them can")
    @_common
    def modelroute(name: str, **options: Any) -> None:
        """Share a name out over deployments: mr NAME --backend=qwen=80 --backend=phi=20."""
        spec = {
            "model": options["model"] or name,
            "backends": generated.backends(options["backends"]),
            "fallbacks": list(options["fallbacks"]),
        }
        tree = generated.manifest("ModelRoute", name, spec, _notes(options))
        make([generated.loaded(tree, _ROUTE)], options, _ROUTE)

    return modelroute
