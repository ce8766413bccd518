"""What Ollama's clients ask about models besides answers: which there are, and what they can. Pure.

A fleet knows no files, so sizes are 0 and families unknown; a digest is one of the name.
"""

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TypeAlias

from gateway.routing.table import Model

Json: TypeAlias = dict[str, Any]

# The version of Ollama whose API this is; clients refuse to talk to servers that are too old for them.
VERSION = "0.13.0"
# Nothing of this fleet is unloaded because nobody asked for it.
_FOR_EVER = "9999-12-31T23:59:59Z"
_DETAILS = {
    "parent_model": "",
    "format": "mlx",
    "family": "",
    "families": None,
    "parameter_size": "",
    "quantization_level": "",
}
_ARCHITECTURE = "mlx"


def tags(models: Iterable[Model]) -> Json:
    """Return the answer to `/api/tags`."""
    return {"models": [_entry(model) for model in models]}


def running(models: Iterable[Model], contexts: dict[str, int]) -> Json:
    """Return the answer to `/api/ps`: those that somebody serves, or did when the store was last heard; `contexts` in tokens, by name."""
    found = []
    for model in models:
        if not model.ready() and not model.kept():
            continue
        entry = {**_entry(model), "expires_at": _FOR_EVER, "size_vram": 0}
        del entry["modified_at"]
        found.append({**entry, "context_length": contexts.get(model.name, 0)})
    return {"models": found}


def shown(model: Model, context: int) -> Json:
    """Return the answer to `/api/show`; `context` in tokens, 0 if nobody knows."""
    info: Json = {"general.architecture": _ARCHITECTURE, "general.basename": model.name}
    if context:
        info[f"{_ARCHITECTURE}.context_length"] = context
    return {
        "modelfile": f"# Declared by a ModelDeployment or a ModelRoute.\nFROM {model.name}\n",
        "parameters": "",
        "template": "{{ .Prompt }}",
        "details": _DETAILS,
        "model_info": info,
        "capabilities": ["completion", "tools"],
        "modified_at": _time(model),
    }


def _entry(model: Model) -> Json:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _time(model),
        "size": 0,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": _DETAILS,
    }


def _time(model: Model) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat()
