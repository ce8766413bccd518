"""The labels of trees that selectors match: what people gave, and what objects are anyway. Pure.

`-l` and `--field-selector`: which objects are meant, as kubectl's selectors say it. Pure.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fleetctl.cli.errors import FleetctlError
from manifests.trees import derived_node_labels
from store.object_trees import Tree

# Their labels say which deployment they are of.
DEPLOYMENT_OWNED_KINDS = ("Replica", "Endpoint", "Revision")


def tree_labels(tree: Tree) -> dict[str, str]:
    """Return the labels that selectors match: derived ones as well, as schemas.node.effective_labels has them for nodes."""
    own = tree.get("metadata", {}).get("labels") or {}
    kind, spec = tree.get("kind"), tree.get("spec") or {}
    if kind in DEPLOYMENT_OWNED_KINDS:
        return {**deployment_labels(spec.get("deployment"), spec.get("template")), **own}
    return {**derived_node_labels(tree), **own} if kind == "Node" else dict(own)


def with_selectable_labels(tree: Tree) -> Tree:
    """Return an object with all labels that selectors match, so that people see what they select by.

    Applied again, those that nobody gave are dropped (manifests/load.py).
    """
    labels = tree_labels(tree)
    if not labels:
        return tree
    metadata = tree["metadata"]
    rest = {part: value for part, value in metadata.items() if part not in ("name", "labels")}
    return {**tree, "metadata": {"name": metadata["name"], "labels": labels, **rest}}


def deployment_labels(deployment: str | None, template: str | None) -> dict[str, str]:
    """Return the labels that say of which deployment, and of which version of it, something is."""
    derived = {"fleet/deployment": deployment, "fleet/template": template}
    return {label: value for label, value in derived.items() if value}


if TYPE_CHECKING:  # who has typed objects has imported it
    from schemas.meta import ApiObject

Obj = TypeVar("Obj", bound="ApiObject | Tree")

_LABEL_PATTERN = re.compile(
    r"(?P<no>!?)\s*(?P<key>[A-Za-z0-9._/-]+)"
    r"(\s*(?P<op>==?|!=)\s*(?P<value>[^=!()]*)|\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?"
)
_SEPARATOR = re.compile(r",(?![^(]*\))")
_FIELD_PATTERN = re.compile(
    r"(?P<path>(metadata|spec|status)(\.[A-Za-z0-9_-]+)+)\s*(?P<op>==?|!=)(?P<value>.*)"
)


class LabelRequirement(NamedTuple):
    """One part of a selector of labels; without values it is about the label being there."""

    key: str
    values: tuple[str, ...] | None
    is_negated: bool

    def holds(self, labels: dict[str, str]) -> bool:
        if self.values is None:
            there = self.key in labels
        else:
            there = self.key in labels and labels[self.key] in self.values
        return there is not self.is_negated


class FieldRequirement(NamedTuple):
    """One part of a selector of fields; a field that is not there is empty."""

    path: tuple[str, ...]
    value: str
    is_negated: bool

    def holds(self, tree: Tree) -> bool:
        """Return whether an object is of it.

        Raises:
            FleetctlError: the field holds several values.

        """
        return (self._spelled(tree) == self.value) is not self.is_negated

    def is_there(self, tree: Tree) -> bool:
        """Return whether an object has the field."""
        return self._found(tree) is not None

    def _found(self, tree: Any) -> Any:
        for name in self.path:
            tree = tree.get(name) if isinstance(tree, dict) else None
        return tree

    def _spelled(self, tree: Any) -> str:
        tree = self._found(tree)
        if isinstance(tree, dict | list):
            raise FleetctlError(
                f"--field-selector: {'.'.join(self.path)} holds several values; name a field of one"
            )
        if isinstance(tree, bool):
            return str(tree).lower()
        return "" if tree is None else str(tree)


def parse_labels(text: str) -> tuple[LabelRequirement, ...]:
    """Return what `-l key=value,key!=value,key in (a,b),key,!key` asks for.

    Raises:
        FleetctlError: it is not of that form.

    """
    return tuple(
        _parse_requirement(part.strip(), text) for part in _SEPARATOR.split(text) if part.strip()
    )


def parse_fields(text: str) -> tuple[FieldRequirement, ...]:
    """Return what `--field-selector spec.node=mac-1,status.x!=y` asks for.

    Raises:
        FleetctlError: it is not of that form.

    """
    return tuple(_parse_field(part.strip()) for part in text.split(",") if part.strip())


def _parse_requirement(part: str, text: str) -> LabelRequirement:
    found = _LABEL_PATTERN.fullmatch(part)
    if found is None or (found["no"] and (found["op"] or found["set"])):
        raise FleetctlError(
            f"-l {text}: write key=value, key!=value, key in (a,b), key notin (a,b), key or !key, with "
            "commas between several"
        )
    values: tuple[str, ...] | None = None
    if found["op"]:
        values = (found["value"].strip(),)
    elif found["set"]:
        values = tuple(value.strip() for value in found["values"].split(","))
    negated = bool(found["no"]) or found["op"] == "!=" or found["set"] == "notin"
    return LabelRequirement(key=found["key"], values=values, is_negated=negated)


def _parse_field(part: str) -> FieldRequirement:
    found = _FIELD_PATTERN.fullmatch(part)
    if found is None:
        raise FleetctlError(
            f"--field-selector {part}: write FIELD=value or FIELD!=value, where FIELD begins with metadata., spec. or "
            "status., such as metadata.name=qwen or spec.node=mac-1"
        )
    return FieldRequirement(
        path=tuple(found["path"].split(".")),
        value=found["value"].strip(),
        is_negated=found["op"] == "!=",
    )


def select(found: Sequence[Obj], selector: Sequence[LabelRequirement]) -> list[Obj]:
    """Return the objects for which all of the selector holds."""
    if not selector:
        return list(found)
    of_each: Callable[[Obj], dict[str, str]] = selectable_labels
    return [obj for obj in found if all(part.holds(of_each(obj)) for part in selector)]


def selectable_labels(obj: "ApiObject | Tree") -> dict[str, str]:
    """Return the labels that selectors match, derived ones among them; see `fleetctl.objects.selectors`."""
    if isinstance(obj, dict):
        return tree_labels(obj)
    from schemas.node import Node, effective_labels  # noqa: PLC0415 - as above

    if isinstance(obj, Node):
        return effective_labels(obj)
    if obj.kind not in DEPLOYMENT_OWNED_KINDS:
        return obj.metadata.labels
    spec = getattr(obj, "spec")  # noqa: B009 - each kind narrows it, so mypy sees no such field in the base
    return {**deployment_labels(spec.deployment, spec.template), **obj.metadata.labels}
