"""The commands `fleetctl create modeldeployment`, `nodepool` and `modelroute`: build objects from flags."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import click

from fleetctl.cli.arguments import manager_option, result_options
from fleetctl.cli.connect import store_options
from fleetctl.cli.hub_options import source_option
from fleetctl.objects import key_values
from manifests.documents import Document
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject, read_objects
from manifests.trees import Tree
from manifests.yaml import parser
from schemas.meta import API_VERSION


def read_object(tree: dict[str, Tree], flags: Mapping[str, str]) -> LoadedObject:
    """Return the object of a tree made from flags; `flags` maps fields to flags.

    Raises:
        click.UsageError: the object is invalid; the message names the flags.

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
    """Yield all texts and keys in a tree, each with the path of its field."""
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
    """Return the problems with the names of flags instead of fields, one line each."""
    problems = [
        f"{flag_of(problem.path, flags)}: {problem.message}"
        + (f". {problem.hint}" if problem.hint else "")
        for problem in errors.problems
    ]
    return "\n".join(dict.fromkeys(problems))


def flag_of(path: str, flags: Mapping[str, str]) -> str:
    """Return the flag that sets the field or its parent; the field itself if there is none."""
    for field in sorted(flags, key=len, reverse=True):
        if path == field or path.startswith((f"{field}.", f"{field}[")):
            return flags[field]
    return path


def build_manifest(
    kind: str, name: str, spec: dict[str, Tree], notes: Mapping[str, dict[str, str]]
) -> dict[str, Tree]:
    """Return the object as in a manifest, with the given fields only."""
    given: dict[str, Tree] = {key: dict(texts) for key, texts in notes.items() if texts}
    metadata: dict[str, Tree] = {"name": name, **given}
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": metadata,
        "spec": prune_empty(spec),
    }


def prune_empty(tree: dict[str, Tree]) -> dict[str, Tree]:
    """Return the tree without None, and without empty mappings and lists."""
    found: dict[str, Tree] = {}
    for key, value in tree.items():
        kept = prune_empty(value) if isinstance(value, dict) else value
        if kept is not None and kept not in ({}, []):
            found[key] = kept
    return found


