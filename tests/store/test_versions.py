"""Stored versions: a document of a newer release is refused, and never overwritten."""

import pytest

from schemas.meta import ApiModel, ObjectMeta
from schemas.node import NodeLease
from store import codec, versions
from store.port import KeyValue
from tests.support.world import deployment


class Thing(ApiModel):
    metadata: ObjectMeta
    urls: tuple[str, ...] = ()


NOW = Thing(metadata=ObjectMeta(name="a", labels={"storedVersion": "7"}), urls=("u",))


def item(value: bytes) -> KeyValue:
    return KeyValue(key="/k", value=value, create_revision=1, mod_revision=9)


def test_a_document_begins_with_its_version() -> None:
    assert codec.encode(NOW).startswith(b'{"storedVersion":1,"metadata":')
    assert codec.encode_spec(deployment()).startswith(b'{"storedVersion":1,"apiVersion":')
    assert versions.stamp_version(b"{}", 2) == b'{"storedVersion":2}'
    assert codec.decode(Thing, item(codec.encode(NOW))) == NOW


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(
            b'{\n "storedVersion" : 1 ,\n "metadata": {"name": "a"}, "urls": ["u"]}', id="spaces"
        ),
        pytest.param(b'{"urls":["u"],"storedVersion":1,"metadata":{"name":"a"}}', id="last"),
        pytest.param(b'{"urls":["u"],"metadata":{"name":"a"}}', id="none"),
    ],
)
def test_documents_edited_by_hand_are_read(raw: bytes) -> None:
    assert codec.decode(Thing, item(raw)) == Thing(metadata=ObjectMeta(name="a"), urls=("u",))


@pytest.mark.parametrize("raw", [b'{"storedVersion":4,"x":1}', b'{"a":1,"storedVersion":9}'])
def test_a_newer_document_is_refused_with_an_explanation(raw: bytes) -> None:
    with pytest.raises(
        codec.NewerDocumentError,
        match=r"^/k \(Thing\): its stored version is \d, this process reads 1\. "
        r"A newer mlx-fleet wrote it: upgrade this process",
    ):
        codec.decode(Thing, item(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"storedVersion":1,"urls":["u"]}',  # no metadata
        b'{"storedVersion":1,"metadata":',
        b'{"storedVersion":1,[]}',
        b"[]",
        b'["storedVersion"]',
        b'{"a":"b","storedVersion":"x"}',
        b'{"storedVersion":true,"a":1}',
        b'{"storedVersion":-1}',
        b"",
    ],
)
def test_invalid_documents_are_not_taken_for_newer_ones(raw: bytes) -> None:
    with pytest.raises(codec.UndecodableError, match="/k") as caught:
        codec.decode(Thing, item(raw))
    assert not isinstance(caught.value, codec.NewerDocumentError)


def test_only_newer_documents_must_not_be_overwritten() -> None:
    lease = NodeLease(uid="u", session="s")
    for value in (codec.encode(lease), b"by hand", b"{}"):
        codec.refuse_newer(NodeLease, item(value))
    codec.refuse_newer(NodeLease, None)
    newer = versions.stamp_version(lease.model_dump_json(by_alias=True).encode(), 4)
    with pytest.raises(codec.NewerDocumentError):
        codec.refuse_newer(NodeLease, item(newer))
