"""Parsed fields of requests, encoded requests, and event boundaries."""

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.openai import OpenAiAdapter
from gateway.forwarding.attempt import encode_request
from gateway.forwarding.engine_stream import split_events
from gateway.forwarding.retry_state import RetryState
from gateway.request import HttpRequest, InferenceRequest
from gateway.upstream import request_encoder
from machinery import engine_link
from schemas.wire.errors import RefusedError
from tests.support.gateway_world import target


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"m"', None),
        (b"{}", "model"),
        (b'{"model": null}', "model"),
        (b'{"model": 1}', "model"),
        (b'{"model": ""}', "model"),
        (b'{"model": ["m"]}', "model"),
    ],
)
def test_bodies_without_a_model_are_refused(body: bytes, param: str | None) -> None:
    with pytest.raises(RefusedError) as caught:
        OpenAiAdapter().read(
            HttpRequest(
                path="/v1/completions", query=b"", headers=(), fields={}, request_id=b"r", body=body
            )
        )
    assert (caught.value.refusal.status, caught.value.refusal.param) == (400, param)


def test_the_body_goes_to_the_engine_as_it_came() -> None:
    body = b'{ "model" :"m",  "temperature": 1.10, "seed": 18446744073709551615 }'
    ask = InferenceRequest(path="/v1/completions", model="m", body=body, request_id=b"r-1")
    raw, apart = encode_request(ask, target("m-0"), RetryState(), 0.0)
    head, sent = engine_link.decode_request(raw)
    assert (sent, bytes(apart)) == (body, b"")
    assert (head.method, head.path, head.body_bytes) == ("POST", "/v1/completions", len(body))
    assert b"x-request-id: r-1\r\n" in head.lines
    # A large body is not copied.
    ask.body = b"%b%b" % (body, b" " * 100_000)
    raw, apart = encode_request(ask, target("m-0"), RetryState(), 0.0)
    head, sent = engine_link.decode_request(raw)
    assert head.body_bytes == len(ask.body)
    assert sent + apart == ask.body
    assert apart.obj is ask.body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            b'{ "model" : "route" , "x": 1.10}', b'{ "model" : "m" , "x": 1.10}', id="in-place"
        ),
        pytest.param(
            rb'{"p": "\"model\": \"route\"", "model": "route"}',
            rb'{"p": "\"model\": \"route\"", "model": "m"}',
            id="not-in-text",
        ),
        pytest.param(rb'{"model": "r\u006fute"}', b'{"model": "m"}', id="escaped-value"),
        pytest.param(
            b'{"tool": {"model": "x"}, "model": "route"}',
            b'{"tool":{"model": "x"},"model":"m"}',
            id="ambiguous-is-written-anew-with-values-as-they-were",
        ),
        pytest.param(rb'{"mod\u0065l": "route"}', b'{"model":"m"}', id="escaped-key"),
    ],
)
def test_a_routes_name_becomes_the_engines(body: bytes, expected: bytes) -> None:
    assert request_encoder.rename_model(body, "route", "m") == expected


json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.just("model"),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["model", "a", '"model":']), inner, max_size=3),
    max_leaves=8,
)


@given(rest=st.dictionaries(st.text(max_size=5), json), old=st.text(min_size=1, max_size=8))
def test_renaming_changes_the_name_only(rest: dict[str, object], old: str) -> None:
    tree = {**rest, "model": old}
    changed = orjson.loads(request_encoder.rename_model(orjson.dumps(tree), old, "new"))
    assert changed == {**tree, "model": "new"}


@given(
    events=st.lists(st.text("ab:", min_size=1, max_size=5), max_size=6),
    tail=st.text("ab", max_size=3),
    separator=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_only_whole_events_are_passed_on(
    events: list[str], tail: str, separator: bytes, cuts: list[int]
) -> None:
    whole = b"".join(event.encode() + separator for event in events)
    data = whole + tail.encode()
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    passed, held = b"", b""
    for start, end in pairwise(edges):
        out, held = split_events(held, data[start:end])
        assert not out or out.endswith((b"\n\n", b"\r\n\r\n"))
        passed += out
    assert (passed, held) == (whole, tail.encode())


def test_an_event_without_end_is_not_held_for_ever() -> None:
    held = b"x" * (1 << 20)
    assert split_events(held, b"y") == (held + b"y", b"")
