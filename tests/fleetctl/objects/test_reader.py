"""Plain trees equal the typed objects of every kind; invalid documents are errors with a reason."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetctl.objects import reader, selectors
from fleetctl.objects.selectors import DEPLOYMENT_OWNED_KINDS, tree_labels
from fleetctl.objects.table_context import TableContext
from fleetctl.output import columns
from fleetctl.output.printers import COLUMNS, TableOptions, rows
from machinery.clock import SystemClock
from manifests.trees import object_tree
from schemas import kinds, quantity
from schemas.kinds import KINDS, Kind
from schemas.meta import API_VERSION, ApiObject
from schemas.node import Node, NodeSpec, effective_labels
from schemas.replica import Replica
from store import codec, keys, object_trees
from store.errors import NewerDocumentError, UndecodableError
from store.memory import MemoryTransport
from store.port import Put
from store.reads import KeyValue
from tests.support.sampling import samples
from tests.support.schemas_strategies import objects

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
slowly = settings(max_examples=samples(6, quick=2))
MOMENT = TableContext(now=SystemClock().now())


def item(key: str, value: bytes, revision: int = 9) -> KeyValue:
    return KeyValue(key=key, value=value, create_revision=1, mod_revision=revision)


def tree_from_store(obj: ApiObject) -> object_trees.Tree:
    tree = object_trees.of_item(item("/k", codec.encode_spec(obj)), obj.kind)
    status = getattr(obj, "status", None)
    there = None if status is None else item("/s", codec.encode(status))
    return object_trees.with_status(tree, there, obj.kind)


@every_kind
@slowly
@given(data=st.data())
def test_a_tree_equals_the_typed_object_and_has_a_row(kind: Kind, data: st.DataObject) -> None:
    obj = data.draw(objects(kind.type))
    assert isinstance(obj, ApiObject)
    tree = tree_from_store(obj)
    typed = object_tree(codec.with_version(obj, 9))
    assert tree == typed
    assert list(tree["metadata"]) == list(typed["metadata"])  # type: ignore[arg-type]  # it is a mapping
    (row,) = rows([tree], MOMENT, TableOptions(is_wide=True, has_labels=True))
    assert len(row) == len(COLUMNS[kind.name]) + 1
    assert "<invalid>" not in row
    assert "None" not in row


@slowly
@given(data=st.data())
def test_trees_of_nodes_have_the_labels_of_placement(data: st.DataObject) -> None:
    node = data.draw(objects(Node))
    assert isinstance(node, Node)
    assert tree_labels(tree_from_store(node)) == effective_labels(node)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in DEPLOYMENT_OWNED_KINDS])
@slowly
@given(data=st.data())
def test_objects_of_a_deployment_have_derived_labels(kind: Kind, data: st.DataObject) -> None:
    obj = data.draw(objects(kind.type))
    assert isinstance(obj, ApiObject)
    labels = selectors.selectable_labels(tree_from_store(obj))
    assert labels == selectors.selectable_labels(obj)
    assert labels.keys() >= {"fleet/deployment", *obj.metadata.labels}


@slowly
@given(data=st.data())
def test_the_memory_column_is_the_memory_proof(data: st.DataObject) -> None:
    replica = data.draw(objects(Replica))
    assert isinstance(replica, Replica)
    (column,) = [column for column in COLUMNS["Replica"] if column.title == "MEMORY"]
    total = sum(rank.memory.total_bytes for rank in replica.spec.ranks)
    assert column.cell(tree_from_store(replica), MOMENT) == quantity.show(total)


def test_a_new_node_equals_its_type() -> None:
    assert object_trees.API_VERSION == API_VERSION
    spec = json.loads(NodeSpec().model_dump_json(by_alias=True))
    assert spec == object_trees.NEW_NODE


async def stored(*pairs: tuple[str, bytes]) -> MemoryTransport:
    transport = MemoryTransport(SystemClock())
    await transport.commit([], [Put(key=key, value=value) for key, value in pairs])
    return transport


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "is not an object"),
        (b"{}", r"has no metadata\.name"),
        (b'{"metadata": []}', r"has no metadata\.name"),
        (b'{"metadata": {"name": 1}}', r"has no metadata\.name"),
        (b'{"metadata": {"name": "a"}, "spec": 3}', "its spec is not an object"),
    ],
)
async def test_an_invalid_document_reports_its_key(value: bytes, reason: str) -> None:
    key = keys.spec_key("NodePool", "a")
    store = await stored((key, value))
    with pytest.raises(UndecodableError, match=rf"^{key} \(NodePool\): {reason}.*delete the key"):
        await object_trees.list_all(store, "NodePool")


async def test_a_newer_document_is_an_error() -> None:
    store = await stored((keys.spec_key("NodePool", "a"), b'{"storedVersion":7,"metadata":{}}'))
    with pytest.raises(NewerDocumentError, match="upgrade this process"):
        await object_trees.get(store, "NodePool", "a")


@pytest.mark.parametrize("spec", [{"replicas": []}, {"autoscaling": 3}, {"model": "x"}, {}])
@pytest.mark.parametrize(
    "status", [None, {"conditions": 3}, {"conditions": [1]}, {"desiredReplicas": {}}]
)
def test_an_invalid_document_does_not_hide_others(spec: dict[str, Any], status: Any) -> None:
    tree = {"kind": "ModelDeployment", "metadata": {"name": "odd"}, "spec": spec}
    found = rows(
        [tree if status is None else {**tree, "status": status}], MOMENT, TableOptions(is_wide=True)
    )
    assert found[0][0] == "odd"


async def test_events_are_sorted_by_exact_time() -> None:
    def event(name: str, time: str) -> tuple[str, bytes]:
        tree = {"metadata": {"name": name}, "spec": {"lastSeen": time}}
        return keys.event_key("reconciler", name), json.dumps(tree).encode()

    store = await stored(
        event("c", "2026-01-01T00:00:01.5Z"),
        event("b", "2026-01-01T00:00:01Z"),
        event("a", "2026-01-01T02:00:00+02:00"),
        event("d", "at noon"),
    )
    names = [object_trees.name_of(tree) for tree in await object_trees.list_all(store, "Event")]
    assert names == ["d", "a", "b", "c"]


async def test_api_keys_have_no_hash() -> None:
    value = b'{"name": "ci", "hash": "abc", "role": "admin", "created": "2000-01-01T00:00:00Z"}'
    store = await stored((f"{keys.API_KEY_PREFIX}ci", value))
    (key,) = await object_trees.list_all(store, "ApiKey")
    assert list(key) == ["apiVersion", "kind", "metadata", "spec"]
    assert key["spec"] == {"role": "admin"}
    assert "abc" not in str(key)


async def nodes(*pairs: tuple[str, bytes]) -> Sequence[object_trees.Tree]:
    """Return the nodes, after seeing that typed ones are the same."""
    store = await stored(*pairs)
    trees = await object_trees.list_all(store, "Node")
    kind = kinds.by_name("Node")
    assert kind is not None
    typed = await reader.read(store, kind, ())
    assert [obj.name for obj in typed] == [object_trees.name_of(tree) for tree in trees]
    return trees


STATUS = {
    "uid": "u", "hostname": "h", "address": "a", "agentVersion": "1", "os": "macOS", "osVersion": "15",
    "machine": "m", "chip": "Apple M4 Pro", "cpuCores": 1, "gpuCores": 1, "memoryBytes": 1,
    "allocatableBytes": 1,
}  # fmt: skip


async def test_the_lease_decides_whether_a_node_is_ready() -> None:
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "x",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    flaps = {"type": "Flapping", "status": "True", "reason": "Often"}
    found = await nodes(
        (keys.spec_key("Node", "b"), b'{"metadata": {"name": "b", "generation": 4}}'),
        (keys.status_key("Node", "b"), json.dumps(STATUS).encode()),
        (keys.node_life_key("b"), json.dumps({"conditions": [ready, flaps]}).encode()),
        (keys.node_lease_key("b"), b"{}"),
        (keys.status_key("Node", "a"), json.dumps(STATUS).encode()),
        (keys.spec_key("Node", "c"), b'{"metadata": {"name": "c"}}'),
    )
    assert [object_trees.name_of(node) for node in found] == ["a", "b", "c"]
    joined, led, silent = found
    assert object_trees.is_true(led, "Ready")
    assert object_trees.is_true(led, "Flapping")
    condition = object_trees.condition(led, "Ready")
    assert condition is not None
    assert condition["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    assert condition["observedGeneration"] == led["status"]["observedGeneration"] == 4
    assert not object_trees.is_true(joined, "Ready")
    assert joined["spec"] == object_trees.NEW_NODE
    assert object_trees.condition(silent, "Ready") is None


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "0s"), (59, "59s"), (119, "119s"), (120, "2m"), (7200, "2h"), (172800, "2d")],
)
def test_ages_are_written_as_in_kubectl(seconds: int, shown: str) -> None:
    assert columns.age(MOMENT.now - timedelta(seconds=seconds), MOMENT.now) == shown
