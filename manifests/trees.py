"""Plain values as manifests hold them, and the paths to them. Pure; knows neither YAML nor etcd.

The labels that nobody gave a node: what it is called, what it is, what its agent was told. Pure; imports no models.
"""

import json
import re
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # `fleetctl get` prints trees, and imports no models
    from schemas.meta import ApiObject, ObjectKey

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"
Path: TypeAlias = tuple[str | int, ...]


def show_path(path: Path) -> str:
    """Return the path as people write it: `spec.placement.pools[0]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z0-9_-]+", part):
            text += f".{part}" if text else part
        else:  # label keys have dots and slashes of their own
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


def key_of(obj: "ApiObject") -> "ObjectKey":
    from schemas.meta import ObjectKey  # noqa: PLC0415 - as above

    return ObjectKey(obj.kind, obj.name)


def spec_of(obj: "ApiObject") -> object:
    """Return the object's spec; each kind narrows it, so the base class does not name it."""
    return getattr(obj, "spec", None)


def object_tree(obj: "ApiObject") -> dict[str, Tree]:
    """Return the whole object for `get -o yaml`, without empty metadata."""
    tree: dict[str, Tree] = json.loads(obj.model_dump_json(by_alias=True, exclude_none=True))
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    tree["metadata"] = {key: value for key, value in metadata.items() if value or key == "name"}
    return tree


def declared_tree(obj: "ApiObject") -> dict[str, Tree]:
    """Return what a user declares of the object: all but status and what the fleet keeps."""
    tree = object_tree(obj)
    tree.pop("status", None)
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    theirs = ("name", "labels", "annotations")
    tree["metadata"] = {key: metadata[key] for key in theirs if key in metadata}
    return tree


def derived_node_labels(node: dict[str, Tree]) -> dict[str, str]:
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
