"""Drafts of manifests from files of other tools: fields with their places in the file, nodes, names and weights."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from pydantic import ValidationError

from compat.importers import source as source_module
from compat.importers.source import Source
from manifests.errors import ManifestError, ManifestErrors
from manifests.trees import Path, Tree, show_path
from manifests.yaml import comments, parser
from manifests.yaml.comments import DocumentComments, FieldComments, comment_lines
from schemas import kinds
from schemas.deployment import HUB_REPO_PATTERN
from schemas.meta import API_VERSION, object_name
from schemas.shardgroup import Backend

Place: TypeAlias = tuple[str | int, ...]
ForeignHosts: TypeAlias = Sequence[tuple[Place, Sequence[str]]]
"""The path of each Mac in the file, and its names and addresses there, the best name first."""
FieldRow: TypeAlias = tuple[str, Callable[[Source, str], Tree], str]
"""A field of a manifest, the reader of its value, and the key in the file."""
Routing: TypeAlias = Sequence[tuple[str, Tree, Path | None]]
"""Fields of spec.routing, and their places in the file."""
ONE_AT_A_TIME = "concurrency: the tool served one request at a time; the fleet's default is Auto"
# The maximum of schemas.routing.Weight.
_MAX_WEIGHT = 1000


class NodeFinder(Protocol):
    """Finds the nodes of the Macs that a file names."""

    @property
    def given(self) -> tuple[str, ...]:
        """The nodes in the file's order, as the user gives them; () to find them."""
        ...

    @property
    def advice(self) -> str: ...

    def find(self, index: int, *hosts: str) -> str:
        """Return the node of the Mac at the place in the file; "" if it is unknown."""
        ...

    def look_up(self, *hosts: str) -> str:
        """Return the node with one of the names and addresses; "" if there is none."""
        ...


class GroupMaker(Protocol):
    """Makes manifests of the host file that a file of another tool names."""

    def __call__(
        self, host_file: str, *, group: str, pool: str, backend: Backend, fast_synch: str | None
    ) -> tuple[bool, str]:
        """Return whether it has several Macs, and the ShardGroup of them, or the NodePool of the only one.

        `group` and `pool` are their names; `fast_synch` is the value of MLX_METAL_FAST_SYNCH for every rank.

        Raises:
            ManifestErrors: the host file is missing or wrong.

        """
        ...


def resolve_nodes(source: Source, hosts: ForeignHosts, finder: NodeFinder) -> list[str]:
    """Return the node of each Mac; record refusals in `source`."""
    if finder.given and len(finder.given) != len(hosts):
        source.refuse(
            hosts[0][0] if hosts else (),
            f"names {len(hosts)} Macs, but --nodes names {len(finder.given)}",
            "Name one node per Mac, in the file's order",
        )
        return []
    nodes: list[str] = []
    for index, (path, names) in enumerate(hosts):
        node = finder.find(index, *names)
        if not node:
            known = next(filter(None, names), "")
            source.refuse(path, f"does not name the node of {known}", finder.advice)
        elif node in nodes:
            hint = "Give --nodes with distinct names"
            source.refuse(path, f"is the second Mac named {node}", hint)
        nodes.append(node)
    return nodes


def served_names(name: str, *others: str | None) -> list[Tree] | None:
    """Return the valid names under which clients request the model besides the object's own; None if there are none."""
    valid: list[Tree] = [
        other
        for other in dict.fromkeys(others)
        if other and other != name and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}", other)
    ]
    return valid or None


def positive(source: Source, key: str) -> Tree:
    """Read a whole number from 1 upwards."""
    return source.integer(key, least=1)


