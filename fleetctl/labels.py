"""The labels of trees that selectors match: what people gave, and what objects are anyway. Pure."""

from fleetctl.documents import Tree
from manifests.derived import node_labels

# Their labels say which deployment they are of.
MADE_OF_DEPLOYMENTS = ("Replica", "Endpoint", "Revision")


def labels_of(tree: Tree) -> dict[str, str]:
    """Return the labels that selectors match: derived ones as well, as schemas.node.effective_labels has them for nodes."""
    own = tree.get("metadata", {}).get("labels") or {}
    kind, spec = tree.get("kind"), tree.get("spec") or {}
    if kind in MADE_OF_DEPLOYMENTS:
        return {**of_deployment(spec.get("deployment"), spec.get("template")), **own}
    return {**node_labels(tree), **own} if kind == "Node" else dict(own)


def labelled(tree: Tree) -> Tree:
    """Return an object with all labels that selectors match, so that people see what they select by.

    Applied again, those that nobody gave are dropped (manifests/load.py).
    """
    labels = labels_of(tree)
    if not labels:
        return tree
    metadata = tree["metadata"]
    rest = {part: value for part, value in metadata.items() if part not in ("name", "labels")}
    return {**tree, "metadata": {"name": metadata["name"], "labels": labels, **rest}}


def of_deployment(deployment: str | None, template: str | None) -> dict[str, str]:
    """Return the labels that say of which deployment, and of which version of it, something is."""
    derived = {"fleet/deployment": deployment, "fleet/template": template}
    return {label: value for label, value in derived.items() if value}
