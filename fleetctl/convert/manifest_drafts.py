"""Names: which Mac of the fleet a host is, what an object is called, which names clients go on using. Pure.

Manifests on their way: fields that remember where they came from, so that a refusal names the line. Pure.

Load balancing of other tools as spec.routing, and the deployments that carry it. Pure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from pydantic import ValidationError

from fleetctl.convert.foreign_config import ForeignConfig
from manifests.errors import ManifestError, ManifestErrors
from manifests.trees import Path, Tree, show_path
from manifests.yaml import parser
from nodeagent.node.identity import dns_label
from schemas import duration, kinds
from schemas.meta import API_VERSION

_ADDRESS = re.compile(r"[0-9.]*|.*:.*")


def node_name(host: str) -> str:
    """Return the name that an agent on the host gives its node; empty for an address, which names no Mac."""
    bare = host.rpartition("@")[2]
    return "" if _ADDRESS.fullmatch(bare) else dns_label(bare, fallback="")


def resolve_nodes(
    source: ForeignConfig, hosts: Sequence[tuple[tuple[str | int, ...], str]], given: Sequence[str]
) -> tuple[str, ...]:
    """Return the node of each host (its place in the file, and what stands there); notes refusals."""
    if given and len(given) != len(hosts):
        source.refuse(
            hosts[0][0] if hosts else (),
            f"names {len(hosts)} Macs, and --nodes {len(given)}",
            "Name one for each, in the file's order",
        )
        return ()
    found: list[str] = []
    for index, (path, host) in enumerate(hosts):
        name = given[index] if given else node_name(host)
        if not name:
            source.refuse(
                path,
                f"does not say which node {host} is",
                "Write --nodes NODE,NODE,... in the file's order (`fleetctl get nodes` shows them)",
            )
        elif name in found:
            source.refuse(
                path, f"is the second Mac called {name}", "Write --nodes with other names"
            )
        found.append(name)
    return tuple(found)


def object_name(text: str, fallback: str) -> str:
    """Return the name as an object may have it: of `mlx-community/Qwen3-8B-4bit` it is `qwen3-8b-4bit`."""
    last = text.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9.]+", "-", last.lower()).strip("-.")[:100] or fallback


def served_names(name: str, *others: str | None) -> list[str]:
    """Return the names that clients use besides the object's own, those that can be served."""
    wanted = [one for one in others if one and one != name]
    return [
        one
        for one in dict.fromkeys(wanted)
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", one) and len(one) <= 200
    ]


@dataclass(slots=True, kw_only=True)
class ManifestDraft:
    """A manifest that is being made."""

    kind: str
    name: str
    source: ForeignConfig
    notes: list[str] = field(default_factory=list)
    """Comments above it."""
    _tree: dict[str, Tree] = field(default_factory=dict)
    _places: dict[Path, Path] = field(default_factory=dict)

    def put(self, path: str, value: Tree, *came_from: str | int) -> None:
        """Set a field such as `spec.routing.strategy`, unless the value is None; `came_from` is its place in the file."""
        if value is None:
            return
        *parents, last = path.split(".")
        tree = self._tree
        for part in parents:
            inner = tree.setdefault(part, {})
            assert isinstance(inner, dict)
            tree = inner
        tree[last] = value
        place = self.source.where(*came_from) if came_from else None
        if place is not None:
            self._places[(*parents, last)] = place

    def has(self, field_name: str) -> bool:
        return field_name in self._tree

    def manifest(self) -> str:
        """Return the YAML, the notes above it.

        Raises:
            ManifestErrors: it would be refused; with the line of the file that is at fault.

        """
        metadata: dict[str, Tree] = {"name": self.name}
        said = self._tree.get("metadata")
        tree: dict[str, Tree] = {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            **self._tree,
            "metadata": {**metadata, **(said if isinstance(said, dict) else {})},
        }
        kind = kinds.by_name(self.kind)
        assert kind is not None
        try:
            kind.type.model_validate_json(json.dumps(tree), by_alias=True, by_name=False)
        except ValidationError as error:
            found = error.errors(include_url=False)
            raise ManifestErrors(
                [self._problem(one["loc"], one["msg"]) for one in found]
            ) from error
        return comment_lines(self.notes) + parser.dump(tree)

    def _problem(self, path: Path, message: str) -> ManifestError:
        said = message.removeprefix("Value error, ")
        tried = [path[:length] for length in range(len(path), 0, -1)]
        place = next((self._places[one] for one in tried if one in self._places), ())
        return self.source.document.problem(
            place, f"makes a {self.kind} that cannot be: {show_path(path)}: {said}"
        )


