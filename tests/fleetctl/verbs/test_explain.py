"""`fleetctl explain` of fields, and `fleetctl api-resources`."""

import json

import pytest
from ruamel.yaml import YAML

from fleetctl.objects import kind_schema
from fleetctl.verbs import explain
from schemas import kinds
from schemas.kinds import Kind
from tests.support.fleet import fleetctl


async def test_a_field_is_printed_as_in_kubectl() -> None:
    done = await fleetctl("explain", "md.spec.model.draft")
    assert done.code == 0, done.err
    assert done.out == (
        "KIND:       ModelDeployment\n"
        "VERSION:    fleet/v1alpha1\n"
        "\n"
        "FIELD: draft <DraftModel>\n"
        "\n"
        "DESCRIPTION:\n"
        "    A draft model for speculative decoding, which makes a single request faster.\n"
        "    Give one of `draft`, `ngram` and `mtp`.\n"
        "\n"
        "FIELDS:\n"
        "  path\t<string> -required-\n"
        "    limits: matches ^[^\\x00-\\x1f]+$\n"
        "    Its folder on the node, as model.path. It must have the model's tokenizer.\n"
        "\n"
        "  tokens\t<integer>\n"
        "    limits: 1 to 16\n"
        "    default: 3\n"
        "    Tokens that it proposes at once, while a single request runs. The output\n"
        "    does not depend on it.\n"
    )


async def test_recursive() -> None:
    done = await fleetctl("explain", "shardgroup.spec.members", "--recursive")
    assert done.out.startswith("KIND:       ShardGroup\n")
    assert "\n  node\t<string> -required-\n" in done.out
    done = await fleetctl("explain", "replica", "--recursive")
    assert (
        "\n  metadata\t<ObjectMeta> -required-\n    annotations\t<map[string]string>\n" in done.out
    )


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("md.spec.placment",), "ModelDeployment.spec has no field 'placment'; did you mean placement?"),
        (("md.spec.replicas.x",), "ModelDeployment.spec.replicas has no fields, so 'x' does not exist"),
        (("md.speck",), "ModelDeployment has no field 'speck'; did you mean spec?"),
        (("mdd",), "unknown kind 'mdd'"),
        (("md", "spec"), "write fields after a dot: md.spec; only `placement` takes a name"),
        (("placement", "x", "--recursive"), "--recursive applies to fields"),
        (("",), "the kind is empty; write KIND"),
    ],
)  # fmt: skip
async def test_errors_have_hints(words: tuple[str, ...], refusal: str) -> None:
    done = await fleetctl("explain", *words)
    assert done.code in (1, 2)
    assert refusal in done.err


async def test_yaml_and_json() -> None:
    found = json.loads((await fleetctl("explain", "md.spec.rollout", "-o", "json")).out)
    assert found["type"] == "Rollout"
    assert found["fields"]["strategy"]["default"] == "RollingUpdate"
    assert "RollingUpdate" in found["fields"]["strategy"]["enum"]
    told = (await fleetctl("explain", "md.spec.rollout", "-o", "yaml")).out
    assert YAML(typ="safe", pure=True).load(told) == found


def below(model: kind_schema.KindSchema, field: kind_schema.FieldSchema, path: str) -> list[str]:
    """Return the paths of all nested fields without a description."""
    silent = [] if field.description or field.name in _OBVIOUS else [path]
    for one in model.fields(field.schema):
        silent += below(model, one, f"{path}.{one.name}")
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


async def test_api_resources() -> None:
    done = await fleetctl("api-resources")
    assert done.out.splitlines()[:3] == [
        "NAME               SHORTNAMES   APIVERSION       KIND",
        "apikeys            ak                            ApiKey",
        "endpoints          ep           fleet/v1alpha1   Endpoint",
    ]
    names = (await fleetctl("api-resources", "-o", "name")).out.split()
    assert set(names) == {kind.plural for kind in kinds.KINDS} | {"apikeys"}
    wide = (await fleetctl("api-resources", "-o", "wide", "--no-headers")).out
    assert "Replica           get,list,watch,delete\n" in wide
    assert "Endpoint          get,list,watch\n" in wide
