"""Stored versions: old documents are read, newer ones are refused, and no shape changes unnoticed."""

import hashlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import kinds
from schemas.fabrictest import FabricRank
from schemas.meta import ApiModel, ObjectMeta
from schemas.node import NodeLease, NodeLifeStatus
from schemas.records import ApiKey, GatewayLease
from schemas.replica import RankStatus
from store import codec, versions
from store.port import KeyValue
from store.versions import HISTORIES, Tree, VersionError, VersionHistory
from tests.support.fleets import deployment


def item(value: bytes, key: str = "/k") -> KeyValue:
    return KeyValue(key=key, value=value, create_revision=1, mod_revision=9)


# A kind of the tests' own that had three shapes: a port, then a url, then several of them.


class Thing1(ApiModel):
    metadata: ObjectMeta
    host: str
    port: int = 4100


class Thing2(ApiModel):
    metadata: ObjectMeta
    url: str


class Thing(ApiModel):
    metadata: ObjectMeta
    urls: tuple[str, ...]
    note: str = ""


def to_url(tree: Tree) -> Tree:
    rest = {name: value for name, value in tree.items() if name not in ("host", "port")}
    return {**rest, "url": f"http://{tree['host']}:{tree['port']}"}


def to_urls(tree: Tree) -> Tree:
    rest = {name: value for name, value in tree.items() if name != "url"}
    return {**rest, "urls": [tree["url"]]}


THING = {"Thing": VersionHistory(current=3, steps={1: to_url, 2: to_urls})}
META = ObjectMeta(name="a", labels={"storedVersion": "7"})
NOW = Thing(metadata=META, urls=("http://h:1",))


def written(model: ApiModel, version: int | None) -> bytes:
    """Return what a process of that time wrote; before the first stamp it was the bare document."""
    raw = model.model_dump_json(by_alias=True, exclude_none=True).encode()
    return raw if version is None else versions.stamp_version(raw, version)


def test_a_document_begins_with_its_version() -> None:
    assert codec.encode(NOW, THING).startswith(b'{"storedVersion":3,"metadata":')
    assert codec.encode(NOW).startswith(b'{"storedVersion":1,"metadata":')
    assert codec.encode_spec(deployment()).startswith(b'{"storedVersion":1,"apiVersion":')
    assert versions.stamp_version(b"{}", 2) == b'{"storedVersion":2}'


@given(
    host=st.text(max_size=20),
    port=st.integers(0, 65535),
    labels=st.dictionaries(st.sampled_from(["storedVersion", "a"]), st.just("1")),
    is_stamped=st.booleans(),
)
def test_what_was_written_then_is_read_as_what_is_meant_now(
    host: str, port: int, labels: dict[str, str], *, is_stamped: bool
) -> None:
    meta = ObjectMeta(name="a", labels=labels)
    first = Thing1(metadata=meta, host=host, port=port)
    second = Thing2(metadata=meta, url=f"http://{host}:{port}")
    third = Thing(metadata=meta, urls=(second.url,))
    for raw in (
        written(first, 1 if is_stamped else None),
        written(second, 2),
        codec.encode(third, THING),
    ):
        assert codec.decode(Thing, item(raw), THING) == third


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'{"storedVersion":2,"metadata":{"name":"a"},"url":"u"}', id="ours"),
        pytest.param(
            b'{\n "storedVersion" : 2 ,\n "metadata": {"name": "a"}, "url": "u"}', id="spaces"
        ),
        pytest.param(b'{"url":"u","storedVersion":2,"metadata":{"name":"a"}}', id="last"),
    ],
)
def test_a_person_may_have_edited_it(raw: bytes) -> None:
    found = codec.decode(Thing, item(raw), THING)
    assert found == Thing(metadata=ObjectMeta(name="a"), urls=("u",))


@pytest.mark.parametrize(
    "raw",
    [
        codec.encode(NOW, {"Thing": VersionHistory(current=4, steps={})}),
        b'{"a":1,"storedVersion":9}',
    ],
)
def test_a_newer_document_is_refused_in_words(raw: bytes) -> None:
    with pytest.raises(
        codec.NewerDocumentError,
        match=r"^/fleet/a \(Thing\): its stored version is \d, this process reads 1 to 3\. "
        r"A newer mlx-fleet wrote it: upgrade this process",
    ):
        codec.decode(Thing, item(raw, "/fleet/a"), THING)


def test_one_that_is_too_old_says_what_to_do() -> None:
    histories = {"Thing": VersionHistory(current=3, steps={2: to_urls})}
    with pytest.raises(codec.UndecodableError, match=r"stored version is 1.*a release in between"):
        codec.decode(Thing, item(written(META, 1)), histories)
    second = written(Thing2(metadata=META, url="http://h:1"), 2)
    assert codec.decode(Thing, item(second), histories) == NOW


@pytest.mark.parametrize(
    "raw",
    [
        b'{"storedVersion":1,"metadata":{"name":"a"}}',  # no host
        b'{"storedVersion":1,"metadata":',
        b'{"storedVersion":1,[]}',
        b"[]",
        b'["storedVersion"]',
        b'{"a":"b","storedVersion":"x"}',
        b'{"storedVersion":true,"a":1}',
        b'{"storedVersion":-1}',
        b'{"storedVersion":3}',
        b"",
    ],
)
def test_nonsense_is_told_and_not_taken_for_newer(raw: bytes) -> None:
    with pytest.raises(codec.UndecodableError, match="/k") as caught:
        codec.decode(Thing, item(raw), THING)
    assert not isinstance(caught.value, codec.NewerDocumentError)