def comment_lines(notes: list[str]) -> str:
    """Return the notes as comments, whatever the file had in them."""
    return "".join(f"# {_printable(note)}\n" for note in notes)


def _printable(note: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in note)


def join_manifests(header: list[str], drafts: list[ManifestDraft]) -> str:
    """Return the file: what concerns all of it first.

    Raises:
        ManifestErrors: everything that would be refused.

    """
    made: list[str] = []
    problems: list[ManifestError] = []
    for draft in drafts:
        try:
            made.append(draft.manifest())
        except ManifestErrors as errors:
            problems.extend(errors.problems)
    if problems:
        raise ManifestErrors(problems)
    return comment_lines(header) + "---\n".join(made)


# schemas.routing.Weight ends there.
_MOST = 1000


def duration_text(milliseconds: float) -> str:
    """Return the time as a duration: 1500 is `1s500ms`."""
    whole, rest = divmod(round(milliseconds), 1000)
    parts = (duration.show(whole) if whole else "", f"{rest}ms" if rest else "")
    return "".join(parts) or "0s"


def scale_weights(
    source: ForeignConfig, named: Mapping[str, tuple[str | int, ...]]
) -> dict[str, Tree] | None:
    """Return whole weights in the proportion of the file's fractions; None where it has none.

    `named` is our name of each weight, and where the file says it.
    """
    found = {ours: source.number(*path) for ours, path in named.items()}
    said = {ours: value for ours, value in found.items() if value is not None}
    if not said:
        return None
    thousandths = {ours: round(value * 1000) for ours, value in said.items()}
    common = gcd(*thousandths.values()) or 1
    least = {ours: value // common for ours, value in thousandths.items()}
    # 0.4, 0.2, 0.3 and 0.1 read best as 40, 20, 30 and 10.
    total = sum(least.values())
    factor = 100 // total if total and 100 % total == 0 else 1
    most = max(least.values(), default=0) * factor
    if most > _MOST:
        return {ours: round(value * _MOST / max(said.values())) for ours, value in said.items()}
    return {ours: value * factor for ours, value in least.items()}


def draft_deployments(
    source: ForeignConfig, models: Sequence[str], routing: dict[str, Tree], pools: Sequence[str]
) -> list[ManifestDraft]:
    """Return a deployment for each model that --model names."""
    made = []
    for path in models:
        name = object_name(path, "model")
        draft = ManifestDraft(kind="ModelDeployment", name=name, source=source)
        draft.put("spec.model.path", path)
        names: list[Tree] = [*served_names(name, path)]
        draft.put("spec.servedNames", names or None)
        set_placement(draft, routing, pools)
        made.append(draft)
    return made


def set_placement(draft: ManifestDraft, routing: dict[str, Tree], pools: Sequence[str]) -> None:
    """Say of a deployment where it may go, and how requests are shared out."""
    listed: list[Tree] = [*pools]
    draft.put("spec.placement.pools", listed or None)
    draft.put("spec.routing", routing or None)


def routing_comment(routing: dict[str, Tree]) -> list[str]:
    """Return the routing as lines of a comment, for a file that names no model."""
    if not routing:
        return []
    body = parser.dump({"routing": routing}).splitlines()
    return [
        "The file names no model: write this below spec of each ModelDeployment, or name models with --model",
        *(f"  {line}" for line in body),
    ]
