"""Label selectors (`-l`) as in kubectl, and the labels that they match. Pure."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fleetctl.cli.errors import FleetctlError
from manifests.trees import derived_node_labels
from store.object_trees import Tree

# Kinds with derived labels that name their deployment.
DEPLOYMENT_OWNED_KINDS = ("Replica", "Endpoint", "Revision")


def tree_labels(tree: Tree) -> dict[str, str]:
    """Return the labels that selectors match, with the derived ones (for nodes as schemas.node.effective_labels)."""
    own = tree.get("metadata", {}).get("labels") or {}
    kind, spec = tree.get("kind"), tree.get("spec") or {}
    if kind in DEPLOYMENT_OWNED_KINDS:
        return {**deployment_labels(spec.get("deployment"), spec.get("template")), **own}
    return {**derived_node_labels(tree), **own} if kind == "Node" else dict(own)


def with_selectable_labels(tree: Tree) -> Tree:
    """Return an object with all labels that selectors match, so that users see what they can select by.

    When such an object is applied again, manifests/load.py drops the derived labels.
    """
    labels = tree_labels(tree)
    if not labels:
        return tree
    metadata = tree["metadata"]
    rest = {part: value for part, value in metadata.items() if part not in ("name", "labels")}
    return {**tree, "metadata": {"name": metadata["name"], "labels": labels, **rest}}


def deployment_labels(deployment: str | None, template: str | None) -> dict[str, str]:
    """Return the labels that name the deployment, and its version, that an object belongs to."""
    derived = {"fleet/deployment": deployment, "fleet/template": template}
    return {label: value for label, value in derived.items() if value}


if TYPE_CHECKING:  # callers with typed objects have imported it
    from schemas.meta import ApiObject

Obj = TypeVar("Obj", bound="ApiObject | Tree")

_LABEL_PATTERN = re.compile(
    r"(?P<no>!?)\s*(?P<key>[A-Za-z0-9._/-]+)"
    r"(\s*(?P<op>==?|!=)\s*(?P<value>[^=!()]*)|\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?"
)
_SEPARATOR = re.compile(r",(?![^(]*\))")


class LabelRequirement(NamedTuple):
    """One part of a label selector; without values it asks whether the label exists."""

    key: str
    values: tuple[str, ...] | None
    is_negated: bool

    def holds(self, labels: dict[str, str]) -> bool:
        is_match = self.key in labels
        if self.values is not None:
            is_match = is_match and labels[self.key] in self.values
        return is_match is not self.is_negated


def parse_labels(text: str) -> tuple[LabelRequirement, ...]:
    """Return the requirements of `-l key=value,key!=value,key in (a,b),key,!key`.

    Raises:
        FleetctlError: the text is not of this form.

    """
    return tuple(
        _parse_requirement(part.strip(), text) for part in _SEPARATOR.split(text) if part.strip()
    )


def _parse_requirement(part: str, text: str) -> LabelRequirement:
    found = _LABEL_PATTERN.fullmatch(part)
    if found is None or (found["no"] and (found["op"] or found["set"])):
        raise FleetctlError(
            f"-l {text}: write key=value, key!=value, key in (a,b), key notin (a,b), key or !key, separated "
            "by commas"
        )
    values: tuple[str, ...] | None = None
    if found["op"]:
        values = (found["value"].strip(),)
    elif found["set"]:
        values = tuple(value.strip() for value in found["values"].split(","))
    negated = bool(found["no"]) or found["op"] == "!=" or found["set"] == "notin"
    return LabelRequirement(key=found["key"], values=values, is_negated=negated)


def select(found: Sequence[Obj], selector: Sequence[LabelRequirement]) -> list[Obj]:
    """Return the objects that match all requirements."""
    if not selector:
        return list(found)
    of_each: Callable[[Obj], dict[str, str]] = selectable_labels
    return [obj for obj in found if all(part.holds(of_each(obj)) for part in selector)]


def selectable_labels(obj: "ApiObject | Tree") -> dict[str, str]:
    """Return the labels that selectors match, with the derived ones. Pure."""
    if isinstance(obj, dict):
        return tree_labels(obj)
    from schemas.node import Node, effective_labels  # noqa: PLC0415 - as above

    if isinstance(obj, Node):
        return effective_labels(obj)
    if obj.kind not in DEPLOYMENT_OWNED_KINDS:
        return obj.metadata.labels
    spec = getattr(obj, "spec")  # noqa: B009 - each kind narrows it, so mypy sees no such field in the base
    return {**deployment_labels(spec.deployment, spec.template), **obj.metadata.labels}
