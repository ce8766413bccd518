"""Images of a deployment: defaults, limits, and what they exclude."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.deployment import ModelDeploymentSpec
from schemas.vision import Vision

SEES: dict[str, Any] = {"path": "m", "vision": {}}


def spec(**fields: Any) -> ModelDeploymentSpec:
    return ModelDeploymentSpec.model_validate_json(json.dumps(fields))


def test_an_empty_mapping_switches_images_on() -> None:
    assert spec(model=SEES).model.vision == Vision()
    assert spec(model={"path": "m"}).model.vision is None


@pytest.mark.parametrize(("fields", "words"), [
    ({"model": SEES | {"adapter": "a"}}, "model.vision and model.adapter"),
    ({"model": SEES | {"draft": {"path": "d"}}}, "model.vision and model.draft"),
    ({"model": SEES | {"ngram": {}}}, "model.vision and model.ngram"),
    ({"model": SEES | {"mtp": {}}}, "model.vision and model.mtp"),
    ({"model": SEES, "kvCache": {"bits": 8}}, "model.vision and kvCache.bits"),
    ({"model": SEES, "kvCache": {"window": 64}}, "model.vision and kvCache.window"),
    ({"model": SEES, "sharding": "Auto"}, "model.vision, which engines of several ranks"),
    ({"model": {"path": "m", "vision": {"maxImages": 0}}}, "maxImages"),
    ({"model": {"path": "m", "vision": {"maxPixels": 2**30}}}, "maxPixels"),
    ({"model": {"path": "m", "vision": {"hosts": ["x"]}}}, "hosts"),
])  # fmt: skip
def test_what_does_not_go_with_images_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        spec(**fields)
    assert words in str(refused.value)
