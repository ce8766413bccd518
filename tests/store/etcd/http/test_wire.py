"""What etcd's gateways say, of every build, and what it means to us."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import (
    CompactedError,
    LeaseLostError,
    NoSpaceError,
    PermissionDeniedError,
    StoreError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)
from store.etcd.error_mapping import error_from_status
from store.etcd.http import json_api
from store.port import CreateRevisionGuard, Delete, ModRevisionGuard, Put


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            b'{"error":"etcdserver: mvcc: required revision has been compacted","code":11}',
            CompactedError,
            id="v1-compacted",
        ),
        pytest.param(
            b'{"code":11,"message":"etcdserver: mvcc: required revision has been compacted"}',
            CompactedError,
            id="v2-compacted",
        ),
        pytest.param(
            b'{"error":{"grpc_code":14,"http_code":503,"message":"no leader"}}',
            UnavailableError,
            id="stream-v1",
        ),
        pytest.param(
            b'{"error":{"code":14,"message":"etcdserver: leader changed"}}',
            UnavailableError,
            id="stream-v2",
        ),
        pytest.param(
            b'{"error":"etcdserver: requested lease not found","code":5}',
            LeaseLostError,
            id="lease",
        ),
        pytest.param(
            b'{"code": 5, "message": "etcdserver: requested lease not found", "details": []}',
            LeaseLostError,
            id="v2-lease-spaced",
        ),
        pytest.param(
            b'{"error":"etcdserver: request is too large","code":3}', TooLargeError, id="too-large"
        ),
        pytest.param(
            b'{"error":"grpc: received message larger than max (2 vs. 1)","code":8}',
            TooLargeError,
            id="larger-than-max-is-not-unavailable",
        ),
        pytest.param(
            b'{"error":"etcdserver: too many operations in txn request","code":3}',
            TooLargeError,
            id="too-many",
        ),
        pytest.param(
            b'{"error":"etcdserver: mvcc: database space exceeded","code":8}',
            NoSpaceError,
            id="no-space-is-not-unavailable",
        ),
        pytest.param(
            b'{"error":"etcdserver: permission denied","code":7}', PermissionDeniedError, id="role"
        ),
        pytest.param(
            b'{"error":"etcdserver: invalid auth token","code":16}',
            UnauthenticatedError,
            id="stale-token",
        ),
        pytest.param(
            b'{"error":"etcdserver: user name is empty","code":3}',
            UnauthenticatedError,
            id="no-token",
        ),
        pytest.param(
            b'{"error":"etcdserver: request timed out","code":14}', UnavailableError, id="quorum"
        ),
        pytest.param(
            b'{"error":"context deadline exceeded","code":2}', UnavailableError, id="deadline"
        ),
        pytest.param(
            b'{"error":"etcdserver: too many requests","code":8}', UnavailableError, id="busy"
        ),
        pytest.param(b"404 page not found\n", StoreError, id="plain-text"),
        pytest.param(b"", StoreError, id="nothing"),
        pytest.param(b"{}", StoreError, id="empty"),
        pytest.param(b'{"code":"not_found"}', StoreError, id="a-proxys-code"),
        pytest.param(b'{"error":{"code":"x","message":null}}', StoreError, id="odd-nested"),
    ],
)
def test_error_bodies(body: bytes, expected: type[StoreError]) -> None:
    error = error_from_status(*json_api.error_of_body(body))
    assert type(error) is expected
    if isinstance(error, UnavailableError):
        assert error.ambiguous  # the server was reached, so it may have written


@given(
    st.binary(max_size=200) | st.from_regex(rb'\{"(error|code|message)":.{0,20}\}', fullmatch=True)
)
def test_no_error_body_breaks_the_reader(body: bytes) -> None:
    assert isinstance(error_from_status(*json_api.error_of_body(body)), StoreError)


@given(st.dictionaries(st.sampled_from(["kv", "key", "value", "lease"]), st.text() | st.none()))
def test_no_item_breaks_the_reader_but_as_unavailable(tree: json_api.Json) -> None:
    for read in (json_api.key_value, json_api.change):
        try:
            read(tree)
        except UnavailableError as error:
            assert error.ambiguous  # noqa: PT017 - most trees raise, some do not


def test_what_is_left_out_is_zero_or_empty() -> None:
    found = json_api.key_value({"key": "L2E="})
    assert (found.key, found.value, found.mod_revision, found.lease) == ("/a", b"", 0, 0)


def test_a_put_has_no_type_and_a_delete_no_value() -> None:
    put = json_api.change({"kv": {"key": "L2E=", "mod_revision": "9007199254740993"}})
    assert put.now is not None
    assert put.now.mod_revision == 9007199254740993  # beyond a float
    gone = json_api.change({"type": "DELETE", "kv": {"key": "L2E=", "mod_revision": "7"}})
    assert (gone.key, gone.mod_revision, gone.now) == ("/a", 7, None)


def test_a_transaction_says_guards_and_operations() -> None:
    body = json_api.transaction(
        [
            ModRevisionGuard(key="/a", mod_revision=3),
            CreateRevisionGuard(key="/b", create_revision=4),
        ],
        [Put(key="/c", value=b"", lease=5), Put(key="/c", value=b"v"), Delete(key="/d")],
    )
    compare = [
        (c["target"], c.get("mod_revision"), c.get("create_revision")) for c in body["compare"]
    ]
    assert compare == [("MOD", "3", None), ("CREATE", None, "4")]
    assert body["success"] == [
        {"request_put": {"key": "L2M=", "value": "", "lease": "5"}},
        {"request_put": {"key": "L2M=", "value": "dg=="}},
        {"request_delete_range": {"key": "L2Q="}},
    ]


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_keys_survive_the_way_there_and_back(key: str) -> None:
    if key != key.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape"):
        return
    assert json_api.key_value({"key": json_api.b64(key)}).key == key


def test_what_must_be_there_is_taken_or_missed_aloud() -> None:
    assert json_api.field_at({"header": {"revision": "3"}}, "header", "revision") == "3"
    odd: list[json_api.Json] = [{}, {"header": None}, {"header": {}}, {"header": "revision"}]
    for tree in odd:
        with pytest.raises(UnavailableError, match="not an answer of etcd"):
            json_api.field_at(tree, "header", "revision")
