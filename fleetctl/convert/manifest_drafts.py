"""Drafts of manifests from foreign configuration: nodes, names, fields with their source lines, and shared routing."""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from types import MappingProxyType
from typing import TypeAlias

import click
from pydantic import ValidationError

from fleetctl.cli.errors import FleetctlError
from fleetctl.convert import foreign_config
from fleetctl.convert.foreign_config import ForeignConfig
from fleetctl.convert.node_names import ADVICE, NodeNames
from manifests.errors import ManifestError, ManifestErrors
from manifests.trees import Path, Tree, show_path
from manifests.yaml import comments, parser
from manifests.yaml.comments import DocumentComments, FieldComments
from schemas import kinds
from schemas.deployment import HUB_REPO_PATTERN
from schemas.meta import API_VERSION

ForeignHosts: TypeAlias = Sequence[tuple[tuple[str | int, ...], tuple[str, ...]]]
"""The path of each Mac in the file, and its names and addresses there, the best name first."""


def resolve_nodes(source: ForeignConfig, hosts: ForeignHosts, names: NodeNames) -> tuple[str, ...]:
    """Return the node of each Mac; record refusals in `source`."""
    if names.given and len(names.given) != len(hosts):
        source.refuse(
            hosts[0][0] if hosts else (),
            f"names {len(hosts)} Macs, but --nodes names {len(names.given)}",
            "Name one node per Mac, in the file's order",
        )
        return ()
    nodes: list[str] = []
    for index, (path, host) in enumerate(hosts):
        name = names.find(index, *host)
        if not name:
            source.refuse(path, f"does not name the node of {next(filter(None, host), '')}", ADVICE)
        elif name in nodes:
            source.refuse(
                path, f"is the second Mac named {name}", "Give --nodes with distinct names"
            )
        nodes.append(name)
    return tuple(nodes)


def object_name(text: str, fallback: str) -> str:
    """Return a valid object name: `mlx-community/Qwen3-8B-4bit` becomes `qwen3-8b-4bit`."""
    last = text.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9.]+", "-", last.lower()).strip("-.")[:100] or fallback


def served_names(name: str, *others: str | None) -> list[str]:
    """Return the names under which clients request the model besides the object's own; skip invalid ones."""
    candidates = [other for other in others if other and other != name]
    return [
        candidate
        for candidate in dict.fromkeys(candidates)
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", candidate) and len(candidate) <= 200
    ]


@dataclass(slots=True, kw_only=True)
class ManifestDraft:
    """A manifest under construction."""

    kind: str
    name: str
    source: ForeignConfig
    notes: list[str] = field(default_factory=list)
    """Comments above the manifest."""
    _tree: dict[str, Tree] = field(default_factory=dict)
    _places: dict[Path, Path] = field(default_factory=dict)

    def put_model(self, model: str | None, *came_from: str | int) -> None:
        """Set the model: a repository of a hub if it has that form, else a folder."""
        if model is None or not re.fullmatch(HUB_REPO_PATTERN, model):
            self.put("spec.model.path", model, *came_from)
        else:
            self.put("spec.model.hub.repo", model, *came_from)

    def put(self, path: str, value: Tree, *came_from: str | int) -> None:
        """Set a field such as `spec.routing.strategy` unless the value is None; `came_from` is its path in the file."""
        if value is None:
            return
        *parents, last = path.split(".")
        tree = self._tree
        for part in parents:
            inner = tree.setdefault(part, {})
            assert isinstance(inner, dict)
            tree = inner
        tree[last] = value
        place = self.source.find_path(*came_from) if came_from else None
        if place is not None:
            self._places[(*parents, last)] = place

    def set_place(self, path: str, place: Path) -> None:
        """Set where the foreign file has a field, as a path of the whole document."""
        self._places[tuple(path.split("."))] = place

    def has(self, field_name: str) -> bool:
        """Return whether a top-level field is set."""
        return field_name in self._tree

    def manifest(self) -> str:
        """Return the manifest as YAML, with its notes above it.

        Raises:
            ManifestErrors: the manifest is invalid; each problem names the line of the foreign file.

        """
        metadata: dict[str, Tree] = {"name": self.name}
        own_metadata = self._tree.get("metadata")
        tree: dict[str, Tree] = {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            **self._tree,
            "metadata": {**metadata, **(own_metadata if isinstance(own_metadata, dict) else {})},
        }
        kind = kinds.by_name(self.kind)
        assert kind is not None
        try:
            kind.type.model_validate_json(json.dumps(tree), by_alias=True, by_name=False)
        except ValidationError as error:
            problems = [
                self._problem(one["loc"], one["msg"]) for one in error.errors(include_url=False)
            ]
            raise ManifestErrors(problems) from error
        body = comments.with_comments(parser.dump(tree), self._comments())
        return comment_lines(self.notes) + body

    def _comments(self) -> DocumentComments:
        """Return the comments of the foreign file that belong to fields of this manifest.

        The comments of a setting go to the field that was made of it, those of a section to the first field of it, and
        those inside of a setting to its field.
        """
        above: dict[Path, list[str]] = {}
        beside: dict[Path, str] = {}
        for place, one in self.source.document.comments.fields.items():
            ours = None if place in self.source.taken_comments else self._field_of(place)
            if ours is None:
                continue
            self.source.taken_comments.add(place)
            above.setdefault(ours, []).extend(map(foreign_config.shown_comment, one.above))
            if one.beside and self._places[ours] == place:
                beside[ours] = foreign_config.shown_comment(one.beside)
            elif one.beside:
                above[ours].append(foreign_config.shown_comment(one.beside))
        return DocumentComments(
            fields={
                path: FieldComments(above=tuple(lines), beside=beside.get(path, ""))
                for path, lines in above.items()
            }
        )

    def _field_of(self, place: Path) -> Path | None:
        """Return the field that a place in the foreign file belongs to; None if it does not concern this manifest."""
        same = [ours for ours, theirs in self._places.items() if theirs == place]
        inside = [ours for ours, theirs in self._places.items() if place[: len(theirs)] == theirs]
        # A section above this draft's own holds other manifests, too.
        at = self.source.at
        is_own = place == at or at[: len(place)] != place
        section = [
            ours
            for ours, theirs in self._places.items()
            if is_own and theirs[: len(place)] == place
        ]
        inside.sort(key=lambda ours: len(self._places[ours]), reverse=True)
        return next(iter((*same, *inside, *section)), None)

    def _problem(self, path: Path, message: str) -> ManifestError:
        reason = message.removeprefix("Value error, ")
        prefixes = [path[:length] for length in range(len(path), 0, -1)]
        place = next((self._places[one] for one in prefixes if one in self._places), ())
        return self.source.document.problem(
            place, f"results in an invalid {self.kind}: {show_path(path)}: {reason}"
        )


