"""Repositories of small models for the stand-in hub, and deployments that name them."""

import json

from schemas.deployment import HubReference, HubSource, ModelDeployment, ModelSource
from tests.support.hub import COMMIT, REPO
from tests.support.model_folders import safetensors
from tests.support.world import deployment

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
FOLDER = f"mlx-community--Tiny-4bit@{COMMIT[:12]}"


def servable_files() -> dict[str, bytes]:
    """Return the files of a repository that can be inspected."""
    return {
        "README.md": b"# Tiny\n",
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": safetensors(),
        "tokenizer.json": b"{}",
    }


def hub_deployment(
    endpoint: str, *, name: str = "qwen", revision: str = "main", source: HubSource = "huggingface"
) -> ModelDeployment:
    """Return a deployment of the stand-in's repository."""
    model_deployment = deployment(name=name)
    hub = HubReference(repo=REPO, source=source, revision=revision, endpoint=endpoint)
    spec = model_deployment.spec.model_copy(update={"model": ModelSource(hub=hub)})
    metadata = model_deployment.metadata.model_copy(update={"resource_version": ""})
    return model_deployment.model_copy(update={"spec": spec, "metadata": metadata})
