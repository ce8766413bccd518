"""The commands `fleetctl create modeldeployment`, `nodepool` and `modelroute`: build objects from flags."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

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
        [loaded_object] = read_objects([Document(source=about, root=root)])
    except ManifestErrors as errors:
        raise click.UsageError(problems_in_flags(errors, flags)) from None
    return loaded_object


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
        "spec": spec,
    }


def _parse_pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    """Return the pairs of `key=value` flags; each flag may hold several, separated by commas.

    Raises:
        click.UsageError: a pair is not of this form.

    """
    pairs: dict[str, str] = {}
    for part in (part for word in words for part in word.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{flag}: {part!r} is not a pair; write KEY=VALUE")
        if key in pairs:
            raise click.UsageError(f"{flag}: {key} is given twice; give one value")
        pairs[key] = value
    return pairs


class FieldFlag(NamedTuple):
    """A flag of fleetctl create that sets one field."""

    flag: str
    field: str
    """Path of the field in the spec."""
    help: str
    form: Literal["text", "number", "amount", "list", "pairs", "backends", "source"] = "text"
    """amount: a number or a percentage. The last four but source can be repeated."""

    @property
    def option(self) -> str:
        """The name of the option's value."""
        return self.flag.removeprefix("--").replace("-", "_")

    def decorate(self, command: Callable[..., Any]) -> Callable[..., Any]:
        """Add the flag to a command."""
        if self.form == "source":
            decorated: Callable[..., Any] = source_option(command)
            return decorated
        is_repeated = self.form in ("list", "pairs", "backends")
        return click.option(
            self.flag,
            type=int if self.form == "number" else str,
            multiple=is_repeated,
            help=f"{self.help}. Can be repeated." if is_repeated else f"{self.help}.",
        )(command)

    def value(self, given: Any) -> Tree:
        """Return the value of the field; None or empty without the flag.

        Raises:
            click.UsageError: a value is not of the form.

        """
        match self.form:
            case "list":
                return list(given)
            case "pairs":
                return {**_parse_pairs(given, self.flag)}
            case "amount":
                return int(given) if given is not None and given.isdecimal() else given
            case "backends":
                backends: list[Tree] = []
                for word in given:
                    name, equals, weight = word.partition("=")
                    if equals and not re.fullmatch(r"[0-9]{1,6}", weight):
                        raise click.UsageError(
                            f"{self.flag}: the weight of {word!r} is not a whole number; write NAME or NAME=80"
                        )
                    weights: dict[str, Tree] = {"weight": int(weight)} if equals else {}
                    backends.append({"deployment": name, **weights})
                return backends
            case _:
                found: Tree = given
                return found


_METADATA_FLAGS = {
    "metadata.name": "NAME",
    "metadata.labels": "--label",
    "metadata": "--annotation",
}
_DEPLOYMENT = (
    FieldFlag("--model", "model.path", "Folder of the model on the nodes"),
    FieldFlag("--hub", "model.hub.repo", "Repository of a model hub, ORG/NAME; in place of --model"),
    FieldFlag("--source", "model.hub.source", "", "source"),
    FieldFlag("--revision", "model.hub.revision", "Branch, tag or commit of --hub (default: that of its hub)"),
    FieldFlag("--adapter", "model.adapter", "Folder of a LoRA adapter"),
    FieldFlag("--draft", "model.draft.path", "Folder of a draft model for speculative decoding"),
    FieldFlag("--replicas", "replicas", "Number of replicas", "number"),
    FieldFlag("--context-length", "contextLength", "Maximum of prompt plus output, in tokens", "number"),
    FieldFlag("--concurrency", "concurrency", "Concurrent requests of a replica", "number"),
    FieldFlag("--served-name", "servedNames", "Additional model name for clients", "list"),
    FieldFlag("--pool", "placement.pools", "NodePool to place replicas in", "list"),
    FieldFlag("--node-selector", "placement.nodeSelector", "Label that nodes must have: KEY=VALUE", "pairs"),
    FieldFlag("--sharding", "sharding", "Never, Auto, or the name of a ShardGroup"),
    FieldFlag("--priority", "priority", "Deployments of higher priority displace others", "number"),
    FieldFlag("--min-available", "minAvailable", "Replicas that must stay available: a number, or 50%", "amount"),
    FieldFlag("--min-replicas", "autoscaling.minReplicas", "Lower bound of autoscaling", "number"),
    FieldFlag("--max-replicas", "autoscaling.maxReplicas", "Upper bound of autoscaling", "number"),
)  # fmt: skip
_POOL = (
    FieldFlag("--node", "nodes", "Node in the pool", "list"),
    FieldFlag("--match-label", "selector.matchLabels", "Select nodes with this label: KEY=VALUE", "pairs"),
    FieldFlag("--chip", "selector.chips", 'Select nodes with this chip, such as "Apple M4 Pro"', "list"),
    FieldFlag("--min-memory", "selector.minMemory", "Select nodes with at least this memory, such as 64Gi"),
    FieldFlag("--reserved-memory", "reserved.memory", "Memory reserved for the owner of a node, such as 8Gi"),
    FieldFlag("--reserved-disk", "reserved.disk", "Disk reserved for the owner of a node, such as 50Gi"),
    FieldFlag("--priority", "priority", "Pools of higher priority are filled first", "number"),
)  # fmt: skip
_ROUTE = (
    FieldFlag("--model", "model", "Model name for clients (default: NAME)"),
    FieldFlag("--backend", "backends", "Deployment with an optional weight: qwen or qwen=80", "backends"),
    FieldFlag("--fallback", "fallbacks", "Deployment to use when no backend is available", "list"),
)  # fmt: skip

