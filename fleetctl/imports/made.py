"""Manifests on their way: fields that remember where they came from, so that a refusal names the line. Pure."""

import json
from dataclasses import dataclass, field

from pydantic import ValidationError

from fleetctl.imports.foreign import Foreign
from manifests import yamlio
from manifests.errors import ManifestError, ManifestErrors
from manifests.tree import Path, Tree, show_path
from schemas import kinds
from schemas.meta import API_VERSION


@dataclass(slots=True, kw_only=True)
class Draft:
    """A manifest that is being made."""

    kind: str
    name: str
    source: Foreign
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
        return comments(self.notes) + yamlio.dump(tree)

    def _problem(self, path: Path, message: str) -> ManifestError:
        said = message.removeprefix("Value error, ")
        tried = [path[:length] for length in range(len(path), 0, -1)]
        place = next((self._places[one] for one in tried if one in self._places), ())
        return self.source.document.problem(
            place, f"makes a {self.kind} that cannot be: {show_path(path)}: {said}"
        )


def comments(notes: list[str]) -> str:
    """Return the notes as comments, whatever the file had in them."""
    return "".join(f"# {_printable(note)}\n" for note in notes)


def _printable(note: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in note)


def joined(header: list[str], drafts: list[Draft]) -> str:
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
    return comments(header) + "---\n".join(made)