def comment_lines(notes: Sequence[str]) -> str:
    """Return the notes as YAML comments; unprintable characters are replaced."""
    return "".join(f"# {_printable(note)}\n" for note in notes)


def _printable(note: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in note)


def join_manifests(header: list[str], drafts: list[ManifestDraft]) -> str:
    """Return the manifests as one YAML file, with the header as comments above them.

    Raises:
            ManifestErrors: problems of all drafts.

    """
    manifests: list[str] = []
    problems: list[ManifestError] = []
    for draft in drafts:
        try:
            manifests.append(draft.manifest())
        except ManifestErrors as errors:
            problems.extend(errors.problems)
    if problems:
        raise ManifestErrors(problems)
    return comment_lines(header) + "---\n".join(manifests)


# The maximum of schemas.routing.Weight.
_MAX_WEIGHT = 1000


def scale_weights(
    source: ForeignConfig, named: Mapping[str, tuple[str | int, ...]]
) -> dict[str, Tree] | None:
    """Return integer weights in the proportion of the file's fractions; None if the file has none.

    `named` maps the fleet's name of each weight to its path in the file.
    """
    read = {name: source.number(*path) for name, path in named.items()}
    fractions = {name: value for name, value in read.items() if value is not None}
    if not fractions:
        return None
    thousandths = {name: round(value * 1000) for name, value in fractions.items()}
    common = gcd(*thousandths.values()) or 1
    smallest = {name: value // common for name, value in thousandths.items()}
    # 0.4, 0.2, 0.3 and 0.1 become 40, 20, 30 and 10, which are easier to read than 4, 2, 3 and 1.
    total = sum(smallest.values())
    factor = 100 // total if total and 100 % total == 0 else 1
    most = max(smallest.values(), default=0) * factor
    if most > _MAX_WEIGHT:
        largest = max(fractions.values())
        return {name: round(value * _MAX_WEIGHT / largest) for name, value in fractions.items()}
    return {name: value * factor for name, value in smallest.items()}


def draft_deployments(
    source: ForeignConfig,
    models: Sequence[str],
    routing: dict[str, Tree],
    pools: Sequence[str],
    places: Mapping[str, Path | None] = MappingProxyType({}),
) -> list[ManifestDraft]:
    """Return a deployment draft for each model of --model; `places` as in `set_placement`."""
    drafts = []
    for path in models:
        name = object_name(path, "model")
        draft = ManifestDraft(kind="ModelDeployment", name=name, source=source)
        draft.put_model(path)
        names: list[Tree] = [*served_names(name, path)]
        draft.put("spec.servedNames", names or None)
        set_placement(draft, routing, pools, places)
        drafts.append(draft)
    return drafts


def set_placement(
    draft: ManifestDraft,
    routing: dict[str, Tree],
    pools: Sequence[str],
    places: Mapping[str, Path | None] = MappingProxyType({}),
) -> None:
    """Set the pools and the routing of a deployment draft; `places` is where the file has fields of the routing."""
    listed: list[Tree] = [*pools]
    draft.put("spec.placement.pools", listed or None)
    draft.put("spec.routing", routing or None)
    for name, place in places.items():
        if name in routing and place is not None:
            draft.set_place(f"spec.routing.{name}", place)


def routing_comment(routing: dict[str, Tree]) -> list[str]:
    """Return the routing as comment lines, for a file that names no model."""
    if not routing:
        return []
    body = parser.dump({"routing": routing}).splitlines()
    return [
        "The file names no model. Add this below spec of each ModelDeployment, or name models with --model",
        *(f"  {line}" for line in body),
    ]


def save_text(text: str, output: pathlib.Path | None) -> None:
    """Write the text to the file, or to standard output if `output` is None.

    Raises:
        FleetctlError: the file cannot be written.

    """
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FleetctlError(f"cannot write {output}: {error.strerror}") from error
