"""Adapters that requests choose: their names, and what a deployment refuses."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.deployment import (
    HubReference,
    ModelDeployment,
    ModelDeploymentSpec,
    ModelSource,
    adapter_names,
    served_names,
)
from schemas.meta import ObjectMeta

ADAPTERS = [{"name": "law", "path": "adapters/law"}, {"name": "poems", "path": "/p"}]


def source(**fields: Any) -> ModelSource:
    return ModelSource.model_validate_json(json.dumps(fields))


def test_each_name_of_the_model_has_each_adapter() -> None:
    model = source(path="m", adapters=ADAPTERS)
    spec = ModelDeploymentSpec(model=model, served_names=("fast",))
    model_deployment = ModelDeployment(metadata=ObjectMeta(name="qwen"), spec=spec)
    assert served_names(model_deployment) == (
        *("qwen", "fast"),
        *("qwen:law", "qwen:poems", "fast:law", "fast:poems"),
    )
    assert model.adapter_paths == ("adapters/law", "/p")


def test_a_hubs_repository_has_them_too() -> None:
    model = source(hub={"repo": "org/m"}, adapters=ADAPTERS[:1])
    assert isinstance(model.hub, HubReference)
    assert list(adapter_names(("qwen", "org/m"), model)) == ["qwen:law", "org/m:law"]


@pytest.mark.parametrize(("model", "message"), [
    ({"adapter": "a", "adapters": ADAPTERS}, "which all requests use, and adapters"),
    ({"adapters": ADAPTERS[:1] * 2}, "has two adapters with the name law"),
    ({"adapters": [{"name": "latest", "path": "a"}]}, "is Ollama's word for the model itself"),
    ({"adapters": [{"name": "a:b", "path": "a"}]}, "adapters.0.name"),
    ({"adapters": [{"name": "a", "path": "../a"}]}, "adapters.0.path"),
    ({"adapters": [{"name": "a", "path": "m"}]}, "adapter is the model's own folder"),
    ({"adapters": [{"name": f"a{at}", "path": "a"} for at in range(65)]}, "at most 64 items"),
])  # fmt: skip
def test_wrong_adapters_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        source(**{"path": "m"} | model)
    assert message in str(refused.value)


def test_groups_take_none() -> None:
    model = source(path="m", adapters=ADAPTERS)
    with pytest.raises(ValidationError, match=r"model\.adapters, which engines of several ranks"):
        ModelDeploymentSpec(model=model, sharding="Auto")