CreateObjects: TypeAlias = Callable[[list[LoadedObject], dict[str, Any], Mapping[str, str]], None]


def kind_commands(make: CreateObjects) -> list[click.Command]:
    """Return a command for each kind; `make` creates the objects."""
    return [
        _command(
            "ModelDeployment",
            _DEPLOYMENT,
            "Create a ModelDeployment: md NAME --hub=ORG/NAME, or --model=FOLDER. Other fields need a manifest.",
            make,
        ),
        _command(
            "NodePool",
            _POOL,
            "Create a NodePool: np NAME --node=mac-1, or with flags that select nodes.",
            make,
        ),
        _command(
            "ModelRoute",
            _ROUTE,
            "Create a ModelRoute: mr NAME --backend=qwen=80 --backend=phi=20.",
            make,
        ),
    ]


def _command(
    kind: str, fields: Sequence[FieldFlag], help_: str, make: CreateObjects
) -> click.Command:
    flags = {**_METADATA_FLAGS, **{f"spec.{flag.field}": flag.flag for flag in fields}}

    def create(name: str, **options: Any) -> None:
        if kind == "ModelDeployment" and (options["model"] is None) == (options["hub"] is None):
            raise click.UsageError("give either --hub ORG/NAME or --model FOLDER")
        if kind == "ModelRoute":
            options["model"] = options["model"] or name
        spec: dict[str, Tree] = {}
        for field in fields:
            value = field.value(options[field.option])
            if value in (None, {}, []):
                continue
            *parents, last = field.field.split(".")
            tree: dict[str, Any] = spec
            for parent in parents:
                tree = tree.setdefault(parent, {})
            tree[last] = value
        notes = {}
        for word in options["annotations"]:  # an annotation may contain commas
            key, equals, text = word.partition("=")
            if not equals:
                raise click.UsageError(f"--annotation: {word!r} is not a pair; write KEY=VALUE")
            notes[key] = text
        labels = _parse_pairs(options["labels"], "--label")
        tree = build_manifest(kind, name, spec, {"labels": labels, "annotations": notes})
        make([read_object(tree, flags)], options, flags)

    decorators: tuple[Callable[..., Any], ...] = (
        click.argument("name"),
        *(field.decorate for field in fields),
        click.option(
            *("--label", "labels"), multiple=True, help="Label to set: KEY=VALUE. Can be repeated."
        ),
        click.option(
            *("--annotation", "annotations"),
            multiple=True,
            help="Annotation to set: KEY=VALUE. Can be repeated.",
        ),
        manager_option,
        result_options,
        store_options,
    )
    command: Callable[..., Any] = create
    for decorator in reversed(decorators):
        command = decorator(command)
    return click.command(kind.lower(), help=help_)(command)
