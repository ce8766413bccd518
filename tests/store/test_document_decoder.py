"""Tests of `store.document_decoder`: it makes of every document what pydantic makes of it, and shares equal parts."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas import kinds
from schemas.deployment import ModelDeployment
from schemas.meta import ApiModel, ObjectMeta
from schemas.node import NodeLease
from schemas.replica import RankStatus
from store import codec
from store.document_decoder import DocumentDecoder
from tests.support.sampling import samples
from tests.support.schemas_strategies import objects
from tests.support.world import deployment

STATUSES = [found for kind in kinds.KINDS if (found := codec.status_type(kind.type)) is not None]
MODELS: list[type[ApiModel]] = [
    *(kind.type for kind in kinds.KINDS),
    *STATUSES,
    NodeLease,
    RankStatus,
]
DECODERS = {model: DocumentDecoder(model, first=0) for model in MODELS}


def outcome(model: type[ApiModel], raw: bytes) -> tuple[ApiModel | str, ApiModel | str]:
    """Return what the decoder and pydantic make of a document, or their errors."""
    results: list[ApiModel | str] = []
    for decode in (DECODERS[model].decode, model.model_validate_json):
        try:
            results.append(decode(raw))
        except ValidationError as error:
            results.append(str(error))
    return results[0], results[1]


def same(ours: object, pydantics: object) -> bool:
    """Compare as deeply as anything in the project could tell two models apart."""
    if isinstance(ours, ApiModel) and isinstance(pydantics, ApiModel):
        return (
            type(ours) is type(pydantics)
            and list(vars(ours)) == list(vars(pydantics))
            and ours.model_fields_set == pydantics.model_fields_set
            and all(same(vars(ours)[name], vars(pydantics)[name]) for name in vars(ours))
        )
    if isinstance(ours, tuple) and isinstance(pydantics, tuple):
        return len(ours) == len(pydantics) and all(map(same, ours, pydantics))
    return type(ours) is type(pydantics) and ours == pydantics


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=samples(100, quick=2))
@given(data=st.data())
def test_it_makes_what_pydantic_makes(model: type[ApiModel], data: st.DataObject) -> None:
    obj = data.draw(objects(model))
    for raw in (
        obj.model_dump_json(by_alias=True, exclude_none=True),
        obj.model_dump_json(by_alias=True),
        obj.model_dump_json(by_alias=True, exclude_defaults=True),
        obj.model_dump_json(),
    ):
        for _ in range(2):  # the second one has parts that are known
            ours, pydantics = outcome(model, raw.encode())
            assert same(ours, pydantics)


SPOILED = [None, 1, 1.0, -1, 10**30, True, "", "x\n", "name\n", "\ud83d", [], ["a"], {}, {"a": 1}]


@given(data=st.data())
def test_it_refuses_what_pydantic_refuses(data: st.DataObject) -> None:
    """Documents that another version or a person wrote: a member that is wrong, unknown, missing or there twice."""
    model = data.draw(st.sampled_from(MODELS))
    tree = json.loads(data.draw(objects(model)).model_dump_json(by_alias=True, exclude_none=True))
    part = data.draw(
        st.sampled_from([tree, *(tree[name] for name in tree if isinstance(tree[name], dict))])
    )
    name = data.draw(st.sampled_from([*part, "colour"]))
    if data.draw(st.booleans()):
        part[name] = data.draw(st.sampled_from(SPOILED))
    else:
        part.pop(name, None)
    raw = json.dumps(tree).encode()
    if data.draw(st.booleans()):
        raw = raw[:-1] + raw.replace(b"{", b",", 1)[: len(raw)]
    ours, pydantics = outcome(model, raw)
    assert same(ours, pydantics)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b'{"kind":"\xff"}'])
def test_it_refuses_bytes_that_are_no_document(raw: bytes) -> None:
    ours, pydantics = outcome(ModelDeployment, raw)
    assert isinstance(ours, str)
    assert ours == pydantics


def test_a_check_of_the_whole_model_is_made() -> None:
    tree = json.loads(deployment().model_dump_json(by_alias=True, exclude_none=True))
    tree["spec"]["kvCache"] = {"window": 100_000}
    with pytest.raises(ValidationError, match="no request is longer than contextLength"):
        DECODERS[ModelDeployment].decode(json.dumps(tree).encode())


def test_equal_parts_are_one_object() -> None:
    decoder = DocumentDecoder(ModelDeployment, first=0)
    raw = deployment().model_dump_json(by_alias=True, exclude_none=True).encode()
    decoder.decode(raw)
    model_deployment, other = decoder.decode(raw), decoder.decode(raw)
    assert model_deployment.spec.routing is other.spec.routing
    assert model_deployment.metadata is not other.metadata  # the reader writes its version into it


def test_parts_of_a_field_are_remembered_up_to_a_number() -> None:
    decoder = DocumentDecoder(ObjectMeta, first=0)
    for number in range(3_000):
        assert decoder.decode(f'{{"name":"a-{number}"}}'.encode()).name == f"a-{number}"


def test_a_few_documents_are_left_to_pydantic() -> None:
    decoder = DocumentDecoder(ModelDeployment, first=2)
    raw = deployment().model_dump_json(by_alias=True, exclude_none=True).encode()
    deployments = [decoder.decode(raw) for _ in range(6)]
    assert deployments[1].spec.routing is not deployments[2].spec.routing
    assert deployments[4].spec.routing is deployments[5].spec.routing
