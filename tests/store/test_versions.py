"""Stored versions: old documents are read, newer ones are refused, and no shape changes unnoticed."""

import hashlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import kinds
from schemas.blob_share import FetchClaim, ModelOffer
from schemas.change import ChangeRecord
from schemas.fabrictest import FabricRank
from schemas.meta import ApiModel, ObjectMeta
from schemas.model_snapshot import ModelSnapshot, PreloadAssignment
from schemas.model_use import ModelUse
from schemas.node import NodeLease, NodeLifeStatus, NodeLoad
from schemas.records import (
    ApiKey,
    DashboardLease,
    ExternalKey,
    GatewayLease,
    HubToken,
    ReconcilerLease,
)
from schemas.replica import RankStatus
from schemas.trust import (
    CertificateRequest,
    FleetTrust,
    IssuedCertificate,
    JoinDecision,
    JoinTokenRecord,
    PendingJoin,
    RefusedRequest,
    RevokedCertificate,
)
from store import codec, versions
from store.port import KeyValue
from store.versions import HISTORIES, Tree, VersionError, VersionHistory
from tests.support.fleets import deployment


def item(value: bytes, key: str = "/k") -> KeyValue:
    return KeyValue(key=key, value=value, create_revision=1, mod_revision=9)


# A kind for these tests that has had three shapes: a port, then a URL, then several URLs.


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
    """Return the document as a process of that version wrote it; before the first stamp it had no version."""
    raw = model.model_dump_json(by_alias=True, exclude_none=True).encode()
    return raw if version is None else versions.stamp_version(raw, version)


def test_a_document_begins_with_its_version() -> None:
    assert codec.encode(NOW, THING).startswith(b'{"storedVersion":3,"metadata":')
    assert codec.encode(NOW).startswith(b'{"storedVersion":1,"metadata":')
    assert codec.encode_spec(deployment()).startswith(b'{"storedVersion":11,"apiVersion":')
    assert versions.stamp_version(b"{}", 2) == b'{"storedVersion":2}'


