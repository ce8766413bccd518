"""Descriptions in JSON Schemas come from the docstrings of fields."""

from schemas.deployment import ModelDeployment
from schemas.meta import ApiModel


class _Base(ApiModel):
    size: int
    """Bytes
    on disk."""
    name: str
    """The name."""


class _Narrowed(_Base):
    name: str = "fixed"
    max_count: int = 3
    """The most."""


def test_docstrings_of_fields_are_their_descriptions() -> None:
    properties = _Narrowed.model_json_schema()["properties"]
    texts = {name: field.get("description") for name, field in properties.items()}
    assert texts == {"size": "Bytes\non disk.", "name": None, "maxCount": "The most."}


def test_types_within_types_have_them_too() -> None:
    definitions = ModelDeployment.model_json_schema()["$defs"]
    assert (
        definitions["Autoscaling"]["properties"]["maxReplicas"]["description"] == "Most replicas."
    )
