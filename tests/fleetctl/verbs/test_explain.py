"""`fleetctl explain` of fields as YAML and JSON; every field has a type and a description."""

import pytest

from fleetctl.objects import kind_schema
from fleetctl.verbs import explain
from schemas import kinds
from schemas.kinds import Kind


def below(model: kind_schema.KindSchema, field: kind_schema.FieldSchema, path: str) -> list[str]:
    """Return the paths of all nested fields without a description."""
    silent = [] if field.description or field.name in _OBVIOUS else [path]
    for schema in model.fields(field.schema):
        silent += below(model, schema, f"{path}.{schema.name}")
    return silent


# Well-known fields of conditions and references.
_OBVIOUS = {"status", "reason", "kind", "name", "uid", "conditions", "metadata", "spec"}


@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: kind.name)
def test_every_field_has_a_type_and_most_a_description(kind: Kind) -> None:
    model = kind_schema.schema_of(kind.short)
    whole = kind_schema.find_field(model, ())
    assert explain.field_text(model, whole, (), is_recursive=True).count("<any>") == 0
    if kind.written_by_users:
        spec = kind_schema.find_field(model, ("spec",))
        assert below(model, spec, f"{kind.name}.spec") == []
