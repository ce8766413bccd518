"""A store of Ollama, as its MLX engine's documentation describes it: one safetensors blob for each tensor."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TENSOR = "application/vnd.ollama.image.tensor"
JSON = "application/vnd.ollama.image.json"
GGUF = "application/vnd.ollama.image.model"


def add_blob(store: Path, kind: str, name: str, content: bytes) -> dict[str, Any]:
    """Write a blob; return its layer."""
    digest = hashlib.sha256(content).hexdigest()
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    (store / "blobs" / f"sha256-{digest}").write_bytes(content)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content), "name": name}


def add_manifest(store: Path, name: str, layers: list[dict[str, Any]]) -> Path:
    """Write the manifest of NAMESPACE/MODEL/TAG; return its file."""
    path = store / "manifests/registry.ollama.ai" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    config = add_blob(store, "application/vnd.docker.container.image.v1+json", "", b"{}")
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers}
    path.write_text(json.dumps(manifest))
    return path


def add_jsons(store: Path, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [add_blob(store, JSON, name, content) for name, content in files.items()]
