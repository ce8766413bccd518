"""Manifests for tests, from text."""

from io import BytesIO

from manifests import load
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject

HEAD = "apiVersion: fleet/v1alpha1\n"


def read(text: str) -> list[LoadedObject]:
    return load.load_objects(["-"], stdin=BytesIO(text.encode()))


def complaints(text: str | bytes) -> list[str]:
    """Return the problems of the text, without the name of the source."""
    raw = text.encode() if isinstance(text, str) else text
    try:
        load.load_objects(["-"], stdin=BytesIO(raw))
    except ManifestErrors as errors:
        return [str(problem).removeprefix("standard input") for problem in errors.problems]
    return []


def deployment(name: str = "qwen", *, replicas: int = 1, rest: str = "", meta: str = "") -> str:
    return (
        f"---\n{HEAD}kind: ModelDeployment\nmetadata:\n  name: {name}\n{meta}"
        f"spec:\n  model:\n    path: models/qwen\n  replicas: {replicas}\n{rest}"
    )


def pool(name: str = "studio") -> str:
    return f"---\n{HEAD}kind: NodePool\nmetadata:\n  name: {name}\nspec:\n  nodes: [mac-1]\n"


def route(
    name: str = "chat", *, model: str = "chat", backends: str = "[{deployment: qwen}]"
) -> str:
    return (
        f"---\n{HEAD}kind: ModelRoute\nmetadata:\n  name: {name}\n"
        f"spec:\n  model: {model}\n  backends: {backends}\n"
    )


def in_pool(name: str = "studio") -> str:
    return f"  placement:\n    pools: [{name}]\n"
