"""Affinity: the bounded map, conversations, and beginnings of prompts."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request import InferenceRequest
from gateway.routing.affinity import FIRST_BLOCK, AffinityMemory, RecentMap, blocks_of, opening_of
from gateway.routing.table import RoutingQuery, ServedModel
from tests.support.gateway_world import target

A, B = target("m-0"), target("m-1", port=2)
MODEL = ServedModel(
    name="m", created=0, backends=(), reason="", session_s=300.0, is_prefix_aware=True
)  # fmt: skip
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": 'hi {["}]'},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and now?"},
]
LONG = "a long story " * 400


def ask(
    messages: object, *, session: str = "", model: str = "m", cache_key: str = "", **salts: Any
) -> InferenceRequest:
    prompt = messages if isinstance(messages, bytes) else json.dumps(messages).encode()
    return InferenceRequest(
        path="/", model=model, body=b"", request_id=b"", session=session, prompt=prompt,
        cache_key=cache_key, **salts,
    )  # fmt: skip


def recalled(
    memory: AffinityMemory, one: InferenceRequest, now_s: float = 100.0, model: ServedModel = MODEL
) -> RoutingQuery:
    query = RoutingQuery(one.model, 0.5)
    memory.recall(one, model, query, now_s)
    return query


def small() -> AffinityMemory:
    return AffinityMemory(sessions=2_000, blocks=2_000)


def asked(memory: AffinityMemory, one: InferenceRequest, now_s: float = 100.0) -> None:
    """Record a request to A."""
    memory.remember(recalled(memory, one, now_s), MODEL, A, now_s)


def test_a_named_session_is_remembered_until_its_time_is_over() -> None:
    memory, named = small(), ask([], session="one")
    assert recalled(memory, named).sticky_mark == 0
    asked(memory, named, 100.0)
    assert recalled(memory, named, 399.0).sticky_mark == A.mark
    asked(memory, named, 399.0)  # each use renews it
    assert recalled(memory, named, 698.0).sticky_mark == A.mark
    assert recalled(memory, named, 700.0).sticky_mark == 0
    assert recalled(memory, ask([], session="other"), 399.0).sticky_mark == 0
    assert recalled(memory, ask([], session="one", model="n"), 399.0).sticky_mark == 0


def test_a_conversation_is_known_by_its_opening_from_the_second_turn() -> None:
    memory = small()
    asked(memory, ask(TALK[:2]))
    # Same as any other with this beginning: many ask the same question.
    assert recalled(memory, ask(TALK[:2])).sticky_mark == 0
    assert recalled(memory, ask(TALK)).sticky_mark == A.mark
    assert recalled(memory, ask([{"role": "user", "content": "bye"}, *TALK[2:]])).sticky_mark == 0
    assert recalled(memory, ask(TALK)).session == "", "chance decides between its backends"
    assert recalled(memory, ask([], session="x")).session == "x"


def test_what_is_turned_off_is_not_remembered() -> None:
    off = ServedModel(name="m", created=0, backends=(), reason="")
    memory = small()
    for request in (ask(TALK), ask([], session="x"), ask(LONG.encode())):
        query = recalled(memory, request, model=off)
        assert (query.session, query.session_key, query.blocks) == ("", 0, ())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (b"", False),
        (b'"a text"', False),
        (b"[1, 2, 3]", False),
        (b'["a", "b"]', False),
        (b"[[1], [2]]", False),
        (b"[{}, {}]", False),
        (b'[{"role": 1}]', False),
        (b'[{"role": "system", "content": "x"}]', False),
        (b'[{"content": {"role": "user"}, "role": "assistant"}]', False),
        (b'[{"role": "user"}]', True),
        (b'[{"type": "message", "role": "user", "content": [{"text": "x"}]}]', True),
        (b'[{"role": "user"}', False),
    ],
)
def test_openings(prompt: bytes, expected: bool) -> None:
    assert (opening_of(prompt)[0] != b"") is expected


def test_an_opening_stays_the_same_when_the_conversation_grows() -> None:
    texts = [json.dumps(TALK[:n]).encode() for n in (2, 3, 4)]
    assert len({opening_of(text)[0] for text in texts}) == 1
    assert [opening_of(text)[1] for text in texts] == [False, True, True]


messages = st.builds(
    lambda role, content, is_reversed: dict(
        [("role", role), ("content", content)][:: -1 if is_reversed else 1]
    ),
    st.sampled_from(("system", "user", "assistant")),
    st.sampled_from(("x", 'a"role":"user"},{"role":', '},{"content":', "]}]"))
    | st.just([{"type": "text", "text": "x"}, {"type": "text", "text": "}, {"}]),
    st.booleans(),
)


@given(st.lists(messages, min_size=2, max_size=6), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_a_found_opening_is_the_parsed_one(
    talk: list[dict[str, object]], separators: tuple[str, str]
) -> None:
    """Leading white space forbids every search, so the messages are parsed."""
    prompt = json.dumps(talk, separators=separators).encode()
    parsed = opening_of(b"[ " + prompt[1:])
    found = opening_of(prompt)
    assert found[1] == parsed[1]
    assert found[0].replace(b", ", b",") == parsed[0].replace(b", ", b",")


def test_prompts_go_to_the_longest_cached_beginning() -> None:
    memory = small()
    first = ask([{"role": "system", "content": LONG}, {"role": "user", "content": "one"}])
    asked(memory, first)
    other = ask([{"role": "system", "content": LONG}, {"role": "user", "content": "two"}])
    cached = recalled(memory, other).cached
    assert {mark for mark, _ in cached} == {A.mark}
    assert max(part for _, part in cached) > 0.5
    assert [part for _, part in cached] == sorted((part for _, part in cached), reverse=True)
    # B has it cached too, and A has more than a third.
    memory.remember(recalled(memory, other), MODEL, B, 101.0)
    assert {mark for mark, _ in recalled(memory, first).cached} == {B.mark}
    assert recalled(memory, ask(f"x{LONG}".encode())).cached == []
    assert recalled(memory, ask(LONG[: FIRST_BLOCK - 1].encode())).cached == ()


def test_a_cache_key_joins_and_separates_prompts() -> None:
    memory = small()
    asked(memory, ask([{"role": "user", "content": "short"}], cache_key="team"))
    kin = recalled(memory, ask([{"role": "user", "content": "else"}], cache_key="team"))
    assert [mark for mark, _ in kin.cached] == [A.mark]
    assert recalled(memory, ask([{"role": "user", "content": "short"}], cache_key="x")).cached == []


@pytest.mark.parametrize("salts", [{"key_salt": b"bob"}, {"key_salt": b""}])
def test_the_engine_of_another_keys_prompt_is_not_told(salts: dict[str, Any]) -> None:
    memory = small()
    for request in (ask(LONG.encode()), ask(TALK), ask([], session="s")):
        request.key_salt = b"alice"
        asked(memory, request)
        own, other = (
            recalled(memory, request),
            recalled(memory, msgspec.structs.replace(request, **salts)),
        )
        assert own.sticky_mark == A.mark or own.cached
        assert not other.sticky_mark
        assert not other.cached


def test_a_cache_salt_separates_the_prompts_of_one_key() -> None:
    memory, prompt = small(), LONG.encode()
    asked(memory, ask(prompt, cache_salt="one", key_salt=b"alice"))
    assert recalled(memory, ask(prompt, cache_salt="one", key_salt=b"alice")).cached
    assert not recalled(memory, ask(prompt, cache_salt="two", key_salt=b"alice")).cached


@given(st.binary(max_size=5_000), st.binary(max_size=3_000), st.binary(max_size=3_000))
def test_blocks_are_few_and_equal_for_equal_beginnings(
    start: bytes, one: bytes, other: bytes
) -> None:
    mine, theirs = (blocks_of(start + rest, ("m", "")) for rest in (one, other))
    assert len(mine) <= 2 + max(0, (len(start + one) // FIRST_BLOCK).bit_length())
    assert all(begin < end for (begin, _), (end, _) in pairwise(mine))
    for (end, key), (_, their_key) in zip(mine, theirs, strict=False):
        same = (start + one)[:end] == (start + other)[:end]
        assert (key == their_key) is same


keys = st.integers(-(2**63), 2**63 - 1)


@given(st.integers(1, 6), st.lists(st.tuples(keys, st.integers(1, 2**40)), max_size=60))
def test_a_map_keeps_the_latest_and_at_most_twice_as_many(
    size: int, puts: list[tuple[int, int]]
) -> None:
    recent = RecentMap(size)
    latest: dict[int, int] = {}
    for key, value in puts:
        recent.put(key, value)
        latest.pop(key, None)
        latest[key] = value
        assert recent.get(key) == value
    order = list(latest)
    for key in order[-size:]:
        assert recent.get(key) == latest[key]
    assert all(recent.get(key) in (0, latest[key]) for key in order)
    assert sum(recent.get(key) != 0 for key in order) <= 2 * size