@pytest.mark.parametrize("steps", [{2: to_urls}, {0: to_url}, {1: to_url, 2: to_urls}])
def test_a_history_has_every_step_up_to_now(steps: dict[int, versions.Migration]) -> None:
    with pytest.raises(ValueError, match="a step from each version"):
        VersionHistory(current=2, steps=steps)


def test_only_what_is_newer_must_not_be_replaced() -> None:
    lease = NodeLease(uid="u", session="s")
    for value in (codec.encode(lease), b"by hand", b"{}", written(lease, None)):
        codec.refuse_newer(NodeLease, item(value))
    codec.refuse_newer(NodeLease, None)
    with pytest.raises(codec.NewerDocumentError):
        codec.refuse_newer(NodeLease, item(written(lease, 2)))


def test_versions_are_only_refused_by_number() -> None:
    with pytest.raises(VersionError, match="upgrade"):
        versions.migrate(b'{"storedVersion":2}', VersionHistory())
    assert versions.migrate(b'{"storedVersion":1}', VersionHistory()) == b"{}"


# What the first fleets wrote, byte for byte: these must be readable for ever.
UNSTAMPED = (
    (
        "ModelDeployment",
        b'{"apiVersion":"fleet/v1alpha1","kind":"ModelDeployment","metadata":{"name":"qwen","labels":'
        b'{},"annotations":{},"uid":"u","generation":1,"resourceVersion":"","finalizers":[],'
        b'"ownerReferences":[]},"spec":{"model":{"path":"qwen"},"replicas":2}}',
    ),
    ("NodeLease", b'{"uid":"u","session":"0123/45"}'),
    ("RankStatus", b'{"replicaUid":"u","node":"a","restarts":0,"conditions":[]}'),
)


@pytest.mark.parametrize(("name", "raw"), UNSTAMPED)
def test_what_the_first_fleets_wrote_is_read(name: str, raw: bytes) -> None:
    codec.decode(stored()[name], item(raw))


def stored() -> dict[str, type[ApiModel]]:
    """Return every model that is a document of its own in the store."""
    found: list[type[ApiModel]] = [NodeLease, GatewayLease, NodeLifeStatus, RankStatus, ApiKey]
    found.append(FabricRank)
    for kind in kinds.KINDS:
        status = codec.status_type(kind.type)
        found += [kind.type] if status is None else [kind.type, status]
    return {model.__name__: model for model in found}


def shape(model: type[ApiModel]) -> str:
    """Return a digest of what documents of the model look like; wording does not count."""

    def bare(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {
                name: bare(value)
                for name, value in tree.items()
                if not (name in ("description", "title") and isinstance(value, str))
            }
        return [bare(value) for value in tree] if isinstance(tree, list) else tree

    schema = bare(model.model_json_schema())
    return hashlib.sha256(orjson.dumps(schema, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


# The shape of each document at its current version.
SHAPES: dict[str, tuple[int, str]] = {
    "GitSourceStatus": (1, "03b48fc7c01d"),
    "GitSource": (1, "51b11a4e6950"),
    "FabricTest": (1, "50dc4ee4428c"),
    "FabricRank": (1, "53025a00334d"),
    "ApiKey": (1, "931feb71a3a5"),
    "Revision": (1, "43cb63694aa7"),
    "NodeLifeStatus": (1, "dd264ed2032a"),
    "GatewayLease": (1, "76050e983853"),
    "NodeLease": (1, "16cfc222c002"),
    "RankStatus": (1, "56f9bbe81b3b"),
    "ModelDeployment": (1, "862c29811f3e"),
    "ModelDeploymentStatus": (1, "3101ea7481af"),
    "NodePool": (1, "084e43b2eccc"),
    "NodePoolStatus": (1, "15b3e6ae3707"),
    "ShardGroup": (1, "9d2d74e7572d"),
    "ShardGroupStatus": (1, "6331570a008a"),
    "ModelRoute": (1, "4a9fe790d83c"),
    "ModelRouteStatus": (1, "dd264ed2032a"),
    "Node": (1, "b8da445200ca"),
    "NodeStatus": (1, "bba3765bc6e6"),
    "Replica": (1, "9fc6000253f6"),
    "ReplicaStatus": (1, "dd264ed2032a"),
    "Endpoint": (1, "825ca11a3e08"),
    "Event": (1, "7e552db3a90c"),
}


def test_a_shape_changes_only_with_its_version() -> None:
    now = {
        name: (versions.history_of(name).current, shape(model)) for name, model in stored().items()
    }
    news = {name: entry for name, entry in now.items() if SHAPES.get(name) != entry}
    assert not news, (
        "stored documents changed their shape. If a fleet may hold such as they were (a release wrote "
        "them), raise their version in store/versions.py and add the step. Then write into SHAPES: "
        f"{news}"
    )
    assert set(SHAPES) == set(now)
    assert set(HISTORIES) <= set(now)