def parse_pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    """Return the pairs of `key=value` flags; each flag may hold several, separated by commas.

    Raises:
        click.UsageError: a pair is not of this form.

    """
    found: dict[str, str] = {}
    for part in (part for word in words for part in word.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{flag}: {part!r} is not a pair; write KEY=VALUE")
        if key in found:
            raise click.UsageError(f"{flag}: {key} is given twice; give one value")
        found[key] = value
    return found


def parse_backends(words: Sequence[str]) -> list[Tree]:
    """Return the deployments and weights of `--backend qwen` and `--backend qwen=80`.

    Raises:
        click.UsageError: a weight is not a whole number.

    """
    found: list[Tree] = []
    for word in words:
        name, equals, weight = word.partition("=")
        if equals and not re.fullmatch(r"[0-9]{1,6}", weight):
            raise click.UsageError(
                f"--backend: the weight of {word!r} is not a whole number; write NAME or NAME=80"
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
    "spec.model.hub.repo": "--hub",
    "spec.model.hub.revision": "--revision",
    "spec.model.hub.source": "--source",
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
    """Add the arguments and flags that all kinds have."""
    command = store_options(result_options(manager_option(command)))
    for flag, name, help_ in (
        ("--annotation", "annotations", "Annotation to set: KEY=VALUE. Can be repeated."),
        ("--label", "labels", "Label to set: KEY=VALUE. Can be repeated."),
    ):
        command = click.option(flag, name, multiple=True, help=help_)(command)
    return click.argument("name")(command)


def _repeated(flag: str, name: str, help_: str) -> Callable[..., Any]:
    return click.option(flag, name, multiple=True, help=f"{help_}. Can be repeated.")


def _parse_metadata(options: dict[str, Any]) -> dict[str, dict[str, str]]:
    # An annotation may contain commas.
    notes = {}
    for word in options["annotations"]:
        key, equals, value = word.partition("=")
        if not equals:
            raise click.UsageError(f"--annotation: {word!r} is not a pair; write KEY=VALUE")
        notes[key] = value
    return {"labels": parse_pairs(options["labels"], "--label"), "annotations": notes}


def kind_commands(make: CreateObjects) -> list[click.Command]:
    """Return a command for each kind; `make` creates the objects."""
    return [_modeldeployment(make), _nodepool(make), _modelroute(make)]


def _modeldeployment(make: CreateObjects) -> click.Command:
    @click.command()
    @click.option("--model", help="Folder of the model on the nodes.")
    @click.option(
        "--hub", metavar="ORG/NAME", help="Repository of a model hub; in place of --model."
    )
    @source_option
    @click.option("--revision", help="Branch, tag or commit of --hub (default: that of its hub).")
    @click.option("--adapter", help="Folder of a LoRA adapter.")
    @click.option("--draft", help="Folder of a draft model for speculative decoding.")
    @click.option("--replicas", type=int, help="Number of replicas.")
    @click.option("--context-length", type=int, help="Maximum of prompt plus output, in tokens.")
    @click.option("--concurrency", type=int, help="Concurrent requests of a replica.")
    @_repeated("--served-name", "served_names", "Additional model name for clients")
    @_repeated("--pool", "pools", "NodePool to place replicas in")
    @_repeated("--node-selector", "node_selector", "Label that nodes must have: KEY=VALUE")
    @click.option("--sharding", help="Never, Auto, or the name of a ShardGroup.")
    @click.option("--priority", type=int, help="Deployments of higher priority displace others.")
    @click.option("--min-available", help="Replicas that must stay available: a number, or 50%.")
    @click.option("--min-replicas", type=int, help="Lower bound of autoscaling.")
    @click.option("--max-replicas", type=int, help="Upper bound of autoscaling.")
    @_common
    def modeldeployment(name: str, **options: Any) -> None:
        """Create a ModelDeployment: md NAME --hub=ORG/NAME, or --model=FOLDER. Other fields need a manifest."""
        if (options["model"] is None) == (options["hub"] is None):
            raise click.UsageError("give either --hub ORG/NAME or --model FOLDER")
        least = options["min_available"]
        is_number = least is not None and least.isdecimal()
        spec = {
            "model": {
                "path": options["model"],
                "hub": {
                    "repo": options["hub"],
                    **{name: options[name] for name in ("source", "revision")},
                },
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
    @_repeated("--node", "nodes", "Node in the pool")
    @_repeated("--match-label", "match_labels", "Select nodes with this label: KEY=VALUE")
    @_repeated("--chip", "chips", 'Select nodes with this chip, such as "Apple M4 Pro"')
    @click.option("--min-memory", help="Select nodes with at least this memory, such as 64Gi.")
    @click.option("--reserved-memory", help="Memory reserved for the owner of a node, such as 8Gi.")
    @click.option("--reserved-disk", help="Disk reserved for the owner of a node, such as 50Gi.")
    @click.option("--priority", type=int, help="Pools of higher priority are filled first.")
    @_common
    def nodepool(name: str, **options: Any) -> None:
        """Create a NodePool: np NAME --node=mac-1, or with flags that select nodes."""
        spec = {
            "nodes": list(options["nodes"]),
            "selector": {
                "matchLabels": {**parse_pairs(options["match_labels"], "--match-label")},
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
    @click.option("--model", help="Model name for clients (default: NAME).")
    @_repeated("--backend", "backends", "Deployment with an optional weight: qwen or qwen=80")
    @_repeated("--fallback", "fallbacks", "Deployment to use when no backend is available")
    @_common
    def modelroute(name: str, **options: Any) -> None:
        """Create a ModelRoute: mr NAME --backend=qwen=80 --backend=phi=20."""
        spec = {
            "model": options["model"] or name,
            "backends": parse_backends(options["backends"]),
            "fallbacks": list(options["fallbacks"]),
        }
        tree = build_manifest("ModelRoute", name, spec, _parse_metadata(options))
        make([read_object(tree, _ROUTE_FLAGS)], options, _ROUTE_FLAGS)

    return modelroute
