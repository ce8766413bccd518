"""Manifests from flags: `fleetctl create modeldeployment`, `nodepool` and `modelroute`. Pure; writes nothing.

The kinds that `fleetctl create` makes from flags: what is asked for most; the rest of a spec is for manifests.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import click

from fleetctl.cli.connect import store_options
from fleetctl.objects import key_values
from fleetctl.objects.targets import manager_option
from fleetctl.output.results import result_options
from manifests.errors import ManifestErrors
from manifests.load import Document, LoadedObject, read_objects
from manifests.trees import Tree
from manifests.yaml import parser
from schemas.meta import API_VERSION


def read_object(tree: dict[str, Tree], flags: Mapping[str, str]) -> LoadedObject:
    """Return the object that was declared by flags; `flags` says which flag wrote which field.

    Raises:
        click.UsageError: it is not valid, in words of the flags.

    """
    for path, text in _iterate_texts(tree):
        key_values.refuse_not_utf8(flag_of(path, flags), text)
    about = f"{tree['kind']}"
    [root] = parser.parse(parser.dump(tree), about).documents
    try:
        [found] = read_objects([Document(source=about, root=root)])
    except ManifestErrors as errors:
        raise click.UsageError(problems_in_flags(errors, flags)) from None
    return found


def _iterate_texts(tree: Tree, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a tree, keys too, each with the path of its field."""
    match tree:
        case str():
            yield path, tree
        case dict():
            for key, value in tree.items():
                inner = f"{path}.{key}" if path else key
                yield inner, key
                yield from _iterate_texts(value, inner)
        case list():
            for number, value in enumerate(tree):
                yield from _iterate_texts(value, f"{path}[{number}]")
        case _:
            return


def problems_in_flags(errors: ManifestErrors, flags: Mapping[str, str]) -> str:
    """Return what is wrong, in words of the flags: a line each."""
    said = [
        f"{flag_of(problem.path, flags)}: {problem.message}"
        + (f". {problem.hint}" if problem.hint else "")
        for problem in errors.problems
    ]
    return "\n".join(dict.fromkeys(said))


def flag_of(path: str, flags: Mapping[str, str]) -> str:
    """Return the flag that wrote the field, or the field that it is in; the field itself if none did."""
    for field in sorted(flags, key=len, reverse=True):
        if path == field or path.startswith((f"{field}.", f"{field}[")):
            return flags[field]
    return path


def build_manifest(
    kind: str, name: str, spec: dict[str, Tree], notes: Mapping[str, dict[str, str]]
) -> dict[str, Tree]:
    """Return the object as a manifest says it: only what was given."""
    given: dict[str, Tree] = {key: dict(texts) for key, texts in notes.items() if texts}
    metadata: dict[str, Tree] = {"name": name, **given}
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": metadata,
        "spec": prune_empty(spec),
    }


def prune_empty(tree: dict[str, Tree]) -> dict[str, Tree]:
    """Return the tree without what was not given: None, and mappings and lists without anything in them."""
    found: dict[str, Tree] = {}
    for key, value in tree.items():
        kept = prune_empty(value) if isinstance(value, dict) else value
        if kept is not None and kept not in ({}, []):
            found[key] = kept
    return found


def parse_pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    """Return what `key=value` flags say; each may hold several, with commas between them.

    Raises:
        click.UsageError: one is not of that form.

    """
    found: dict[str, str] = {}
    for part in (part for word in words for part in word.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{flag}: {part!r} is no pair; write KEY=VALUE")
        if key in found:
            raise click.UsageError(f"{flag}: {key} is given twice; give it one value")
        found[key] = value
    return found


def parse_backends(words: Sequence[str]) -> list[Tree]:
    """Return what `--backend qwen` and `--backend qwen=80` say: deployments and their weights.

    Raises:
        click.UsageError: a weight is no whole number.

    """
    found: list[Tree] = []
    for word in words:
        name, equals, weight = word.partition("=")
        if equals and not re.fullmatch(r"[0-9]{1,6}", weight):
            raise click.UsageError(
                f"--backend: {word!r} has no whole number as its weight; write NAME or NAME=80"
            )
        found.append({"deployment": name, **({"weight": int(weight)} if equals else {})})
    return found


CreateObjects: TypeAlias = Callable[[list[LoadedObject], dict[str, Any], Mapping[str, str]], None]

_METADATA_FLAGS = {
    "metadata.name": "NAME",
    "metadata.labels": "--label",
    "metadata": "--annotation",
}
_DEPLOYMENT_FLAGS = {
    **_METADATA_FLAGS,
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
_POOL_FLAGS = {
    **_METADATA_FLAGS,
    "spec.nodes": "--node",
    "spec.selector.matchLabels": "--match-label",
    "spec.selector.chips": "--chip",
    "spec.selector.minMemory": "--min-memory",
    "spec.reserved.memory": "--reserved-memory",
    "spec.reserved.disk": "--reserved-disk",
    "spec.priority": "--priority",
}
_ROUTE_FLAGS = {
    **_METADATA_FLAGS,
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


def _parse_metadata(options: dict[str, Any]) -> dict[str, dict[str, str]]:
    # A note may hold commas of its own.
    notes = {}
    for word in options["annotations"]:
        key, equals, value = word.partition("=")
        if not equals:
            raise click.UsageError(f"--annotation: {word!r} is no pair; write KEY=VALUE")
        notes[key] = value
    return {"labels": parse_pairs(options["labels"], "--label"), "annotations": notes}


def kind_commands(make: CreateObjects) -> list[click.Command]:
    """Return a command for each kind; `make` creates what one has read."""
    return [_modeldeployment(make), _nodepool(make), _modelroute(make)]


def _modeldeployment(make: CreateObjects) -> click.Command:
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
                "nodeSelector": {**parse_pairs(options["node_selector"], "--node-selector")},
            },
            "sharding": options["sharding"],
            "priority": options["priority"],
            "minAvailable": int(least) if is_number else least,
            "autoscaling": {
                "minReplicas": options["min_replicas"],
                "maxReplicas": options["max_replicas"],
            },
        }
        tree = build_manifest("ModelDeployment", name, spec, _parse_metadata(options))
        make([read_object(tree, _DEPLOYMENT_FLAGS)], options, _DEPLOYMENT_FLAGS)

    return modeldeployment


def _nodepool(make: CreateObjects) -> click.Command:
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
                "matchLabels": {**parse_pairs(options["labelled"], "--match-label")},
                "chips": list(options["chips"]),
                "minMemory": options["min_memory"],
            },
            "reserved": {"memory": options["reserved_memory"], "disk": options["reserved_disk"]},
            "priority": options["priority"],
        }
        tree = build_manifest("NodePool", name, spec, _parse_metadata(options))
        make([read_object(tree, _POOL_FLAGS)], options, _POOL_FLAGS)

    return nodepool


def _modelroute(make: CreateObjects) -> click.Command:
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
            "backends": parse_backends(options["backends"]),
            "fallbacks": list(options["fallbacks"]),
        }
        tree = build_manifest("ModelRoute", name, spec, _parse_metadata(options))
        make([read_object(tree, _ROUTE_FLAGS)], options, _ROUTE_FLAGS)

    return modelroute