@given(
    host=st.text(max_size=20),
    port=st.integers(0, 65535),
    labels=st.dictionaries(st.sampled_from(["storedVersion", "a"]), st.just("1")),
    is_stamped=st.booleans(),
)
def test_documents_of_earlier_versions_are_migrated(
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
def test_documents_edited_by_hand_are_read(raw: bytes) -> None:
    found = codec.decode(Thing, item(raw), THING)
    assert found == Thing(metadata=ObjectMeta(name="a"), urls=("u",))


@pytest.mark.parametrize(
    "raw",
    [
        codec.encode(NOW, {"Thing": VersionHistory(current=4, steps={})}),
        b'{"a":1,"storedVersion":9}',
    ],
)
def test_a_newer_document_is_refused_with_an_explanation(raw: bytes) -> None:
    with pytest.raises(
        codec.NewerDocumentError,
        match=r"^/fleet/a \(Thing\): its stored version is \d, this process reads 1 to 3\. "
        r"A newer mlx-fleet wrote it: upgrade this process",
    ):
        codec.decode(Thing, item(raw, "/fleet/a"), THING)


def test_a_document_that_is_too_old_says_what_to_do() -> None:
    histories = {"Thing": VersionHistory(current=3, steps={2: to_urls})}
    with pytest.raises(
        codec.UndecodableError, match=r"stored version is 1.*an intermediate release"
    ):
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
def test_invalid_documents_are_not_taken_for_newer_ones(raw: bytes) -> None:
    with pytest.raises(codec.UndecodableError, match="/k") as caught:
        codec.decode(Thing, item(raw), THING)
    assert not isinstance(caught.value, codec.NewerDocumentError)


@pytest.mark.parametrize("steps", [{2: to_urls}, {0: to_url}, {1: to_url, 2: to_urls}])
def test_a_history_needs_every_step(steps: dict[int, versions.Migration]) -> None:
    with pytest.raises(ValueError, match="a step from each version"):
        VersionHistory(current=2, steps=steps)


def test_only_newer_documents_must_not_be_overwritten() -> None:
    lease = NodeLease(uid="u", session="s")
    for value in (codec.encode(lease), b"by hand", b"{}", written(lease, None)):
        codec.refuse_newer(NodeLease, item(value))
    codec.refuse_newer(NodeLease, None)
    with pytest.raises(codec.NewerDocumentError):
        codec.refuse_newer(NodeLease, item(written(lease, 4)))


def test_only_the_number_decides_about_a_version() -> None:
    with pytest.raises(VersionError, match="upgrade"):
        versions.migrate(b'{"storedVersion":2}', VersionHistory())
    assert versions.migrate(b'{"storedVersion":1}', VersionHistory()) == b"{}"


# Documents of the first fleets, byte for byte: these must stay readable for ever.
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


OLD_KEY = (
    b'{"storedVersion":1,"name":"ci","hash":"'
    + b"a" * 64
    + b'","created":"2026-01-01T00:00:00Z","models":["m"],'
    b'"isAdmin":%b,"requestsPerMinute":60}'
)


@pytest.mark.parametrize(("is_admin", "role"), [(b"true", "admin"), (b"false", "user")])
def test_an_admin_key_of_the_previous_release_has_the_role_admin(
    is_admin: bytes, role: str
) -> None:
    key = codec.decode(ApiKey, item(OLD_KEY % is_admin))
    assert (key.role, key.models, key.requests_per_minute) == (role, ("m",), 60)
    assert codec.encode(key).startswith(b'{"storedVersion":2,')


@pytest.mark.parametrize(("name", "raw"), UNSTAMPED)
def test_documents_of_the_first_fleets_are_read(name: str, raw: bytes) -> None:
    codec.decode(stored()[name], item(raw))


def stored() -> dict[str, type[ApiModel]]:
    """Return every model that is stored as a document of its own."""
    found: list[type[ApiModel]] = [NodeLease, GatewayLease, NodeLifeStatus, RankStatus, ApiKey]
    found += [FabricRank, ReconcilerLease, JoinTokenRecord]
    found += [FleetTrust, IssuedCertificate, RevokedCertificate, CertificateRequest, RefusedRequest]
    found += [
        PendingJoin,
        JoinDecision,
        ModelSnapshot,
        HubToken,
        ExternalKey,
        ModelOffer,
        FetchClaim,
    ]
    found += [PreloadAssignment, DashboardLease, ChangeRecord, NodeLoad, ModelUse]
    for kind in kinds.KINDS:
        status = codec.status_type(kind.type)
        found += [kind.type] if status is None else [kind.type, status]
    return {model.__name__: model for model in found}


def shape(model: type[ApiModel]) -> str:
    """Return a digest of the documents of a model; wording and the names of models do not count."""
    schema = model.model_json_schema()
    models = schema.pop("$defs", {})

    def bare(tree: Any) -> Any:
        if isinstance(tree, dict):
            if "$ref" in tree:
                referred = models[tree["$ref"].rpartition("/")[2]]
                tree = {**referred, **{key: value for key, value in tree.items() if key != "$ref"}}
            return {
                name: bare(value)
                for name, value in tree.items()
                if not (name in ("description", "title") and isinstance(value, str))
            }
        return [bare(value) for value in tree] if isinstance(tree, list) else tree

    return hashlib.sha256(orjson.dumps(bare(schema), option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


# The shape of each document at its current version.
SHAPES: dict[str, tuple[int, str]] = {
    "ModelUse": (1, "b4fb976d37d2"),
    "NodeLoad": (1, "8cf2d3d8c831"),
    "ModelSnapshot": (2, "8c36c1537aa9"),
    "ExternalKey": (1, "dea8bf1bea77"),
    "HubToken": (1, "dd9bb1365afc"),
    "PreloadAssignment": (1, "c0fcb850f9d1"),
    "ModelOffer": (2, "982d0d29b9f1"),
    "FetchClaim": (1, "f152568b8dff"),
    "GitSourceStatus": (3, "9d53eb88b940"),
    "GitSource": (3, "d9fe7b7cc1a2"),
    "FabricTest": (1, "6c1f69fbdd8b"),
    "FabricRank": (1, "5e927d2c4f71"),
    "ApiKey": (2, "e3951ec66d0a"),
    "Revision": (8, "9b610628f5c0"),
    "NodeLifeStatus": (1, "b8f5719a979b"),
    "GatewayLease": (3, "2dd91f35dbd9"),
    "DashboardLease": (2, "2b97a1534a4b"),
    "ReconcilerLease": (3, "7cf0985fbc99"),
    "NodeLease": (3, "349f9df08a8a"),
    "PendingJoin": (1, "6c026fa1d721"),
    "JoinDecision": (1, "8242e0d1c4ab"),
    "JoinTokenRecord": (1, "76a13dc09e81"),
    "RankStatus": (2, "13694bcb84dc"),
    "ModelDeployment": (11, "cac3ffbd77cf"),
    "ModelDeploymentStatus": (4, "61cbe9b256b6"),
    "NodePool": (2, "de4a600939f6"),
    "NodePoolStatus": (1, "b6d47a333cc2"),
    "ShardGroup": (3, "0303f7c802b7"),
    "ShardGroupStatus": (2, "1e033c3be985"),
    "ModelRoute": (5, "e77118ac8229"),
    "ModelRouteStatus": (1, "b8f5719a979b"),
    "Node": (4, "855885b5eb33"),
    "NodeStatus": (4, "797a4822207e"),
    "Replica": (9, "c317b2155c21"),
    "ReplicaStatus": (2, "27c38a9c9209"),
    "Endpoint": (2, "185a5161288e"),
    "Event": (1, "b77b443a401d"),
    "FleetTrust": (1, "4c143e9b1daa"),
    "IssuedCertificate": (1, "3ea331162e34"),
    "RevokedCertificate": (1, "54302417331b"),
    "CertificateRequest": (1, "32d47f51c1bf"),
    "RefusedRequest": (1, "218dbcff76d3"),
    "ChangeRecord": (1, "38df2c0db116"),
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
