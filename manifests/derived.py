"""The labels that nobody gave a node: what it is called, what it is, what its agent was told. Pure; imports no models."""

from manifests.tree import Tree


def node_labels(node: dict[str, Tree]) -> dict[str, str]:
    """Return what a node's labels say before its owner says anything; as schemas.node.effective_labels has it."""
    metadata, status = node.get("metadata"), node.get("status")
    assert isinstance(metadata, dict)
    found = {"fleet/node": str(metadata["name"])}
    if not isinstance(status, dict) or not status:
        return found
    found["fleet/os"] = str(status.get("os", ""))
    found["fleet/chip"] = str(status.get("chip", "")).replace(" ", "-")
    given = status.get("labels")
    more = given if isinstance(given, dict) else {}
    return {**found, **{key: str(value) for key, value in more.items()}}
