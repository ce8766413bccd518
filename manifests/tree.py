"""Plain values as manifests hold them, and the paths to them. Pure; knows neither YAML nor etcd."""

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


def tree_of(obj: "ApiObject") -> dict[str, Tree]:
    """Return the whole object for `get -o yaml`, without empty metadata."""
    tree: dict[str, Tree] = json.loads(obj.model_dump_json(by_alias=True, exclude_none=True))
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    tree["metadata"] = {key: value for key, value in metadata.items() if value or key == "name"}
    return tree


def declared(obj: "ApiObject") -> dict[str, Tree]:
    """Return what a user declares of the object: all but status and what the fleet keeps."""
    tree = tree_of(obj)
    tree.pop("status", None)
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    theirs = ("name", "labels", "annotations")
    tree["metadata"] = {key: metadata[key] for key in theirs if key in metadata}
    return tree
