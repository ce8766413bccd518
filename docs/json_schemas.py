"""JSON Schemas of the kinds, for editors that complete and check YAML. Pure."""

from typing import Any

from schemas.kinds import KINDS, Kind
from schemas.meta import API_VERSION, FLEET_OWNED


def json_schema(kind: Kind) -> dict[str, Any]:
    """Return the schema of a kind's manifests: the fields that users may write, without those that the fleet writes."""
    tree = kind.type.model_json_schema(by_alias=True, mode="validation")
    tree["properties"].pop("status", None)
    tree["required"] = ["apiVersion", "kind", "metadata", "spec"]
    metadata = tree["$defs"]["ObjectMeta"]["properties"]
    for name in FLEET_OWNED:
        metadata.pop(_camel(name))
    _drop_unused(tree)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{kind.name} ({API_VERSION})",
        **{key: value for key, value in tree.items() if key != "title"},
    }


def user_kinds() -> list[Kind]:
    """Return the kinds that users write."""
    return [kind for kind in KINDS if kind.written_by_users]


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _drop_unused(tree: dict[str, Any]) -> None:
    """Drop definitions without references, until none is left."""
    while True:
        text = str(tree)
        unused = [name for name in tree["$defs"] if f"#/$defs/{name}'" not in text]
        if not unused:
            return
        for name in unused:
            del tree["$defs"][name]