@dataclass(slots=True, kw_only=True)
class ManifestDraft:
    """A manifest under construction."""

    kind: str
    name: str
    source: Source
    notes: list[str] = field(default_factory=list)
    """Comments above the manifest."""
    _tree: dict[str, Tree] = field(default_factory=dict)
    _places: dict[Path, Path] = field(default_factory=dict)

    def put_model(self, model: str | None, *came_from: str | int) -> None:
        """Set the model: a repository of a hub if it has that form, else a folder."""
        is_repo = model is not None and re.fullmatch(HUB_REPO_PATTERN, model)
        self.put("spec.model.hub.repo" if is_repo else "spec.model.path", model, *came_from)

    def put(self, path: str, value: Tree, *came_from: str | int) -> None:
        """Set a field such as `spec.routing.strategy` unless the value is None; `came_from` is its path in the file."""
        self.put_at(path, value, self.source.find_path(*came_from) if came_from else None)

    def put_all(self, rows: Iterable[FieldRow]) -> None:
        """Set fields from the values of keys."""
        for path, read, key in rows:
            self.put(path, read(self.source, key), key)

    def put_at(self, path: str, value: Tree, place: Path | None) -> None:
        """Set a field unless the value is None; `place` is a path of the whole document."""
        if value is None:
            return
        *parents, last = path.split(".")
        tree = self._tree
        for part in parents:
            inner = tree.setdefault(part, {})
            assert isinstance(inner, dict)
            tree = inner
        tree[last] = value
        if place is not None:
            self._places[(*parents, last)] = place

    def put_group(self, *, group: str, pool: str) -> None:
        """Set the ShardGroup of a deployment; without one, the pool."""
        self.put("spec.sharding", group or None)
        self.put("spec.placement.pools", None if group else [pool])

    def put_routing(self, routing: Routing, pools: Sequence[str]) -> None:
        """Set the pools and the routing of a deployment."""
        self.put("spec.placement.pools", [*pools] or None)
        for name, value, place in routing:
            self.put_at(f"spec.routing.{name}", value, place)

    def manifest(self) -> str:
        """Return the manifest as YAML, with its notes above it.

        Raises:
            ManifestErrors: the manifest is invalid; each problem names the line of the foreign file.

        """
        metadata = self._tree.get("metadata")
        tree: dict[str, Tree] = {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            **self._tree,
            "metadata": {"name": self.name, **(metadata if isinstance(metadata, dict) else {})},
        }
        kind = kinds.by_name(self.kind)
        assert kind is not None
        try:
            kind.type.model_validate_json(json.dumps(tree), by_alias=True, by_name=False)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            raise ManifestErrors([self._problem(p["loc"], p["msg"]) for p in problems]) from error
        body = comments.with_comments(parser.dump(tree), self._comments())
        return comment_lines(self.notes) + body

    def _comments(self) -> DocumentComments:
        """Return the comments of the foreign file that belong to fields of this manifest.

        The comments of a setting go to the field that was made of it, those of a section to the first field of it, and
        those inside of a setting to its field.
        """
        above: dict[Path, list[str]] = {}
        beside: dict[Path, str] = {}
        for place, comment in self.source.document.comments.fields.items():
            ours = None if place in self.source.record.copied_comments else self._field_of(place)
            if ours is None:
                continue
            self.source.record.copied_comments.add(place)
            shown = [source_module.shown_comment(text) for text in comment.above]
            above.setdefault(ours, []).extend(shown)
            if comment.beside and self._places[ours] == place:
                beside[ours] = source_module.shown_comment(comment.beside)
            elif comment.beside:
                above[ours].append(source_module.shown_comment(comment.beside))
        fields = {
            path: FieldComments(above=tuple(lines), beside=beside.get(path, ""))
            for path, lines in above.items()
        }
        return DocumentComments(fields=fields)

    def _field_of(self, place: Path) -> Path | None:
        """Return the field that a place in the foreign file belongs to; None if it does not concern this manifest."""
        places, at = self._places.items(), self.source.at
        same = [ours for ours, theirs in places if theirs == place]
        inside = [ours for ours, theirs in places if place[: len(theirs)] == theirs]
        inside.sort(key=lambda ours: len(self._places[ours]), reverse=True)
        # A section above this draft's own holds other manifests, too.
        is_own = place == at or at[: len(place)] != place
        section = [ours for ours, theirs in places if is_own and theirs[: len(place)] == place]
        return next(iter((*same, *inside, *section)), None)

    def _problem(self, path: Path, message: str) -> ManifestError:
        prefixes = (path[:length] for length in range(len(path), 0, -1))
        place = next((self._places[part] for part in prefixes if part in self._places), ())
        reason = message.removeprefix("Value error, ")
        message = f"results in an invalid {self.kind}: {show_path(path)}: {reason}"
        return self.source.document.problem(place, message)


def join_manifests(header: Sequence[str], drafts: Sequence[ManifestDraft | str]) -> str:
    """Return drafts and texts of manifests as one YAML file, with the header as comments above them.

    Raises:
        ManifestErrors: problems of all drafts.

    """
    manifests: list[str] = []
    problems: list[ManifestError] = []
    for draft in drafts:
        try:
            manifests.append(draft if isinstance(draft, str) else draft.manifest())
        except ManifestErrors as errors:
            problems.extend(errors.problems)
    if problems:
        raise ManifestErrors(problems)
    return comment_lines(header) + "---\n".join(manifests)


def header(source: str, tool: str, omitted: Sequence[str]) -> list[str]:
    """Return the comments above the manifests of a file."""
    return [f"From {source} of {tool}. Settings without a counterpart:", *omitted]


def scale_weights(source: Source, named: Mapping[str, Place]) -> dict[str, Tree] | None:
    """Return integer weights in the proportion of the file's fractions; None if the file has none.

    `named` maps the fleet's name of each weight to its path in the file.
    """
    read = {name: source.number(*path) for name, path in named.items()}
    fractions = {name: value for name, value in read.items() if value is not None}
    if not fractions:
        return None
    percents = {name: round(value * 100, 6) for name, value in fractions.items()}
    largest = max(fractions.values())
    if largest * 100 <= _MAX_WEIGHT and all(value.is_integer() for value in percents.values()):
        return {name: int(value) for name, value in percents.items()}
    return {name: round(value * _MAX_WEIGHT / largest) for name, value in fractions.items()}


def draft_deployments(
    source: Source, models: Sequence[str], routing: Routing, pools: Sequence[str]
) -> list[ManifestDraft]:
    """Return a deployment draft for each model of --model."""
    drafts = []
    for path in models:
        name = object_name(path, "model")
        draft = ManifestDraft(kind="ModelDeployment", name=name, source=source)
        draft.put_model(path)
        draft.put("spec.servedNames", served_names(name, path))
        draft.put_routing(routing, pools)
        drafts.append(draft)
    return drafts


def routing_comment(routing: Routing) -> list[str]:
    """Return the routing as comment lines, for a file that names no model."""
    if not routing:
        return []
    body = parser.dump({"routing": {name: value for name, value, _ in routing}}).splitlines()
    return [
        "The file names no model. Add this below spec of each ModelDeployment, or name models with --model",
        *(f"  {line}" for line in body),
    ]
