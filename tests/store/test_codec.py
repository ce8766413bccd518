"""Tests of `store.codec`: objects to bytes and back, separate statuses, versions, unreadable documents."""

import pytest

from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import ObjectMeta
from schemas.pools import NodePoolStatus
from schemas.replica import Endpoint, EndpointSpec
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import KeyValue, Put
from tests.support.world import deployment


def item(key: str, value: bytes, revision: int = 9) -> KeyValue:
    return KeyValue(key=key, value=value, create_revision=1, mod_revision=revision)


STATUS = ModelDeploymentStatus(observed_generation=1, replicas=2)


def test_a_spec_is_read_back_with_the_version_of_its_key() -> None:
    obj = deployment().model_copy(update={"status": STATUS})
    raw = codec.encode_spec(obj)
    assert b"status" not in raw
    assert b'"resourceVersion":"7"' not in raw
    model_deployment = codec.decode_object(ModelDeployment, item("/k", raw))
    assert model_deployment.metadata.resource_version == "9"
    assert model_deployment == deployment().model_copy(
        update={"metadata": obj.metadata.model_copy(update={"resource_version": "9"})}
    )


@pytest.mark.parametrize(
    ("value", "where"),
    [
        pytest.param(b'{"metadata":{"name":"a"}}', "spec", id="missing"),
        pytest.param(
            b'{"metadata":{"name":"a"},"spec":{"model":{"path":"p"},"replicas":"2"}}',
            "spec.replicas",
            id="type",
        ),
        pytest.param(
            b'{"metadata":{"name":"a","colour":"red"},"spec":{"model":{"path":"p"}}}',
            "metadata.colour",
            id="newer",
        ),
    ],
)
def test_an_unreadable_document_is_reported_with_place_and_remedy(value: bytes, where: str) -> None:
    with pytest.raises(codec.UndecodableError, match=f"^/k: {where}: .*run the newer version"):
        codec.decode(ModelDeployment, item("/k", value))


@pytest.mark.parametrize("value", [b"", b"\xff"])
def test_bytes_that_are_no_document_are_reported(value: bytes) -> None:
    with pytest.raises(codec.UndecodableError, match=r"^/k: document: .*run the newer version"):
        codec.decode(NodePoolStatus, item("/k", value))


def test_a_status_joins_its_object() -> None:
    obj = deployment()
    assert codec.with_status(obj, None) is obj
    assert codec.with_status(obj, item("/s", codec.encode(STATUS))).status == STATUS
    endpoint = ENDPOINT
    assert codec.with_status(endpoint, item("/s", b"{}")) is endpoint


def test_a_write_is_guarded_by_the_version_read() -> None:
    obj = deployment()
    key = keys.spec_key("ModelDeployment", "qwen")
    assert (codec.unchanged_guard(obj).key, codec.unchanged_guard(obj).mod_revision) == (key, 7)
    fresh = obj.model_copy(update={"metadata": ObjectMeta(name="qwen")})
    assert codec.unchanged_guard(fresh).mod_revision == 0
    assert codec.put_spec(obj) == Put(key=key, value=codec.encode_spec(obj))


ENDPOINT = Endpoint(
    metadata=ObjectMeta(name="qwen-0"),
    spec=EndpointSpec(
        deployment="qwen", replica_uid="u", node="a", url="http://h:1", served_names=("qwen",)
    ),
)


async def test_objects_are_read_with_their_statuses() -> None:
    store = MemoryTransport(SystemClock())
    for name in ("b", "a"):
        await store.commit([], [codec.put_spec(deployment(name=name))])
    status_key = keys.status_key("ModelDeployment", "a")
    await store.commit([], [Put(key=status_key, value=codec.encode(STATUS))])
    model_deployments = await objects.list_all(store, ModelDeployment)
    assert [(obj.name, obj.status) for obj in model_deployments] == [("a", STATUS), ("b", None)]
    assert await objects.get(store, ModelDeployment, "a") == model_deployments[0]
    assert await objects.get(store, ModelDeployment, "c") is None


def test_a_value_that_watches_share_is_decoded_once() -> None:
    item = KeyValue("/a", codec.encode_spec(deployment()), 1, 2)
    first = codec.decode_object(ModelDeployment, item)
    assert codec.decode_object(ModelDeployment, item) is first
    again = codec.decode_object(ModelDeployment, item._replace(mod_revision=3))
    assert (first.metadata.resource_version, again.metadata.resource_version) == ("2", "3")
    assert (again.spec, again.name) == (first.spec, first.name)
